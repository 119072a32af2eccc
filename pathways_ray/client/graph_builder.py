"""Building the graph of a program from its jaxpr.

Every call of a compiled function is one node; every ordinary JAX operation becomes a small node of its own, on the
slice of its first placed operand. A value that is still with the client is placed where its first consumer wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.extend import core as jex_core

from pathways_ray import limits
from pathways_ray.client import copies, jaxprs, prng, puts, source_info
from pathways_ray.client.argument_types import ArgumentType, check_width, extended_dtype
from pathways_ray.client.array import Array
from pathways_ray.client.debugging import Reported
from pathways_ray.client.estimates import NO_WORK, Work
from pathways_ray.client.export import Exported, export_function
from pathways_ray.client.jaxprs import CONTROL, INLINED, body_of, constant_bytes, is_transposed, used_equations
from pathways_ray.client.operation import Operation
from pathways_ray.client.slices import VirtualSlice, array_belongs, slice_belongs
from pathways_ray.client.tracer import CallSite, Trace, call_p, capture_p, first_slice, holds_calls, is_call
from pathways_ray.errors import ForeignArray, GraphError, TooLarge, TraceError
from pathways_ray.ir.graph import Argument, Branch, Compute, Graph, Node, Recipe, Ref, Repeat, Result, Transfer
from pathways_ray.ir.types import ArrayType, Layout, Spec
from pathways_ray.ir.verify import verify
from pathways_ray.jax_types import array_type

if TYPE_CHECKING:
    from pathways_ray.client.session import Session


@dataclass
class Value:
    """A value of the jaxpr: a ref once it is in the graph, else where it comes from (a leaf, an array, a constant). A
    constant is a NumPy array, or a `jax.Array` of typed PRNG keys."""

    ref: Ref | None = None
    leaf: int = -1
    array: Array | None = None
    constant: Any = None
    kind: ArgumentType | None = None


def constant(value: Any) -> Value:
    """A constant of a jaxpr, which may be an array of a slice. A user's NumPy array is copied: it may change later."""
    if isinstance(value, Array):
        return Value(array=value, kind=value._type)
    if extended_dtype(value) is not None:
        return Value(constant=prng.to_data(value) if prng.is_zeros(value) else value)
    return Value(constant=np.array(value, copy=isinstance(value, np.ndarray) or None))


@dataclass(frozen=True)
class Source:
    """The source of argument k of a launch: a leaf of the call, or an array or constant that the program captured."""

    leaf: int
    held: Any
    slice: VirtualSlice
    spec: Spec


@dataclass(frozen=True)
class Output:
    """The source of leaf k of the result: result `result` of the launch, or what was there before."""

    result: int = -1
    leaf: int = -1
    held: Array | None = None


@dataclass
class BuiltProgram:
    """A graph, the functions it runs, and how calls and results map to it. The last results are those of `reported`."""

    graph: Graph
    functions: dict[str, bytes]
    sources: list[Source]
    outputs: list[Output]
    result_kinds: tuple[ArgumentType, ...]
    reported: tuple[Reported, ...]
    work: Work
    donated_leaves: tuple[int, ...]


