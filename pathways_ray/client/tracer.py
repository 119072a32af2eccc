"""Tracing a program: the user's function runs once on JAX tracers, and what it did becomes a graph.

A call of a compiled function binds a primitive of our own; ordinary `jnp` operations leave JAX's. So a traced program
is a jaxpr, and JAX itself checks shapes, refuses `float(tracer)`, and knows the user's line of every operation. `trace`
makes the jaxpr; `graph_builder` turns it into a graph.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
from jax.extend import core as jex_core

from pathways_ray import jax_hooks, jax_refs
from pathways_ray.client import puts, refs, source_info
from pathways_ray.client.argument_types import WIDE, ArgumentType, extended_dtype, to_numpy
from pathways_ray.client.array import Array
from pathways_ray.client.context import tracing
from pathways_ray.client.debugging import is_debugging
from pathways_ray.client.export import Exported
from pathways_ray.client.jaxprs import constants_of, equations_of, inner_constants, inner_equations
from pathways_ray.client.operation import is_pinned, slices_of
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import BufferDeleted, GraphError, PathwaysError, TraceError

if TYPE_CHECKING:
    from pathways_ray.client.session import Session

call_p = jex_core.Primitive("pathways_call")
call_p.multiple_results = True
capture_p = jex_core.Primitive("pathways_capture")

is_outside = jax_hooks.outside_of_traces()

JITTED = ("pjit", "jit")
"""The names of a call of a jitted function."""


@dataclass(frozen=True, eq=False)
class CallSite:
    """A call of a compiled function inside a program."""

    exported: Exported
    slice: VirtualSlice
    where: str


jax_hooks.keep_weakly(CallSite)


@dataclass(frozen=True, eq=False)
class Captured:
    """A `pw.Array` that a program uses without taking it as an argument.

    Weak: JAX keeps the parameters of operations in its caches, and an array must go when its last user goes. While a
    program is traced, `tracing.captured` holds it; afterwards the program does.
    """

    reference: weakref.ref[Array]
    type: jax.ShapeDtypeStruct

    @property
    def array(self) -> Array:
        found = self.reference()
        if found is None:
            raise BufferDeleted(f"{self.type}, which a jitted function captured, is gone")
        return found


@call_p.def_effectful_abstract_eval
def _call_types(*_: Any, site: CallSite) -> tuple[list[Any], Any]:
    return [
        jax.core.ShapedArray(r.shape, r.dtype, weak_type=bool(r.weak_type)) for r in site.exported.results
    ], site.exported.effects


@capture_p.def_abstract_eval
def _capture_type(*, captured: Captured) -> Any:
    return jax.core.ShapedArray(captured.type.shape, captured.type.dtype, weak_type=bool(captured.type.weak_type))


def holds_calls(equation: Any) -> bool:
    """Whether jaxprs in an equation call compiled functions or hold arrays of slices."""
    return any(is_call(inner) or inner.primitive is capture_p for inner in inner_equations(equation)) or any(
        isinstance(constant, Array) for constant in inner_constants(equation)
    )


def is_call(equation: Any) -> bool:
    """Whether an equation calls a function that is pinned to a slice."""
    return equation.primitive is call_p or (equation.primitive.name in JITTED and is_pinned(equation.params))


def first_slice(kinds: Sequence[ArgumentType], closed: Any) -> VirtualSlice | None:
    """The first slice that a traced program uses: that of an argument, a captured array, a compiled function, or one
    that it puts values on."""
    kinds = [*kinds, *(constant._type for constant in constants_of(closed) if isinstance(constant, Array))]
    found = next((kind.slice for kind in kinds if kind.slice is not None), None)
    for equation in equations_of(closed.jaxpr) if found is None else ():
        if equation.primitive is capture_p:
            return equation.params["captured"].array.slice
        if named := slices_named(equation):
            return named[0]
    return found


def slices_of_call(equation: Any) -> list[VirtualSlice]:
    """The slices that a call of a function that is pinned to one says."""
    site = equation.params.get("site")
    return [site.slice] if site is not None else slices_of(equation.params)


def slices_named(equation: Any) -> list[VirtualSlice]:
    """The slices that an equation says, as a call or by the words of JAX (`puts`)."""
    return [*(slices_of_call(equation) if is_call(equation) else ()), *puts.named(equation)]


def operand(leaf: Any, name: str, number: int) -> Any:
    """An argument of a call inside a program, as a value that JAX traces."""
    if isinstance(leaf, jax.core.Tracer):
        return leaf
    if isinstance(leaf, Array):
        return _capture(leaf)
    return constant(leaf, f"argument {number} of {name}")


def constant(value: Any, what: str) -> Any:
    """A value that is no array of a slice, as one that JAX traces: keys keep their type, Python's numbers theirs, which
    is weak."""
    if extended_dtype(value) is not None:
        return value
    array, weak = to_numpy(value, what)
    return value if weak and not isinstance(value, jax.Array) else array


def _capture(array: Array) -> Any:
    array._check_not_deleted()
    if tracing.session is not None:  # outside of a program nobody takes the list, and the caller has the array
        tracing.captured.append(array)
    return capture_p.bind(captured=Captured(weakref.ref(array), array._type.aval))


@dataclass(frozen=True)
class Trace:
    """A traced program: a jaxpr over the leaves of its arguments, the tree of its results, the arrays it captured; and
    its operations as far as they were exported (`GraphBuilder.operations`)."""

    closed: jex_core.ClosedJaxpr
    output_tree: Any
    captured: list[Array]
    operations: dict[Any, Exported] = field(default_factory=dict)

    @property
    def arrays(self) -> list[Array]:
        """The arrays that it captured."""
        return [*self.captured, *(one for one in constants_of(self.closed) if isinstance(one, Array))]

    @property
    def slices(self) -> Iterator[VirtualSlice]:
        """The slices of what it calls and that it puts values on, in order."""
        return (where for one in equations_of(self.closed.jaxpr) for where in slices_named(one))

    @property
    def is_current(self) -> bool:
        """Whether its arrays and slices are still there. Where they are not, the function may have others now."""
        return not any(array.is_deleted() for array in self.arrays) and not any(where.released for where in self.slices)


def traced(session: Session, fun: Callable[..., Any], tree: Any, kinds: list[ArgumentType]) -> Any:
    """The `jax.stages.Traced` of a program."""
    around = tracing.session, tracing.captured
    tracing.session, tracing.captured = session, []
    try:
        fun = functools.wraps(fun, updated=())(functools.partial(fun))
        args, kwargs = jax.tree.unflatten(tree, [kind.aval for kind in kinds])
        return jax.jit(fun).trace(*args, **kwargs)
    finally:
        tracing.session, tracing.captured = around


def trace(session: Session, fun: Callable[..., Any], name: str, tree: Any, kinds: list[ArgumentType]) -> Trace:
    """Runs `fun` once on tracers.

    Args:
        tree: of (positional arguments, keyword arguments).
        kinds: the type of each leaf.

    Raises:
        TraceError: `fun` raised, looked at a value, or let a tracer escape.
        GraphError: it returns no array.
    """
    trees: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(tree, leaves)
        out, out_tree = jax.tree.flatten(fun(*args, **kwargs))
        trees.append(out_tree)
        return [_result(leaf, name, k) for k, leaf in enumerate(out)]

    around = tracing.session, tracing.captured  # those of a program that looks at the types of another one
    captured: list[Array] = []
    tracing.session, tracing.captured = session, captured
    try:
        with jax.checking_leaks(), jax.disable_jit(False):
            closed = jax_refs.without_own(jax.make_jaxpr(flat)(*[kind.aval for kind in kinds]))
    except PathwaysError:
        raise
    except Exception as error:
        at = source_info.of_error(error)
        if "Leaked" in str(error):
            raise TraceError(
                f"program {name!r} keeps a traced value in an outer list, variable or object; a program may only hand "
                "values on through its results"
            ) from error
        text = f"program {name!r}{f' ({at})' if at else ''} cannot be traced: {source_info.text_of(error)}"
        raise source_info.noted(TraceError(text), source_info.hint_for(error)) from error
    finally:
        tracing.session, tracing.captured = around
    if not closed.jaxpr.outvars and not closed.effects:
        raise GraphError(f"program {name!r} returns no array; return what should be computed")
    refs.check_own(f"program {name!r}", closed.effects)
    if not is_debugging(closed.effects):
        raise TraceError(f"program {name!r} has side effects: {', '.join(map(str, closed.effects))}")
    return Trace(closed, trees[-1], captured)


def _result(leaf: Any, name: str, number: int) -> Any:
    if isinstance(leaf, jax.core.Tracer):
        return leaf
    if isinstance(leaf, Array):
        return _capture(leaf)
    if isinstance(leaf, jax.Array) and leaf.dtype.name in WIDE:  # made under jax.enable_x64: JAX keeps it
        return leaf
    return jax.numpy.asarray(constant(leaf, f"result {number} of {name}"))


def check_no_outer_assignment(fun: Callable[..., Any], name: str) -> None:
    """Raises `TraceError` when `fun` assigns to a global or to a variable of an enclosing function.

    It would happen once, when the program is traced, and never again; what the program computes must not depend on it.
    """
    code = getattr(fun, "__code__", None)
    if isinstance(code, types.CodeType):
        _check_code(code, set(code.co_freevars), name)


def _check_code(code: types.CodeType, outer: set[str], name: str) -> None:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = getattr(getattr(instruction, "positions", None), "lineno", None) or line
        assigns_global = instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        assigns_outer = instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in outer
        if assigns_global or assigns_outer:
            file = code.co_filename.rsplit("/", 1)[-1]
            raise TraceError(
                f"program {name!r} assigns to {instruction.argval!r}, which lives outside of it ({file}:{line}); that "
                "would happen once, while tracing. Return the value instead"
            )
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _check_code(constant, outer & set(constant.co_freevars), name)
