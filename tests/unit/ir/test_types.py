"""Array types, meshes and partition specs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pathways_ray.errors import GraphError, SpecError
from pathways_ray.ir.types import (
    ArrayType,
    Layout,
    SliceType,
    canonical_spec,
    check_layout,
    check_spec,
    item_bytes,
    spec_text,
)

MESH = SliceType(1, (2, 4), ("x", "y"))
_OWN = [name for name in dir(ml_dtypes) if isinstance(getattr(ml_dtypes, name), type)]
_JAX = [name for name in _OWN if name.startswith(("bfloat16", "float", "int", "uint"))] + [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


@pytest.mark.parametrize("name", [name for name in _JAX if name not in ("finfo", "iinfo")])
def test_every_dtype_has_the_size_that_numpy_gives_it(name: str) -> None:
    assert item_bytes(name) == np.dtype(getattr(ml_dtypes, name, name)).itemsize


@pytest.mark.parametrize("name", ["", "int", "float", "int12", "float99999", "int-8", "<i4", "object", "key<fry>"])
def test_a_name_that_is_no_dtype_is_refused(name: str) -> None:
    with pytest.raises(GraphError, match="there is no dtype"):
        item_bytes(name)


def test_bytes_of_an_array_are_those_of_all_its_elements() -> None:
    assert ArrayType((3, 5), "bfloat16").nbytes == 30
    assert ArrayType((), "float64").nbytes == 8
    assert ArrayType((7, 0), "float32").nbytes == 0


def test_types_read_well() -> None:
    assert str(ArrayType((8, 2), "float32")) == "float32[8,2]"
    assert str(ArrayType((), "bool")) == "bool[]"
    assert str(MESH) == "slice1(x=2, y=4)"
    assert str(Layout(3, (("x",), (), ("y", "z")))) == "slice3:P(x, None, (y,z))"
    assert spec_text(()) == "P()"


def test_a_mesh_knows_its_axes() -> None:
    assert MESH.size == 8
    assert [MESH.axis_size(axis) for axis in ("x", "y")] == [2, 4]


def test_equal_specs_have_one_form() -> None:
    assert canonical_spec((("x",), (), ())) == canonical_spec((("x",),)) == (("x",),)
    assert canonical_spec(((), ())) == ()
    assert canonical_spec(((), ("x",), ())) == ((), ("x",)), "only trailing dimensions may go"


def test_a_spec_names_axes_of_the_mesh_each_once() -> None:
    check_spec((("x",), ("y",)), MESH.axes)
    with pytest.raises(SpecError, match=r"axis 'z' in P\(z\) is not an axis of the mesh; it has \['x', 'y'\]"):
        check_spec((("z",),), MESH.axes)
    with pytest.raises(SpecError, match="axis 'x' is used 2 times"):
        check_spec((("x",), ("x",)), MESH.axes)
    with pytest.raises(SpecError, match="axis 'x' is used 2 times"):
        check_spec((("x", "x"),), MESH.axes)


def test_cut_dimensions_divide() -> None:
    check_layout(ArrayType((8, 3), "int8"), (("x", "y"),), MESH, "v")
    check_layout(ArrayType((0, 3), "int8"), (("x", "y"),), MESH, "v")
    with pytest.raises(
        SpecError, match=r"v: dimension 0 of int8\[12\] has size 12, which does not divide into 8 parts"
    ):
        check_layout(ArrayType((12,), "int8"), (("x", "y"),), MESH, "v")
    with pytest.raises(SpecError, match=r"partitions dimension 1, but int8\[8\] has 1 dimensions"):
        check_layout(ArrayType((8,), "int8"), ((), ("x",)), MESH, "v")


@pytest.mark.parametrize("array", [ArrayType((4, -4), "int8"), ArrayType((4,), "nonsense")])
def test_a_type_that_cannot_be_is_refused(array: ArrayType) -> None:
    with pytest.raises(GraphError):
        check_layout(array, (), MESH, "v")


@pytest.mark.parametrize("shape", [(1 << 62,) * 64, (1 << 45,), (1 << 45, 0)])
def test_a_type_of_more_bytes_than_a_value_may_have_is_refused(shape: tuple[int, ...]) -> None:
    """Bytes of such arrays are no numbers that can be divided, and XLA ends a process that is to compile one."""
    check_layout(ArrayType((1 << 44,), "int8"), (), MESH, "v")
    with pytest.raises(GraphError, match="is larger than the 17592186044416 bytes that a value may have"):
        check_layout(ArrayType(shape, "int8"), (), MESH, "v")
