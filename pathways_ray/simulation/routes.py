"""Random programs that route rows: pieces leave one slice or two for several, and what came of them comes back."""

from __future__ import annotations

from random import Random

from pathways_ray.ir.graph import Argument, Compute, Graph, Node, Part, Recipe, Ref, Result
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import Layout
from pathways_ray.simulation.programs import ARRAY, Drawn
from pathways_ray.simulation.values import POISON

MOST_PARTS = 4


def drawn_routed(random: Random, number: int, name: str, slices: list[PlacedSlice], poisoned: bool = False) -> Drawn:
    """A program of the shape that `pw.route` and `pw.combine` make. Several parts may lie on one slice.

    Args:
        poisoned: what works on one of the parts fails on the devices.
    """
    ids = [placed.mesh.id for placed in slices]
    sources = [Layout(random.choice(ids), random.choice([(), (("x",),)])) for _ in range(random.randint(1, 2))]
    parts = [Layout(home, ()) for home in random.choices(ids, k=random.randint(2, MOST_PARTS))]
    nodes: list[Node] = [Argument(k, ARRAY, layout) for k, layout in enumerate(sources)]
    recipes: list[Recipe] = []

    def call(inputs: list[Ref], layout: Layout, outputs: int = 1, kind: str = "") -> list[Ref]:
        function = f"{name}.{len(recipes)}{kind}"
        part = Part(function, function, tuple(Ref(-1, k) for k in range(len(inputs))))
        recipes.append(Recipe((part,), tuple(Ref(0, k) for k in range(outputs))))
        asked, made = (layout,) * len(inputs), (layout,) * outputs
        types = (ARRAY,) * outputs
        nodes.append(
            Compute(function, len(recipes) - 1, layout.slice, tuple(inputs), asked, types, made, (), "sim.py:5")
        )
        return [Ref(len(nodes) - 1, k) for k in range(outputs)]

    pieces = [call([Ref(k)], layout, len(parts)) for k, layout in enumerate(sources)]
    bad = random.randrange(len(parts)) if poisoned else -1
    made = [
        call([own[k] for own in pieces], layout, kind=f".{POISON}" if k == bad else "")[0]
        for k, layout in enumerate(parts)
    ]
    results = [call(list(made), layout)[0] for layout in sources]
    nodes.append(Result(tuple(results)))
    graph = Graph(name, tuple(placed.mesh for placed in slices), tuple(recipes), tuple(nodes))
    functions = {recipe.parts[0].function: b"" for recipe in recipes if isinstance(recipe.parts[0], Part)}
    return Drawn(number, graph, functions, tuple(sources), frozenset(), tuple(sources))
