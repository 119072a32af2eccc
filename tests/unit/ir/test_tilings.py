"""XLA's tile assignments as specs, and back."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pathways_ray.ir.tilings import axis_names, iota, refined, spec_of, tiles_of


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [((1,), (1,)), ((4,), (2, 2)), ((2, 2), (2, 2)), ((6,), (2, 3)), ((3, 2), (3, 2)), ((1, 8, 1), (2, 2, 2))],
)
def test_a_refined_mesh_has_axes_of_prime_sizes(sizes: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    assert refined(sizes) == mesh


@pytest.mark.parametrize(
    ("tiles", "devices", "dimensions", "spec"),
    [
        ((4, 1), (0, 1, 2, 3), 2, (("f0", "f1"),)),
        ((2, 2), (0, 2, 1, 3), 2, (("f1",), ("f0",))),
        ((2, 1, 2), (0, 1, 2, 3), 2, (("f0",),)),
        ((2, 1, 2), (0, 2, 1, 3), 2, (("f1",),)),
        ((1, 1, 4), (0, 1, 2, 3), 2, ()),
        ((4,), (0, 2, 1, 3), 1, (("f1", "f0"),)),
    ],
)
def test_tiles_over_four_devices_as_a_spec(
    tiles: tuple[int, ...], devices: tuple[int, ...], dimensions: int, spec: object
) -> None:
    assert spec_of(tiles, devices, dimensions, (2, 2)) == spec


@pytest.mark.parametrize(
    ("tiles", "devices"), [((4,), (0, 3, 1, 2)), ((4,), (0, 1, 2)), ((4,), (0, 1, 2, 7)), ((), (0, 1, 2, 3))]
)
def test_tiles_in_an_order_that_no_spec_says_are_none(tiles: tuple[int, ...], devices: tuple[int, ...]) -> None:
    assert spec_of(tiles, devices, 1, (2, 2)) is None


def test_an_iota_that_does_not_fit_its_tiles_is_an_error() -> None:
    with pytest.raises(ValueError, match="8 tiles for 4 devices"):
        iota((8,), (4,), (0,))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[str, ...], ...], int]:
    mesh = refined(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dimensions = draw(st.integers(0, 3))
    axes = draw(st.permutations(axis_names(mesh)))
    spec: list[tuple[str, ...]] = [() for _ in range(dimensions)]
    for axis in axes:
        at = draw(st.integers(-1, dimensions - 1))
        if at >= 0 and mesh[int(axis[1:])] > 1:
            spec[at] += (axis,)
    while spec and not spec[-1]:
        spec.pop()
    return mesh, tuple(spec), dimensions


@given(layouts())
def test_a_spec_is_what_its_tiles_say(layout: tuple[tuple[int, ...], tuple[tuple[str, ...], ...], int]) -> None:
    mesh, spec, dimensions = layout
    tiles, order = tiles_of(spec, mesh, dimensions)
    assert math.prod(tiles) == math.prod(mesh)
    assert spec_of(tiles, iota(tiles, mesh, order), dimensions, mesh) == spec
