"""Divisions of integers: whatever their divisor, they compile, and give what plain JAX gives."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pathways_ray.executor.compile.divisions import without_divisions_by_zero

INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)


def test_a_host_compiles_divisions_by_constants_that_are_0() -> None:
    """Formulas, exports, and modules for several devices that are compiled as they are: XLA, which computes such a
    division while it compiles, has ended the process."""
    told = [sys.executable, "-m", "tests.unit.executor.compile.dividing_host"]
    ended = subprocess.run(told, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-1] == "all are there"


@pytest.mark.parametrize("dtype", INTEGERS)
def test_arguments_are_divided_as_in_jax(dtype: Any) -> None:
    with jax.enable_x64(True):
        ends = np.iinfo(dtype)
        some = np.array([0, 1, 2, 7, ends.max, ends.min, ends.max - 1, ends.min + 1], dtype)
        some = np.append(some, np.array([-1, -2, -7]).astype(dtype))
        x, y = (one.ravel() for one in np.meshgrid(some, some))
        jitted = jax.jit(lambda x, y: (lax.div(x, y), lax.rem(x, y), lax.rem(x, y[0]), x // y, x % y))
        found = without_divisions_by_zero(jitted.lower(x, y)).compile()(x, y)
        for one, other in zip(found, jitted(x, y), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", [jnp.int2, jnp.uint2, jnp.int4, jnp.uint4])
def test_so_are_integers_of_less_than_a_byte(dtype: Any) -> None:
    one, zero = jnp.ones(8, dtype), jnp.zeros(8, dtype)

    def divided(v: Any) -> Any:
        few = v.astype(dtype)
        return [made.astype(np.int32) for made in (lax.rem(few, one), lax.rem(one, zero), lax.div(few, few - few))]

    found = without_divisions_by_zero(jax.jit(divided).lower(np.ones(8, np.int32))).compile()(np.ones(8, np.int32))
    ones = 2 ** jnp.iinfo(dtype).bits - 1 if jnp.iinfo(dtype).min == 0 else -1
    np.testing.assert_array_equal(found, [[0] * 8, [1] * 8, [ones] * 8])


@pytest.mark.parametrize("number", [0, 3])
def test_arrays_without_elements_may_be_divided(number: int) -> None:
    v = np.zeros((0, 4), np.int32)
    found = without_divisions_by_zero(jax.jit(lambda v: lax.rem(v, np.full((0, 4), number, np.int32))).lower(v))
    assert found.compile()(v).shape == (0, 4)


def test_divisions_of_floats_and_by_numbers_that_are_not_0_are_left() -> None:
    v = np.arange(8, dtype=np.int32)
    for function in (lambda v: lax.rem(v, jnp.full(8, 3, np.int32)), lambda v: v / 3, lambda v: v * 1.5 % v):
        lowered = jax.jit(function).lower(v)
        before = lowered.as_text()
        assert "divide" in before or "remainder" in before
        assert without_divisions_by_zero(lowered).as_text() == before
    lowered = jax.jit(lambda v: lax.rem(v, v)).lower(v)
    assert "select" not in lowered.as_text()
    assert "select" in without_divisions_by_zero(lowered).as_text()
