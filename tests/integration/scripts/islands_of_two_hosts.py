"""A client that has layouts, sums, a refused reduce-scatter and transfers, on two islands of two hosts each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

with pw.connect(*sys.argv[1:]) as session:
    assert [len(island["hosts"]) for island in pw.islands()] == [2, 2]
    a, b = (pw.virtual_slice((4,), ("x",), island=k) for k in (0, 1))
    grid, pair = pw.virtual_slice((2, 2), ("x", "y"), island=1), pw.virtual_slice((2,), ("x",), island=0)
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    specs = {a: [P("x"), P(None, "x")], b: [P("x")], pair: [P()], grid: [P("x", "y"), P("y")]}
    layouts = [(where, spec) for where, list_ in specs.items() for spec in list_]
    same = {(w, str(s)): pw.compiled(lambda v: v + 0, slice=w, in_specs=s, out_specs=s) for w, s in layouts}

    # 1. any layout to any other, between islands and inside one, shard by shard
    for source, first in layouts:

        @pw.program
        def spread(v: Any, start: Callable[..., Any] = same[source, str(first)]) -> list[Any]:
            return [same[w, str(s)](start(v)) for w, s in layouts]

        for y, layout in zip(spread(pw.put(x, source, first)), layouts, strict=True):
            assert np.array_equal(np.asarray(y), x), (source, first, layout)
    print("layouts ok")

    # 2. sums over all devices of an island, big ones too
    big = np.random.default_rng(0).integers(0, 1000, (4, 1 << 20)).astype(np.float32)
    total = pw.compiled(
        jax.shard_map(lambda v: jax.lax.psum(v, "x"), mesh=a.mesh, in_specs=P("x"), out_specs=P()),
        slice=a,
        in_specs=P("x"),
        out_specs=P(),
    )
    for _ in range(5):
        assert np.array_equal(np.asarray(total(big))[0], big.sum(0))
    print("sums ok")

    # 3. a reduce-scatter, whose sums gloo gets wrong, is refused
    scatter = pw.compiled(
        jax.shard_map(
            lambda v: jax.lax.psum_scatter(v, "x", tiled=True),
            mesh=a.mesh,
            in_specs=P(),
            out_specs=P("x"),
            check_vma=False,
        ),
        slice=a,
        in_specs=P(),
        out_specs=P("x"),
    )
    try:
        np.asarray(scatter(np.ones(16, np.float32)))
        raise SystemExit("a reduce-scatter ran")
    except pw.errors.CompileError as error:
        assert "reduce-scatter" in str(error) and "psum" in str(error), error
    print("scatter refused")

    # 4. back and forth between islands, with collectives on both
    def gang(where: pw.VirtualSlice) -> Callable[..., Any]:
        def body(v: jax.Array) -> jax.Array:
            return (v + jax.lax.psum(v.sum(), "x")) / 64

        mapped = jax.shard_map(body, mesh=where.mesh, in_specs=P("x"), out_specs=P("x"))
        return pw.compiled(mapped, slice=where, in_specs=P("x"), out_specs=P("x"))

    here, there = gang(a), gang(b)

    @pw.program
    def both(v: Any) -> Any:
        for _ in range(20):
            v = there(here(v))
        return v

    v = np.linspace(0, 1, 8, dtype=np.float32)
    alone = v
    for _ in range(20):
        alone = np.asarray(there(np.asarray(here(alone))))
    for _ in range(10):
        assert np.array_equal(np.asarray(both(v)), alone)
    print("both ok")

    # 5. of each host, the thread that reads for gloo takes no core from others
    for host in (host for island in session.status()["islands"] for host in island["hosts"]):
        threads = os.listdir(f"/proc/{host['pid']}/task")
        assert [os.sched_getscheduler(int(one)) for one in threads].count(os.SCHED_BATCH) == 1
    print("readers ok")
