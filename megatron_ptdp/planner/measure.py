"""Measures a cluster through the runtime, for `calibrate`. The one module of the planner that loads JAX and Ray.

Every figure is a median of several launches, with the time of an empty launch taken off, and a loop on the device where
one operation would be too short. Nothing here decides; `calibrate` makes a cluster file of the numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from megatron_ptdp.planner.calibrate import Measured

ROUNDS = 5
PRODUCTS = {"cpu": (128, 256, 512, 1024), "gpu": (1024, 2048, 4096, 8192), "tpu": (1024, 2048, 4096, 8192)}
MESSAGES = (1 << 16, 1 << 19, 1 << 22, 1 << 24)
"""Bytes."""


def measure(platform: str, islands: int, devices: int) -> Measured:
    """Measures the cluster of the open session: `islands` islands of `devices` devices."""
    kind = jnp.float32 if platform == "cpu" else jnp.bfloat16
    one = pw.virtual_slice((1,), ("x",))
    launch = _empty(one)
    flops = {size: _product(one, size, kind) for size in PRODUCTS[platform]}
    copied = _copy(one, 1 << 26)
    several = pw.virtual_slice((devices,), ("x",)) if devices > 1 else one
    reductions = [(float(size), _reduction(several, devices, size)) for size in MESSAGES] if devices > 1 else []
    messages = [(float(size), _message(size)) for size in MESSAGES] if islands > 1 else []
    return Measured(f"{platform} device", devices, flops, copied, reductions, messages, launch)


def _seconds(call: Callable[[], Any]) -> float:
    """The median time until the results of a call are there; the first, which compiles, does not count."""
    call().block_until_ready()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call().block_until_ready()
        times.append(time.perf_counter() - start)
    return median(times)


def _looped(call: Callable[[int], Callable[[], Any]], least: float = 0.05) -> float:
    """Seconds of one turn of a loop on the device: so many turns that a launch takes `least` longer than without."""
    base, turns = _seconds(call(0)), 1
    while True:
        taken = _seconds(call(turns)) - base
        if taken >= least or turns >= 1 << 14:
            return max(taken, 1e-9) / turns
        turns *= 4


def _empty(where: Any) -> float:
    value = pw.put(np.zeros((8,), np.float32), slice=where, spec=P())
    same = pw.compiled(lambda v: v + 1, slice=where, in_specs=P(), out_specs=P())
    return _seconds(lambda: same(value))


def _product(where: Any, size: int, kind: Any) -> float:
    """FLOP/s of size×size×size products."""
    value = pw.put(np.full((size, size), 1 / size, np.float32), slice=where, spec=P())

    def call(turns: int) -> Callable[[], Any]:
        def products(v: Any) -> Any:
            a = v.astype(kind)
            return jax.lax.fori_loop(0, turns, lambda _, x: x @ a, a).astype(jnp.float32)

        run = pw.compiled(products, slice=where, in_specs=P(), out_specs=P())
        return lambda: run(value)

    return 2.0 * size**3 / _looped(call)


def _copy(where: Any, size: int) -> float:
    """Bytes/s read and written by an elementwise operation on `size` bytes."""
    value = pw.put(np.zeros((size // 4,), np.float32), slice=where, spec=P())

    def call(turns: int) -> Callable[[], Any]:
        run = pw.compiled(
            lambda v: jax.lax.fori_loop(0, turns, lambda _, x: x * 0.5 + 1, v)[:1],
            slice=where,
            in_specs=P(),
            out_specs=P(),
        )
        return lambda: run(value)

    return 2.0 * size / _looped(call)


def _reduction(where: Any, devices: int, size: int) -> float:
    """Seconds of one all-reduce of `size` bytes over the devices of a slice."""
    value = pw.put(np.zeros((devices, size // 4), np.float32), slice=where, spec=P("x"))

    def call(turns: int) -> Callable[[], Any]:
        def sums(v: Any) -> Any:
            return jax.lax.fori_loop(0, turns, lambda _, x: jax.lax.psum(x, "x") * (1 / devices), v)

        inner = jax.shard_map(sums, mesh=where.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        run = pw.compiled(inner, slice=where, in_specs=P("x"), out_specs=P("x"))
        return lambda: run(value)

    return _looped(call)


def _message(size: int) -> float:
    """Seconds of `size` bytes from a device of one island to one of another, the launch taken off."""
    here, there = pw.virtual_slice((1,), ("x",), island=0), pw.virtual_slice((1,), ("x",), island=1)
    value = pw.put(np.zeros((size // 4,), np.float32), slice=here, spec=P())
    take = pw.compiled(lambda v: v[:1] + 1, slice=there, in_specs=P(), out_specs=P())
    near = pw.put(np.zeros((size // 4,), np.float32), slice=there, spec=P())
    return max(_seconds(lambda: take(value)) - _seconds(lambda: take(near)), 1e-6)
