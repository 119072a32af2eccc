"""Building blocks of the unit tests: graphs written in a few lines, and slices placed on hosts.

    sketch = Sketch()
    a = sketch.slice("0.0", "0.1")
    x = sketch.argument(a, spec="x")
    y = sketch.call("f", x, slice=a, specs="x", output_specs="x")
    graph = sketch.graph(y)

A spec is written as one text: axes of a dimension are joined by "+", dimensions by spaces, "-" is an uncut one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pathways_ray.controller.programs import PlannedProgram, plan_program
from pathways_ray.ir.graph import Argument, Body, Branch, Compute, Graph, Node, Part, Recipe, Ref, Repeat, Result
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, Layout, SliceType, Spec, canonical_spec
from pathways_ray.transport.messages import FROM_HOST_DATA, EarlyAllowed, EarlyRefused, LocalDoor

VECTOR = ArrayType((8,), "uint64")
SCALAR = ArrayType((), "uint64")


def spec(text: str) -> Spec:
    """`"x - y+z"` is P('x', None, ('y', 'z'))."""
    return canonical_spec(tuple(() if part == "-" else tuple(part.split("+")) for part in text.split()))


def device(text: str) -> Device:
    host, index = text.split(".")
    return Device(int(host), int(index))


def placed(slice_id: int, devices: Sequence[str], shape: tuple[int, ...] = (), island: int = 0) -> PlacedSlice:
    """A slice on the devices named as `host.index`; left out, the shape is one axis over all of them."""
    shape = shape or (len(devices),)
    return PlacedSlice.on(
        SliceType(slice_id, shape, ("x", "y", "z")[: len(shape)]), island, tuple(map(device, devices))
    )


class Sketch:
    """Writes a graph node by node. `signatures` has the output types of every function, by digest."""

    def __init__(self, name: str = "sketch") -> None:
        self.name = name
        self.placement: dict[int, PlacedSlice] = {}
        self.recipes: dict[Recipe, int] = {}
        self.nodes: list[Node] = []
        self.signatures: dict[str, tuple[ArrayType, ...]] = {}
        self.arguments = 0

    def slice(self, *devices: str, shape: tuple[int, ...] = (), island: int = 0) -> int:
        number = len(self.placement) + 1
        self.placement[number] = placed(number, devices, shape, island)
        return number

    def argument(self, slice: int, spec: str | Spec = "", type: ArrayType = VECTOR) -> Ref:
        self.nodes.append(Argument(self.arguments, type, Layout(slice, _spec(spec))))
        self.arguments += 1
        return Ref(len(self.nodes) - 1)

    def call(
        self,
        name: str,
        *inputs: Ref,
        slice: int,
        specs: str | Sequence[Spec] = "",
        outputs: Sequence[ArrayType] = (VECTOR,),
        output_specs: str | Sequence[Spec] = "",
        donated: tuple[int, ...] = (),
        where: str = "",
        no_fusion: bool = False,
        host_limit_ms: int = 0,
        has_loop: bool = False,
    ) -> Ref:
        """Adds a compute node and returns its first output. One spec, given as text, stands for all. With a limit it is
        a host function."""
        taken = tuple(Ref(-1, k) for k in range(len(inputs)))
        part = Part(name, name, taken, no_fusion or host_limit_ms > 0, 0, has_loop, host_limit_ms=host_limit_ms)
        recipe = Recipe((part,), tuple(Ref(0, k) for k in range(len(outputs))))
        self.signatures[name] = tuple(outputs)
        self.nodes.append(
            Compute(
                name=name,
                recipe=self.recipes.setdefault(recipe, len(self.recipes)),
                slice=slice,
                inputs=inputs,
                input_layouts=_layouts(slice, specs, len(inputs)),
                outputs=tuple(outputs),
                output_layouts=_layouts(slice, output_specs, len(outputs)),
                donated=donated,
                where=where,
            )
        )
        return Ref(len(self.nodes) - 1)

    def layout(self, ref: Ref) -> Layout:
        return self.graph().layout_of(ref)

    def body(self, inputs: Sequence[Ref], write: Callable[[Sketch, list[Ref]], Sequence[Ref]]) -> Body:
        """A body over these values: `write` adds its nodes, and returns its results."""
        inner = Sketch(self.name)
        inner.placement, inner.recipes, inner.signatures = self.placement, self.recipes, self.signatures
        outer = self.graph()
        given = []
        for ref in inputs:
            layout = outer.layout_of(ref)
            given.append(inner.argument(layout.slice, layout.spec, outer.type_of(ref)))
        results = tuple(write(inner, given))
        return Body((*inner.nodes, Result(results)), "body.py:1")

    def control(self, node: Branch | Repeat) -> Ref:
        """Adds a branch or a loop and returns its first output."""
        self.nodes.append(node)
        return Ref(len(self.nodes) - 1)

    def graph(self, *results: Ref) -> Graph:
        meshes = tuple(slice.mesh for slice in self.placement.values())
        return Graph(self.name, meshes, tuple(self.recipes), (*self.nodes, Result(results)))

    def planned(
        self, *results: Ref, key: int = 1, session: int = 1, fusion: bool = False, tenant: str = "", kept_bytes: int = 0
    ) -> PlannedProgram:
        functions = dict.fromkeys(self.signatures, b"")
        graph = self.graph(*results)
        return plan_program(key, session, graph, functions, self.placement, fusion, tenant, kept_bytes)


def _spec(value: str | Spec) -> Spec:
    return spec(value) if isinstance(value, str) else value


def _layouts(slice: int, specs: str | Sequence[Spec], count: int) -> tuple[Layout, ...]:
    each = [spec(specs)] * count if isinstance(specs, str) else specs
    assert len(each) == count
    return tuple(Layout(slice, each_spec) for each_spec in each)


def calls(graph: Graph) -> list[str]:
    """The names of the compute nodes, in order."""
    return [node.name for node in graph.nodes if isinstance(node, Compute)]


def requests_in(batch: bytes) -> list[int]:
    """The requests that a batch of a host's data stream answers."""
    aside = LocalDoor | EarlyAllowed | EarlyRefused
    return [message.request for message in FROM_HOST_DATA.decode_batch(batch) if not isinstance(message, aside)]
