"""Branches and loops over several islands on a real cluster: what decides lies on one, what follows on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from tests.integration.conftest import Slices
from tests.unit.control_programs import (
    HELD,
    Functions,
    arguments,
    compiled_functions,
    expected,
    random_program,
)

Equal = Callable[[Any, Any], None]


def on(where: pw.VirtualSlice, fun: Callable[..., Any], **options: Any) -> Any:
    return pw.compiled(fun, slice=where, in_specs=P("x"), out_specs=P("x"), **options)


def check_random(equal: Equal, seed: int, depth: int, functions: Functions) -> None:
    """Runs the random program of a seed on these functions, and compares it with `jax.lax`."""
    code = random_program(seed, depth)
    x, y = arguments(seed)
    equal(pw.program(lambda x, y: code(pw, functions, x, y))(x, y), expected(code, x, y))


@pytest.mark.parametrize("seed", [1, 4, 26])
def test_random_programs_over_two_islands_are_equal_to_the_bit(
    session: ClusterSession, slices: Slices, equal: Equal, seed: int
) -> None:
    held = pw.put(HELD, slices.b4, P("x"))
    check_random(equal, seed, 2, compiled_functions([slices.a4, slices.b4], P("x"), held))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_random_programs_are_equal_to_the_bit(session: ClusterSession, slices: Slices, equal: Equal) -> None:
    held = pw.put(HELD, slices.b4, P("x"))
    for seed in range(2000, 2040):
        for where, depth in (([slices.a4], 3), ([slices.a4, slices.b4], 2), ([slices.b2, slices.a22, slices.a1], 2)):
            functions = compiled_functions(where, P("x") if len(where) < 3 else P(), held)
            check_random(equal, seed, depth, functions)


def counting(slices: Slices) -> Any:
    """A loop that goes to and fro between two islands until its vector is large."""
    there = on(slices.b4, lambda v: v + 1)
    back = on(slices.a4, lambda v: v * 2)
    large = pw.compiled(lambda v, limit: v.max() < limit, slice=slices.b2, in_specs=(P(), P()))
    return pw.program(
        lambda v, limit: pw.while_loop(lambda c: large(c[1], limit), lambda c: (c[0] + 1, back(there(c[1]))), (0, v))
    )


def test_a_loop_over_two_islands_ends_as_its_value_says(session: ClusterSession, slices: Slices, equal: Equal) -> None:
    program = counting(slices)
    v = np.arange(4, dtype=np.float32)
    for limit in (0.0, 10.0, 1000.0):
        rounds, wanted = 0, v
        while wanted.max() < limit:
            rounds, wanted = rounds + 1, (wanted + 1) * 2
        count, found = program(v, np.float32(limit))
        equal(found, wanted)
        assert int(count) == rounds
    text = program.lower(v, np.float32(1)).explain()
    assert "segment 1" in text
    assert "slice" in text


def test_later_launches_take_what_a_deciding_one_gives(session: ClusterSession, slices: Slices, equal: Equal) -> None:
    program, double = counting(slices), on(slices.a4, lambda v: v * 2)
    v = np.arange(4, dtype=np.float32)
    made = [double(program(v, np.float32(100))[1]) for _ in range(4)]
    wanted = v
    while wanted.max() < 100:
        wanted = (wanted + 1) * 2
    for one in made:
        equal(one, wanted * 2)


def test_what_a_branch_hands_through_is_an_array_of_its_own(
    session: ClusterSession, slices: Slices, equal: Equal
) -> None:
    there = on(slices.b4, lambda v: v + 1)
    back = on(slices.a4, lambda v: v * 2)
    total = pw.compiled(lambda v: v.sum(), slice=slices.b2)
    program = pw.program(lambda v: pw.cond(total(v) > 100, lambda x: back(there(x)), lambda x: x, v))
    consume = on(slices.a4, lambda v: v * 3, donate_argnums=0)
    v = pw.put(np.arange(4, dtype=np.float32), slices.a4, P("x"))
    same = program(v)
    equal(consume(same), np.arange(4, dtype=np.float32) * 3)
    equal(v, np.arange(4, dtype=np.float32))


def test_scans_over_two_islands_take_and_stack_rows(session: ClusterSession, slices: Slices, equal: Equal) -> None:
    there = pw.compiled(lambda c, x: c * 2 + x, slice=slices.b2)
    back = pw.compiled(lambda c: c - 1, slice=slices.a1)

    def scanned(c: Any, xs: Any) -> Any:
        return pw.scan(lambda c, x: (back(there(c, x)), c.sum()), back(c), xs, reverse=True)

    def plain(c: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda c, x: (c * 2 + x - 1, c.sum()), c - 1, xs, reverse=True)

    c, xs = np.arange(3, dtype=np.int32), np.arange(12, dtype=np.int32).reshape(4, 3)
    equal(pw.program(scanned)(c, xs), plain(c, xs))


def test_donated_arguments_are_taken_outside_of_bodies(session: ClusterSession, slices: Slices, equal: Equal) -> None:
    there, back = on(slices.b4, lambda v: v + 1), on(slices.a4, lambda v: v * 2)
    take = on(slices.a4, lambda v: v - 1, donate_argnums=0)
    total = pw.compiled(lambda v: v.sum(), slice=slices.b2)
    program = pw.program(lambda v: pw.cond(total(v) > 3, lambda x: back(there(x)), back, take(v)))
    v = pw.put(np.arange(4, dtype=np.float32), slices.a4, P("x"))
    equal(program(v), np.arange(4, dtype=np.float32) * 2)
    assert v.is_deleted()


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_part_that_fails_is_the_outcome_with_its_line(session: ClusterSession, slices: Slices) -> None:
    there = on(slices.b4, lambda v: v + 1)
    huge = pw.compiled(lambda v: jnp.sort(jnp.arange(1 << 42, dtype=np.float32) * v[0])[:4], slice=slices.a1)
    test = pw.compiled(lambda v: v.max() < 5, slice=slices.b2)
    program = pw.program(lambda v: pw.while_loop(test, lambda c: there(c) + huge(c), there(v)))
    v = np.zeros(4, np.float32)
    with pytest.raises(pw.errors.ExecutionError):
        np.asarray(program(v))


def test_a_loop_without_end_can_be_cancelled(session: ClusterSession, slices: Slices) -> None:
    there, back = on(slices.b4, lambda v: v + 1), on(slices.a4, lambda v: v * 1)
    test = pw.compiled(lambda v: v.max() >= 0, slice=slices.b2)
    y = pw.program(lambda v: pw.while_loop(test, lambda c: back(there(c)), back(v)))(np.zeros(4, np.float32))
    with pytest.raises(pw.errors.WaitTimeout):
        y.block_until_ready(timeout=1.0)
    other = on(slices.a4, lambda v: v + 5)(np.zeros(4, np.float32))
    assert float(np.asarray(other).sum()) == 20.0
    y.cancel()
    with pytest.raises(pw.errors.Cancelled):
        y.block_until_ready(timeout=20.0)
