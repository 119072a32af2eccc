"""Typed PRNG keys: on devices, and between nodes, they are arrays of uint32, with one more dimension or several."""

from __future__ import annotations

from typing import Any

import jax


def is_key(value: Any) -> bool:
    """Whether an array, tracer or type is one of typed PRNG keys."""
    return jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def data_type(aval: Any) -> jax.ShapeDtypeStruct:
    """The type of a value as it lies on devices."""
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
    return jax.random.key_data(value) if is_key(value) else value


def from_data(data: Any, aval: Any) -> Any:
    """The inverse of `to_data`: a value of type `aval`."""
    if not is_key(aval):
        return data
    implementations: list[Any] = []

    def look(key: Any) -> Any:
        implementations.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    jax.eval_shape(look, jax.ShapeDtypeStruct((), aval.dtype))
    return jax.random.wrap_key_data(data, impl=implementations[0])
