"""Export of JAX functions: traced once with their layouts fixed, checked, and serialised to be run elsewhere.

The result is StableHLO, named by its content, with the types, layouts and costs that a node of a graph needs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import export
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, NamedSharding

from pathways_ray import jax_refs, limits
from pathways_ray.client import debugging, estimates, prng, refs, source_info
from pathways_ray.client.argument_types import check_width
from pathways_ray.client.codes import Code, Evaluated, Pending, jax_settings, jitted, tracing_for
from pathways_ray.client.jaxpr_formulas import formula_of
from pathways_ray.client.jaxprs import constant_bytes, constants_of, equations_of
from pathways_ray.client.puts import check_stays
from pathways_ray.client.slice_array import SliceArray
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.compat import module_of
from pathways_ray.errors import TooLarge, TraceError
from pathways_ray.formulas.calls import text_of
from pathways_ray.formulas.formula import Formula, is_formulas, unpacked
from pathways_ray.ir.graph import MAX_ESTIMATED_US, Part, Ref
from pathways_ray.ir.types import ArrayType, Spec, check_layout
from pathways_ray.jax_types import array_type, partition_spec
from pathways_ray.joint_exports import Packed, is_joint_export

_CALLBACKS = ("pure_callback", "io_callback", "callback", "infeed", "outfeed")

_OURS = ("pathways_call", "pathways_capture")
"""The primitives that calls and captured arrays of a program are traced to (`tracer`)."""

_MAX_ELEMENTS = 1 << 58
"""Elements. XLA counts bytes in 64 bits with a sign, and ends the process instead of refusing what overflows."""

_ANY_CUSTOM_CALL = export.DisabledSafetyCheck.custom_call("ALL")
"""Sessions that the operator trusts export whatever JAX can; others, what it promises to understand later."""

_LEAVES = inspect.Signature([inspect.Parameter("leaves", inspect.Parameter.VAR_POSITIONAL)])

_BARRIERS = ("optimization_barrier", "checkpoint", "remat", "remat2")
"""Operations that become an optimisation barrier."""


@dataclass(frozen=True, eq=False)
class Exported:
    """A function exported for given argument types, flat: leaves in, leaves out.

    `arguments` and `results` are types as JAX sees them, `outputs` those of what lies on devices. The last outputs are
    what `reports` say. A function that only `moves` gives its arguments as they are, in the layouts of its outputs.
    """

    name: str
    code: Code
    input_specs: tuple[Spec, ...]
    outputs: tuple[ArrayType, ...]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    output_specs: tuple[Spec, ...]
    output_tree: Any
    donated: tuple[int, ...]
    no_fusion: bool
    estimated_us: int
    run: Callable[..., tuple[jax.Array, ...]]
    """The function itself, with its layouts fixed, for tracing it inside another one on a slice of the same mesh."""
    reports: tuple[debugging.Report, ...] = ()
    effects: frozenset[Any] = frozenset()
    work: estimates.Work = estimates.NO_WORK
    moves: bool = False
    host_limit_ms: int = 0
    """Of a host function, whose `blob` is pickled."""

    def check_width(self, given: Iterable[ArrayType]) -> None:
        """Checks that arguments have as many bits as the function takes (`check_width`)."""
        for number, (kind, aval) in enumerate(zip(given, self.arguments, strict=True)):
            check_width(self.name, number, kind, aval)

    def without_function(self) -> Exported:
        """The export alone, which holds no more of the function than its code."""
        return replace(self, run=_not_kept)

    def part(self, inputs: tuple[Ref, ...], functions: dict[str, bytes], later: list[Exported] | None = None) -> Part:
        """The function as a part of a recipe; `functions` gets its code. Where that has yet to be made, and there is
        `later`, that gets the function, and the part names none."""
        if later is not None and self.code.pending is not None:
            later.append(self)
            return Part(self.name, "", inputs)
        made = self.code.made
        limit_ms = self.host_limit_ms
        part = Part(
            self.name,
            made.function,
            inputs,
            self.no_fusion,
            self.estimated_us,
            made.has_loop,
            host_limit_ms=limit_ms,
            is_line=made.is_line,
        )
        functions[part.digest] = made.blob
        return part


def _not_kept(*_: Any) -> Any:
    raise AssertionError("an operation that was exported before is not traced inside another function")


def export_function(
    name: str,
    flat: Callable[..., Sequence[Any]],
    avals: Sequence[jax.ShapeDtypeStruct],
    input_specs: Sequence[Spec],
    output_specs: Callable[[list[ArrayType]], Sequence[Spec]],
    where: VirtualSlice,
    platforms: tuple[str, ...],
    donated: tuple[int, ...] = (),
    output_tree: Callable[[], Any] = lambda: None,
    known: jex_core.ClosedJaxpr | None = None,
) -> Exported:
    """Traces and exports a flat function.

    Args:
        known: the jaxpr that the function evaluates, if it is one: a formula on one device is not traced again.

    Raises:
        TraceError: the function raised, or does what cannot be shipped (host callbacks, effects).
        SpecError: an input or output does not divide as its spec says.
        TooLarge: it captured more than `limits.MAX_CONSTANT_BYTES` of constants.
    """
    mesh = where.mesh.abstract_mesh
    data = [prng.data_type(aval) for aval in avals]
    _check_layouts(map(array_type, data), input_specs, where, f"{name}, input")
    given = _Results()
    run = _laid_out(flat, avals, input_specs, output_specs, mesh, given)
    shardings = tuple(NamedSharding(mesh, partition_spec(spec)) for spec in input_specs)
    reports: list[debugging.Report] = []
    formula = _formula_as_it_is(known, mesh)
    if known is not None and formula is not None:
        given.types = list(map(prng.logical, known.out_avals))
        given.specs = output_specs([array_type(kind) for kind in given.types])
        effects: frozenset[Any] = frozenset()
        pending = Pending(name, Evaluated(known), shardings, tuple(data), mesh, platforms, (), jax_settings(), formula)
    else:
        effects, pending = _traced(name, run, shardings, data, where, platforms, reports)
    traced = pending.traced
    check_stays(name, traced.jaxpr.jaxpr, where)
    specs = (*given.specs, *((),) * (len(traced.jaxpr.out_avals) - len(given.specs)))
    outputs = tuple(map(array_type, traced.jaxpr.out_avals))
    _check_layouts(outputs, specs, where, f"{name}, output")
    return Exported(
        name=name,
        code=Code(pending=pending),
        input_specs=tuple(input_specs),
        outputs=outputs,
        arguments=tuple(avals),
        results=tuple(given.types),
        output_specs=specs,
        output_tree=output_tree(),
        donated=donated,
        no_fusion=any(equation.primitive.name in _BARRIERS for equation in equations_of(traced.jaxpr.jaxpr)),
        estimated_us=round(min(1e6 * estimates.seconds(traced.jaxpr, mesh.size, platforms), MAX_ESTIMATED_US)),
        run=run,
        reports=tuple(reports),
        effects=effects,
        work=estimates.work(traced.jaxpr, mesh.size),
    )


@dataclass
class _Results:
    """The types that a function gives, and how they lie; noted while it is traced."""

    types: list[jax.ShapeDtypeStruct] = field(default_factory=list)
    specs: Sequence[Spec] = ()


def _laid_out(
    flat: Callable[..., Sequence[Any]],
    avals: Sequence[jax.ShapeDtypeStruct],
    input_specs: Sequence[Spec],
    output_specs: Callable[[list[ArrayType]], Sequence[Spec]],
    mesh: AbstractMesh,
    given: _Results,
) -> Callable[..., tuple[jax.Array, ...]]:
    """A flat function of values as they lie on devices, whose layouts are fixed."""

    def run(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        leaves = tuple(_constrained(leaf, spec, mesh) for leaf, spec in zip(leaves, input_specs, strict=True))
        taken = [prng.from_data(leaf, aval) for leaf, aval in zip(leaves, avals, strict=True)]
        logical = [jax.numpy.asarray(leaf) for leaf in flat(*taken)]
        given.types = list(map(type_of, logical))
        out = [prng.to_data(leaf) for leaf in logical]
        given.specs = output_specs([array_type(leaf) for leaf in out])
        return tuple(_constrained(leaf, spec, mesh) for leaf, spec in zip(out, given.specs, strict=True))

    return run


def _check_layouts(types: Iterable[ArrayType], specs: Sequence[Spec], where: VirtualSlice, what: str) -> None:
    for k, (array, spec) in enumerate(zip(types, specs, strict=True)):
        check_layout(array, spec, where.type, f"{what} {k}")


def stablehlo(blob: bytes) -> str:
    """The code of an exported function, of a joint export or of formulas, as text."""
    if is_formulas(blob):
        return text_of(unpacked(blob))
    if is_joint_export(blob):
        return str(module_of(Packed.read(blob).code))
    return str(export.deserialize(bytearray(blob)).mlir_module())


def type_of(value: Any) -> jax.ShapeDtypeStruct:
    """The type that a trace depends on, of a value that JAX traces."""
    return prng.logical(jax.typeof(value))


def _traced(
    name: str,
    run: Callable[..., Any],
    shardings: tuple[NamedSharding, ...],
    avals: Sequence[jax.ShapeDtypeStruct],
    where: VirtualSlice,
    platforms: tuple[str, ...],
    reports: list[debugging.Report],
) -> tuple[frozenset[Any], Pending]:
    """The effects of a function, and the one that is exported for it, traced. `reports` is filled with what that adds
    to the results."""
    disabled = (_ANY_CUSTOM_CALL,) if where.session.trusted else ()
    mesh = where.mesh.abstract_mesh
    run.__signature__ = _LEAVES  # type: ignore[attr-defined]  # which JAX takes long to find out
    with tracing_for(name, mesh):
        traced = jitted(run, shardings, mesh).trace(*avals)
        if (pure := jax_refs.without_own(traced.jaxpr)) is not traced.jaxpr:
            evaluated = jex_core.jaxpr_as_fun(pure)
            traced = jitted(lambda *leaves: tuple(evaluated(*leaves)), shardings, mesh).trace(*avals)
        effects = frozenset(traced.jaxpr.effects)
        if debugging.reports(traced.jaxpr):
            rewritten = debugging.reporting(traced.jaxpr, reports)
            traced = jitted(rewritten, shardings, mesh).trace(*avals)
        _check_shippable(name, traced.jaxpr)
    formula = formula_of(traced.jaxpr, mesh)
    return effects, Pending(name, traced, shardings, tuple(avals), mesh, platforms, disabled, jax_settings(), formula)


def _formula_as_it_is(known: jex_core.ClosedJaxpr | None, mesh: AbstractMesh) -> Formula | None:
    """The formula of a jaxpr, where its code is made of it alone: on one device, where nothing is said of layouts, and
    no values are looked for."""
    return formula_of(known, mesh) if known is not None and mesh.size == 1 and not debugging.checks_asked() else None


def _constrained(leaf: jax.Array, spec: Spec, mesh: AbstractMesh) -> jax.Array:
    """Fixes the layout of a value, so that a function computes alike alone and inside a larger computation."""
    if mesh.size == 1:
        return leaf
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, partition_spec(spec)))


def _place(equation: jex_core.JaxprEqn) -> str:
    """The user's line of an operation; that of the call, where JAX calls the operation by itself and notes no line."""
    return source_info.of_equation(equation) or source_info.here()


