"""Types that devices do not have. Typed PRNG keys are there, and between nodes, arrays of uint32, with one more
dimension or several. float0, the zeros that are derivatives by whole numbers, is of truth values, as in XLA; a result
of it is made here."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def is_key(value: Any) -> bool:
    """Whether an array, tracer or type is one of typed PRNG keys."""
    return jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def is_zeros(value: Any) -> bool:
    """Whether an array, tracer or type is of float0."""
    return bool(getattr(value, "dtype", None) == jax.dtypes.float0)


def is_extended(value: Any) -> bool:
    """Whether devices have another type in place of that of an array, tracer or type."""
    return is_key(value) or is_zeros(value)


def data_type(aval: Any) -> jax.ShapeDtypeStruct:
    """The type of a value as it lies on devices."""
    if is_zeros(aval):
        return jax.ShapeDtypeStruct(aval.shape, bool)
    if not is_key(aval):
        return logical(aval)
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def logical_type(shape: tuple[int, ...], dtype: Any, weak: bool, extended: Any) -> jax.ShapeDtypeStruct:
    """The type that JAX sees of data on devices: that of keys with dtype `extended`, if that is given."""
    if extended is None:
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
    words = len(data_type(jax.ShapeDtypeStruct((), extended)).shape)
    return jax.ShapeDtypeStruct(shape[: len(shape) - words], extended)


def logical(aval: Any) -> jax.ShapeDtypeStruct:
    """The type of a traced value, without where it lies."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def to_data(value: Any) -> Any:
    """The value as it lies on devices."""
    if is_zeros(value):
        return np.zeros(value.shape, bool)
    return jax.random.key_data(value) if is_key(value) else value


def from_data(data: Any, aval: Any) -> Any:
    """The inverse of `to_data`: a value of type `aval`."""
    if is_zeros(aval):
        return np.zeros(aval.shape, aval.dtype)
    if not is_key(aval):
        return data
    implementations: list[Any] = []

    def look(key: Any) -> Any:
        implementations.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    jax.eval_shape(look, jax.ShapeDtypeStruct((), aval.dtype))
    return jax.random.wrap_key_data(data, impl=implementations[0])
