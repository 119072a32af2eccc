"""Mutable arrays of JAX, `jax.Ref`s: inside of functions on slices, and beside arrays on them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray import jax_refs
from pathways_ray.errors import TraceError, UsageError

V = np.arange(8, dtype=np.float32)


def doubled(x: Any) -> Any:
    """A loop that fills a mutable array."""
    made = jax.new_ref(jnp.zeros_like(x))

    def fill(i: Any, _: None) -> None:
        made[i] = x[i] * 2

    jax.lax.fori_loop(0, 8, fill, None)
    return made[...]


def chosen(x: Any) -> Any:
    """A branch that changes one, in which a jitted function does too, and a debug call that reads it."""
    made = jax.new_ref(x)

    @jax.jit
    def add() -> None:
        made[...] += 1

    jax.lax.cond(x[1] > 0, add, lambda: None)
    jax.debug.callback(lambda _: None, made[0])
    return jax.freeze(made)


def totals(x: Any) -> Any:
    """A loop of which each round has its own."""

    def step(total: Any, one: Any) -> Any:
        made = jax.new_ref(total)
        made[...] += one
        return jax.freeze(made), one

    return jax.lax.scan(step, x[0], x)


@pytest.mark.parametrize("fun", [doubled, chosen, totals])
def test_functions_use_their_own(a4: pw.VirtualSlice, fun: Any) -> None:
    x = pw.put(V, a4, P("x"))
    expected = jax.tree.map(np.asarray, jax.jit(fun)(V))
    for run in (jax.jit(fun), pw.program(fun), pw.compiled(fun, slice=a4), jax.jit(fun).lower(x).compile()):
        found = run(x)
        assert {leaf.slice for leaf in jax.tree.leaves(found)} == {a4}
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, found), expected)


def test_a_program_uses_its_own_around_calls_and_captured_arrays(a4: pw.VirtualSlice) -> None:
    """Its constants are arrays of slices, in their order."""
    double, one, two = pw.compiled(lambda v: v * 2, slice=a4), pw.put(V * 0 + 1, a4), pw.put(V * 0 + 2, a4)

    def run(x: Any) -> Any:
        made = jax.new_ref(x)

        def body(_: Any, __: None) -> None:
            made[...] = double(made[...]) + one

        jax.lax.fori_loop(0, 2, body, None)
        return made[...] - two, one

    x = pw.put(V, a4)
    for function in (pw.program(run), jax.jit(run)):
        np.testing.assert_array_equal(np.asarray(function(x)[0]), V * 4 + 1)


def test_a_traced_function_is_rewritten_once() -> None:
    """What was exported of it is known by the identity of its operations, which others may have once they are gone."""
    closed: Any = jax.jit(doubled).trace(V).jaxpr
    pure = jax_refs.without_own(closed)
    assert not pure.effects
    assert jax_refs.without_own(closed) is pure
    assert jax_refs.without_own(pure) is pure


def test_those_of_this_process_are_refused_beside_arrays_on_slices(a4: pw.VirtualSlice) -> None:
    """At once: reading one as NumPy does would ask for each element."""
    x, here = pw.put(V, a4), jax.new_ref(jnp.zeros(8))

    def use(v: Any) -> Any:
        return here[...] + v

    with pytest.raises(UsageError, match=r"a jax.Ref is of this process, and pw.Array.* lies on a slice: take and"):
        jax.new_ref(x)
    with pytest.raises(UsageError, match=r"a jax.Ref, Ref\{float32\[8\]\}, is of this process, and is used with"):
        here[...] = x
    with pytest.raises(UsageError, match=r"is of this process, and is used with what is on a slice"):
        jax.jit(lambda held, v: held[...] + v)(here, x)
    for run in (jax.jit(use), pw.program(use), pw.compiled(use, slice=a4)):
        with pytest.raises(TraceError, match=r"reads or writes a jax.Ref that it has not made"):
            run(x)
    here[0] = 3.0
    np.testing.assert_array_equal(np.asarray(here[...]), [3, 0, 0, 0, 0, 0, 0, 0])
