"""`pw.program`: traced once for each combination of argument types, then launched with one small message per call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from operator import attrgetter
from typing import Any, cast

import jax
from jax.tree_util import default_registry

from pathways_ray.client import notebook, source_info
from pathways_ray.client.argument_types import ArgumentType, keeping_width, to_numpy
from pathways_ray.client.array import Array
from pathways_ray.client.asked_calls import AskedCalls
from pathways_ray.client.bodies import control_node, has_control
from pathways_ray.client.buffer import DELETED, FAILURE_OF, INLINE, STATE_OF, BufferRecord
from pathways_ray.client.carried import Carrying, kinds_of
from pathways_ray.client.codes import export_together, few_collections, jax_settings, settings_of_calls
from pathways_ray.client.context import current_session, sessions, tracing
from pathways_ray.client.export import Exported
from pathways_ray.client.graph_builder import BuiltProgram
from pathways_ray.client.known_programs import KnownPrograms
from pathways_ray.client.leaves import argument, named
from pathways_ray.client.methods import Method, deep_copy
from pathways_ray.client.outlines import ProgramBuilder
from pathways_ray.client.outputs import Outputs, living
from pathways_ray.client.registered import RegisteredProgram, type_of
from pathways_ray.client.retraces import Traces
from pathways_ray.client.session import Session
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.stages import Lowered
from pathways_ray.client.tracer import (
    Trace,
    check_no_outer_assignment,
    first_slice,
    is_outside,
    trace,
    traced,
)
from pathways_ray.errors import BufferDeleted, ForeignArray, InvalidArray, PathwaysError, UsageError
from pathways_ray.transport.messages import InlineArgument

_TYPE_OF, _RECORD_OF, _OWNER_OF = map(attrgetter, ("_type", "_buffer.record", "_buffer.session"))
_ONLY_ARRAYS = frozenset((Array,)).issuperset


def _are_arrays(values: list[Any]) -> bool:
    """Whether all are handles: asked by the interpreter, since a call may take hundreds."""
    try:
        return _ONLY_ARRAYS(map(type, values))
    except TypeError:  # a type that has no hash
        return False


class Program(Method):
    """The result of `pw.program`. Calling it launches; inside another program it is inlined.

    It runs in the session of the first array that it is given, of the first slice that its function names for arguments
    of these types, or else in the one opened last. A compiled function called alone runs in that of its slice: `slice`.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        name: str = "",
        check: bool = True,
        slice: VirtualSlice | None = None,
        on_retrace: str | None = None,
    ) -> None:
        if not callable(fun):
            raise UsageError(f"pw.program decorates a function, not {fun!r}")
        self.fun = fun
        self.slice = slice
        self._known = KnownPrograms()
        self._cache: dict[Any, LoweredProgram] = self._known.lowered
        self._traces = Traces(name or getattr(fun, "__name__", type(fun).__name__), on_retrace)
        functools.update_wrapper(self, fun, updated=())
        self.__name__ = str(name or getattr(fun, "__name__", type(fun).__name__))
        if check:
            check_no_outer_assignment(fun, self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns at once: a `pw.Array` for every array of the result, in the result's pytree."""
        if tracing.session is not None or not is_outside():
            tracing.programs += 1
            try:
                return self.fun(*args, **kwargs)
            finally:
                tracing.programs -= 1
        return self._outside(args, kwargs)

    def ask(self, *args: Any) -> Any:
        """Calls it for its values alone: what it returns as NumPy, where the host of the call says it at once; else
        handles, as other calls return."""
        if tracing.session is not None or not is_outside():
            return self(*args)
        return self._outside(args, {}, for_values=True)

    def _outside(self, args: tuple[Any, ...], kwargs: dict[str, Any], for_values: bool = False) -> Any:
        """The call of a thread that traces nothing."""
        leaves, tree = default_registry.flatten((args, kwargs))
        try:
            lowered = self._prepared(leaves, tree, args, kwargs)
        except PathwaysError as error:
            raise source_info.trimmed(error)  # noqa: B904
        if for_values and (values := lowered.values(leaves)) is not None:
            return values
        try:
            return lowered.launch(leaves)
        except (BufferDeleted, ForeignArray, InvalidArray) as error:
            raise self._about_leaf(error, lowered.session, leaves, args, kwargs) from None

    def prepared(self, args: tuple[Any, ...]) -> LoweredProgram:
        """The program for a call with such arguments, as that call will find it."""
        leaves, tree = jax.tree.flatten((args, {}))
        return self._prepared(leaves, tree, args, {})

    def _prepared(self, leaves: list[Any], tree: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoweredProgram:
        where = self.slice
        session: Any = where.session if where is not None else None  # slices know a part of it only
        if session is None or session.closed_because:
            session = (self._given(leaves) if len(sessions) > 1 else None) or current_session()
        kinds = list(map(_TYPE_OF, leaves)) if _are_arrays(leaves) else self._kinds(leaves, args, kwargs)
        key = (session, tree, settings_of_calls(), *kinds)
        try:
            lowered = self._cache.get(key)
        except (TypeError, ValueError) as error:  # from what a user's class of pytrees says beside its children
            raise UsageError(f"the arguments of {self.__name__} cannot be told from earlier ones: {error}") from error
        if lowered is None or (lowered.session is not session and lowered.session.closed_because):
            owner = self._session(leaves, tree, kinds)
            lowered = self._cache.get((owner, *key[1:])) if owner is not session else None
            if lowered is None:
                lowered = self._lower(owner, tree, kinds, noted=True)
            session.known_by(self._known)
            self._cache[lowered.session, *key[1:]] = self._cache[key] = lowered  # the next call looks once
        return lowered

    def _kinds(self, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ArgumentType]:
        kinds: list[ArgumentType] = []
        try:
            kinds.extend(map(type_of, leaves))
        except InvalidArray as error:
            name = f"{argument(self.fun, args, kwargs, len(kinds))} of {self.__name__}"
            if not isinstance(leaves[len(kinds)], jax.ShapeDtypeStruct):
                to_numpy(leaves[len(kinds)], name)
            raise named(error, name) from None
        return kinds

    def _about_leaf(
        self, error: PathwaysError, session: Session, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PathwaysError:
        """The error about what cannot be used, with the name of the argument that it is, if it is one."""
        for number, leaf in enumerate(leaves):
            lost = isinstance(leaf, Array) and (leaf.is_deleted() or leaf._buffer.session is not session)
            if lost or isinstance(leaf, jax.ShapeDtypeStruct):
                return named(error, f"{argument(self.fun, args, kwargs, number)} of {self.__name__}")
        return error

    def __deepcopy__(self, memo: Any) -> Any:
        known, traces = KnownPrograms(), Traces(self._traces.name, self._traces.action)
        return deep_copy(self, memo, _known=known, _cache=known.lowered, _traces=traces)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The program for arguments of these types, traced and checked but not launched.

        Arguments may be `jax.ShapeDtypeStruct`s.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        kinds = self._kinds(leaves, args, kwargs)
        lowered = self._lower(self._session(leaves, tree, kinds), tree, kinds)
        return Lowered(lowered, kinds, tree, lowered.output_tree)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The `jax.stages.Traced` of the program: `.jaxpr`, `.out_info`. Nothing is launched, nor sent."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        kinds = self._kinds(leaves, args, kwargs)
        return traced(self._session(leaves, tree, kinds), self.fun, tree, kinds)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The types of the results, in their tree, with their shardings."""
        return self.lower(*args, **kwargs).out_info

    def _given(self, leaves: Sequence[Any]) -> Session | None:
        """The session that a call says: that of its slice, or of its first array."""
        owners: Any = (leaf._buffer.session for leaf in leaves if type(leaf) is Array)  # they know a part of it only
        if self.slice is not None:
            owners = self.slice.session, *owners
        return next((owner for owner in owners if not owner.closed_because), None)

    def _session(self, leaves: Sequence[Any], tree: Any, kinds: list[ArgumentType]) -> Session:
        """The session in which a call runs: that which it says, that of the first slice which the function named when
        it was traced for such arguments, or the one opened last."""
        return self._given(leaves) or self._owner(_traced_for(tree, kinds)) or current_session()

    def _owner(self, arguments: Any) -> Session | None:
        """The session of the first slice that the function named when it was traced for these, unless it is closed."""
        owner: Session | None = self._known.owners.get(arguments)
        return None if owner is None or owner.closed_because else owner

    def _lower(self, session: Session, tree: Any, kinds: list[ArgumentType], noted: bool = False) -> LoweredProgram:
        """The program for arguments of these types. What the function does depends on their shapes and dtypes alone: it
        does not run again for arguments that lie elsewhere, as long as all is there that it used."""
        session.check_open()
        session.known_by(self._known)
        arguments = _traced_for(tree, kinds)
        found = self._known.traced.get((session, *arguments))
        owner = None
        with few_collections():
            if found is None or not found.is_current:
                found = self._known.traced[session, *arguments] = self._traced(session, tree, kinds, noted)
            if self.slice is None and (owner := _owner_of(found)) is not None:
                session = owner
                session.known_by(self._known)
                self._known.traced[session, *arguments] = found
            later: list[Exported] = []
            built = self._built(session, found, kinds, None if has_control(found.closed) else later)
            if later:  # it is known what they are: their code is made together
                export_together(one.code for one in later)
                built = self._built(session, found, kinds, None)
            if owner is not None and self._owner(arguments) is None:  # the first stays: calls do not change theirs
                self._known.owners[arguments] = owner
            made = LoweredProgram(session, built, found.output_tree, len(kinds))
            if noted and built.result_kinds:  # the cluster plans it while this process looks for cycles again
                made.register()
            return made

    def _traced(self, session: Session, tree: Any, kinds: list[ArgumentType], noted: bool) -> Trace:
        if noted:
            self._traces.check(kinds)
        found = trace(session, self.fun, self.__name__, tree, kinds)
        used: list[Any] = [where.session for where in (*found.slices, *(one.slice for one in found.arrays))]
        others = [one for one in used if one is not session and not one.closed_because]
        if others and session in used:  # perhaps by default slices, which are those of the session that it is traced in
            found = trace(others[0], self.fun, self.__name__, tree, kinds)
        if noted:
            self._traces.note(kinds)
        return found

    def _built(
        self, session: Session, found: Trace, kinds: list[ArgumentType], later: list[Exported] | None
    ) -> BuiltProgram:
        name, made = self.__name__, found.operations
        return ProgramBuilder(session, name, kinds, control_node, operations=made, later=later).build(found)

    def __repr__(self) -> str:
        return f"pw.program({self.__name__})"

    def _repr_html_(self) -> str:
        """The program in a notebook: its graph for the argument types of the last call, where there was one."""
        last = next(reversed(self._cache.values()), None)
        return f"<p>{escape(repr(self))}</p>" if last is None else notebook.graph_html(last.graph)


def _traced_for(tree: Any, kinds: Sequence[ArgumentType]) -> tuple[Any, ...]:
    """Types and settings that a trace depends on beside its session."""
    return (tree, *jax_settings(), *(kind.aval for kind in kinds))


def _owner_of(found: Trace) -> Session | None:
    """The session of the first slice that a traced function names, where it names one of an open session."""
    first = next(found.slices, None) or first_slice((), found.closed)
    owner: Any = None if first is None or first.session.closed_because else first.session
    return cast("Session | None", owner)


class LoweredProgram(RegisteredProgram):
    """A program for given argument types, which can be called, with so many `leaves`."""

    def __init__(self, session: Session, built: BuiltProgram, output_tree: Any, leaves: int) -> None:
        super().__init__(session, built)
        self.output_tree = output_tree
        self._held: dict[int, Array] = {}
        self._takes_leaves = [source.leaf for source in built.sources] == list(range(leaves))
        self._donated = built.graph.donated_arguments
        self._outputs = Outputs(session, built)
        further = built.donated_leaves, self._donated, built.reported, not self._outputs.is_plain
        self._only_computes = bool(built.result_kinds) and not any(further)
        self._carried = kinds_of(built)
        self._asked = AskedCalls(session, built, self._carried, self._held)
        self._are_mine = frozenset((session,)).issuperset

    def launch(self, leaves: list[Any]) -> Any:
        """One call: uploads what is still with the client and not small, sends the launch, returns handles."""
        session, built = self.session, self._built
        placed: dict[int, Array] = {}
        # Kept until the launch has left: another thread may put its own array into `_held`.
        values = leaves if self._takes_leaves else [self._value(leaves, k) for k in range(len(built.sources))]
        inline: tuple[InlineArgument, ...] = ()
        if _are_arrays(values):
            buffers = self._records(values)
        else:
            buffers, inline = self._placed(values, placed)
        if built.donated_leaves and len(set(map(id, buffers))) < len(buffers) - max(0, len(inline) - 1):
            self._check_donated(leaves, buffers)
        if built.result_kinds and self._number < 0:
            self.register()
        if self._only_computes:  # most programs
            results = session.launch(self._number, buffers, built.result_kinds, (), "", inline)
            return self.output_tree.unflatten(results)
        made: list[Array] = []
        donated = [buffers[k] for k in self._donated]
        why = f"it was donated to {built.graph.name}" if donated else ""
        if built.result_kinds:
            made = session.launch(self._number, buffers, built.result_kinds, donated, why, inline)
        if built.reported:
            session.debug_calls.made(built.reported, made)
        outputs = made if self._outputs.is_plain else self._outputs.of(made, leaves, placed)
        return self.output_tree.unflatten(outputs)

    def _records(self, arrays: Sequence[Array]) -> list[BufferRecord]:
        """The buffers of arrays, which may be arguments now."""
        found = list(map(_RECORD_OF, arrays))
        if any(map(FAILURE_OF, found)) or DELETED in map(STATE_OF, found) or not self._are_mine(map(_OWNER_OF, arrays)):
            for array in arrays:
                self.session.check_mine(array._buffer)
            found = list(map(_RECORD_OF, arrays))  # one that was lost may have another one now
        return found

    def _placed(self, values: list[Any], placed: dict[int, Array]) -> tuple[list[BufferRecord], tuple[Any, ...]]:
        """The same where some are still with the client, which are uploaded or go with the launch, and the latter."""
        buffers: list[BufferRecord] = []
        carrying = Carrying(self._carried, most=partial(self.session.carries, self._number))
        for k, (value, source) in enumerate(zip(values, self._built.sources, strict=True)):
            if type(value) is not Array:
                if carrying.takes(k, value, source.slice):
                    buffers.append(INLINE)
                    continue
                if source.leaf >= 0:
                    placed[source.leaf] = value = self.session.put(value, source.slice, source.spec)
                else:
                    with keeping_width((value,)):
                        self._held[k] = values[k] = value = self.session.put(value, source.slice, source.spec)
            buffers += self._records((value,))
        return buffers, tuple(carrying.inline)

    def _value(self, leaves: list[Any], k: int) -> Any:
        """Argument k of a launch: a leaf of the call, or what was captured."""
        source = self._built.sources[k]
        return leaves[source.leaf] if source.leaf >= 0 else living(self._held, k, source.held)

    def values(self, leaves: list[Any]) -> Any:
        """The values of one call in their tree, where its host serves it; else None: it has to be launched."""
        with contextlib.suppress(PathwaysError):  # the launch says what is wrong
            found = self._asked.values(self._number, leaves)
            return None if found is None else self.output_tree.unflatten(found)

    def placed(self) -> list[int]:
        """The buffers that it has placed for itself: of what it captured, as it is the same for each call."""
        return [array._buffer.id for array in list(self._held.values())]

    def _check_donated(self, leaves: list[Any], buffers: list[BufferRecord]) -> None:
        for k in self._built.donated_leaves:
            if isinstance(leaves[k], Array) and buffers.count(leaves[k]._buffer.record) > 1:
                raise UsageError(
                    f"{self._built.graph.name} donates argument {k}, which is passed or captured a second time"
                )


def program(fun: Callable[..., Any] | None = None, *, name: str = "", on_retrace: str | None = None) -> Any:
    """Makes a Python function that calls compiled functions a program: a graph launched with one message per island.

    The function runs once for each combination of argument types (shapes, dtypes, and where `pw.Array` arguments lie);
    later calls only launch. Any pytrees in and out. Ordinary `jnp` operations become small nodes.

        @pw.program
        def step(state, batch):
            return update(state, encode(batch))

    Args:
        on_retrace: for each trace but the first: "warn" says what differs, "raise" refuses with `TraceError`. Left out,
            the tenth is warned of.

    Raises:
        TraceError: it assigns to a global or outer variable, when decorated; or what tracing finds, when called.
    """
    if fun is None:
        return lambda f: Program(f, name, on_retrace=on_retrace)
    return Program(fun, name, on_retrace=on_retrace)
