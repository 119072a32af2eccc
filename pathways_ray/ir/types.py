"""The type and the place of a value: array types, meshes, partition specs, layouts.

A `Spec` is the canonical form of a `jax.sharding.PartitionSpec`: for each array dimension the tuple of mesh axes it is
sharded over, trailing unsharded dimensions left out. Equal specs are equal tuples.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from pathways_ray import limits
from pathways_ray.errors import GraphError, SpecError, Unschedulable

MAX_ARRAY_DIMENSIONS = 64
"""Dimensions of an array, as in NumPy: a product of very many sizes would take minutes."""

MAX_AXIS_NAME = 64
"""Characters of the name of a mesh axis."""

Spec = Annotated[
    tuple[Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_ARRAY_DIMENSIONS)], ...],
    msgspec.Meta(max_length=MAX_ARRAY_DIMENSIONS),
]

REPLICATED: Spec = ()

_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")

# Sub-byte types take a byte each on a host.
_ITEM_BYTES = {
    "bool": 1,
    **{f"{kind}{bits}": max(bits // 8, 1) for kind in ("int", "uint") for bits in (1, 2, 4, 8, 16, 32, 64)},
    **dict.fromkeys(("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"), 1),
    **{f"float8_{form}": 1 for form in _FLOAT8},
    **dict.fromkeys(("float16", "bfloat16"), 2),
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


def item_bytes(dtype: str) -> int:
    """Bytes of one element in a host's memory. Raises `GraphError` for a dtype that JAX does not have."""
    found = _ITEM_BYTES.get(dtype)
    if found is None:
        raise GraphError(f"there is no dtype {dtype!r}")
    return found


class ArrayType(msgspec.Struct, frozen=True, array_like=True):
    """Global shape and dtype name of a logical array."""

    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_ARRAY_DIMENSIONS)]
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
    """The place of a logical array: a slice of the program, and how the array is sharded over its mesh."""

    slice: int
    spec: Spec

    def __str__(self) -> str:
        return f"slice{self.slice}:{spec_text(self.spec)}"


def spec_text(spec: Spec) -> str:
    """`P('x', None)` style text."""
    parts = ("None" if not axes else axes[0] if len(axes) == 1 else "(" + ",".join(axes) + ")" for axes in spec)
    return f"P({', '.join(parts)})"


def canonical_spec(entries: tuple[tuple[str, ...], ...]) -> Spec:
    """Drops trailing unsharded dimensions."""
    end = len(entries)
    while end and not entries[end - 1]:
        end -= 1
    return entries[:end]


def plain_name(name: str) -> str:
    """The name as a string of Python's own: NumPy's are strings too, and no message takes them."""
    return str.__str__(name)


def check_axis_names(axes: tuple[str, ...]) -> None:
    """Raises `Unschedulable` unless the names of a mesh's axes are different, not empty, and short: status shows those
    of all slices."""
    if len(set(axes)) != len(axes) or not all(0 < len(axis) <= MAX_AXIS_NAME for axis in axes):
        rule = f"must be different and not empty, and have up to {MAX_AXIS_NAME} characters"
        raise Unschedulable(f"axis names {str(axes)[:200]} {rule}")


def check_spec(spec: Spec, axes: tuple[str, ...], what: str = "") -> None:
    """Raises `SpecError` for an axis that the mesh does not have, or one used twice."""
    prefix = f"{what}: " if what else ""
    used = [axis for dimension in spec for axis in dimension]
    for axis in used:
        if axis not in axes:
            raise SpecError(
                f"{prefix}axis {axis!r} in {spec_text(spec)} is not an axis of the mesh; it has {list(axes)}"
            )
        if used.count(axis) > 1:
            raise SpecError(
                f"{prefix}axis {axis!r} is used {used.count(axis)} times in {spec_text(spec)}; once is the limit"
            )


def check_layout(array: ArrayType, spec: Spec, mesh: SliceType, what: str) -> None:
    """Raises `SpecError` unless every sharded dimension of the array divides evenly over its mesh axes.

    JAX has the same rule for the arguments and results of a jitted function.

    Raises:
        GraphError: the type itself is invalid.
    """
    if array.dtype not in _ITEM_BYTES:
        raise GraphError(f"{what}: there is no dtype {array.dtype!r}")
    if any(size < 0 for size in array.shape):
        raise GraphError(f"{what}: {array} has a negative size")
    # Without the sizes of 0, which would hide the others.
    if math.prod(size for size in array.shape if size) * item_bytes(array.dtype) > limits.MAX_TENSOR_BYTES:
        raise GraphError(f"{what}: {array} is larger than the {limits.MAX_TENSOR_BYTES} bytes that a value may have")
    check_spec(spec, mesh.axes, what)
    if len(spec) > len(array.shape):
        raise SpecError(
            f"{what}: {spec_text(spec)} partitions dimension {len(spec) - 1}, but {array} has {len(array.shape)} "
            "dimensions; give one entry for each dimension at most"
        )
    for dimension, axes in enumerate(spec):
        parts = math.prod(mesh.axis_size(axis) for axis in axes)
        if array.shape[dimension] % parts:
            raise SpecError(
                f"{what}: dimension {dimension} of {array} has size {array.shape[dimension]}, which does not divide "
                f"into {parts} parts over {' and '.join(axes)} of {mesh}; pad the array or choose another spec"
            )
