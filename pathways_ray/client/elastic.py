"""`pw.elastic`: a step of a user's loop that survives the loss of hosts, from snapshots in the memory of others, and
that of the controller.

The step is a function `(state, *inputs) -> state` or `(state, …)`. Snapshots of the state are taken now and then, and
the inputs of the calls since are kept. When a result is looked at, or used, and a host took it along, the state is
restored and those calls are made again; the handles that the user has then name the new arrays. So the loop that calls
the step need not know of it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pathways_ray.client.array import Array
from pathways_ray.client.buffer import DELETED, LOSSES, PENDING, Buffer
from pathways_ray.client.codes import jax_settings, under
from pathways_ray.client.history import History, Place
from pathways_ray.client.interrupted import is_mine, new_lock
from pathways_ray.client.methods import Method, deep_copy
from pathways_ray.client.returned import Returned, owned, state_of
from pathways_ray.client.snapshots import Snapshot, beside, snapshot
from pathways_ray.client.weak import living
from pathways_ray.errors import (
    BufferDeleted,
    BufferLost,
    Failure,
    PathwaysError,
    QuotaExceeded,
    Unschedulable,
    UsageError,
)

_LOG = logging.getLogger(__name__)

RECOVERY_LIMIT_S = 300.0
"""A step that cannot be made again within this time is given up. A lost island's slices are elsewhere after 120 s."""

PAUSE_S = 0.2
"""Time between two attempts."""

MAX_UNDER_WAY = 2
"""Snapshots under way at most: each takes the memory of a state and its copies, and has the calls before it kept."""

EXPOSED_PAUSE_S = 1.0
"""Time between two attempts to take a snapshot while none can be had that outlives the host of the state."""


