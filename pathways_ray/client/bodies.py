"""Branches and loops of a program, from the jaxpr to nodes.

The bodies of such an operation are built like programs of their own, first for the layouts alone (`Outline`): where
each value lies that goes in, is carried, comes out. Where all that the bodies run is on one slice, the operation
becomes one computation there (`one_computation`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from pathways_ray.client import inlining, prng, source_info
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.array import Array
from pathways_ray.client.export import Exported
from pathways_ray.client.graph_builder import GraphBuilder, Value
from pathways_ray.client.jaxprs import inner_equations
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.tracer import call_p, capture_p
from pathways_ray.errors import GraphError
from pathways_ray.ir.graph import Argument, Compute, Node, Ref
from pathways_ray.ir.types import ArrayType, Layout, Spec

Place = Layout | None
"""The layout of a value; None where nothing has asked for the value yet."""

_ROUNDS = 4
"""Times that a loop's body is outlined at most before its carry has its layouts: each finds some of them."""


@dataclass
class Outline:
    """A body without its code: its nodes, and the places of its inputs and results.

    `asked` are the layouts in which computations take inputs, `makers` the lines that results come from. Ordinary
    operations put a result wherever their operands lie: such a place is `loose`, and yields to any other.
    """

    jaxpr: Any
    nodes: list[Node]
    inputs: list[Place]
    results: list[Place]
    asked: dict[int, Layout]
    makers: list[str]
    loose: list[bool]

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


@dataclass
class Outliner(GraphBuilder):
    """Builds a body for its layouts alone, without code. Operations without a placed operand go to `home`."""

    home: VirtualSlice | None = None
    loose: set[Ref] = field(default_factory=set)

    def outline(self, closed: jex_core.ClosedJaxpr, given: Sequence[Any]) -> Outline:
        """Args: given: for each input its place, as a `Value` without content."""
        constants = [Value(constant=np.asarray(c)) for c in closed.consts]
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
        makers = [self._made_at(value) for value in results]
        loose = [value.ref in self.loose or (value.leaf >= 0 and not given[value.leaf].slice) for value in results]
        return Outline(closed.jaxpr, self.nodes, inputs, places, asked, makers, loose)

    def _operation(self, equation: Any, read: Any) -> list[Value]:
        made = super()._operation(equation, read)
        self.loose.update(value.ref for value in made if value.ref is not None)
        return made

    def layout_of(self, value: Value) -> tuple[VirtualSlice, Spec] | None:
        """The layout of a value; None as well where it lies elsewhere than at `home`, to which all is brought."""
        found = super().layout_of(value)
        return found if found is not None and found[0] is self.home else None

    def _place(self, value: Value) -> Place:
        found = self.layout_of(value)
        return None if found is None else Layout(found[0].id, found[1])

    def _made_at(self, value: Value) -> str:
        node = self.nodes[value.ref.node] if value.ref is not None else None
        return node.where if isinstance(node, Compute) else ""

    def _ref(self, value: Value, where: VirtualSlice, spec: Spec) -> Ref:
        before = value.ref
        found = super()._ref(value, where, spec)
        if before is None:  # an argument: under the number of the input, or -1 for what the body captures
            argument = self.nodes[-1]
            assert isinstance(argument, Argument)
            self.nodes[-1] = Argument(value.leaf, argument.type, argument.layout)
        return found

    def _default_slice(self) -> VirtualSlice:
        assert self.home is not None
        return self.home


def _stub(
    name: str,
    flat: Callable[..., Any],
    avals: Sequence[jax.ShapeDtypeStruct],
    input_specs: Sequence[Spec],
    output_specs: Callable[[list[ArrayType]], Sequence[Spec]],
    where: VirtualSlice,
    platforms: tuple[str, ...],
) -> Exported:
    """An operation with its types and layouts, and no code."""
    made = jax.eval_shape(flat, *avals)
    outputs = tuple(ArrayType(tuple(one.shape), np.dtype(one.dtype).name) for one in made)
    specs = tuple(output_specs(list(outputs)))
    weak = (False,) * len(outputs)
    return Exported(name, name, b"", tuple(input_specs), outputs, weak, specs, None, (), True, 0, False, lambda *_: ())


