"""Estimates of how long functions take: that they tell long from short, on few devices and on many."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pathways_ray.client import estimates
from pathways_ray.client.estimates import COLLECTIVE_S, HOST


def of(function: Callable[..., Any], *shapes: tuple[int, ...], devices: int = 1) -> float:
    values = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return estimates.seconds(jax.jit(function).trace(*values).jaxpr, devices, ("cpu",))


def test_a_product_takes_two_operations_for_each_pair_it_multiplies() -> None:
    assert of(jnp.dot, (64, 512), (512, 256)) == pytest.approx(2 * 64 * 512 * 256 / HOST.operations)


def test_devices_share_the_work_and_an_accelerator_is_faster() -> None:
    product = of(jnp.dot, (512, 512), (512, 512))
    assert of(jnp.dot, (512, 512), (512, 512), devices=4) == pytest.approx(product / 4)
    value = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    jaxpr = jax.jit(jnp.dot).trace(value, value).jaxpr
    assert estimates.seconds(jaxpr, 1, ("cuda",)) < product / 50


def test_a_loop_takes_its_length_times_its_body() -> None:
    def repeated(times: int) -> Callable[..., Any]:
        return lambda v: jax.lax.fori_loop(0, times, lambda _, u: u @ u, v)

    assert of(repeated(100), (256, 256)) == pytest.approx(10 * of(repeated(10), (256, 256)))


def test_a_loop_without_a_known_length_may_take_for_ever() -> None:
    assert of(lambda v: jax.lax.while_loop(lambda u: u.sum() > 1, lambda u: u * 0.5, v), (4,)) == math.inf


def test_a_loop_of_no_rounds_takes_no_time_whatever_is_in_it() -> None:
    def body(u: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.while_loop(lambda w: w.sum() > 1, lambda w: w * 0.5, u), None

    assert of(lambda v: jax.lax.scan(body, v, None, length=0)[0], (4,)) < 1e-6
    assert of(lambda v: jax.lax.scan(body, v, None, length=1)[0], (4,)) == math.inf


def test_keys_and_tokens_have_an_estimate_too() -> None:
    assert of(lambda v: v + jax.random.normal(jax.random.key(0), v.shape), (4,)) < 1e-3
    token = jax.jit(lambda v: (jax.lax.create_token(v), v * 2))
    assert of(lambda v: token(v)[1], (4,)) < 1e-6


def test_of_branches_the_longer_one_counts() -> None:
    def branch(v: jax.Array) -> jax.Array:
        return jax.lax.cond(v.sum() > 0, lambda u: u @ u, lambda u: u, v)

    assert of(branch, (256, 256)) == pytest.approx(of(lambda v: v @ v, (256, 256)), rel=0.5)


def test_a_convolution_and_a_decomposition_are_not_taken_for_an_addition() -> None:
    addition = of(lambda v: v + 1, (1, 64, 128, 128))
    assert of(lambda v, w: jax.lax.conv(v, w, (1, 1), "SAME"), (1, 64, 128, 128), (64, 64, 3, 3)) > 10 * addition
    assert of(jnp.linalg.cholesky, (512, 512)) > 10 * of(lambda v: v + 1, (512, 512))


def test_a_collective_takes_some_microseconds_whatever_its_size() -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("x",))
    with jax.sharding.use_abstract_mesh(mesh):
        value = jax.ShapeDtypeStruct((4,), jnp.float32)
        jaxpr = jax.make_jaxpr(lambda v: jax.lax.psum(v, "x"), axis_env=[("x", 4)])(value)
    assert estimates.seconds(jaxpr, 4, ("cpu",)) == pytest.approx(COLLECTIVE_S, rel=0.01)


def test_empty_arrays_take_next_to_no_time() -> None:
    assert of(lambda v: v * 2, (0, 4)) < 1e-8
