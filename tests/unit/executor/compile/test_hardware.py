"""What a host says of its devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pathways_ray.executor.compile.hardware import described
from pathways_ray.ir.links import Hardware


def devices(*coords: tuple[int, ...] | None) -> list[Any]:
    return [SimpleNamespace(device_kind="TPU v4", **({"coords": at} if at else {})) for at in coords]


def test_what_was_declared_stands_and_jax_says_the_rest() -> None:
    found = described(Hardware(grid=(1, 2), places=((0, 0), (0, 1))), devices(None, None), 9)
    assert found == Hardware(9, "TPU v4", (1, 2), False, ((0, 0), (0, 1)))
    assert described(Hardware(5, "fast"), devices(None), 9) == Hardware(5, "fast")


def test_places_of_jax_are_better_than_declared_ones() -> None:
    told = devices((0, 0, 0), (1, 0, 0))
    assert described(Hardware(grid=(4, 4), torus=True, places=((0, 0), (0, 1))), told, 0) == Hardware(
        0, "TPU v4", (4, 4, 1), True, ((0, 0, 0), (1, 0, 0))
    )
    assert described(Hardware(grid=(1,)), told, 0).grid == (), "the declared grid has no such places"
    assert described(Hardware(), devices((0, 0, 0), (0, 0, 0)), 0).places == (), "two cores of one chip"