class _Call:
    """A call: its inputs, JAX's settings, and the buffers of its results while somebody has a handle."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.args, self.kwargs, self.settings = args, kwargs, jax_settings()
        leaves = enumerate(jax.tree.leaves(result))
        self._results = [(place, weakref.ref(leaf._buffer)) for place, leaf in leaves if isinstance(leaf, Array)]

    def living(self) -> list[tuple[int, Buffer]]:
        """Results with a handle, by their place. The others are forgotten: those of all calls are looked at each time.
        Any thread may call this."""
        results = self._results
        found = [(place, buffer) for place, one in results if (buffer := one()) is not None]
        if len(found) < len(results):
            self._results = [(place, one) for place, one in results if one() is not None]
        return found


class Elastic(Method):
    """The result of `pw.elastic`. `losses` counts what it has survived, `replayed` the calls that it made again."""

    def __init__(self, step: Callable[..., Any], snapshot_every: int, copies: int) -> None:
        if not callable(step):
            raise UsageError(f"pw.elastic decorates a function, not {step!r}")
        if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
            raise UsageError(f"copies= is a number of islands from 1 up, not {copies!r}")
        self.losses = self.replayed = 0
        self._step, self._copies, self._every = step, copies, snapshot_every
        self._history = History(snapshot_every)
        self._calls: dict[int, _Call] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._returned: Returned | None = None
        self._not_before, self._warned, self._recovers = 0.0, False, False
        self._session: Any = None
        self._lock = new_lock()
        functools.update_wrapper(self, step, updated=())

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes a call of the step, which returns as the step does. What was lost is made again first."""
        with self._lock:
            if not self._goes_on(state):
                self._begin(state)
            self.recover()
            self._look_at_snapshots()
            self._protect(state)
            args, kwargs = jax.tree.map(owned, (args, kwargs))
            try:
                result = self._step(state, *args, **kwargs)
            except LOSSES as error:
                result = self._again(state, args, kwargs, error)
            self._calls[self._history.calls] = _Call(args, kwargs, result)
            self._history.calls += 1
            self._returned = Returned(state_of(result))
            return result

    def __deepcopy__(self, memo: Any) -> Any:
        """One that has made no calls."""
        begun = vars(Elastic(self._step, self._every, self._copies))
        rest = [name for name in begun if name != "_step" and not name.startswith("__")]
        return deep_copy(self, memo, **{name: begun[name] for name in rest})

    # --- the state ----------------------------------------------------------------------------------------------------

    def _goes_on(self, state: Any) -> bool:
        """Whether this is the state that the last call returned, as it was then."""
        if not _buffers(state):
            raise UsageError("an elastic step takes a state with pw.Arrays as its first argument (of a method: self)")
        return self._returned is not None and self._returned.is_same(state)

    def _begin(self, state: Any) -> None:
        """Another loop begins, or the user has changed the state: nothing before it is made again, but what of the old
        state is in this one."""
        kept = [buffer for buffer in _buffers(state) if self.covers(buffer)]
        _wait(kept)
        if any(buffer.is_lost for buffer in kept):
            self.recover()
        self._history, self._calls, self._snapshots = History(self._every), {}, {}
        self._returned, self._not_before, self._warned = None, 0.0, False
        self._session = _buffers(state)[0].session
        self._session.guards[id(self)] = self
        if kept:
            self._protect(state)
        else:  # where it was never possible, the user hears of it, each time
            self._take(state)
        self._returned = Returned(state)

    def _protect(self, state: Any) -> None:
        """Takes a snapshot where one is due, or the last one would be lost together with the state: a slice has moved,
        or the island of the copies was lost. Where that cannot be, it is tried again with a later call."""
        if (place := self._history.place(time.monotonic())) is not Place.APART:
            return self._shorten(state, place)
        exposed = bool(self._snapshots) and self._snapshots[max(self._snapshots)].is_exposed()
        if not (exposed or self._history.due) or time.monotonic() < self._not_before:
            return
        try:
            self._take(state)
        except (*LOSSES, Unschedulable, QuotaExceeded):
            exposed = True
        if exposed:
            self._not_before = time.monotonic() + EXPOSED_PAUSE_S

    def _shorten(self, state: Any, place: Place) -> None:
        """Has fewer calls be kept, while no snapshot can be had that outlives the island of the state."""
        if not self._warned:
            _LOG.warning("an elastic step finds no place for snapshots: until it does, a loss of its island is final")
        self._warned = True
        if place is Place.NOWHERE:
            self._history.forget()
            self._snapshots.clear()
        elif self._history.due:
            with contextlib.suppress(*LOSSES, QuotaExceeded):
                self._take(state, beside)

    def _take(self, state: Any, how: Callable[[Any], Snapshot] | None = None) -> None:
        """Takes a snapshot. A loop that runs ahead of its devices waits here until few are under way."""
        under_way = [taken for _, taken in sorted(self._snapshots.items()) if not taken.is_ready()]
        for taken in under_way[: 1 - MAX_UNDER_WAY]:
            taken.wait_for_all()
        self._look_at_snapshots()
        taken = how(state) if how else snapshot(state, self._copies, local=True)  # the step may span islands
        self._snapshots[self._history.taken()] = taken

    def _look_at_snapshots(self, needed: bool = False) -> None:
        """Forgets what is not needed any more; where something is lost, only what cannot be used."""
        for name, taken in list(self._snapshots.items()):
            if not taken.is_ready():
                continue
            if not taken.is_whole():
                self._history.lost(name)
                del self._snapshots[name]
            elif needed:
                self._history.usable(name)
            elif not self._history.snapshots[name]:
                for old in self._history.whole(name):
                    del self._snapshots[old]
        for number in [number for number in self._calls if number < self._history.first]:
            del self._calls[number]

    # --- losses -------------------------------------------------------------------------------------------------------

    def covers(self, buffer: Buffer) -> bool:
        """Whether an array is the result of a call that can be made again. Takes no lock: two steps that wait,
        in two threads, would each want that of the other."""
        return any(one is buffer for call in list(self._calls.values()) for _, one in call.living())

    def recover(self) -> None:
        """Makes again what was lost, as often as it takes; nothing once the session has ended.

        Raises:
            BufferLost: there is no snapshot left from which it could be made, or an input is lost too.
            PathwaysError: what went wrong for `RECOVERY_LIMIT_S`.
        """
        if not any(is_mine(one._lock) for one in living(self._session.guards) if isinstance(one, Elastic)):
            with self._lock:
                self._recover()
        elif self._lock.acquire(blocking=False):  # who has it may wait for the lock that this thread has
            try:
                self._recover()
            finally:
                self._lock.release()

    def _recover(self) -> None:
        """Makes again what was lost; the caller has the lock. A call that is made again takes what is still lost."""
        if self._recovers:
            return
        try:
            self._recovers = True
            self._recover_by(time.monotonic() + RECOVERY_LIMIT_S)
        finally:
            self._recovers = False

    def _recover_by(self, deadline: float) -> None:
        before: Failure | None = None
        while not self._session.closed_because and self._lost() is not None:
            for taken in self._snapshots.values():
                taken.wait_for_all()
            if self._session.closed_because:
                return
            self._look_at_snapshots(needed=True)
            if not self._snapshots:
                raise BufferLost("the results of an elastic step are lost, and so is every snapshot from before it")
            if (lost := self._lost()) is None:
                return  # it was from before the snapshots that are left
            try:
                self._make_again(lost)
            except BufferDeleted:
                self._check_inputs(lost, deleted=True)
                raise
            except LOSSES as error:
                if self._session.closed_because or time.monotonic() > deadline:
                    raise
                if not self._check_inputs(lost) and error.failure is not None and error.failure is before:
                    # Not another loss, but one from before the attempt; state and inputs were there.
                    raise BufferLost(
                        "the results of an elastic step are lost, and so is an array that the step captures "
                        f"({error}): pass it as a part of the state, or capture it as a NumPy array"
                    ) from None
                before = error.failure
                _LOG.info("a step cannot be made again yet: %s", error)
                threading.Event().wait(PAUSE_S)
            else:
                self.losses += 1

    def _lost(self) -> int | None:
        """The first call with a result that was lost, and that somebody has a handle to. A state that was given to the
        next call is needed where that one's results are."""
        return next((n for n, call in sorted(self._calls.items()) if any(b.is_lost for _, b in call.living())), None)

    def _make_again(self, needed: int) -> None:
        """Makes all calls again from a snapshot on, and has handles name what they make. A call that took a result of
        one before it takes what that has made now."""
        start = self._history.start(needed)
        if start is None:
            raise BufferLost("the results of an elastic step are lost, and its snapshots are not over yet")
        calls, state = dict(self._calls), self._snapshots[start].restore()
        made: list[tuple[_Call, Any]] = []
        remade: dict[int, Any] = {}
        for number in range(start, self._history.calls):
            call = calls[number]
            args, kwargs = jax.tree.map(functools.partial(_remade, remade), (call.args, call.kwargs))
            with under(call.settings):  # who looks at a result may have others, and so other bits
                result = self._step(state, *args, **kwargs)
            if living := call.living():  # the others go at once, or the states of all calls would be there together
                made.append((call, result))
                leaves = jax.tree.leaves(result)
                remade |= {id(buffer): leaves[place] for place, buffer in living}
            state = state_of(result)
        for call, result in made:
            _wait(buffer for _, buffer in call.living())
            for buffer in _buffers(result):
                if buffer.record.state is not DELETED:
                    buffer.session.wait(buffer.record)
        for call, result in made:
            _exchange(call, result)
        self.replayed += self._history.calls - start

    def _check_inputs(self, needed: int, deleted: bool = False) -> bool:
        """Raises `BufferLost` where an array that a call took is lost as well, or with `deleted` is no more, so that no
        attempt will do: none that a call before it makes again. Returns whether what is lost may be made again by
        another step: such an array, or a result that this step may capture."""
        others = [one for one in living(self._session.guards) if one is not self]
        awaited = any(one._lost() is not None for one in others if isinstance(one, Elastic))
        start = self._history.start(needed)
        remade: set[int] = set()
        for number in range(self._history.calls if start is None else start, self._history.calls):
            call = self._calls[number]
            for leaf in jax.tree.leaves((call.args, call.kwargs)):
                if not isinstance(leaf, Array) or id(leaf._buffer) in remade:
                    continue
                if deleted and leaf._buffer.record.state is DELETED:
                    raise BufferLost(
                        "the results of an elastic step are lost, and an input with which they would be made again was "
                        f"deleted or donated, {leaf!r}; NumPy arrays are kept in this process"
                    )
                if not leaf._buffer.is_lost:
                    continue
                if not any(guard.covers(leaf._buffer) for guard in others):
                    raise BufferLost(
                        "the results of an elastic step are lost, and so is an input with which they would be made "
                        f"again, {leaf!r}; NumPy arrays are kept in this process"
                    )
                awaited = True
            remade.update(id(buffer) for _, buffer in self._calls[number].living())
        return awaited

    def _again(self, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: PathwaysError) -> Any:
        """Makes a call that failed at once, for an upload that met a lost host; its state may be lost as well."""
        deadline = time.monotonic() + RECOVERY_LIMIT_S
        while True:
            _wait(_buffers(state))
            self.recover()
            try:
                return self._step(state, *args, **kwargs)
            except LOSSES:
                if self._session.closed_because or time.monotonic() > deadline:
                    raise error from None
                threading.Event().wait(PAUSE_S)


