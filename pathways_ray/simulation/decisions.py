"""Random programs that decide: branches and loops over a session's slices, nested at will."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import msgspec

from pathways_ray.ir.graph import (
    Argument,
    Body,
    Branch,
    Compute,
    Graph,
    Node,
    Part,
    Recipe,
    Ref,
    Repeat,
    Result,
    functions_in,
)
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.simulation.programs import ARRAY, Drawn, drawn
from pathways_ray.simulation.routes import drawn_routed
from pathways_ray.simulation.settings import Settings
from pathways_ray.simulation.values import CHOICES, DIVERGENT, FLAWS, PICK, POISON, flaw_of, is_divergent, named

NUMBER = ArrayType((), "int32")
DEPTH = 2
MAX_TIMES = 3


def drawn_decisions(random: Random, number: int, name: str, slices: list[PlacedSlice], poisoned: bool = False) -> Drawn:
    """A program with branches and loops. Args: poisoned: one of its functions fails on the devices."""
    drawer = _Drawer(random, name, [placed.mesh.id for placed in slices])
    homes = [random.choice(drawer.homes) for _ in range(1 + (random.random() < 0.5))]
    given = [Layout(home, random.choice([(), (("x",),)])) for home in homes]
    nodes, values = drawer.nodes(given, DEPTH)
    nodes.append(Result(tuple(dict.fromkeys(random.choices(sorted(values)[len(homes) :], k=2)))))
    if poisoned:
        drawer.poison()
    graph = Graph(name, tuple(placed.mesh for placed in slices), tuple(drawer.recipes), tuple(nodes))
    functions = {part.function: b"" for recipe in drawer.recipes for part in functions_in(recipe.parts)}
    results = tuple(graph.layout_of(ref) for ref in graph.result.inputs)
    return Drawn(number, graph, functions, tuple(given), frozenset(), results)


def drawn_program(random: Random, number: int, name: str, slices: list[PlacedSlice], settings: Settings) -> Drawn:
    """A program: one that decides, one that routes rows, or another one; sound or not."""
    poisoned = random.random() < settings.poison
    if settings.flaws and random.random() < settings.flaws:
        name += f".{random.choice(FLAWS)}"
    if settings.divergent and random.random() < settings.divergent:
        name += f".{DIVERGENT}"
    if settings.decisions and random.random() < settings.decisions:
        made = drawn_decisions(random, number, name, slices, poisoned)
    elif settings.routes and random.random() < settings.routes:
        made = drawn_routed(random, number, name, slices, poisoned)
    else:
        made = drawn(random, number, name, slices, poisoned, settings.apart)
    return with_host_functions(made, settings.calls) if settings.calls else made


def with_host_functions(made: Drawn, share: float) -> Drawn:
    """The same program, in which hosts run a share of the functions; which they are, their names say."""
    graph = made.graph
    chosen = {k for k, recipe in enumerate(graph.recipes) if named(f"calls {_function(recipe)}") % 100 < 100 * share}
    chosen -= {k for k in chosen if flaw_of(graph.recipes[k]) or is_divergent(graph.recipes[k])}
    recipes = tuple(_on_hosts(recipe) if k in chosen else recipe for k, recipe in enumerate(graph.recipes))
    nodes = tuple(
        msgspec.structs.replace(node, donated=()) if isinstance(node, Compute) and node.recipe in chosen else node
        for node in graph.nodes
    )
    graph = msgspec.structs.replace(graph, recipes=recipes, nodes=nodes)
    return replace(made, graph=graph, donated=frozenset(graph.donated_arguments))


def _function(recipe: Recipe) -> str:
    return next(functions_in(recipe.parts)).function


def _on_hosts(recipe: Recipe) -> Recipe:
    (part,) = recipe.parts
    return Recipe((msgspec.structs.replace(part, no_fusion=True, host_limit_ms=1000),), recipe.outputs)


class _Drawer:
    """Draws the nodes of a program and of its bodies, over common recipes."""

    def __init__(self, random: Random, name: str, homes: list[int]) -> None:
        self.random = random
        self.name = name
        self.homes = homes
        self.recipes: list[Recipe] = []

    def nodes(self, given: list[Layout], depth: int) -> tuple[list[Node], dict[Ref, Layout]]:
        """Arguments in these layouts and some nodes behind them, with the layouts of all arrays."""
        nodes: list[Node] = [Argument(k, ARRAY, layout) for k, layout in enumerate(given)]
        values = {Ref(k): layout for k, layout in enumerate(given)}
        for _ in range(self.random.randint(1, 3)):
            draw = self.random.choice([self.call, self.call, self.branch, self.loop]) if depth else self.call
            draw(nodes, values, depth)
        return nodes, values

    def call(self, nodes: list[Node], values: dict[Ref, Layout], depth: int) -> Ref:
        layout = Layout(self.random.choice(self.homes), self.random.choice([(), (("x",),)]))
        inputs = tuple(self.random.choices(sorted(values), k=self.random.randint(1, 2)))
        return self.compute(nodes, values, inputs, layout)

    def compute(
        self, nodes: list[Node], values: dict[Ref, Layout], inputs: tuple[Ref, ...], layout: Layout, kind: str = ""
    ) -> Ref:
        function = f"{self.name}.{len(self.recipes)}{kind}"
        part = Part(function, function, tuple(Ref(-1, k) for k in range(len(inputs))))
        self.recipes.append(Recipe((part,), (Ref(0, 0),)))
        asked = tuple(Layout(layout.slice, self.random.choice([(), (("x",),)])) for _ in inputs)
        made = NUMBER if kind else ARRAY
        recipe = len(self.recipes) - 1
        nodes.append(Compute(function, recipe, layout.slice, inputs, asked, (made,), (layout,), (), "sim.py:3"))
        ref = Ref(len(nodes) - 1)
        if not kind:
            values[ref] = layout
        return ref

    def pick(self, nodes: list[Node], values: dict[Ref, Layout]) -> Ref:
        """A small number, on any slice."""
        inputs = (self.random.choice(sorted(values)),)
        return self.compute(nodes, values, inputs, Layout(self.random.choice(self.homes), ()), f".{PICK}")

    def branch(self, nodes: list[Node], values: dict[Ref, Layout], depth: int) -> None:
        index = self.pick(nodes, values)
        inputs = tuple(self.random.choices(sorted(values), k=self.random.randint(1, 2)))
        given = [values[ref] for ref in inputs]
        outputs = tuple(Layout(self.random.choice(self.homes), ()) for _ in range(self.random.randint(1, 2)))
        bodies = tuple(self.body(given, outputs, depth) for _ in range(CHOICES))
        made = (ARRAY,) * len(outputs)
        nodes.append(Branch(f"{self.name}.branch", index, inputs, bodies, made, outputs, "sim.py:4"))
        values.update({Ref(len(nodes) - 1, k): layout for k, layout in enumerate(outputs)})

    def loop(self, nodes: list[Node], values: dict[Ref, Layout], depth: int) -> None:
        inputs = tuple(self.random.choices(sorted(values), k=self.random.randint(1, 3)))
        carried = self.random.randint(1, len(inputs))
        given = [values[ref] for ref in inputs]
        outputs = tuple(given[:carried])
        body = self.body(given, outputs, depth)
        test, times = None, self.random.randint(0, MAX_TIMES)
        if self.random.random() < 0.6:
            inner: list[Node] = [Argument(k, ARRAY, layout) for k, layout in enumerate(given)]
            found = self.pick(inner, {Ref(0): given[0]})
            test, times = Body((*inner, Result((found,)))), 0
        made = (ARRAY,) * carried
        nodes.append(Repeat(f"{self.name}.loop", inputs, times, test, body, made, outputs, "sim.py:5"))
        values.update({Ref(len(nodes) - 1, k): layout for k, layout in enumerate(outputs)})

    def body(self, given: list[Layout], outputs: tuple[Layout, ...], depth: int) -> Body:
        """A body that gives arrays in these layouts; all but the first may be what it is given. The first changes with
        what it carries, so that a loop's test does not see the same values without end."""
        nodes, values = self.nodes(given, depth - 1)
        results = []
        for k, layout in enumerate(outputs):
            fitting = [ref for ref in sorted(values) if values[ref] == layout]
            if k and fitting and self.random.random() < 0.4:
                results.append(self.random.choice(fitting))
            else:
                results.append(self.compute(nodes, values, (sorted(values)[-1], Ref(0)), layout))
        return Body((*nodes, Result(tuple(results))), "sim.py:6")

    def poison(self) -> None:
        k = self.random.randrange(len(self.recipes))
        (part,) = self.recipes[k].parts
        assert isinstance(part, Part)
        if PICK not in part.function:
            name = f"{part.function}.{POISON}"
            self.recipes[k] = Recipe((Part(name, name, part.inputs),), self.recipes[k].outputs)
