"""Operations on arrays outside of a program: `x + 1`, `jnp.sum(x)`, `jax.jit(f)(x)`, `jax.grad(f)(x)`.

JAX traces what it is asked for, as always, and hands over the jaxpr instead of compiling it for devices of this process
(`jax_hooks.make_jax_value`). Here it becomes a program of one node, on the slice of its first argument that lies on
one, and is launched. What is done again, with arguments of the same types and layouts, is launched at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.sharding import NamedSharding

from pathways_ray import jax_hooks, jax_refs
from pathways_ray.client import prng, puts, refs, source_info
from pathways_ray.client.always_jitted import always_jitted
from pathways_ray.client.argument_types import ArgumentType, extended_dtype
from pathways_ray.client.array import Array
from pathways_ray.client.bodies import control_node
from pathways_ray.client.context import current_session
from pathways_ray.client.debugging import checks_asked
from pathways_ray.client.export import Exported
from pathways_ray.client.jaxprs import constants_of, equations_of
from pathways_ray.client.known_programs import KnownPrograms
from pathways_ray.client.operation import Operation, is_pinned, slices_of
from pathways_ray.client.outlines import ProgramBuilder
from pathways_ray.client.placement import Target, put_all_at, put_at
from pathways_ray.client.program import LoweredProgram
from pathways_ray.client.session import Session
from pathways_ray.client.slices import slice_of
from pathways_ray.client.specs import spec_from_user, warn_of_memory
from pathways_ray.client.stages import Lowered
from pathways_ray.client.tracer import holds_calls, is_call, slices_named
from pathways_ray.errors import UsageError
from pathways_ray.jax_types import array_type

_known: weakref.WeakKeyDictionary[Any, KnownPrograms] = weakref.WeakKeyDictionary()
"""For each jaxpr that JAX keeps in its caches, the programs made of it, by session and argument types; and, as what was
traced for them, the operations of it that were exported (`GraphBuilder.operations`)."""

_naming: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def concerns(arguments: Sequence[Any], closed: Any, params: Any) -> bool:
    """Whether a jaxpr is to run on a slice: since arrays of slices are among its arguments or constants, or since the
    function was written so."""
    return (
        any(type(argument) is Array for argument in arguments)
        or any(type(constant) is Array for constant in closed.consts)
        or is_pinned(params)
        or _names_slices(closed)
    )


def _names_slices(closed: Any) -> bool:
    """Whether a jaxpr calls functions that run on slices, or puts values on some. JAX asks at each call."""
    found = _naming.get(closed)
    if found is None:
        calls = any(is_call(one) or holds_calls(one) for one in closed.jaxpr.eqns)
        found = _naming[closed] = calls or any(map(puts.named, equations_of(closed.jaxpr)))
    return found


def evaluate(arguments: Sequence[Any], closed: Any, params: Any) -> list[Any]:
    """Launches a jaxpr as one operation.

    Raises:
        ForeignArray: arrays of several sessions.
        TraceError: it cannot be shipped to hosts.
    """
    if params["name"] == "scan" and _calls_back_alone(closed):
        return list(jex_core.jaxpr_as_fun(closed)(*map(jax.device_get, arguments)))
    captured = [constant for constant in closed.consts if type(constant) is Array]
    leaves = [*captured, *(_leaf(value, aval) for value, aval in zip(arguments, closed.in_avals, strict=True))]
    session = _session(leaves, closed, params)
    avals = [*(array.aval for array in captured), *closed.in_avals]
    kinds = [_kind(leaf, aval) for leaf, aval in zip(leaves, avals, strict=True)]
    results: list[Any] = _program(session, captured, kinds, closed, params).launch(leaves)
    return results


def _calls_back_alone(closed: Any) -> bool:
    """Whether all that a jaxpr does is to call back, as what `jax.vmap` makes of a callback that takes one element at a
    time: outside of functions, JAX calls it with values."""
    found = {equation.primitive.name for equation in equations_of(closed.jaxpr)}
    return found in ({"scan", "pure_callback"}, {"scan", "io_callback"})


def _program(
    session: Session, captured: Sequence[Array], kinds: list[ArgumentType], closed: Any, params: Any
) -> LoweredProgram:
    """The program of a jaxpr for arguments of these types, captured arrays first."""
    known = _known.get(closed)
    if known is None:
        known = _known.setdefault(closed, KnownPrograms())
    asked = (params[name] for name in ("name", "in_shardings", "out_shardings", "donated_invars"))
    settings = (session, *asked, checks_asked())
    key = (*settings, *kinds)
    found = known.lowered.get(key)
    if found is None:
        session.check_open()
        session.known_by(known)
        closed = jax_refs.without_own(closed)
        made: dict[Any, Exported] = known.traced.setdefault(settings, {})
        builder = ProgramBuilder(session, str(params["name"]), kinds, control_node, operations=made)
        lying = next((kind.slice for kind in kinds if kind.slice is not None), None)
        moves = not is_pinned(params) and puts.is_program(closed.jaxpr, lying)
        if moves or any(is_call(equation) or holds_calls(equation) for equation in closed.jaxpr.eqns):
            built = builder.build_hoisted(closed, captured)  # functions on slices of their own: a program
        else:
            built = builder.build_operation(Operation.of_jit(closed, params, source_info.here()))
        tree = jax.tree.structure([0] * len(closed.out_avals))
        found = known.lowered[key] = LoweredProgram(session, built, tree, len(kinds))
    return found


def _session(leaves: Sequence[Any], closed: Any, params: Any) -> Session:
    """The session that an operation runs in: that of its slice, else of its first array."""
    owners: list[Any] = [leaf._buffer.session for leaf in leaves if type(leaf) is Array]
    if is_pinned(params):
        owners = [*(where.session for where in slices_of(params)), *owners, None]
    if not owners:  # jitted functions inside of it have captured arrays, or say where they run
        owners = [one._buffer.session for one in constants_of(closed) if type(one) is Array]
        owners += [where.session for one in equations_of(closed.jaxpr) for where in slices_named(one)]
    found = owners[0] if owners else None
    return cast(Session, found) if found is not None else current_session()


def _leaf(value: Any, aval: Any) -> Any:
    """An argument as `Session.put` takes it, of the type that it was traced with. A weak type is kept: the argument may
    be a result."""
    if type(value) is Array or extended_dtype(value) is not None:
        return value
    if aval.weak_type and isinstance(value, jax.Array | int | float | complex):
        return value
    if type(value) is refs.Ref:
        refs.refuse_use(aval)
    return np.asarray(value, aval.dtype)


def _kind(value: Any, aval: Any) -> ArgumentType:
    if type(value) is Array:
        return value._type
    extended = aval.dtype if prng.is_extended(aval) else None
    return ArgumentType.of(array_type(prng.data_type(aval)), bool(aval.weak_type), None, (), extended)


def lower(traced: Any) -> Any:
    """The `Lowered` of a jitted function that is to run on a slice."""
    closed, params = traced.jaxpr, traced._params
    types = [_type_at(aval, sharding) for aval, sharding in zip(closed.in_avals, jax_hooks.lying(traced), strict=True)]
    if not concerns((), closed, params) and all(kind.slice is None for kind in types):
        return NotImplemented
    captured = [constant for constant in closed.consts if type(constant) is Array]
    slices = [kind.slice for kind in types if kind.slice is not None]
    session = cast(Session, slices[0].session) if slices else _session(captured, closed, params)
    program = _program(session, captured, [*(array._type for array in captured), *types], closed, params)
    asked = tuple(k for k, is_given in enumerate(params["donated_invars"]) if is_given)
    return Lowered(Holding(program, captured, asked), types, traced.in_tree, traced.out_tree, "stablehlo")


class Holding:
    """A program whose first arguments are arrays that its function captured.

    `donated_leaves` are the leaves of the arguments that the user donates: a call takes those that it has use for.
    """

    def __init__(self, program: LoweredProgram, captured: list[Array], donated: tuple[int, ...]) -> None:
        self._program = program
        self._captured = captured
        self.donated_leaves = donated

    def launch(self, leaves: list[Any]) -> Any:
        """One call."""
        return self._program.launch([*self._captured, *leaves])

    def places_of(self, number: int) -> list[NamedSharding]:
        """The layouts in which a launch takes a leaf of the arguments."""
        return self._program.places_of(number + len(self._captured))

    def output_kinds(self, kinds: Sequence[ArgumentType]) -> list[ArgumentType]:
        """The types of the results, given those of the arguments."""
        return self._program.output_kinds([*(array._type for array in self._captured), *kinds])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def _type_at(aval: Any, sharding: Any) -> ArgumentType:
    """The type of an argument of a traced function."""
    data = prng.data_type(aval)
    where = slice_of(sharding.mesh) if isinstance(sharding, NamedSharding) else None
    spec = spec_from_user(sharding.spec, where.axes) if where is not None else ()
    return ArgumentType.of(
        array_type(data), bool(aval.weak_type), where, spec, aval.dtype if prng.is_extended(aval) else None
    )


def place(values: Sequence[Any], targets: Sequence[Any], own: Sequence[bool]) -> list[Any]:
    """`jax.device_put` to slices, or of arrays that lie on some; to no place in particular these stay where they are.

    Args:
        own: the result is to be an array of its own, whatever becomes of the value (`may_alias=False`).
    """
    placed: list[Any] = [NotImplemented] * len(values)
    ours: dict[int, Target] = {}
    for n, (value, target) in enumerate(zip(values, targets, strict=True)):
        where = slice_of(target.mesh) if isinstance(target, NamedSharding) else None
        if where is None:
            placed[n] = _placed_nowhere(value, target)
        elif prng.is_zeros(value):
            placed[n] = value  # as JAX does: there is nothing to place
        else:
            warn_of_memory(target)
            ours[n] = where, spec_from_user(target.spec, where.axes)
    for n, one in zip(ours, put_all_at([values[n] for n in ours], [*ours.values()]), strict=True):
        placed[n] = one
    for n, value in enumerate(values):
        one = placed[n]
        if own[n] and type(value) is Array and type(one) is Array and one._buffer is value._buffer:
            placed[n] = value.copy()
    return placed


def _placed_nowhere(value: Any, target: Any) -> Any:
    """An array that is put on no slice."""
    if type(value) is not Array:
        return NotImplemented
    if target is None or isinstance(target, jax.memory.Space):
        warn_of_memory(target)
        return value
    raise UsageError(
        f"jax.device_put cannot move {value!r} to {target}; to a slice it moves with NamedSharding(slice.mesh, spec), "
        "and jax.device_put(np.asarray(y), ...) fetches it first"
    )


def refuse(value: Any) -> NoReturn:
    """Raises the error for what would download an array unasked."""
    raise UsageError(
        f"{value!r} lies on a slice, and JAX wants its value in this process; np.asarray(y) fetches it. "
        "In a compiled function, pass it as an argument"
    )


def full_like(value: Any, fill: Any, dtype: Any) -> Any:
    """An array of one value that lies as another one does."""
    if type(fill) is int:  # as JAX does: it may be one that 32 bits do not hold, or that wraps
        fill = np.asarray(fill).astype(dtype if dtype is not None else value.dtype)
    return _jitted_fill(value, fill, dtype)


def _filled(value: Any, fill: Any, dtype: Any) -> Any:
    filled = jax.lax.full_like(value, fill, dtype)
    # It has to depend on the array to lie as it does; XLA sees that its values are not used.
    lying = value if dtype is None else value.astype(dtype)
    return jax.lax.select(jax.numpy.ones(value.shape, bool), filled, lying)


_jitted_fill = always_jitted(_filled, static_argnums=2)


def nonzero(value: Array, size: int | None, of: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    """The indices of what is not zero. How many there are has to be known: they are found in this process, as an index
    of booleans is. Of a given number they are found on the slice, by each device for itself."""
    mask, where = value != 0, value.slice
    if type(mask) is not Array or not mask.shape:  # a function that has captured it is traced; or JAX refuses it
        return of(value)
    if size is not None:
        return of(put_at(mask, where, ()))
    kind = jax.numpy.result_type(int)
    found = [one.astype(kind) for one in np.nonzero(np.asarray(mask))]  # JAX compiles each size
    return tuple(put_all_at(found, [(where, ())] * len(found)))


def fetch(value: Array) -> Any:
    """`jax.device_get` of typed keys: keys in this process."""
    return prng.from_data(np.asarray(jax.random.key_data(value)), value.aval)


class _Rules:
    concerns = staticmethod(concerns)
    evaluate = staticmethod(evaluate)
    place = staticmethod(place)
    refuse = staticmethod(refuse)
    full_like = staticmethod(full_like)
    fetch = staticmethod(fetch)
    nonzero = staticmethod(nonzero)
    lower = staticmethod(lower)


jax_hooks.make_jax_value(Array, _Rules())
jax_refs.leave(Array, refs.refuse_start)
