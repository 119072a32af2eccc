"""Bytes of host buffers as arrays, and arrays as bytes, in whatever order the client has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pathways_ray.ir.types import ArrayType, item_bytes
from pathways_ray.jax_types import dtype_named
from pathways_ray.proxy.arrays import Code, Refused
from pathways_ray.transport.shared_memory import bytes_of


def viewed(data: Any, kind: ArrayType, strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Bytes of the client as an array.

    Raises:
        Refused: they are too few.
    """
    dtype = dtype_named(kind.dtype)
    if strides and len(strides) != len(kind.shape):
        raise Refused(Code.INVALID_ARGUMENT, f"{len(strides)} strides for an array of {len(kind.shape)} dimensions")
    needed = kind.nbytes
    if strides:
        empty = not needed
        spread = sum((size - 1) * stride for size, stride in zip(kind.shape, strides, strict=True))
        needed = 0 if empty else spread + item_bytes(kind.dtype)
    if len(data) < needed or any(stride < 0 for stride in strides):
        raise Refused(
            Code.INVALID_ARGUMENT, f"{len(data)} bytes with strides {strides} for an array {kind} of {needed} bytes"
        )
    if not kind.nbytes:
        return np.empty(kind.shape, dtype)
    if not strides:
        return np.frombuffer(data, dtype, kind.nbytes // dtype.itemsize).reshape(kind.shape)
    return np.ndarray(kind.shape, dtype, data, strides=strides)


def written(value: np.ndarray[Any, Any], strides: tuple[int, ...]) -> Any:
    """The bytes of an array, with other strides than those of C order where they are given."""
    if not strides or not value.size:
        return bytes_of(value)
    if len(strides) != value.ndim or any(stride < 0 for stride in strides):
        raise Refused(Code.INVALID_ARGUMENT, f"strides {strides} for an array of shape {value.shape}")
    spread = sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True)) + value.itemsize
    if spread > 2 * value.nbytes + value.itemsize:
        raise Refused(Code.INVALID_ARGUMENT, f"strides {strides} spread {value.nbytes} bytes over {spread}")
    room = np.zeros(spread, np.uint8)
    np.ndarray(value.shape, value.dtype, room.data, strides=strides)[...] = value
    return room.data
