"""The buffers of one host: logical arrays by session and client-made id, or the failure that took their place."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

Value = Any
"""A `jax.Array` over the devices of a slice, or a `Failure`."""

Later = list[Callable[[], None]]
"""What is to be done once a value is computed, by the thread that waits for that anyway."""

MAX_LATER = 2
"""Answers that this thread gives: behind them it looks at the next launch, which is charged for the time, and may be
another tenant's."""

MAX_LATER_SHARDS = 4
"""The shards of the first of them; a further one has one."""

Waiter = Callable[[Later | None], None]
"""Called when a buffer is in the store; with a list where there is a thread that waits for its value."""

MAX_ENDED = 1 << 16
"""Ended sessions that are known as such. Late results and uploads of a session come within seconds of its end."""

Gone = deque[tuple[int, int]]
"""Sessions and the bytes of uploads of theirs that have left the store, for the quota that these counted against."""

_NONE: Set[int] = frozenset()

_NOTHING: Mapping[int, Value] = MappingProxyType({})


def may_be_later(later: Later, shards: int) -> bool:
    """Whether a further answer, of this number of shards, may be given by that thread."""
    return len(later) < MAX_LATER and shards <= (1 if later else MAX_LATER_SHARDS)


class Counted(NamedTuple):
    """The bytes of those uploads of a session that count against a quota, by buffer, and where it is said that one has
    left the store."""

    sizes: dict[int, int]
    gone: Gone


