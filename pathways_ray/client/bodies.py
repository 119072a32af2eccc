"""Branches and loops of a program, from the jaxpr to nodes.

The bodies of such an operation are built like programs of their own, first for the layouts alone (`Outline`): where
each value lies that goes in, is carried, comes out. Where all that the bodies run is on one slice, the operation
becomes one computation there; else a node with its bodies (`assembly`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from pathways_ray.client import inlining, prng, puts, source_info
from pathways_ray.client.argument_types import ArgumentType, check_width
from pathways_ray.client.array import Array
from pathways_ray.client.assembly import BodyBuilder, Inputs, array_type_of, extended_of
from pathways_ray.client.batched_loops import with_scalar_test
from pathways_ray.client.debugging import NanCheck, checks_asked, has_such
from pathways_ray.client.graph_builder import GraphBuilder, Value
from pathways_ray.client.jaxprs import CONTROL, equations_of, inner_constants, inner_equations, is_transposed
from pathways_ray.client.outlines import Outline, Outliner, Place, line_of, own_layout, without_code
from pathways_ray.client.rounds import Loop, nothing_yet, unrolled, users_numbers, while_of
from pathways_ray.client.routed_rows import RowCheck
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.tracer import call_p, capture_p, holds_calls, is_call, slices_named
from pathways_ray.errors import GraphError
from pathways_ray.ir.graph import Body, Branch, Ref, Repeat
from pathways_ray.ir.types import Layout, Spec
from pathways_ray.jax_types import dtype_named

MAX_TITLE = 200
"""Characters of the name of a branch or a loop, which names the functions that it calls."""

_ROUNDS = 4
"""Times that a loop's body is outlined at most before its carry has its layouts: each finds some of them."""


def has_control(closed: Any) -> bool:
    """Whether a program has branches or loops that call compiled functions, or put values on slices."""
    loops = [one for one in equations_of(closed.jaxpr) if one.primitive.name in CONTROL]
    return any(holds_calls(one) or any(map(puts.named, inner_equations(one))) for one in loops)


def control_node(builder: GraphBuilder, equation: Any, inputs: list[Value]) -> list[Value]:
    """The values that a branch or a loop of a program makes.

    Raises:
        GraphError: branches leave a result in different layouts, or a body changes that of its carry.
    """
    return _Control(builder, equation, inputs).build()