def control_node(builder: GraphBuilder, equation: Any, inputs: list[Value]) -> list[Value]:
    """The values that a branch or a loop of a program makes.

    Raises:
        GraphError: branches leave a result in different layouts, or a body changes that of its carry.
    """
    return _Control(builder, equation, inputs).build()


class _Control:
    """One operation whose bodies call compiled functions."""

    def __init__(self, builder: GraphBuilder, equation: Any, inputs: list[Value]) -> None:
        self.builder = builder
        self.equation = equation
        self.inputs = inputs
        self.name = equation.primitive.name
        self.where = source_info.of_equation(equation)
        calls = [one.params["site"] for one in inner_equations(equation) if one.primitive is call_p]
        self.home: VirtualSlice = calls[0].slice if calls else builder._default_slice()
        self.slices = list(dict.fromkeys(site.slice for site in calls))
        self.names = list(dict.fromkeys(site.exported.name for site in calls))
        self.arrays = _captured(equation)

    def build(self) -> list[Value]:
        if len(self.slices) > 1:
            raise GraphError(
                f"{self._shown()} calls compiled functions on several slices ({', '.join(map(str, self.slices))}), "
                "which a branch or a loop of a program cannot do yet; decide in Python between programs"
            )
        bodies, results = self._branches() if self.name == "cond" else self._loop()
        made = self._one_computation(bodies, [place.spec if place is not None else () for place in results])
        if isinstance(self.builder, Outliner):
            firm = [any(k < len(body.results) and body.firm(k) for body in bodies) for k in range(len(made))]
            self.builder.loose.update(v.ref for v, held in zip(made, firm, strict=True) if v.ref and not held)
        return made

    def _shown(self) -> str:
        return f"program {self.builder.name!r}: {self.name} ({self.where})"

    # --- layouts ------------------------------------------------------------------------------------------------------

    def _outline(self, closed: Any, places: Sequence[Place]) -> Outline:
        outer = self.builder
        outliner = Outliner(outer.session, outer.name, [], outer.control, _stub, slices=dict(outer.slices))
        outliner.home, outliner.debug_info = self.home, outer.debug_info
        outliner._use_slice(self.home)
        given = []
        for variable, place in zip(closed.jaxpr.invars, places, strict=True):
            aval = prng.data_type(variable.aval)
            array = ArrayType(tuple(aval.shape), np.dtype(aval.dtype).name)
            where = outliner.slices[place.slice] if place is not None else None
            given.append(ArgumentType.of(array, False, where, place.spec if place is not None else ()))
        return outliner.outline(closed, given)

    def _place(self, value: Value) -> Place:
        """The layout of a value, where it lies on the slice of the operation."""
        found = self.builder.layout_of(value)
        return Layout(found[0].id, found[1]) if found is not None and found[0] is self.home else None

    def _branches(self) -> tuple[list[Outline], list[Place]]:
        given = [self._place(value) for value in self.inputs[1:]]
        bodies = [self._outline(branch, given) for branch in self.equation.params["branches"]]
        results: list[Place] = []
        for k in range(len(self.equation.outvars)):
            firm = [body for body in bodies if body.firm(k) is not None]
            results.append(firm[0].results[k] if firm else next((b.results[k] for b in bodies if b.results[k]), None))
            for body in firm[1:]:
                if body.results[k] != results[k]:
                    raise GraphError(
                        f"{self._shown()}: the branches leave result {k} in different layouts: {firm[0].results[k]} "
                        f"by {firm[0].maker(k)}, and {body.results[k]} by {body.maker(k)}. Give them the same "
                        "out_specs on the same slice, or move one of the values in its branch"
                    )
        return bodies, results

    def _loop(self) -> tuple[list[Outline], list[Place]]:
        """The bodies of a loop, and the places of its results; those of a scan that are stacked come last."""
        params = self.equation.params
        given = [self._place(value) for value in self.inputs]
        if self.name == "while":
            shared = params["cond_nconsts"], params["body_nconsts"]
            before, body, count = sum(shared), params["body_jaxpr"], len(given) - sum(shared)
            constants = given[shared[0] : before]
            rest: list[Place] = []
        else:
            before, count, body = params["num_consts"], params["num_carry"], params["jaxpr"]
            constants = given[:before]
            # Round t takes row t of what is scanned: on the same slice, and whole along what is left of its dimensions.
            rest = [None if place is None else Layout(place.slice, place.spec[1:]) for place in given[before + count :]]
        carry = given[before : before + count]
        for _ in range(_ROUNDS):
            found = self._outline(body, [*constants, *carry, *rest])
            inputs = found.inputs[len(constants) : len(constants) + count]
            settled = [a or b or c for a, b, c in zip(carry, found.results, inputs, strict=False)]
            if settled == carry:
                break
            carry = settled
        for k, place in enumerate(carry):
            made = found.firm(k)
            if made is not None and made != place:
                raise GraphError(
                    f"{self._shown()}: the body changes the layout of carry {k}: it takes it as {place}, and leaves "
                    f"it as {made} ({found.maker(k)}). Give it the same out_specs on the same slice, or move the "
                    "first value there"
                )
        stacked = [
            None if p is None else Layout(p.slice, ((), *p.spec) if p.spec else ()) for p in found.results[count:]
        ]
        bodies = [found]
        if self.name == "while":
            bodies.append(self._outline(params["cond_jaxpr"], [*given[: shared[0]], *carry]))
        return bodies, [*carry, *stacked]

    # --- one computation ----------------------------------------------------------------------------------------------

    def _one_computation(self, bodies: list[Outline], results: list[Spec]) -> list[Value]:
        """The whole operation as one exported function on the slice of its calls."""
        builder, equation = self.builder, self.equation
        atoms = [atom for atom in equation.invars if not isinstance(atom, jex_core.Literal)]
        inputs = [v for v, a in zip(self.inputs, equation.invars, strict=True) if not isinstance(a, jex_core.Literal)]
        captured = [Value(array=array, kind=array._type) for array in self.arrays]
        places = [*self._asked(bodies, results), *(None for _ in captured)]
        specs = [self._spec(value, place) for value, place in zip([*inputs, *captured], places, strict=True)]
        kinds = [atom.aval for atom in atoms]

        def flat(*leaves: Any) -> list[Any]:
            given = [prng.from_data(leaf, kind) for leaf, kind in zip(leaves, kinds, strict=False)]
            held = {id(array): leaf for array, leaf in zip(self.arrays, leaves[len(kinds) :], strict=True)}
            values = iter(given)
            read = [inlining.literal(a) if isinstance(a, jex_core.Literal) else next(values) for a in equation.invars]
            return [prng.to_data(value) for value in inlining.run(equation, read, held)]

        avals = [*(prng.data_type(kind) for kind in kinds), *(array._type.aval for array in self.arrays)]
        name = f"{self.name}({', '.join(self.names)})"[:200]
        exported = builder.export(name, flat, avals, specs, lambda types: results, self.home, builder.session.platforms)
        return builder.node(exported, self.home, [*inputs, *captured], self.where)

    def _asked(self, bodies: list[Outline], results: list[Spec]) -> list[Place]:
        """For each operand that is not a literal, the layout in which the bodies take it first."""
        params, count = self.equation.params, len(self.inputs)
        asked: list[Place] = [None] * count
        if self.name == "cond":
            offsets = [(body, 1, 0, count - 1) for body in bodies]
        elif self.name == "while":
            tests, rest = params["cond_nconsts"], params["body_nconsts"]
            offsets = [(bodies[0], tests, 0, rest), (bodies[1], 0, 0, tests)]
        else:
            offsets = [(bodies[0], 0, 0, params["num_consts"])]
        for body, start, first, size in offsets:
            for k in range(size):
                asked[start + k] = asked[start + k] or body.asked.get(first + k)
        if self.name != "cond":
            carried = count - len(results) if self.name == "while" else params["num_consts"]
            size = len(results) if self.name == "while" else params["num_carry"]
            for k in range(size):
                asked[carried + k] = Layout(self.home.id, results[k])
        atoms = self.equation.invars
        return [a for a, atom in zip(asked, atoms, strict=True) if not isinstance(atom, jex_core.Literal)]

    def _spec(self, value: Value, asked: Place) -> Spec:
        """The spec in which the computation takes an operand: as it lies, where it lies there."""
        place = self._place(value) or asked
        return place.spec if place is not None else ()


def _captured(equation: Any) -> list[Array]:
    """The arrays that the bodies of an operation capture, each once."""
    found: dict[int, Array] = {}
    for inner in inner_equations(equation):
        if inner.primitive is capture_p:
            array = inner.params["captured"].array
            found.setdefault(id(array), array)
    return list(found.values())