class BufferStore:
    """Written by the dispatcher and by uploads, read by both and by fetches. Dict operations are atomic; waiting, and
    what changes a buffer and its count together, take the lock."""

    def __init__(self) -> None:
        self.sessions: dict[int, dict[int, Value]] = {}
        self._lock = threading.RLock()  # memory is collected at any moment, and what that ends may come here
        self._waiters: dict[tuple[int, int], dict[Waiter, Sequence[int]]] = {}  # in the order in which they came
        self._ended: dict[int, None] = {}
        self._new_uploads: dict[int, set[int]] = {}
        self._counted: dict[int, Counted] = {}
        self.on_end: Callable[[int], None] = lambda session: None
        """Called when a session has ended, with its number; must not wait."""

    def of_session(self, session: int) -> Mapping[int, Value]:
        """The buffers of a session, to look into."""
        return self.sessions.get(session, _NOTHING)

    def held(self) -> dict[int, tuple[int, ...]]:
        """The buffers of all sessions, by number."""
        return {session: tuple(found) for session, found in list(self.sessions.items())}

    def put(self, session: int, buffer: int, value: Value, later: Later | None = None) -> bool:
        """Keeps one value."""
        return self.put_all(session, (buffer,), (value,), later)

    def put_all(
        self, session: int, buffers: Collection[int], values: Iterable[Value], later: Later | None = None
    ) -> bool:
        """Keeps values; those for a session that has ended are let go at once. Returns whether there are some, and
        somebody had asked for each; who does puts into `later` what has to wait for the values."""
        found = self.sessions.get(session)
        if found is None:
            if not buffers:
                return False
            found = self.sessions.setdefault(session, {})
        found.update(zip(buffers, values, strict=True))
        # Looked at last: a session that ends from here on finds what was stored.
        if session in self._ended:
            self.sessions.pop(session, None)
            return False
        waiters = self._waiters
        if not waiters:
            return False
        if len(buffers) == 1:  # most often
            key = session, next(iter(buffers))
            return key in waiters and self._wake(key, later)
        unasked = {buffer for buffer in buffers if (session, buffer) not in waiters}
        if unasked and len(unasked) < len(buffers):
            # A question may be for several. One is looked at: a client may have asked thousands, each for thousands.
            first = next(buffer for buffer in buffers if buffer not in unasked)
            unasked.difference_update(*list(waiters.get((session, first), {}).values())[:1])
        for key in zip(repeat(session), buffers):
            if key in waiters:
                self._wake(key, later)
        return len(buffers) > 0 and not unasked

    def add(self, session: int, buffer: int, value: Value, size: int = 0, gone: Gone | None = None) -> bool:
        """Keeps an uploaded value, unless its number is taken; returns whether it was free. To `gone`, if any, comes
        its `size` once it has left."""
        found = self.sessions.setdefault(session, {})
        self._new_uploads.setdefault(session, set()).add(buffer)  # before it can be looked at
        with self._lock:  # it could be dropped before it counts
            if buffer in found or found.setdefault(buffer, value) is not value:  # it may be there as the same array
                return False
            if gone is not None:
                counted = self._counted.get(session)
                if counted is None or counted.gone is not gone:  # the quota of a tenant without uploads does not stay
                    counted = self._counted[session] = Counted({}, gone)
                counted.sizes[buffer] = size
        if session in self._ended:
            self.sessions.pop(session, None)
            self._new_uploads.pop(session, None)
            self._uncount(session)
        elif (session, buffer) in self._waiters:
            self._wake((session, buffer))
        return True

    def new_uploads(self, session: int) -> Set[int]:
        """The uploads of a session that no launch has taken yet. Other hosts of the island may lack their part of
        one: a launch is sent once all have reported it."""
        return self._new_uploads.get(session, _NONE)

    def launched(self, session: int, buffers: Iterable[int]) -> None:
        """A launch that was sent has taken these."""
        if new := self._new_uploads.get(session):
            new.difference_update(buffers)

    def _wake(self, key: tuple[int, int], later: Later | None = None) -> bool:
        with self._lock:
            callbacks = self._waiters.pop(key, {})
        for callback in callbacks:
            callback(later)
        return bool(callbacks)

    def get(self, session: int, buffer: int) -> Value | None:
        return self.sessions.get(session, _NOTHING).get(buffer)

    def when_present(self, session: int, buffer: int, callback: Waiter, others: Sequence[int] = ()) -> None:
        """Calls back once the buffer is in the store (which says nothing of its data being computed). A callback waits
        for one buffer once.

        Args:
            others: further buffers that were asked for with this one.
        """
        with self._lock:
            waiting = self._waiters.setdefault((session, buffer), {})
            waiting[callback] = others
            # Looked for last: what the dispatcher stores from here on calls back.
            if self.get(session, buffer) is None:
                return
            del waiting[callback]  # only its own: `put` has seen the others, and calls them
            if not waiting:
                del self._waiters[session, buffer]
        callback(None)

    def forget(self, session: int, buffer: int, callback: Waiter) -> None:
        """Does not call back any more; nothing if it has."""
        with self._lock:
            waiting = self._waiters.get((session, buffer), {})
            waiting.pop(callback, None)  # in one step, of however many: the loop that serves all tenants does this
            if not waiting:
                self._waiters.pop((session, buffer), None)

    def waiting(self) -> int:
        """Callbacks for buffers that are not there yet."""
        return sum(map(len, self._waiters.values()))

    def drop(self, session: int, buffers: tuple[int, ...]) -> None:
        if new := self._new_uploads.get(session):
            new.difference_update(buffers)  # first: an upload may take the number as soon as it is free
        found = self.sessions.get(session)
        if found is None:
            return
        counted = self._counted.get(session)
        if counted is None or counted.sizes.keys().isdisjoint(buffers):  # most are results: no lock for these
            deque(map(found.pop, buffers, repeat(None)), maxlen=0)  # in one step, and none is kept meanwhile
            return
        with self._lock:  # else an upload could take the number in between, and its count would go with this one's
            left = [found.pop(buffer, None) for buffer in buffers]
            if (counted := self._counted.get(session)) is not None:
                counted.gone.append((session, sum(counted.sizes.pop(buffer, 0) for buffer in buffers)))
        del left  # behind the lock: giving memory back may take long

    def drop_session(self, session: int) -> None:
        self._ended[session] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self.sessions.pop(session, None)
        self._new_uploads.pop(session, None)
        self._uncount(session)
        with self._lock:
            for key in [key for key in self._waiters if key[0] == session]:
                del self._waiters[key]
        self.on_end(session)

    def _uncount(self, session: int) -> None:
        """Says that all uploads of a session have left."""
        with self._lock:
            counted = self._counted.pop(session, None)
        if counted is not None:
            counted.gone.append((session, sum(counted.sizes.values())))

    def ended(self, session: int) -> bool:
        """Whether a session has ended: nothing is kept for it any more."""
        return session in self._ended

    def count(self) -> int:
        return sum(len(found) for found in self.sessions.values())