def elastic(step: Callable[..., Any] | None = None, *, snapshot_every: int = 10, copies: int = 1) -> Callable[..., Any]:
    """Makes a step survive the loss of hosts and of the controller: its loop goes on by itself, with the same bits.

        @pw.elastic(snapshot_every=10)
        def step(state, batch):
            return update(state, batch)  # a pw.program: the new state and the loss

        for batch in batches:
            state, loss = step(state, batch)

    A snapshot of the state is taken every `snapshot_every` calls (`pw.snapshot`: in the memory of other islands,
    while the loop goes on; a call waits where two are under way), and before the next call where the last one is on
    the island of the state, or was lost. When a host is lost, what was made since the last whole one is made again,
    as soon as a result is looked at or used, or the step is called. Handles to results of these calls have their
    values then, whenever they were made.

    The step must depend on its arguments alone, and do nothing else. Its state is the first argument, and the result,
    or the first entry of a tuple that is the result; a loop may change it between calls, which costs a snapshot. Inputs
    are kept until they are not needed; NumPy arrays are copied. What other functions made of lost results is lost. So
    are inputs that lay on a lost host, unless earlier calls returned them, or arrays that the step captures, and then
    it cannot be made again. Nothing is once the step itself is gone (`del step`).

    Args:
        snapshot_every: calls between snapshots, and at most so many are made again, beside those that were made while
            the last snapshot was under way.
        copies: islands that each snapshot is copied to.

    Raises:
        UsageError: a bad value; no `pw.Array` in the state.
        Unschedulable: there is no other island for snapshots.
        BufferLost: more islands were lost at once than there are copies, or an input lay on one.
    """
    if not isinstance(snapshot_every, int) or isinstance(snapshot_every, bool) or snapshot_every < 1:
        raise UsageError(f"snapshot_every= is a number of calls from 1 up, not {snapshot_every!r}")
    if step is None:
        return lambda found: Elastic(found, snapshot_every, copies)
    return Elastic(step, snapshot_every, copies)


def _buffers(tree: Any) -> list[Buffer]:
    return [leaf._buffer for leaf in jax.tree.leaves(tree) if isinstance(leaf, Array)]


def _remade(remade: dict[int, Any], leaf: Any) -> Any:
    """A leaf, or what was made again of it."""
    return remade.get(id(leaf._buffer), leaf) if isinstance(leaf, Array) else leaf


def _wait(buffers: Any) -> None:
    """Waits for the outcomes of arrays, whatever these are."""
    for buffer in buffers:
        if buffer.record.state is PENDING:
            try:
                buffer.session.wait(buffer.record)
            except PathwaysError:
                continue


def _exchange(call: _Call, result: Any) -> None:
    """Has handles to lost results name those that were made again."""
    made: Sequence[Any] = jax.tree.leaves(result)
    for number, old in call.living():
        new = made[number]
        if isinstance(new, Array) and new._buffer is not old and old.is_lost:
            old.record, new._buffer.record = new._buffer.record, old.record
