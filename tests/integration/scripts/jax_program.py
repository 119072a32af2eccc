"""An ordinary JAX program on four devices, which prints what it computed: it knows nothing of proxies.

Run on plain CPU devices and through a proxy, it must print the same, to the last bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

DEVICES = jax.devices()
LINE, GRID = Mesh(np.array(DEVICES), ("x",)), Mesh(np.array(DEVICES).reshape(2, 2), ("a", "b"))
ROWS = NamedSharding(LINE, P("x"))


def operations() -> Any:
    x = jnp.arange(12.0).reshape(3, 4)
    return x + 1, x @ x.T, jnp.sin(x).sum(0), x.astype(jnp.bfloat16), x > 3, jnp.argsort(-x), jnp.fft.fft(x)


def transformed() -> Any:
    w = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
    loss = jax.jit(lambda w, v: jnp.sum(jnp.tanh(w @ v) ** 2))
    return (
        jax.grad(loss)(w, jnp.ones(3)),
        jax.vmap(loss, (None, 0))(w, jnp.eye(3)),
        jax.hessian(loss, 1)(w, jnp.ones(3)),
    )


def random() -> Any:
    key = jax.random.key(7)
    return jax.random.normal(key, (5,)), jax.random.split(key, 3), jax.random.permutation(key, 10)


def control_flow() -> Any:
    looped = jax.jit(lambda n: jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.5), (0, 1.0)))
    scanned = jax.lax.scan(lambda c, v: (c + v, c * v), jnp.float32(0), jnp.arange(7.0))
    return looped(5), scanned, jax.jit(lambda v: jax.lax.cond(v > 2, jnp.sin, jnp.cos, v))(1.5)


def linear_algebra() -> Any:
    a = jax.random.normal(jax.random.key(1), (5, 5))
    spd = a @ a.T + 5 * jnp.eye(5)
    return jnp.linalg.cholesky(spd), jnp.linalg.qr(a), jnp.linalg.eigh(spd), jnp.linalg.solve(spd, jnp.ones(5))


def sharded() -> Any:
    x = jax.device_put(np.arange(32.0, dtype=np.float32).reshape(8, 4), NamedSharding(GRID, P("a", "b")))
    crossed = jax.jit(lambda v: v.T @ v, out_shardings=NamedSharding(GRID, P("b", "a")))(x)
    kept = jax.jit(lambda v: jnp.tanh(v) * 2)(x)
    shards = [np.asarray(shard.data) for shard in kept.addressable_shards]
    return x, crossed, kept, shards, [str(s.index) for s in crossed.addressable_shards], str(kept.sharding.spec)


def collectives() -> Any:
    x = jax.device_put(np.arange(16.0, dtype=np.float32), ROWS)
    mapped = jax.jit(
        jax.shard_map(
            lambda v: (jax.lax.psum(v.sum(), "x"), jax.lax.ppermute(v, "x", [(k, (k + 1) % 4) for k in range(4)])),
            mesh=LINE,
            in_specs=P("x"),
            out_specs=(P(), P("x")),
        )
    )
    spread = jax.shard_map(
        lambda v: jax.lax.psum_scatter(v, "x", tiled=True), mesh=LINE, in_specs=P(), out_specs=P("x"), check_vma=False
    )
    return mapped(x), jax.jit(spread)(x), jax.pmap(lambda v: jax.lax.psum(v, "i"), "i")(jnp.arange(4.0))


def placed() -> Any:
    x = np.arange(8.0, dtype=np.float32)
    everywhere = jax.device_put(x, NamedSharding(LINE, P()))
    from_one = jax.device_put(jax.device_put(x, DEVICES[1]), ROWS)
    back = jax.device_put(from_one, DEVICES[3])
    turned = jax.device_put(from_one, NamedSharding(GRID, P(("b", "a"))))
    host = jax.device_put(from_one, ROWS.with_memory_kind("pinned_host"))
    made = jax.make_array_from_callback((8,), ROWS, lambda index: x[index] * 3)
    parts = [jax.device_put(x[2 * k : 2 * k + 2], device) for k, device in enumerate(DEVICES)]
    joined = jax.make_array_from_single_device_arrays((8,), ROWS, parts)
    second = joined.addressable_shards[1].data + 1
    strided = jax.device_put(np.arange(24.0).reshape(4, 6).T[::2], DEVICES[2])
    empty = jax.device_put(np.zeros((0, 3), np.int32), SingleDeviceSharding(DEVICES[0]))
    everything = [everywhere, from_one, back, turned, host, made, joined, jnp.sum(joined), second, strided, empty]
    return everything, [str(v.devices() == {DEVICES[3]}) for v in (back,)], host.sharding.memory_kind


def in_host_memory() -> Any:
    """Results in another kind of memory: by `out_shardings`, by `device_put` outside and inside, and by neither."""
    x = jnp.arange(8.0)
    alone = SingleDeviceSharding(DEVICES[0], memory_kind="pinned_host")
    split = ROWS.with_memory_kind("unpinned_host")
    space = jax.memory.Space.Host
    made = [
        jax.jit(lambda v: v + 1, out_shardings=alone)(x),
        jax.jit(lambda v: v + 1, out_shardings=alone).lower(x).compile()(x),
        jax.jit(lambda v: v * 2, out_shardings=split)(jax.device_put(x, ROWS)),
        jax.device_put(x, space),
        *jax.jit(lambda v: (jax.device_put(v, space), jax.device_put(v * 3, alone), v - 1))(x),
    ]
    return made, [v.sharding.memory_kind for v in made]


def big() -> Any:
    value = np.arange(3 << 20, dtype=np.int32)
    there, here = jax.device_put(value, DEVICES[3]), jax.device_put(value)
    return there, here + 1, there.devices() == {DEVICES[3]}


def donated() -> Any:
    step = jax.jit(lambda v: v * 1.01 + 1, donate_argnums=0)
    made = []
    for size in (64, 1 << 19):
        x = jax.device_put(np.ones(size, np.float32), ROWS)
        first = x
        for _ in range(50):
            x = step(x)
        made += [x.block_until_ready(), first.is_deleted()]
    alias = jnp.ones(4)
    kept = alias.addressable_shards[0].data
    return *made, step(alias), alias.is_deleted(), kept


def wide() -> Any:
    with jax.enable_x64(True):
        x = jnp.arange(5, dtype=jnp.int64) << 40
        return x, x / 3, jax.random.uniform(jax.random.key(0), (3,), jnp.float64)


def narrow() -> Any:
    x = jnp.arange(6)
    return x.astype(jnp.int4), x.astype(jnp.float8_e4m3fn), x.astype(jnp.uint8), x.astype(jnp.complex64) * 1j


def errors() -> Any:
    """Each is raised where JAX raises it, and leaves all else as it was."""
    found = []
    x = jnp.ones(4)
    gone = jax.jit(lambda v: v + 1, donate_argnums=0)
    gone(x)
    for wrong in (lambda: x + 1, lambda: jnp.ones(3) @ jnp.ones(4), lambda: jax.device_put(np.ones(7), ROWS)):
        try:
            wrong()
        except (RuntimeError, TypeError, ValueError) as error:
            found.append(type(error).__name__)
    return found, jnp.ones(2) + 1


def read(value: Any) -> Any:
    """A value as text that shows its bits."""
    if isinstance(value, jax.Array) and str(value.dtype).startswith("key<"):
        value = jax.random.key_data(value)
    if isinstance(value, (jax.Array, np.ndarray)):
        found = np.asarray(value)
        return [str(found.dtype), list(found.shape), hashlib.sha256(found.tobytes()).hexdigest()[:16]]
    return str(value)


PARTS: list[Callable[[], Any]] = [
    operations,
    transformed,
    random,
    control_flow,
    linear_algebra,
    sharded,
    collectives,
    placed,
    in_host_memory,
    big,
    donated,
    wide,
    narrow,
    errors,
]


def main() -> None:
    found = {}
    for part in PARTS:
        try:
            found[part.__name__] = [read(value) for value in jax.tree.leaves(part())]
        except Exception as error:
            found[part.__name__] = [f"{type(error).__name__}: {error}"]
    print(json.dumps({"devices": len(DEVICES), "results": found}))


if __name__ == "__main__":
    main()
