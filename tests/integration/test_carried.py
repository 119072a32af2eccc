"""Small arguments that go with their launches, on the real runtime."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.limits import MAX_INLINE_BYTES, MAX_SENT_INLINE_BYTES
from tests.integration.test_early import taken, until_taken

LIMITS = (MAX_SENT_INLINE_BYTES, MAX_INLINE_BYTES)


@pytest.mark.parametrize("spec", [P("x"), P()], ids=str)
@pytest.mark.parametrize(("of", "dtype"), [("numpy", np.float32), ("numpy", np.int8), ("jax", np.int32)])
def test_values_are_those_of_arrays_that_were_put(session: Any, slices: Any, spec: Any, of: str, dtype: Any) -> None:
    """Also once a host takes calls from the client, and on another island than the program's first slice."""
    value: Any = (jnp if of == "jax" else np).arange(8, dtype=dtype)
    step = pw.compiled(lambda v, w: v * 2 + w, slice=slices.a4, in_specs=(spec, P()), out_specs=spec)
    there = pw.compiled(lambda v, w: v.sum() + w, slice=slices.b4, in_specs=(P(), P()), out_specs=P())
    expected = np.asarray(value) * 2 + np.asarray(value).dtype.type(1)

    @pw.program
    def both(v: Any, w: Any) -> Any:
        y = step(v, w)
        return y, there(y, w)

    one = np.asarray(value).dtype.type(1)
    put = pw.put(value, slice=slices.a4, spec=spec)
    np.testing.assert_array_equal(np.asarray(step(put, one)), expected)
    until_taken(session, lambda: np.asarray(step(value, one)))
    for k in range(3):
        np.testing.assert_array_equal(np.asarray(step(value, one)), expected)
        y, total = both(value, np.asarray(value).dtype.type(k))
        np.testing.assert_array_equal(np.asarray(y), expected - 1 + k)
        np.testing.assert_array_equal(np.asarray(total), (expected - 1 + k).sum() + k)
    put.delete()


def test_a_stream_of_them_is_right_and_leaves_nothing(session: Any, slices: Any) -> None:
    step = pw.compiled(lambda v, rate: v - rate, slice=slices.a4, in_specs=(P("x"), P()), out_specs=P("x"))
    y = pw.put(np.zeros(4, np.float32), slice=slices.a4, spec=P("x"))
    for k in range(300):
        y = step(y, 0.5 * k)
    np.testing.assert_array_equal(np.asarray(y), -0.5 * sum(range(300)))


@pytest.mark.parametrize("size", [limit // 4 + more for limit in LIMITS for more in (0, 1)])
def test_both_sides_of_the_limits(session: Any, slices: Any, size: int) -> None:
    double = pw.compiled(lambda v: v * 2, slice=slices.a1)
    value = np.arange(size, dtype=np.float32)
    until_taken(session, lambda: np.asarray(double(value)))
    before = taken(session)
    np.testing.assert_array_equal(np.asarray(double(value)), value * 2)
    assert taken(session) >= before


@pytest.mark.parametrize("spec", [P("x"), P()], ids=str)
def test_each_host_of_an_island_makes_its_shards(pairs: Any, spec: Any) -> None:
    with pw.connect(pairs.url, pairs.token) as session, session.virtual_slice((4,), ("x",), island=0) as s:
        turned = pw.compiled(lambda v, k: jnp.roll(v, 1) * k, slice=s, in_specs=(spec, P()), out_specs=spec)
        value = np.arange(8, dtype=np.float32)
        for k in range(5):
            np.testing.assert_array_equal(np.asarray(turned(value + k, k)), np.roll(value + k, 1) * k)
