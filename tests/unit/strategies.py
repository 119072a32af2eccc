"""Hypothesis strategies: meshes, specs, placements, and whole programs over several islands."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from pathways_ray.ir.graph import Compute, Graph, Ref, host_part
from pathways_ray.ir.types import ArrayType, SliceType, Spec, canonical_spec
from tests.drawn import drawn
from tests.unit.helpers import Sketch

HOSTS_PER_ISLAND = 2
DEVICES_PER_HOST = 2


def repeatable(examples: int, **options: Any) -> settings:
    """So many examples, or as many of them as are drawn."""
    return settings(
        max_examples=drawn(examples),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        **options,
    )


def specs(array: ArrayType, mesh: SliceType) -> st.SearchStrategy[Spec]:
    """A spec that fits: every axis at most once, every dimension divides."""
    return st.sampled_from(_fitting_specs(array.shape, mesh))


@functools.cache
def _fitting_specs(shape: tuple[int, ...], mesh: SliceType) -> list[Spec]:
    """All of them, the simplest first: each axis, in each order, cuts one of the dimensions or none."""
    found: dict[Spec, None] = {(): None}
    for axes in itertools.permutations(mesh.axes):
        for places in itertools.product(range(-1, len(shape)), repeat=len(axes)):
            cut = [tuple(a for a, place in zip(axes, places, strict=True) if place == k) for k in range(len(shape))]
            if all(size % math.prod(map(mesh.axis_size, taken)) == 0 for size, taken in zip(shape, cut, strict=True)):
                found[canonical_spec(tuple(cut))] = None
    return sorted(found, key=lambda cut: sum(map(len, cut)))


_SHAPES = [(1,), (2,), (4,), (2, 2), (1, 2), (2, 1)]
_ARRAYS = [ArrayType(shape, "uint64") for shape in [(), (4,), (4, 4), (8, 4), (0, 4)]]


@st.composite
def sketches_with_slices(draw: st.DrawFn, islands: int) -> Sketch:
    """One to four slices over the devices of some islands; some of them on the very devices of another one."""
    sketch = Sketch()
    for _ in range(draw(st.integers(1, 4))):
        if bool(sketch.placement) and draw(st.booleans()):
            other = draw(st.sampled_from(sorted(sketch.placement)))
            like = sketch.placement[other]
            shape = draw(st.sampled_from([s for s in _SHAPES if len(like.devices) == math.prod(s)]))
            sketch.slice(*map(str, like.devices), shape=shape, island=like.island)
            continue
        island = draw(st.integers(0, islands - 1))
        shape = draw(st.sampled_from(_SHAPES))
        hosts = range(island * HOSTS_PER_ISLAND, (island + 1) * HOSTS_PER_ISLAND)
        there = [f"{host}.{k}" for host in hosts for k in range(DEVICES_PER_HOST)]
        chosen = draw(st.sampled_from(list(itertools.permutations(there, math.prod(shape)))))
        sketch.slice(*chosen, shape=shape, island=island)
    return sketch


@st.composite
def programs(draw: st.DrawFn, islands: int = 3, calls: int = 10) -> tuple[Sketch, Graph]:
    """A program of up to `calls` calls, some of host functions, with donations where they are allowed."""
    sketch = draw(sketches_with_slices(islands))
    numbers = sorted(sketch.placement)
    types: dict[Ref, ArrayType] = {}

    def add_argument() -> None:
        array = draw(st.sampled_from(_ARRAYS))
        where = draw(st.sampled_from(numbers))
        types[sketch.argument(where, draw(specs(array, sketch.placement[where].mesh)), array)] = array

    for _ in range(draw(st.integers(0, 3))):
        add_argument()
    home = numbers[0]
    for _ in range(draw(st.integers(1, calls))):
        home = draw(st.sampled_from([home, home, home, *numbers]))
        if draw(st.sampled_from([False, False, False, True])):  # a client has arguments where they are first used
            add_argument()
        mesh = sketch.placement[home].mesh
        inputs = _inputs(draw, list(types))
        outputs = draw(st.lists(st.sampled_from(_ARRAYS), min_size=1, max_size=2))
        limit_ms = draw(st.sampled_from([0, 0, 0, 0, 1000]))
        name = f"{'h' if limit_ms else 'f'}{len(inputs)}" + "".join(
            f"_{'x'.join(map(str, array.shape))}" for array in outputs
        )
        call = sketch.call(
            name,
            *inputs,
            slice=home,
            specs=[draw(specs(types[ref], mesh)) for ref in inputs],
            outputs=outputs,
            output_specs=[draw(specs(array, mesh)) for array in outputs],
            host_limit_ms=limit_ms,
        )
        types.update({Ref(call.node, k): array for k, array in enumerate(outputs)})
    results = draw(st.lists(st.sampled_from(list(types)), min_size=1, max_size=3, unique=True))
    graph = sketch.graph(*results)
    for index, donated in _allowed_donations(graph).items():
        if bool(donated) and draw(st.booleans()):
            node = sketch.nodes[index]
            assert isinstance(node, Compute)
            sketch.nodes[index] = _donating(node, tuple(draw(st.lists(st.sampled_from(donated), unique=True))))
    return sketch, sketch.graph(*results)


def _inputs(draw: st.DrawFn, known: list[Ref]) -> list[Ref]:
    """Up to three values, more often late ones than early ones, so that chains grow."""
    if not known:
        return []
    return draw(st.lists(st.sampled_from([*known, *known[-2:], *known[-2:]]), max_size=3))


def _allowed_donations(graph: Graph) -> dict[int, list[int]]:
    """For each call, the inputs that nothing uses afterwards or beside it."""
    users = graph.consumers()
    return {
        index: [k for k, ref in enumerate(node.inputs) if users[ref][-1] == index and node.inputs.count(ref) == 1]
        for index, node in enumerate(graph.nodes)
        if isinstance(node, Compute) and host_part(graph.recipes[node.recipe]) is None
    }


def _donating(node: Compute, donated: tuple[int, ...]) -> Compute:
    return Compute(**{name: getattr(node, name) for name in node.__struct_fields__} | {"donated": donated})
