"""Programs of other libraries, unmodified, on plain CPU, through a proxy, and two at a time as two tenants.

    pip install ".[train,libraries]"
    python -m tests.jax_suite.programs [NAME ...]

Each program prints what it computed, to the last bit; the command compares. A program whose library is not installed is
left out, and said to be.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DEVICES = 4
STEPS = 20
LIMIT_S = 300
ROOT = Path(__file__).parents[2]


def bits(tree: Any) -> str:
    """A digest of all arrays of a tree."""
    import jax
    import numpy as np

    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


def rows(value: Any) -> Any:
    """An array whose first dimension is split over all devices."""
    import jax

    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(value, jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))


def examples(count: int = 64) -> Any:
    """Inputs and targets of a regression."""
    import numpy as np

    random = np.random.default_rng(0)
    x = random.normal(size=(count, 8)).astype(np.float32)
    return x, np.sin(x).sum(axis=1, keepdims=True).astype(np.float32)


def with_nnx() -> Any:
    """A flax NNX module trained with optax, its batches split over the devices."""
    import jax.numpy as jnp
    import optax
    from flax import nnx

    class Mlp(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.inner, self.drop = nnx.Linear(8, 32, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
            self.outer = nnx.Linear(32, 1, rngs=rngs)

        def __call__(self, v: Any) -> Any:
            return self.outer(self.drop(nnx.relu(self.inner(v))))

    model = Mlp(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    x, y = map(rows, examples())
    losses = [float(step(model, optimizer, x, y)) for _ in range(STEPS)]
    return losses, bits(nnx.state(model, nnx.Param))


def with_equinox() -> Any:
    """An equinox module trained with optax."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax

    model = eqx.nn.MLP(8, 1, 32, 2, key=jax.random.key(0))
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state, loss

    x, y = map(rows, examples())
    losses = []
    for _ in range(STEPS):
        model, state, loss = step(model, state, x, y)
        losses.append(float(loss))
    return losses, bits(eqx.filter(model, eqx.is_array))


def with_orbax() -> Any:
    """Sharded arrays in a checkpoint and back, in their sharding."""
    import jax
    import orbax.checkpoint as ocp

    x, y = map(rows, examples())
    tree = {"x": x, "y": y, "step": jax.numpy.int32(7)}
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as saver:
        saver.save(Path(folder) / "saved", tree)
        saver.wait_until_finished()
        back = saver.restore(Path(folder) / "saved", jax.tree.map(ocp.utils.to_shape_dtype_struct, tree))
    kept = all(back[name].sharding == tree[name].sharding for name in ("x", "y"))
    return kept, bits(back), bits(jax.jit(lambda v, t: v * t)(back["x"], back["y"]))


def with_grain() -> Any:
    """Batches of a grain loader, shuffled by its seed."""
    import grain
    import jax
    import jax.numpy as jnp

    x, y = examples(256)
    data = grain.MapDataset.source(list(zip(x, y, strict=True))).shuffle(3).batch(32)
    step = jax.jit(lambda w, v, t: w - 0.01 * jax.grad(lambda u: jnp.mean((v @ u - t) ** 2))(w))
    weights = jnp.zeros((8, 1))
    for v, t in data:
        weights = step(weights, rows(v), rows(t))
    return weights.ravel().tolist(), bits(weights)


def with_numpyro() -> Any:
    """A NUTS sampler of a regression."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    x, y = examples()

    def model(v: Any, t: Any) -> None:
        weights = numpyro.sample("w", dist.Normal(jnp.zeros(8), 1.0).to_event(1))
        numpyro.sample("t", dist.Normal(v @ weights, 1.0), obs=t)

    sampler = MCMC(NUTS(model), num_warmup=30, num_samples=30, progress_bar=False)
    sampler.run(jax.random.key(1), jnp.asarray(x), jnp.asarray(y[:, 0]))
    return bits(sampler.get_samples())


def with_profiler() -> Any:
    """The part of jax.profiler that is the client's: a trace with its annotations."""
    import jax
    import jax.numpy as jnp

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder), jax.profiler.TraceAnnotation("a step"):
            total = float(jnp.arange(10.0).sum())
        return total, len(list(Path(folder).rglob("*.xplane.pb")))


PROGRAMS: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "nnx": ("flax", with_nnx),
    "equinox": ("equinox", with_equinox),
    "orbax": ("orbax", with_orbax),
    "grain": ("grain", with_grain),
    "numpyro": ("numpyro", with_numpyro),
    "profiler": ("jax", with_profiler),
}
"""By name: the package that it needs, and the program."""


def started(name: str, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    command = [sys.executable, "-m", "tests.jax_suite.programs", "--run", name]
    environment = clean | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"} | dict(variables)
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finished(process: subprocess.Popen[str]) -> str:
    """What a program printed last, or the end of what went wrong."""
    try:
        out, error = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"longer than {LIMIT_S} s"
    return out.splitlines()[-1] if process.returncode == 0 else (error.strip().splitlines() or ["it failed"])[-1]


@contextlib.contextmanager
def doors(hosts: int = 1) -> Iterator[list[Any]]:
    """The proxies of two tenants of an island of so many hosts, each with the devices of all."""
    import pathways_ray as pw
    from pathways_ray.client.proxy_process import ProxyProcess

    shape: Any = {"hosts_per_island": hosts, "devices_per_host": DEVICES // hosts}
    tenants = [{"name": name, "token": f"the token of {name}"} for name in ("one", "two")]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        table = Path(folder) / "tenants.json"
        table.write_text(json.dumps({"tenants": tenants}))
        session = stack.enter_context(pw.init(**shape, tenants=str(table), policy="share"))
        yield [
            stack.enter_context(ProxyProcess(session.url, one["token"], "", DEVICES, one["name"])) for one in tenants
        ]


def installed(name: str) -> bool:
    """Whether the library of a program is."""
    return importlib.util.find_spec(PROGRAMS[name][0]) is not None


def printed(name: str, opened: Sequence[Any]) -> list[str]:
    """What a program prints: in plain JAX, through the first of some proxies, and through all of them at once."""
    plain = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    alone = [finished(started(name, variables)) for variables in (plain, opened[0].env)]
    return alone + [finished(each) for each in [started(name, door.env) for door in opened]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--hosts", type=int, default=1, help="of the island that has the devices")
    parser.add_argument("--run", choices=PROGRAMS, help="this one, here")
    asked = parser.parse_args()
    if asked.run:
        print(json.dumps(PROGRAMS[asked.run][1]()))
        return 0
    wrong = 0
    with doors(asked.hosts) as opened:
        for name in asked.names:
            if not installed(name):
                print(f"{name}: {PROGRAMS[name][0]} is not installed", flush=True)
                continue
            expected, alone, *both = printed(name, opened)
            same = [found == expected for found in (alone, *both)]
            wrong += not all(same)
            print(f"{name}: the bits of plain JAX: {same[0]}; as two tenants: {same[1:]}", flush=True)
            for found in (expected, alone, *both) if not all(same) else ():
                print(f"    {found[:300]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
