"""Arguments of programs: the values that may be passed, and their types.

An `ArgumentType` is the part of an argument that a trace depends on: shape, dtype, weak type, and for a `pw.Array` the
slice and spec it lies in. Types are interned, so that comparing the types of a call with those of an earlier one costs
a few pointer comparisons.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import ml_dtypes
import numpy as np

from pathways_ray.client import prng
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import InvalidArray, UsageError
from pathways_ray.ir.types import ArrayType, Spec, spec_text
from pathways_ray.jax_types import dtype_named

_KINDS = "biufcV"

_HELD_BY_ALL = frozenset(map(np.dtype, ("?", "i1", "i2", "i4", "u1", "u2", "u4", "f2", "f4", "c8", ml_dtypes.bfloat16)))
"""Dtypes that JAX holds whatever it is set to."""

WIDE = ("float64", "int64", "uint64", "complex128")
"""Types that JAX has under `jax_enable_x64` only."""


class ArgumentType:
    """Interned; compare with `is`. `slice` is None for a value that is still with the client.

    `array` is what lies on devices, `aval` what JAX sees: of typed PRNG keys, these differ.
    """

    __slots__ = ("__weakref__", "array", "aval", "cover", "extended", "shaped", "slice", "spec", "weak")

    # Weak: a type goes with the last array and program that have it, and lets go of its slice.
    _known: ClassVar[weakref.WeakValueDictionary[Any, ArgumentType]] = weakref.WeakValueDictionary()

    array: ArrayType
    weak: bool
    slice: VirtualSlice | None
    spec: Spec
    aval: jax.ShapeDtypeStruct
    extended: Any  # the dtype of typed PRNG keys, or float0; None of ordinary arrays
    shaped: Any  # `aval` as JAX traces it, once it was asked for
    cover: Any  # how arrays of the type are fetched (`data.FetchPlan`), once one was

    @classmethod
    def of(
        cls, array: ArrayType, weak: bool, where: VirtualSlice | None, spec: Spec, extended: Any = None
    ) -> ArgumentType:
        """The one type with these values; `extended` is a dtype that devices do not have, whose data `array` is."""
        key = (array.shape, array.dtype, weak, where, spec, extended)
        found = cls._known.get(key)
        if found is None:
            found = object.__new__(cls)
            found.array, found.weak, found.slice, found.spec = array, weak, where, spec
            found.cover = found.shaped = None
            found.aval = prng.logical_type(array.shape, dtype_named(array.dtype), weak, extended)
            found.extended = found.aval.dtype if prng.is_extended(found.aval) else None
            cls._known[key] = found
        return found

    @classmethod
    def forget_covers(cls, where: VirtualSlice) -> None:
        """Has arrays on a slice that has moved be fetched from its new devices."""
        for kind in list(cls._known.values()):
            if kind.slice is where:
                kind.cover = None

    def __str__(self) -> str:
        shape = ",".join(map(str, self.aval.shape))
        return f"{self.aval.dtype}[{shape}]" if self.extended is not None else str(self.array)

    def where(self) -> str:
        return f"{self.slice}:{spec_text(self.spec)}" if self.slice is not None else "client"


def to_numpy(value: Any, what: str = "the value") -> tuple[np.ndarray[Any, Any], bool]:
    """The value as a C-ordered NumPy array of a dtype that JAX holds under its current settings, and its weak type.

    Raises:
        InvalidArray: not an array or number, or of a dtype JAX does not have.
    """
    if type(value) is np.ndarray and value.dtype in _HELD_BY_ALL and value.flags.c_contiguous:
        return value, False
    is_number = isinstance(value, bool | int | float | complex) and not isinstance(value, np.generic)
    weak = is_number and not isinstance(value, bool)  # JAX has no weak type of truth values
    if isinstance(value, jax.Array):
        value = prng.to_data(value)
        weak = bool(getattr(value, "weak_type", False))
    elif not is_number and not hasattr(value, "__array__"):
        raise InvalidArray(f"{what} is a {type(value).__name__}; pass numbers, NumPy arrays, jax.Arrays or pw.Arrays")
    try:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("JAX has no masked arrays; fill it, or pass data and mask")
        array = np.asarray(value)
        if array.dtype.kind not in _KINDS or array.dtype.fields is not None:
            raise TypeError(f"dtype {array.dtype}")
        if array.dtype.kind == "V" and not hasattr(ml_dtypes, array.dtype.name):
            raise TypeError(f"dtype {array.dtype}")
        if array.dtype.itemsize > (16 if array.dtype.kind == "c" else 8):
            raise TypeError(f"dtype {array.dtype}")
        target = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
        if weak and isinstance(value, int):
            _check_fits(value, target)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArray(f"{what} cannot be a JAX array: {error}") from None
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite, as in JAX
        return np.ascontiguousarray(array.astype(target, copy=False)).reshape(array.shape), weak


def _check_fits(value: int, dtype: np.dtype[Any]) -> None:
    limits = np.iinfo(dtype)
    if not limits.min <= value <= limits.max:
        raise OverflowError(f"{value} does not fit into {dtype} (set jax_enable_x64 for 64 bits)")


def extended_dtype(value: Any) -> Any:
    """The dtype of typed PRNG keys, or float0; None of everything else."""
    known = isinstance(value, jax.Array | jax.ShapeDtypeStruct) and prng.is_key(value)
    return value.dtype if known or prng.is_zeros(value) else None


def keeping_width(values: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Has JAX keep 64 bits where one of these arrays, or types, has them: outside of the `jax.enable_x64` under which
    they were made as well."""
    is_wide = any(getattr(one, "dtype", None) is not None and one.dtype.name in WIDE for one in values)
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()


def check_width(name: str, number: int, given: ArrayType, taken: Any) -> None:
    """Checks that an argument has as many bits as a function takes it with.

    Raises:
        UsageError: it has 64, and JAX, which has no such types here, has traced it with 32.
    """
    if given.dtype in WIDE and given.dtype != (dtype := prng.data_type(taken).dtype.name):
        raise UsageError(
            f"argument {number} of {name} is a {given}, which it takes as {dtype}: arrays of 64 bits need "
            "jax_enable_x64 where they are used as well. Call it under `with jax.enable_x64(True):`, or cast the array "
            "there"
        )
