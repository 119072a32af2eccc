"""Bodies of branches and loops as graphs of their own, and the nodes that they belong to.

A body shares recipes, functions and slices with the program around it. What it takes are the inputs of its node: the
operands that JAX found, and behind them, in `Inputs`, the arrays and constants that bodies hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import msgspec
from jax.extend import core as jex_core

from pathways_ray.client import prng
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.debugging import DebugCall
from pathways_ray.client.export import Exported
from pathways_ray.client.graph_builder import GraphBuilder, Value, constant
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import GraphError
from pathways_ray.ir.graph import Argument, Body, Compute, Ref, Result
from pathways_ray.ir.types import ArrayType, Layout, Spec
from pathways_ray.jax_types import array_type, dtype_named


@dataclass
class Inputs:
    """The inputs of a branch or a loop: values of what is around it, and where they are placed if they lie nowhere."""

    values: list[Value]
    places: list[Layout]
    numbers: dict[int, int] = field(default_factory=dict)

    def number_of(self, held: Any, value: Value, place: Layout) -> int:
        """The number of an array or constant that a body holds."""
        number = self.numbers.get(id(held))
        if number is None:
            number = self.numbers[id(held)] = len(self.values)
            self.values.append(value)
            self.places.append(place)
        return number


def array_type_of(variable: Any) -> ArrayType:
    """The type of a variable of a jaxpr as it lies on devices."""
    return array_type(prng.data_type(variable.aval))


def extended_of(variable: Any) -> Any:
    """The dtype of a variable that devices do not have; None of others."""
    return variable.aval.dtype if prng.is_extended(variable.aval) else None


@dataclass
class BodyBuilder(GraphBuilder):
    """Builds a body whose operations without a placed operand go to `home`."""

    home: VirtualSlice | None = None
    inputs: Inputs = field(default_factory=lambda: Inputs([], []))

    @classmethod
    def inside(cls, outer: GraphBuilder, home: VirtualSlice, inputs: Inputs) -> BodyBuilder:
        """A builder of a body inside of what `outer` builds."""
        return cls(
            outer.session,
            outer.name,
            [],
            outer.control,
            outer.export,
            recipes=outer.recipes,
            functions=outer.functions,
            slices=outer.slices,
            home=home,
            inputs=inputs,
        )

    def body(
        self, closed: jex_core.ClosedJaxpr, numbers: Sequence[int], results: Sequence[Layout | None], where: str
    ) -> Body:
        """A body of a jaxpr.

        Args:
            numbers: for each of its inputs that of the node's input.
            results: the layouts of what it gives; None takes one as it lies.
        """
        constants = [constant(c) for c in closed.consts]
        given = []
        for variable, number in zip(closed.jaxpr.invars, numbers, strict=True):
            place = self.inputs.places[number]
            kind = ArgumentType.of(
                array_type_of(variable), False, self.slices[place.slice], place.spec, extended_of(variable)
            )
            given.append(Value(leaf=number, kind=kind))
        found = self._run(closed.jaxpr, constants, given)
        self._check_no_debug_calls(where)
        assert self.home is not None
        alone = Layout(self.home.id, ())
        refs = [self.placed(v, alone if r is None else r, r is None) for v, r in zip(found, results, strict=True)]
        return Body((*self.nodes, Result(tuple(refs))), where)

    def _check_no_debug_calls(self, where: str) -> None:
        """Raises `GraphError` where they would never be made: what they take has no way out of a body."""
        for one, _ in self.reported:
            if isinstance(one.report, DebugCall):
                raise GraphError(
                    f"program {self.name!r}: a debug call ({one.report.where}) in a branch or loop over several slices "
                    f"({where}) cannot be made. Make it before or after, or where all calls are on one slice"
                )

    def placed(self, value: Value, layout: Layout, anywhere: bool) -> Ref:
        """A value as a ref, moved to a layout where it lies in another one."""
        own = self.layout_of(value)
        where = self.slices[layout.slice]
        if own is None or anywhere or (own[0] is where and own[1] == layout.spec):
            return self._ref(value, where, layout.spec)
        array, spec = self.type_of(value), layout.spec
        aval = jax.ShapeDtypeStruct(array.shape, dtype_named(array.dtype))
        exported = self.export("move", lambda v: [v], [aval], [spec], lambda _: [spec], where, self.session.platforms)
        (moved,) = self.node(exported, where, [value], "")
        assert moved.ref is not None
        return moved.ref

    def node(self, exported: Exported, where: VirtualSlice, inputs: list[Value], line: str) -> list[Value]:
        """A compute node that gives nothing away: a round may need again what it takes."""
        made = super().node(exported, where, inputs, line)
        last = self.nodes[-1]
        assert isinstance(last, Compute)
        self.nodes[-1] = msgspec.structs.replace(last, donated=())
        return made

    def _ref(self, value: Value, where: VirtualSlice, spec: Spec) -> Ref:
        if value.ref is not None:
            return value.ref
        number, kind = value.leaf, value.kind
        if number < 0:
            held = value.array if value.array is not None else value.constant
            if kind is not None and kind.slice is not None:
                where, spec = kind.slice, kind.spec
                self._use_slice(where)
            outside = Value(array=value.array, constant=value.constant, kind=kind)
            number = self.inputs.number_of(held, outside, Layout(where.id, spec))
        array = self.type_of(value)
        value.ref = Ref(len(self.nodes))
        self.nodes.append(Argument(number, array, self.inputs.places[number]))
        return value.ref

    def default_slice(self) -> VirtualSlice:
        assert self.home is not None
        return self.home
