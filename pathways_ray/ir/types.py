"""What a value is and where it lies: array types, meshes, partition specs, layouts.

A `Spec` is the canonical form of a `jax.sharding.PartitionSpec`: for each array dimension the tuple of mesh axes it is
cut over, trailing uncut dimensions left out. Equal specs are equal tuples.
"""

from __future__ import annotations

import math
from typing import NewType

import msgspec

from pathways_ray.errors import SpecError

SliceId = NewType("SliceId", int)
Spec = tuple[tuple[str, ...], ...]

REPLICATED: Spec = ()

_ITEM_BYTES = {
    "bool": 1,
    "int2": 1,
    "int4": 1,
    "uint2": 1,
    "uint4": 1,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
}


def item_bytes(dtype: str) -> int:
    """Bytes of one element in memory (sub-byte types take a byte each on a host)."""
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    if dtype.startswith(("float8", "float4")):
        return 1
    return int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz").split("_")[0]) // 8


class ArrayType(msgspec.Struct, frozen=True, array_like=True):
    """Global shape and dtype name of a logical array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class SliceType(msgspec.Struct, frozen=True, array_like=True):
    """A virtual slice as a program sees it: its id in the session, its mesh shape and its axis names."""

    id: int
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def axis_size(self, axis: str) -> int:
        return self.shape[self.axes.index(axis)]

    def __str__(self) -> str:
        return f"slice{self.id}({', '.join(f'{a}={n}' for a, n in zip(self.axes, self.shape, strict=True))})"


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Where a logical array lies: on which slice of the program, cut how."""

    slice: int
    spec: Spec

    def __str__(self) -> str:
        return f"slice{self.slice}:{spec_text(self.spec)}"


def spec_text(spec: Spec) -> str:
    """`P('x', None)` style text."""
    parts = ("None" if not axes else axes[0] if len(axes) == 1 else "(" + ",".join(axes) + ")" for axes in spec)
    return f"P({', '.join(parts)})"


def canonical_spec(entries: tuple[tuple[str, ...], ...]) -> Spec:
    """Drops trailing uncut dimensions."""
    end = len(entries)
    while end and not entries[end - 1]:
        end -= 1
    return entries[:end]


def check_spec(spec: Spec, axes: tuple[str, ...]) -> None:
    """Raises `SpecError` for an axis that the mesh does not have, or one used twice."""
    used = [axis for dimension in spec for axis in dimension]
    for axis in used:
        if axis not in axes:
            raise SpecError(f"axis {axis!r} in {spec_text(spec)} is not an axis of the mesh; it has {list(axes)}")
        if used.count(axis) > 1:
            raise SpecError(f"axis {axis!r} is used {used.count(axis)} times in {spec_text(spec)}; once is the limit")


def check_layout(array: ArrayType, spec: Spec, mesh: SliceType, what: str) -> None:
    """Raises `SpecError` unless every cut dimension of the array divides evenly over its mesh axes.

    JAX has the same rule for the arguments and results of a jitted function.
    """
    check_spec(spec, mesh.axes)
    if len(spec) > len(array.shape):
        raise SpecError(
            f"{what}: {spec_text(spec)} cuts dimension {len(spec) - 1}, but {array} has {len(array.shape)} dimensions"
        )
    for dimension, axes in enumerate(spec):
        parts = math.prod(mesh.axis_size(axis) for axis in axes)
        if array.shape[dimension] % parts:
            raise SpecError(
                f"{what}: dimension {dimension} of {array} has size {array.shape[dimension]}, which does not divide "
                f"into {parts} parts over {'x'.join(axes)} of {mesh}; pad the array or choose another spec"
            )