class _Control:
    """One operation whose bodies call compiled functions, or put values on slices."""

    def __init__(self, builder: GraphBuilder, equation: Any, inputs: list[Value]) -> None:
        if equation.primitive.name == "while":
            equation, inputs = with_scalar_test(equation, inputs)
        self.builder = builder
        self.equation = equation
        self.inputs = inputs
        self.name = equation.primitive.name
        self.where = source_info.of_equation(equation)
        for number, (value, atom) in enumerate(zip(inputs, equation.invars, strict=True)):
            check_width(self.name, number, builder.type_of(value), atom.aval)
        calls = [one for one in inner_equations(equation) if is_call(one)]
        sites = [one.params["site"] for one in calls if one.primitive is call_p]
        self.slices = list(dict.fromkeys(where for one in inner_equations(equation) for where in slices_named(one)))
        self.home: VirtualSlice = self.slices[0] if self.slices else builder.default_slice()
        # A host function is no part of a computation: the controller has to decide around it.
        self.single = len(self.slices) < 2 and not any(site.exported.host_limit_ms for site in sites)
        self.names = list(dict.fromkeys(_name(one) for one in calls))
        if any(isinstance(report, RowCheck) for site in sites for report in site.exported.reports):
            raise GraphError(
                f"{self._shown()}: pw.route with overflow='error' in a branch or a loop, whose counts have no way out; "
                "take overflow='count', and give handle.dropped as a result"
            )
        self.arrays = _captured(equation)
        self.known = dict(builder.slices)
        """Slices that outlines have found: those of the program, and of the bodies."""
        # Nobody wrote the bodies of a derivative: a result goes where one of the branches, or the first value, lies.
        self.derived = builder.derived or is_transposed(equation)
        # In a body all inputs have got a place, whether they lie there or not: its outline was checked.
        self.checked = self.derived or isinstance(builder, BodyBuilder)

    def build(self) -> list[Value]:
        if self.single and not self._keeps_values_elsewhere():
            bodies, results = self._branches() if self.name == "cond" else self._loop()
            made = self._one_computation(bodies, [place.spec if place is not None else () for place in results])
        elif self.name == "cond":
            bodies, results = self._branches()
            made = self._branch_node(bodies, results)
        else:
            return self._loop_node()
        if isinstance(self.builder, Outliner):
            for k, value in enumerate(made):
                if value.ref is not None:
                    of = [body for body in bodies if k < len(body.results)]
                    self.builder.loose.update([value.ref] * (not any(body.firm(k) for body in of)))
                    self.builder.free.update([value.ref] * (not any(body.bound(k) for body in of)))
        return made

    def _shown(self) -> str:
        return f"program {self.builder.name!r}: {self.name} ({self.where})"

    def _keeps_values_elsewhere(self) -> bool:
        """Whether the bodies put some values on the one slice that they name, and leave results where others lie: then
        these are several slices. Where they leave a result on both, all is on the one that they name; so it is inside
        of another body, which is not checked again, and with debug calls, which need one computation.
        """
        nested = isinstance(self.builder, Outliner | BodyBuilder)
        if self.name == "scan" and not self.equation.params["length"]:  # nothing runs
            return False
        if nested or self.equation.effects or not puts.moves_inside(self.builder, self.equation, self.inputs):
            return False
        self.single = False
        try:
            places = self._branches()[1] if self.name == "cond" else self._rounds()[-1]
        except GraphError:
            places = []
        self.single = not any(place is not None and place.slice != self.home.id for place in places)
        return not self.single

    # --- layouts ------------------------------------------------------------------------------------------------------

    def _outline(self, closed: Any, places: Sequence[Place]) -> Outline:
        outer = self.builder
        outliner = Outliner(outer.session, outer.name, [], outer.control, without_code, slices=self.known)
        outliner.home, outliner.single, outliner.derived = self.home, self.single, self.derived
        outliner._use_slice(self.home)
        given = []
        for variable, place in zip(closed.jaxpr.invars, places, strict=True):
            array = array_type_of(variable)
            where = outliner.slices[place.slice] if place is not None else None
            spec = place.spec if place is not None else ()
            given.append(ArgumentType.of(array, False, where, spec, extended_of(variable)))
        return outliner.outline(closed, given)

    def _place(self, value: Value) -> Place:
        """The layout of a value; None as well where it lies elsewhere, and is brought to the slice of all calls."""
        found = own_layout(self.builder, value)
        if found is None or (self.single and found[0] is not self.home):
            return None
        self.builder._use_slice(found[0])
        self.known.setdefault(found[0].id, found[0])
        return Layout(found[0].id, found[1])

    def _branches(self) -> tuple[list[Outline], list[Place]]:
        given = [self._place(value) for value in self.inputs[1:]]
        bodies = [self._outline(branch, given) for branch in self.equation.params["branches"]]
        results: list[Place] = []
        for k in range(len(self.equation.outvars)):
            by_weight = sorted(bodies, key=lambda b: (b.firm(k) is None, b.bound(k) is None, b.results[k] is None))
            first = by_weight[0]
            results.append(first.results[k])
            for body in by_weight[1:]:
                if not self.checked and _differ(first.results[k], body.firm(k), body.bound(k)):
                    raise GraphError(
                        f"{self._shown()}: the branches leave result {k} in different layouts: {first.results[k]} "
                        f"by {first.maker(k)}, and {body.results[k]} by {body.maker(k)}. Give them the same "
                        "out_specs on the same slice, or move one of the values in its branch (pw.reshard)"
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
        numbers = users_numbers(self.equation, count)
        found, carry = self._carried(body, constants, self.inputs[before : before + count], numbers, rest)
        stacked = [
            None if p is None else Layout(p.slice, ((), *p.spec) if p.spec else ()) for p in found.results[count:]
        ]
        bodies = [found]
        if self.name == "while":
            bodies.append(self._outline(params["cond_jaxpr"], [*given[: shared[0]], *carry]))
        return bodies, [*carry, *stacked]

    def _carried(
        self, body: Any, constants: list[Place], values: list[Value], numbers: Sequence[int], rest: Sequence[Place] = ()
    ) -> tuple[Outline, list[Place]]:
        """The outline of a loop's body, and the places of what it carries, which begins as these values."""
        carry, count = [self._place(value) for value in values], len(values)
        for _ in range(_ROUNDS):
            found = self._outline(body, [*constants, *carry, *rest])
            inputs = found.inputs[len(constants) : len(constants) + count]
            settled = [a or b or c for a, b, c in zip(carry, found.results, inputs, strict=False)]
            if settled == carry:
                break
            carry = settled
        for k, value in enumerate(values):
            lies = own_layout(self.builder, value)
            first = carry[k] if lies is None else Layout(lies[0].id, lies[1])
            # In one computation, what operations make of a value from elsewhere lies where the computation is.
            bound = found.bound(k) if lies is not None and not self.single else None
            if not self.checked and _differ(first, found.firm(k), bound):
                line = line_of(value, self.builder.nodes)
                raise GraphError(
                    f"{self._shown()}: the body changes the layout of carry {numbers[k]}: it takes it as {first}"
                    f"{f' (made at {line})' if line else ''}, and leaves it as {found.results[k]} "
                    f"({found.maker(k)}). Give it the same out_specs on the same slice, or move the first value there "
                    "before the loop (pw.reshard)"
                )
        return found, carry

    # --- nodes with bodies --------------------------------------------------------------------------------------------

    def _branch_node(self, outlines: list[Outline], results: list[Place]) -> list[Value]:
        operands = self.inputs[1:]
        first = [next((o.inputs[k] for o in outlines if o.inputs[k]), None) for k in range(len(operands))]
        inputs = self._inputs(operands, first)
        layouts = [place or self._alone for place in results]
        self._use(layouts)
        bodies = tuple(
            BodyBuilder.inside(self.builder, self.home, inputs).body(branch, range(len(operands)), layouts, one.line)
            for branch, one in zip(self.equation.params["branches"], outlines, strict=True)
        )
        index = self.builder._ref(self.inputs[0], self.home, ())
        outputs = tuple(array_type_of(variable) for variable in self.equation.outvars)
        return self._add(Branch(self._title, index, self._refs(inputs), bodies, outputs, tuple(layouts), self.where))

    def _loop_node(self) -> list[Value]:
        params = self.equation.params
        if self.name == "scan" and not params["length"]:  # nothing runs
            first, count = params["num_consts"], params["num_carry"]
            return [*self.inputs[first : first + count], *map(nothing_yet, self.equation.outvars[count:])]
        loop, given, outline, carry = self._rounds()
        outlines, first = [outline], [*carry, *outline.inputs[: len(given)]]
        if loop.test is not None:
            outlines.append(self._outline(loop.test, [*(self._place(v) for v in loop.known), *carry]))
            first += outlines[1].inputs[: len(loop.known)]
        inputs = self._inputs([*loop.carry, *loop.constants, *loop.known], first, carry)
        layouts = inputs.places[: len(carry)]
        count, shared = len(carry), len(loop.constants)

        def body(closed: Any, start: int, size: int, results: Sequence[Layout | None], line: str) -> Body:
            numbers = [*range(start, start + size), *range(count)]
            return BodyBuilder.inside(self.builder, self.home, inputs).body(closed, numbers, results, line)

        round_ = body(loop.body, count, shared, layouts, outline.line if self.name == "while" else loop.line)
        test = None
        if loop.test is not None:
            test = body(loop.test, count + shared, len(loop.known), [None], outlines[1].line)
        outputs = tuple(array_type_of(variable) for variable in loop.body.jaxpr.outvars)
        refs = self._refs(inputs)
        node = Repeat(self._title, refs, loop.times, test, round_, outputs, tuple(layouts), self.where)
        made = self._add(node)
        return [Value(constant=np.zeros(())) if k is None else made[k] for k in loop.results]

    def _rounds(self) -> tuple[Loop, list[Place], Outline, list[Place]]:
        """The loop of a node, the places of its constants, the outline of its body, and the places of its carry."""
        loop = unrolled(self.equation, self.inputs) if self.name == "scan" else while_of(self.equation, self.inputs)
        given = [self._place(value) for value in loop.constants]
        return loop, given, *self._carried(loop.body, given, loop.carry, loop.numbers)

    @property
    def _title(self) -> str:
        return f"{self.name}({', '.join(self.names)})"[:MAX_TITLE] if self.names else self.name

    @property
    def _alone(self) -> Layout:
        return Layout(self.home.id, ())

    def _inputs(self, values: list[Value], first: Sequence[Place], fixed: Sequence[Place] = ()) -> Inputs:
        """The inputs of a node: where they lie, else where a body asks for them first."""
        asked = [*fixed, *first[len(fixed) :]]
        places = [own or place or self._alone for own, place in zip(map(self._place, values), asked, strict=True)]
        self._use(places)
        return Inputs(list(values), places)

    def _use(self, places: Sequence[Layout]) -> None:
        """Has the program hold the slices of places, and those of the calls."""
        for slice in (self.home, *self.slices, *(self.known[place.slice] for place in places)):
            self.builder._use_slice(slice)

    def _refs(self, inputs: Inputs) -> tuple[Ref, ...]:
        """The inputs as refs. What came from the client may lie elsewhere by now, where another consumer took it."""
        builder, refs = self.builder, []
        for value, place in zip(inputs.values, inputs.places, strict=True):
            where = builder.slices[place.slice]
            refs.append(builder._ref(builder._move(value, where, place.spec), where, place.spec))
        return tuple(refs)

    def _add(self, node: Branch | Repeat) -> list[Value]:
        self.builder.nodes.append(node)
        made = [Value(ref=Ref(len(self.builder.nodes) - 1, k)) for k in range(len(node.outputs))]
        if checks_asked() and not isinstance(self.builder, Outliner | BodyBuilder):
            self._look_at(made, checks_asked())
        return made

    def _look_at(self, made: list[Value], what: str) -> None:
        """Looks at the results as `jax_debug_nans` asks: what functions of the bodies find has no way out of them."""
        builder = self.builder
        by_slice: dict[VirtualSlice, dict[int, Spec]] = {}
        types = [builder.type_of(value) for value in made]
        for k, (value, array) in enumerate(zip(made, types, strict=True)):
            lies = builder.layout_of(value)
            if lies is not None and jnp.issubdtype(dtype_named(array.dtype), jnp.inexact):
                by_slice.setdefault(lies[0], {})[k] = lies[1]
        for where, specs in by_slice.items():
            avals = [jax.ShapeDtypeStruct(types[k].shape, dtype_named(types[k].dtype)) for k in specs]
            with jax.debug_nans(False), jax.debug_infs(False):  # nobody looks at what looks
                exported = builder.export(
                    self._title,
                    lambda *given: [jnp.stack([has_such(value, what) for value in given]).any(keepdims=True)],
                    avals,
                    [*specs.values()],
                    lambda _: [()],
                    where,
                    builder.session.platforms,
                )
            looks = replace(exported, results=(), reports=(NanCheck((self.name,), what),))
            builder.node(looks, where, [made[k] for k in specs], self.where)

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
            held = {id(array): leaf for array, leaf in zip(self.arrays, leaves[len(kinds) :], strict=True)}
            values = iter(leaves)
            read = [a.val if isinstance(a, jex_core.Literal) else next(values) for a in equation.invars]
            return inlining.run(equation, read, held)

        avals = [*(prng.logical(kind) for kind in kinds), *(array._type.aval for array in self.arrays)]
        name = self._title
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


def _differ(place: Place, firm: Place, bound: Place) -> bool:
    """Whether a value in a place is somewhere else than where it has to be."""
    return place is not None and ((firm or place) != place or (bound or place).slice != place.slice)


def _name(call: Any) -> str:
    """The name of what is called."""
    return str(call.params["site"].exported.name if call.primitive is call_p else call.params["name"])


def _captured(equation: Any) -> list[Array]:
    """The arrays that the bodies of an operation capture, each once."""
    found = {id(one): one for one in inner_constants(equation) if isinstance(one, Array)}
    for inner in inner_equations(equation):
        if inner.primitive is capture_p:
            array = inner.params["captured"].array
            found.setdefault(id(array), array)
    return list(found.values())
