"""Branches and loops of programs on a real cluster, compared with `jax.lax` in this process."""

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
from tests.integration.test_decisions import check_random
from tests.unit.control_programs import HELD, compiled_functions

Equal = Callable[[Any, Any], None]


@pytest.mark.parametrize("seed", range(100, 103))
def test_random_programs_are_equal_to_the_bit(session: ClusterSession, slices: Slices, equal: Equal, seed: int) -> None:
    held = pw.put(HELD, slices.a4, P("x"))
    check_random(equal, seed, 3, compiled_functions([slices.a4], P("x"), held))


def test_a_predicate_of_one_island_decides_on_another(session: ClusterSession, slices: Slices, equal: Equal) -> None:
    total = pw.compiled(lambda v: v.sum(), slice=slices.b4, in_specs=P("x"))
    half = pw.compiled(lambda v: v / 2, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    shift = pw.put(np.float32(3))

    @pw.program
    def program(v: Any) -> Any:
        shifted = pw.cond(total(v) > 10, half, lambda x: x + shift, v)
        return pw.while_loop(lambda c: c[1].max() > 1, lambda c: (c[0] + 1, half(c[1])), (0, shifted))

    for v in (np.arange(8, dtype=np.float32), np.ones(8, np.float32)):
        rounds, found = program(v)
        wanted = v / 2 if v.sum() > 10 else v + 3
        count = 0
        while wanted.max() > 1:
            wanted, count = wanted / 2, count + 1
        equal(found, wanted)
        assert int(rounds) == count


def test_collectives_may_be_in_loops(session: ClusterSession, slices: Slices, equal: Equal) -> None:
    def mean(v: jax.Array) -> jax.Array:
        return jax.shard_map(lambda u: u + jax.lax.psum(u, "x") // 4, in_specs=P("x"), out_specs=P("x"))(v)

    step = pw.compiled(mean, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    program = pw.program(lambda n, v: pw.fori_loop(0, n, lambda i, c: step(c), v))
    v = np.arange(4, dtype=np.int32)
    wanted = v
    for _ in range(5):
        wanted = wanted + wanted.sum() // 4
    equal(program(np.int32(5), v), wanted.astype(np.int32))


def test_scans_stack_rows_and_explain_names_them(session: ClusterSession, slices: Slices, equal: Equal) -> None:
    step = pw.compiled(lambda c, x: c * 2 + x, slice=slices.a1)
    program = pw.program(lambda c, xs: pw.scan(lambda c, x: (step(c, x), c), c, xs))
    c, xs = np.arange(3, dtype=np.float32), np.ones((4, 3), np.float32)
    equal(program(c, xs), jax.lax.scan(lambda c, x: (c * 2 + x, c), jnp.asarray(c), jnp.asarray(xs)))
    assert "scan(<lambda>)" in program.lower(c, xs).explain()
