"""Sizes: thousands of nodes work; constants beyond the limit are refused, naming it, without using the memory."""

from __future__ import annotations

import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray import limits

V = np.arange(8, dtype=np.float32)
GIB = 1 << 30


def test_5000_nodes(session, slices, equal) -> None:
    here = pw.compiled(lambda v: v + 1, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))

    @pw.program
    def long(v):
        for _ in range(5000):
            v = here(v)
        return v

    start = time.monotonic()
    assert len(long.lower(V).graph.nodes) == 5002
    lowered = time.monotonic()
    equal(long(V), V + 5000)
    first = time.monotonic()
    equal(long(V), V + 5000)
    print(f"lower {lowered - start:.1f} s, first call {first - lowered:.1f} s, next {time.monotonic() - first:.2f} s")
    assert first - start < 60


def test_thousands_of_transfers_between_islands(session, slices, equal) -> None:
    here = pw.compiled(lambda v: v + 1, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    there = pw.compiled(lambda v: v * 1, slice=slices.b2, in_specs=P("x"), out_specs=P("x"))

    def back_and_forth(v, times):
        for _ in range(times):
            v = there(here(v))
        return v

    start = time.monotonic()
    equal(pw.program(lambda v: back_and_forth(v, 1000))(V), V + 1000)
    print(f"{time.monotonic() - start:.1f} s")
    with pytest.raises(pw.errors.TooLarge, match=r"has \d+ nodes; the limit is 8192"):
        np.asarray(pw.program(lambda v: back_and_forth(v, 2500))(V))


def test_nodes_beyond_the_limit_are_refused(session, slices) -> None:
    f = pw.compiled(lambda v: v + 1, slice=slices.a1)

    def too_long(v):
        for _ in range(limits.MAX_NODES):
            v = f(v)
        return v

    with pytest.raises(pw.errors.TooLarge, match=r"program 'too_long' has 8194 nodes; the limit is 8192"):
        pw.program(too_long)(V)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("kind", ["broadcast", "zeros"])
def test_a_constant_of_1_gib_is_refused(session, slices, within, kind) -> None:
    """Neither array takes memory until somebody reads it, which nobody should."""
    size = GIB // 4
    big = np.broadcast_to(np.float32(1), (size,)) if kind == "broadcast" else np.zeros(size, np.float32)
    message = rf"captures constants of \d+ bytes; the limit is {limits.MAX_CONSTANT_BYTES}. Pass them as arguments"
    function = pw.compiled(lambda v: v + big[:8] + jnp.asarray(big)[0], slice=slices.a4)
    before = peak_bytes()
    with within(10), pytest.raises(pw.errors.TooLarge, match=message):
        function(V)
    with within(10), pytest.raises(pw.errors.TooLarge, match=message):
        pw.program(lambda v: v + jnp.asarray(big)[:8])(V)
    nested = jax.jit(lambda v: v + jnp.asarray(big)[:8])
    with within(10), pytest.raises(pw.errors.TooLarge, match=message):
        pw.compiled(nested, slice=slices.a4)(V)
    with within(10), pytest.raises(pw.errors.TooLarge, match=message):
        pw.program(lambda v: nested(v))(V)
    print(f"peak memory grew by {(peak_bytes() - before) >> 20} MiB")


def test_constants_just_over_the_limit_are_refused_in_sum(session, slices) -> None:
    half = np.zeros((limits.MAX_CONSTANT_BYTES // 2 + 4) // 4, np.float32)
    other = half.copy()
    with pytest.raises(pw.errors.TooLarge, match=r"captures constants of 67108\d\d\d bytes"):
        pw.compiled(lambda v: v + jnp.asarray(half)[0] + jnp.asarray(other)[0], slice=slices.a4)(V)
    with pytest.raises(pw.errors.TooLarge, match=r"program 'f' captures constants of 67108\d\d\d bytes"):
        pw.program(lambda v: v + jnp.asarray(half)[0] + jnp.asarray(other)[0], name="f")(V)


def test_functions_that_are_too_large_together_are_refused(session, slices) -> None:
    tables = [np.arange(k, k + (15 << 20), dtype=np.int32) for k in range(3)]  # 60 MiB each
    functions = [pw.compiled(lambda v, t=t: v + jnp.asarray(t)[0], slice=slices.a1) for t in tables]
    with pytest.raises(
        pw.errors.TooLarge, match=r"the functions of program 'f' take \d+ bytes.*the limit is 134217728"
    ):
        pw.program(lambda v: [function(v) for function in functions], name="f")(V)


def test_constants_below_the_limit_work(session, slices, equal) -> None:
    table = np.arange(1 << 20, dtype=np.float32)  # 4 MiB
    equal(pw.compiled(lambda v: v + jnp.asarray(table)[-8:], slice=slices.a4)(V), V + table[-8:])
    equal(pw.program(lambda v: v + jnp.asarray(table)[-8:])(V), V + table[-8:])


def test_constant_returned_by_a_program(session, equal) -> None:
    table = np.arange(1 << 20, dtype=np.float32)
    result, _ = pw.program(lambda v: (table, v + 1))(V)
    equal(result, table)


def test_wide_program(session, slices, equal) -> None:
    """500 nodes that do not depend on each other, and one that takes them all."""
    f = pw.compiled(lambda v, k: v * k, slice=slices.a1)
    g = pw.compiled(lambda *vs: sum(vs), slice=slices.b2)
    program = pw.program(lambda v: g(*[f(v, k) for k in range(500)]))
    equal(program(V), jax.jit(lambda v: v * np.float32(sum(range(500))))(V))
