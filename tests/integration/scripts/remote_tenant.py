"""One of several clients whose collectives meet on the same devices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

number = int(sys.argv[3])
with pw.connect(sys.argv[1], sys.argv[2], name=f"tenant {number}") as session:
    slices = [pw.virtual_slice((4,), ("x",), island=island) for island in (0, 1)]

    def compiled(where: pw.VirtualSlice) -> Callable[..., Any]:
        @pw.compiled(slice=where, in_specs=P("x"), out_specs=P("x"))
        def step(v: jax.Array) -> jax.Array:  # one collective: all devices of the island meet
            total = jax.shard_map(lambda s: jax.lax.psum(s, "x"), mesh=where.mesh, in_specs=P("x"), out_specs=P())
            return v * 0.5 + total(v).sum() * (number + 1)

        return step

    here, there = map(compiled, slices)
    program = pw.program(lambda v: there(here(there(v))))
    v = np.arange(4, dtype=np.float32)
    expected: np.ndarray = v
    np.asarray(program(v))  # compiled
    print("ready", flush=True)
    sys.stdin.readline()
    results = []
    x = v
    for k in range(60):
        x = program(x) if k % 6 else program(v)
        results.append(x)
    for k, result in enumerate(results):
        if k % 6 == 0:
            expected = v
        for _ in range(3):
            expected = np.asarray(expected * 0.5 + expected.sum(dtype=np.float32) * (number + 1), np.float32)
        np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-4)
    print("right", flush=True)