@dataclass
class GraphBuilder:
    """Builds the graph of one trace.

    Args:
        control: makes the values of an operation of `CONTROL` whose bodies name slices.
        export: exports ordinary operations.
        operations: those of the same trace that were exported (`Operation.exported`).
        later: takes functions without code, whose nodes have no function; left out, it is made.
        derived: whether what is built now is the backward of a derivative, which JAX has made.
    """

    session: Session
    name: str
    kinds: list[ArgumentType]
    control: Callable[[GraphBuilder, Any, list[Value]], list[Value]]
    export: Callable[..., Exported] = export_function
    nodes: list[Node] = field(default_factory=list)
    recipes: dict[Recipe, int] = field(default_factory=dict)
    functions: dict[str, bytes] = field(default_factory=dict)
    slices: dict[int, VirtualSlice] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    donated: set[int] = field(default_factory=set)
    reported: list[tuple[Reported, list[Ref]]] = field(default_factory=list)
    work: Work = NO_WORK
    first: VirtualSlice | None = None
    moved: dict[tuple[Ref, Layout], Ref] = field(default_factory=dict)
    operations: dict[Any, Exported] = field(default_factory=dict)
    later: list[Exported] | None = None
    derived: bool = False

    def build(self, traced: Trace) -> BuiltProgram:
        """Raises `GraphError`, `TraceError`, `SpecError` or `TooLarge` as the program deserves."""
        closed = traced.closed
        self._check_constants(closed)
        self.first = first_slice(self.kinds, closed)
        outputs = self._run(closed.jaxpr, [constant(c) for c in closed.consts], self._leaves())
        return self._finish(outputs, closed.out_avals)

    def build_hoisted(self, closed: Any, captured: Sequence[Array]) -> BuiltProgram:
        """The program of a jaxpr whose captured arrays are the first arguments."""
        self._check_constants(closed)
        self.first = first_slice(self.kinds, closed)
        leaves = self._leaves()
        first = iter(leaves[: len(captured)])
        constants = [next(first) if isinstance(c, Array) else constant(c) for c in closed.consts]
        return self._finish(self._run(closed.jaxpr, constants, leaves[len(captured) :]), closed.out_avals)

    def build_operation(self, operation: Operation) -> BuiltProgram:
        """The program of one operation, of the arguments."""
        self._check_constants(operation.closed)
        return self._finish(self._operation(operation, self._leaves()), operation.closed.out_avals)

    def _check_constants(self, closed: Any) -> None:
        size = constant_bytes(closed)
        if size > limits.MAX_CONSTANT_BYTES:
            raise TooLarge(
                f"program {self.name!r} captures constants of {size} bytes; the limit is {limits.MAX_CONSTANT_BYTES}. "
                "Pass them as arguments (pw.put places one once)"
            )

    def _leaves(self) -> list[Value]:
        for kind in self.kinds:
            self._check_mine(kind)
        kinds = enumerate(self.kinds)
        return [constant(k.aval) if prng.is_zeros(k.aval) else Value(leaf=n, kind=k) for n, k in kinds]

    def _finish(self, outputs: list[Value], avals: Sequence[Any]) -> BuiltProgram:
        made = zip(outputs, avals, strict=True)
        outputs = copies.apart(self, [Value(array=prng.from_data(None, a)) if prng.is_zeros(a) else v for v, a in made])
        size = sum(len(blob) for blob in self.functions.values())
        if size > limits.MAX_PROGRAM_BYTES:
            raise TooLarge(
                f"the functions of program {self.name!r} take {size} bytes, constants included; the limit is "
                f"{limits.MAX_PROGRAM_BYTES}. Pass large constants as arguments"
            )
        refs: list[Ref] = []
        mapped = [self._output(value, refs, aval) for value, aval in zip(outputs, avals, strict=True)]
        types, count = dict(zip((output.result for output in mapped), avals, strict=True)), len(refs)
        reported: list[Reported] = []
        for one, its in self.reported:
            reported.append(replace(one, results=tuple(range(len(refs), len(refs) + len(its)))))
            refs += its
        self.nodes.append(Result(tuple(refs)))
        graph = verify(
            Graph(self.name, tuple(s.type for s in self.slices.values()), tuple(self.recipes), tuple(self.nodes))
        )
        return BuiltProgram(
            graph=graph,
            functions=self.functions,
            sources=self.sources,
            outputs=mapped,
            result_kinds=tuple(
                self._kind(graph, ref, types.get(k) if k < count else None) for k, ref in enumerate(refs)
            ),
            reported=tuple(reported),
            work=self.work,
            donated_leaves=tuple(sorted(self.donated)),
        )

    def _kind(self, graph: Graph, ref: Ref, aval: Any) -> ArgumentType:
        layout = graph.layout_of(ref)
        weak = bool(getattr(aval, "weak_type", False))
        extended = aval.dtype if aval is not None and prng.is_key(aval) else None
        return ArgumentType.of(graph.type_of(ref), weak, self.slices[layout.slice], layout.spec, extended)

    def _output(self, value: Value, refs: list[Ref], aval: Any) -> Output:
        """A value that is an argument or a captured array is handed back without a launch."""
        if value.leaf >= 0:
            if value.leaf in self.donated:
                raise GraphError(
                    f"program {self.name!r} donates argument {value.leaf} and returns it as well; drop donate_argnums "
                    "or return a computed value"
                )
            check_width(self.name, value.leaf, self.type_of(value), aval)
            return Output(leaf=value.leaf)
        if value.array is not None:
            return Output(held=value.array)
        assert value.ref is not None
        if value.ref not in refs:
            refs.append(value.ref)
        return Output(result=refs.index(value.ref))

    def _run(self, jaxpr: Any, constants: list[Value], arguments: list[Value]) -> list[Value]:
        values: dict[Any, Value] = dict(zip(jaxpr.constvars, constants, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, jex_core.Literal):
                kind: Any = atom.aval
                return constant(np.asarray(atom.val, kind.dtype))
            return values[atom]

        equations, used = used_equations(jaxpr)
        for equation in equations:
            if equation.primitive is capture_p:
                outputs = [constant(equation.params["captured"].array)]
                self._check_mine(outputs[0].kind)
            elif equation.primitive is call_p:
                outputs = self._call(equation.params["site"], [read(atom) for atom in equation.invars])
            elif is_call(equation):
                where = source_info.of_equation(equation)
                operation = Operation.of_jit(equation.params["jaxpr"], equation.params, where, equation)
                captured = [constant(array) for array in operation.captured]
                outputs = self._operation(operation, [*captured, *(read(atom) for atom in equation.invars)])
            elif holds_calls(equation) or puts.moves_inside(self, equation, map(read, equation.invars)):
                outputs = self._inner(equation, used, [read(atom) for atom in equation.invars])
            elif (moved := puts.moved(self, equation, read)) is not None:
                outputs = moved
            else:
                atoms = list(dict.fromkeys(a for a in equation.invars if not isinstance(a, jex_core.Literal)))
                operation = Operation.of_equation(equation, atoms, jaxpr.debug_info)
                if not atoms and operation.is_small:
                    outputs = [constant(value) for value in operation.value()]
                else:
                    outputs = self._operation(operation, [read(atom) for atom in atoms])
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _inner(self, equation: Any, used: set[Any], inputs: list[Value]) -> list[Value]:
        """An operation whose bodies call compiled functions, capture arrays, or put values on other slices."""
        if equation.primitive.name in CONTROL:
            return self.control(self, jaxprs.without_unused(equation, used), inputs)
        if equation.primitive.name not in INLINED:
            raise TraceError(
                f"program {self.name!r} calls a compiled function inside {equation.primitive.name} "
                f"({source_info.of_equation(equation)}). Branches and loops may do that (pw.cond, pw.while_loop, "
                "pw.scan); for anything else, put it inside the compiled function"
            )
        inner = body_of(equation)
        held = [constant(c) for c in getattr(inner, "consts", ())]
        before, self.derived = self.derived, self.derived or is_transposed(equation)
        made = self._run(getattr(inner, "jaxpr", inner), held, inputs)
        self.derived = before
        return made

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _call(self, site: CallSite, inputs: list[Value]) -> list[Value]:
        if site.exported.moves:
            site.exported.check_width(map(self.type_of, inputs))
            specs = site.exported.output_specs
            return [self._move(value, site.slice, spec) for value, spec in zip(inputs, specs, strict=True)]
        return self.node(site.exported, site.slice, inputs, site.where)

    def _move(self, value: Value, where: VirtualSlice, spec: Spec) -> Value:
        """The value in a layout, by a transfer, which two that ask for the same share."""
        self._use_slice(where)
        ref, layout = self._ref(value, where, spec), Layout(where.id, spec)
        if self.layout_of(value) == (where, spec):  # it may have been with the client; a constant is one still
            return value
        if (ref, layout) not in self.moved:
            self.nodes.append(Transfer(ref, self.type_of(value), layout))
            self.moved[ref, layout] = Ref(len(self.nodes) - 1)
        return Value(ref=self.moved[ref, layout])

    def node(self, exported: Exported, where: VirtualSlice, inputs: list[Value], line: str) -> list[Value]:
        """A compute node, as the values that it makes."""
        exported.check_width(map(self.type_of, inputs))
        self._use_slice(where)
        layouts = tuple(Layout(where.id, spec) for spec in exported.input_specs)
        refs = tuple(self._ref(value, where, layout.spec) for value, layout in zip(inputs, layouts, strict=True))
        # What a program holds is an argument of every launch: as under jax.jit, it is not given away.
        donated = tuple(k for k in exported.donated if inputs[k].array is None and inputs[k].constant is None)
        self.donated.update(inputs[k].leaf for k in donated if inputs[k].leaf >= 0)
        part = exported.part(tuple(Ref(-1, k) for k in range(len(refs))), self.functions, self.later)
        recipe = Recipe((part,), tuple(Ref(0, k) for k in range(len(exported.outputs))))
        self.work += exported.work
        index = len(self.nodes)
        self.nodes.append(
            Compute(
                name=exported.name,
                recipe=self.recipes.setdefault(recipe, len(self.recipes)),
                slice=where.id,
                inputs=refs,
                input_layouts=layouts,
                outputs=exported.outputs,
                output_layouts=tuple(Layout(where.id, spec) for spec in exported.output_specs),
                donated=donated,
                where=line,
            )
        )
        count = len(exported.results)
        for report in exported.reports:
            self.reported.append(
                (Reported(report, exported.name, where, line), [Ref(index, count + k) for k in range(report.count)])
            )
            count += report.count
        return [Value(ref=Ref(index, k)) for k in range(len(exported.results))]

    def _ref(self, value: Value, where: VirtualSlice, spec: Spec) -> Ref:
        """The value as a ref of the graph; one that is not in it yet becomes an argument."""
        if value.ref is not None:
            return value.ref
        held: Any = value.array if value.array is not None else value.constant
        kind = value.kind
        if kind is not None and kind.slice is not None:
            where, spec = kind.slice, kind.spec
            self._use_slice(where)
        self.nodes.append(Argument(len(self.sources), self.type_of(value), Layout(where.id, spec)))
        value.ref = Ref(len(self.nodes) - 1)
        self.sources.append(Source(value.leaf, held, where, spec))
        return value.ref

    def _check_mine(self, kind: ArgumentType | None) -> None:
        if kind is not None and kind.slice is not None and kind.slice.session is not self.session:
            whose = array_belongs(kind.slice.session.closed_because)
            raise ForeignArray(f"program {self.name!r} is given {kind.array} on {kind.slice}, which {whose}")

    def _use_slice(self, where: VirtualSlice) -> None:
        if where.session is not self.session:
            whose = slice_belongs(where.session.closed_because)
            raise GraphError(f"program {self.name!r} uses {where}, which {whose}")
        if where.released:
            raise GraphError(f"program {self.name!r} uses {where}, which was released")
        self.slices.setdefault(where.id, where)

    def _operation(self, operation: Operation, inputs: list[Value]) -> list[Value]:
        """An operation on arrays, as a node: on the slice of its first placed operand, else on the one that it names or
        the default slice. The results lie as JAX has them lie for such operands."""
        where, specs = self._place_operation(inputs, operation)
        if operation.inputs:
            specs = [s if s is not None else lying for s, lying in zip(operation.inputs, specs, strict=True)]
        exported = operation.exported(self.operations, self.export, where, specs, self.session.platforms)
        return self.node(exported, where, inputs, operation.where)

    def _place_operation(self, inputs: list[Value], operation: Operation) -> tuple[VirtualSlice, list[Spec]]:
        """The slice, and each operand's spec: as it lies when it lies there, else like the first of equal shape."""
        layouts = [self.layout_of(value) for value in inputs]
        shapes = [self.type_of(value).shape for value in inputs]
        here = [k for k, layout in enumerate(layouts) if layout is not None and operation.slice in (None, layout[0])]
        if not here:
            return operation.own_slice or self.default_slice(), [()] * len(inputs)
        first = here[0]
        lead = layouts[first]
        assert lead is not None
        where, spec = lead
        specs: list[Spec] = []
        for layout, shape in zip(layouts, shapes, strict=True):
            if layout is not None and layout[0] is where:
                specs.append(layout[1])
            else:
                specs.append(spec if shape == shapes[first] else ())
        return where, specs

    def default_slice(self) -> VirtualSlice:
        """The slice of an operation whose operands are all with the client: the first that the program uses."""
        if self.first is None:
            self.first = self.session.default_slice()
        return self.first

    def layout_of(self, value: Value) -> tuple[VirtualSlice, Spec] | None:
        if value.ref is not None:
            node = self.nodes[value.ref.node]
            made = isinstance(node, Compute | Branch | Repeat)
            layout = node.output_layouts[value.ref.output] if made else node.layout  # type: ignore[union-attr]
            return self.slices[layout.slice], layout.spec
        if value.kind is not None and value.kind.slice is not None:
            return value.kind.slice, value.kind.spec
        return None

    def type_of(self, value: Value) -> ArrayType:
        if value.ref is not None:
            node = self.nodes[value.ref.node]
            made = isinstance(node, Compute | Branch | Repeat)
            return node.outputs[value.ref.output] if made else node.type  # type: ignore[union-attr]
        if value.kind is not None:
            return value.kind.array
        return array_type(prng.to_data(value.constant))