def _check_shippable(name: str, closed: jex_core.ClosedJaxpr) -> None:
    size = constant_bytes(closed)
    if size > limits.MAX_CONSTANT_BYTES:
        raise TooLarge(
            f"{name} captures constants of {size} bytes; the limit is {limits.MAX_CONSTANT_BYTES}. "
            "Pass them as arguments (pw.put places one once)"
        )
    for constant in constants_of(closed):
        if isinstance(constant, SliceArray):
            raise TraceError(f"{name} uses {constant!r} without taking it; pass it as an argument")
    for equation in equations_of(closed.jaxpr):
        if equation.primitive.name in _OURS:
            raise TraceError(
                f"{name} calls a compiled function ({_place(equation)}), and is one itself: one node. "
                "Call both from a pw.program, or call the plain function, which the attribute 'fun' is"
            )
        if equation.primitive.name == "inspect_sharding":
            raise TraceError(
                f"{name} calls jax.debug.inspect_array_sharding ({_place(equation)}), and is compiled where the user's "
                "Python is not; look at y.sharding of what it returns"
            )
        for variable in equation.outvars:
            size = math.prod(getattr(variable.aval, "shape", ()))
            if size > _MAX_ELEMENTS:
                raise TooLarge(f"{name} makes {variable.aval} at {_place(equation)}: {size} elements")
        if equation.primitive.name in _CALLBACKS:
            raise TraceError(
                f"{name} calls back to the host ({equation.primitive.name} at {_place(equation)}); "
                "compiled functions run where the user's Python is not"
            )
    refs.check_own(name, closed.effects)
    if closed.effects:
        raise TraceError(f"{name} has side effects ({', '.join(map(str, closed.effects))}), which cannot be shipped")
