"""Outlines of the bodies of branches and loops: where each value lies that goes in, and that comes out.

A body is built like a program of its own, without code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core as jex_core

from pathways_ray.client import prng
from pathways_ray.client.codes import Code
from pathways_ray.client.export import Exported
from pathways_ray.client.graph_builder import GraphBuilder, Value, constant
from pathways_ray.client.operation import Operation
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.ir.graph import Argument, Compute, Node, Ref
from pathways_ray.ir.types import ArrayType, Layout, Spec
from pathways_ray.jax_types import array_type

Place = Layout | None
"""The layout of a value; None where nothing has asked for the value yet."""


@dataclass
class Outline:
    """A body without its code: its nodes, and the places of its inputs and results.

    `asked` are the layouts in which computations take inputs, `makers` the lines that results come from. Ordinary
    operations put a result on the slice of their operands, in the layout that XLA chooses: that is `loose`, and yields
    to any other on the slice. One without an operand that lies somewhere is `free`: it may lie on any slice.
    """

    jaxpr: Any
    nodes: list[Node]
    inputs: list[Place]
    results: list[Place]
    asked: dict[int, Layout]
    makers: list[str]
    loose: list[bool]
    free: list[bool]

    @property
    def line(self) -> str:
        """The name and the line of the function."""
        return str(self.jaxpr.debug_info.func_src_info)

    def maker(self, result: int) -> str:
        """The line that a result comes from."""
        return f"{self.line}{f', made at {self.makers[result]}' if self.makers[result] else ''}"

    def firm(self, result: int) -> Place:
        """The layout of a result that has to be as it is."""
        return None if self.loose[result] else self.results[result]

    def bound(self, result: int) -> Place:
        """The layout of a result whose slice has to be as it is."""
        return None if self.free[result] else self.results[result]


@dataclass
class ProgramBuilder(GraphBuilder):
    """Builds a graph, and notes which values are `free`: ordinary operations have made them without an operand that
    lies somewhere, and put them on a slice for want of another."""

    free: set[Ref] = field(default_factory=set)

    def _operation(self, operation: Operation, inputs: list[Value]) -> list[Value]:
        is_bound = any(own_layout(self, value) is not None for value in inputs) or operation.own_slice is not None
        made = super()._operation(operation, inputs)
        if not is_bound:
            self.free.update(value.ref for value in made if value.ref is not None)
        return made


@dataclass
class Outliner(ProgramBuilder):
    """Builds a body for its layouts alone, without code. Operations without a placed operand go to `home`; with
    `single`, everything does."""

    home: VirtualSlice | None = None
    single: bool = True
    loose: set[Ref] = field(default_factory=set)

    def outline(self, closed: jex_core.ClosedJaxpr, given: Sequence[Any]) -> Outline:
        """Args: given: for each input its place, as a `Value` without content."""
        constants = [constant(c) for c in closed.consts]
        values = [Value(leaf=k, kind=kind) for k, kind in enumerate(given)]
        results = self._run(closed.jaxpr, constants, values)
        asked: dict[int, Layout] = {}
        numbers = {Ref(k): node.index for k, node in enumerate(self.nodes) if isinstance(node, Argument)}
        for node in self.nodes:
            if isinstance(node, Compute):
                for ref, layout in zip(node.inputs, node.input_layouts, strict=True):
                    if ref in numbers and numbers[ref] >= 0:
                        asked.setdefault(numbers[ref], layout)
        places = [self._place(value) for value in results]
        inputs = [self._place(value) for value in values]
        makers = [line_of(value, self.nodes) for value in results]
        unplaced = [value.leaf >= 0 and not given[value.leaf].slice for value in results]
        loose = [value.ref in self.loose or nowhere for value, nowhere in zip(results, unplaced, strict=True)]
        free = [value.ref in self.free or nowhere for value, nowhere in zip(results, unplaced, strict=True)]
        return Outline(closed.jaxpr, self.nodes, inputs, places, asked, makers, loose, free)

    def _operation(self, operation: Operation, inputs: list[Value]) -> list[Value]:
        made = super()._operation(operation, inputs)
        asked = operation.outputs or (None,) * len(made)
        self.loose.update(v.ref for v, spec in zip(made, asked, strict=True) if v.ref is not None and spec is None)
        return made

    def layout_of(self, value: Value) -> tuple[VirtualSlice, Spec] | None:
        """The layout of a value; None as well where it lies elsewhere, and is brought to `home`."""
        found = super().layout_of(value)
        return found if found is not None and (found[0] is self.home or not self.single) else None

    def _place(self, value: Value) -> Place:
        found = self.layout_of(value)
        return None if found is None else Layout(found[0].id, found[1])

    def _ref(self, value: Value, where: VirtualSlice, spec: Spec) -> Ref:
        before = value.ref
        found = super()._ref(value, where, spec)
        if before is None:  # an argument: under the number of the input, or -1 for what the body captures
            argument = self.nodes[-1]
            assert isinstance(argument, Argument)
            self.nodes[-1] = Argument(value.leaf, argument.type, argument.layout)
        return found

    def default_slice(self) -> VirtualSlice:
        assert self.home is not None
        return self.home


def own_layout(builder: GraphBuilder, value: Value) -> tuple[VirtualSlice, Spec] | None:
    """The layout of a value; None of one that comes from the client, or is `free`: it may lie where a consumer wants
    it."""
    if isinstance(builder, ProgramBuilder) and value.ref in builder.free:
        return None
    comes_in = value.ref is not None and isinstance(builder.nodes[value.ref.node], Argument)
    if comes_in and (value.kind is None or value.kind.slice is None):
        return None
    return builder.layout_of(value)


def line_of(value: Value, nodes: Sequence[Node]) -> str:
    """The user's line that made a value; "" of one that no node has made."""
    return str(getattr(nodes[value.ref.node], "where", "")) if value.ref is not None else ""


def without_code(
    name: str,
    flat: Callable[..., Any],
    avals: Sequence[jax.ShapeDtypeStruct],
    input_specs: Sequence[Spec],
    output_specs: Callable[[list[ArrayType]], Sequence[Spec]],
    where: VirtualSlice,
    platforms: tuple[str, ...],
    donated: tuple[int, ...] = (),
    known: Any = None,
) -> Exported:
    """An operation with its types and layouts, and no code."""
    made = jax.eval_shape(flat, *avals)
    data = [prng.data_type(one) for one in made]
    outputs = tuple(map(array_type, data))
    specs = tuple(output_specs(list(outputs)))
    no_code = (None, (), True, 0, lambda *_: ())
    return Exported(name, Code(), tuple(input_specs), outputs, tuple(avals), tuple(made), specs, *no_code)
