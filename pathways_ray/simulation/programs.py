"""Random programs over a session's slices: real graphs, which go back and forth between islands at will."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import msgspec

from pathways_ray.ir.graph import Argument, Compute, Graph, Node, Part, Recipe, Ref, Result, functions_in
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import ArrayType, Layout, Spec
from pathways_ray.simulation.values import LOOP, POISON

ARRAY = ArrayType((24,), "float32")
"""One type for all: what differs is where arrays lie and how they are cut."""

LONGEST = 7
"""Calls of a program, at most."""


@dataclass(frozen=True)
class Drawn:
    """A program as a client knows it: where its arguments lie, which are donated, where its results lie."""

    number: int
    graph: Graph
    functions: dict[str, bytes]
    arguments: tuple[Layout, ...]
    donated: frozenset[int]
    results: tuple[Layout, ...]


def drawn(
    random: Random, number: int, name: str, slices: list[PlacedSlice], poisoned: bool, apart: float = 0.0
) -> Drawn:
    """A program of up to `LONGEST` calls.

    Args:
        poisoned: one of its calls fails on the devices.
        apart: how likely a call takes only what lies on its slice already, where there is something.
    """
    nodes: list[Node] = []
    recipes: list[Recipe] = []
    layouts: dict[Ref, Layout] = {}

    def spec() -> Spec:
        return () if random.random() < 0.5 else (("x",),)

    homes = [random.choice(slices).mesh.id for _ in range(1 + (random.random() < 0.4 + apart))]
    for index, home in enumerate(homes):
        layout = Layout(home, spec())
        layouts[Ref(index)] = layout
        nodes.append(Argument(index, ARRAY, layout))
    calls = random.randint(1, LONGEST)
    # Some programs stay on a slice, some go to and fro between two, some go anywhere.
    route = random.choice(["stay", "bounce", "roam"])
    pair = [random.choice(slices).mesh.id, random.choice(slices).mesh.id]
    for call in range(calls):
        home = {"stay": homes[0], "bounce": pair[call % 2], "roam": random.choice(slices).mesh.id}[route]
        inputs = _taken(random, layouts, home, apart)
        function = f"{name}.{call}"
        if poisoned and call == calls // 2:
            function += f".{POISON}"
        outputs = 1 + (random.random() < 0.2)
        recipe = Recipe(
            (Part(function, function, tuple(Ref(-1, k) for k in range(len(inputs)))),),
            tuple(Ref(0, k) for k in range(outputs)),
        )
        recipes.append(recipe)
        made = tuple(Layout(home, spec()) for _ in range(outputs))
        asked = tuple(Layout(home, spec()) for _ in inputs)
        nodes.append(
            Compute(function, len(recipes) - 1, home, tuple(inputs), asked, (ARRAY,) * outputs, made, (), "sim.py:1")
        )
        layouts.update({Ref(len(nodes) - 1, k): layout for k, layout in enumerate(made)})
    results = [Ref(len(nodes) - 1)]
    if random.random() < 0.4:
        # An argument is never a result: clients hand it back themselves.
        results.append(random.choice([ref for ref in layouts if ref.node >= len(homes)]))
    nodes.append(Result(tuple(dict.fromkeys(results))))
    meshes = tuple(placed.mesh for placed in slices)
    graph = _donating(random, Graph(name, meshes, tuple(recipes), tuple(nodes)))
    return Drawn(
        number,
        graph,
        {part.function: b"" for recipe in recipes for part in functions_in(recipe.parts)},
        tuple(layouts[Ref(k)] for k in range(len(homes))),
        frozenset(graph.donated_arguments),
        tuple(layouts[ref] for ref in dict.fromkeys(results)),
    )


def _taken(random: Random, layouts: dict[Ref, Layout], home: int, apart: float) -> list[Ref]:
    """Inputs of a call on slice `home`, from the values that there are."""
    known = list(layouts)
    inputs = [known[-1] if random.random() < 0.7 else random.choice(known)]
    if random.random() < 0.4:
        inputs.append(random.choice(known))
    if apart and random.random() < apart:
        return [ref for ref in known if layouts[ref].slice == home][-1:] or inputs
    return inputs


def drawn_loop(random: Random, number: int, name: str, slices: list[PlacedSlice]) -> Drawn:
    """A program of one short call, whose result fits as its argument."""
    mesh = random.choice(slices).mesh
    layout = Layout(mesh.id, ())
    function = f"{name}.{LOOP}"
    recipe = Recipe((Part(function, function, (Ref(-1, 0),)),), (Ref(0, 0),))
    call = Compute(function, 0, mesh.id, (Ref(0),), (layout,), (ARRAY,), (layout,), (), "sim.py:2")
    graph = Graph(name, (mesh,), (recipe,), (Argument(0, ARRAY, layout), call, Result((Ref(1),))))
    return Drawn(number, graph, {function: b""}, (layout,), frozenset(), (layout,))


def _donating(random: Random, graph: Graph) -> Graph:
    """The same graph, in which some calls may overwrite what nothing uses afterwards."""
    users = graph.consumers()
    nodes = list(graph.nodes)
    for index, node in enumerate(nodes):
        if isinstance(node, Compute) and random.random() < 0.6:
            allowed = [
                k for k, ref in enumerate(node.inputs) if users[ref][-1] == index and node.inputs.count(ref) == 1
            ]
            nodes[index] = msgspec.structs.replace(node, donated=tuple(allowed[:1]))
    return msgspec.structs.replace(graph, nodes=tuple(nodes))
