"""JAX's own client at a proxy whose session has no cluster behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

HEAD = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
found = {}
"""

SHARDS = """
mesh = Mesh(np.array(jax.devices()), "x")
x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))
total = jax.shard_map(lambda v: jax.lax.psum(v.sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
found["sum"] = float(jax.jit(total)(x))
found["shards"] = [np.asarray(s.data).tolist() for s in x.addressable_shards]
parts = [s.data + 1 for s in x.addressable_shards]
joined = jax.make_array_from_single_device_arrays((8,), x.sharding, parts)
found["joined"] = np.asarray(jax.jit(lambda v: v * 2)(joined)).tolist()
found["moved"] = np.asarray(jax.device_put(parts[0], jax.devices()[3])).tolist()
kept = x.addressable_shards[0].data
y = jax.jit(lambda v: v + 1, donate_argnums=0)(x)
found["donated"] = [x.is_deleted(), np.asarray(kept).tolist(), float(y[7])]
big = np.arange(1 << 19, dtype=np.float64).astype(np.float32)
found["big"] = bool((np.asarray(jax.device_put(big)) == big).all())
compiled = jax.jit(lambda v: v @ v).lower(jnp.ones((4, 4))).compile()
found["text"] = "dot" in compiled.as_text()
found["cost"] = compiled.cost_analysis()["flops"] > 0
found["memory"] = compiled.memory_analysis().argument_size_in_bytes
"""

FAILURES = """
def broken(v):
    return v + 1
step = jax.jit(broken)
def text(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:60]
x = jnp.ones(4)
bad = step(x)
after = bad * 2
found["broken"] = [text(bad.block_until_ready), text(lambda: np.asarray(after))]
found["others"] = float((x + 1).sum())
def callback(v):
    return jax.pure_callback(lambda w: w, jax.ShapeDtypeStruct((4,), np.float32), v)
found["callback"] = text(lambda: jax.jit(callback)(x))[:34]
"""

OPTIONS = """
from jax.experimental.layout import Format, Layout
x = jnp.arange(6.0).reshape(2, 3)
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
turned = jax.jit(lambda v: v + 1, out_shardings=Format(Layout((1, 0)), one))
y = turned(x)
found["turned"] = [y.format.layout.major_to_minor, np.asarray(y).tolist(), float(jax.jit(lambda v: v[1, 2])(y))]
auto = jax.jit(lambda v: v.T, in_shardings=Format(Layout.AUTO, one), out_shardings=Format(Layout.AUTO, one))
formats = auto.lower(jax.ShapeDtypeStruct((2, 3), np.float32)).compile()
found["auto"] = formats.input_formats[0][0].layout.major_to_minor == formats.output_formats.layout.major_to_minor[::-1]
try:
    jax.jit(lambda v: v, compiler_options={"no_such_option": True})(x)
except Exception as error:
    found["option"] = str(error)[:60]
found["known"] = float(jax.jit(lambda v: v.sum(), compiler_options={"xla_embed_ir_in_executable": True})(x))
"""

LOST = """
from jax.extend import backend
def lose(v):
    return v + 1
x = jnp.ones(4)
try:
    for _ in range(50):
        x = jax.jit(lose)(x)
        x.block_until_ready()
except Exception as error:
    found["lost"] = str(error)[:11]
backend.clear_backends()
found["again"] = float(jnp.ones(3).sum())
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    path = tmp_path_factory.mktemp("proxy") / "s"
    command = [sys.executable, "-m", "tests.unit.proxy.local_proxy", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        variables = json.loads(server.stdout.readline())["env"]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
        yield clean | variables
        server.stdin.close()


def run(env: dict[str, str], body: str) -> Any:
    program = HEAD + body + "\nprint(json.dumps(found))\n"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_shards_are_named_put_together_moved_and_given_away(env: dict[str, str]) -> None:
    assert run(env, SHARDS) == {
        "sum": 28.0,
        "shards": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]],
        "joined": [2.0 * (k + 1) for k in range(8)],
        "moved": [1.0, 2.0],
        "donated": [True, [0.0, 1.0], 8.0],
        "big": True,
        "text": True,
        "cost": True,
        "memory": 64,
    }


def test_layouts_in_memory_are_said_as_asked_for_and_options_of_the_compiler_are_checked(env: dict[str, str]) -> None:
    assert run(env, OPTIONS) == {
        "turned": [[1, 0], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], 6.0],
        "auto": True,
        "option": "INVALID_ARGUMENT: XLA refuses the program: INVALID_ARGUMENT:",
        "known": 15.0,
    }


def test_failures_come_with_the_values_and_others_live_on(env: dict[str, str]) -> None:
    found = run(env, FAILURES)
    gone = "JaxRuntimeError: UNAVAILABLE: HostLost: host 0 is gone"
    assert found["broken"] == [gone, gone]
    assert found["others"] == 8.0
    assert found["callback"] == "JaxRuntimeError: UNIMPLEMENTED: Un"


def test_a_program_attaches_again_after_the_session_was_lost(env: dict[str, str]) -> None:
    assert run(env, LOST) == {"lost": "UNAVAILABLE", "again": 3.0}
