"""Calls of several threads that are computed as one batch, as `pw.padded(…, join_calls=True)` has it.

A call that comes while no batch is under way leaves at once. What comes meanwhile gathers, and leaves as a second batch
once it has as many calls as the first, or with the end of that: as many calls as fit, in the thread of the first of
them. So threads that come back from a batch one by one leave together again, in two batches that take turns.
`CallQueue` decides, `JoinedCalls` has the threads.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

MAX_UNDER_WAY = 2
"""Batches under way: one is computed while the next is on its way."""


class Call:
    """One call.

    Attributes:
        kind: calls of one kind may be joined.
        rows: of its batch.
        arguments: the leaves of its arguments.
        batch: the calls that its thread is to run, itself among them; empty until then.
        outcome: what it came to; None until then.
        error: what it raises instead.
        is_computed: whether each call of `batch` has its outcome.
        is_gone: whether its thread waits no more.
        woken: what its thread waits for. No `Event`: of that, Ctrl-C may leave a lock held or a waiter asleep.
    """

    def __init__(self, kind: Hashable, rows: int, arguments: Sequence[Any]) -> None:
        self.kind, self.rows, self.arguments = kind, rows, arguments
        self.batch: list[Call] = []
        self.outcome: Any = None
        self.error: BaseException | None = None
        self.is_computed = self.is_gone = False
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()


class CallQueue:
    """The calls that wait, and the batches that are `under_way`. Pure. Ctrl-C may come anywhere in here: what it has
    ended may be done again.

    Args:
        max_rows: of a batch.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.waiting: deque[Call] = deque()
        self.under_way: list[list[Call]] = []

    def enter(self, call: Call) -> list[Call]:
        """Takes a call; returns the batch that leaves now, if one does."""
        self.waiting.append(call)
        return self._next()

    def ended(self, batch: list[Call]) -> list[Call]:
        """Takes the end of a batch; returns the one that leaves now, if one does."""
        if batch in self.under_way:
            self.under_way.remove(batch)
        return self._next()

    def shrunk(self, batch: list[Call], rest: list[Call]) -> None:
        """A batch goes on without one of its calls, which was to run it."""
        rest[0].batch = rest
        self.under_way = [rest if one is batch else one for one in self.under_way]

    def leave(self, call: Call) -> bool:
        """Takes back a call that waits; False where it does not any more."""
        if call not in self.waiting:
            return False
        self.waiting.remove(call)
        return True

    def _next(self) -> list[Call]:
        if not self.waiting or len(self.under_way) >= MAX_UNDER_WAY:
            return []
        first, count, rows = self.waiting[0], 0, 0
        for call in self.waiting:
            if not _alike(call, first) or rows + call.rows > self.max_rows:
                break
            count, rows = count + 1, rows + call.rows
        else:
            if self.under_way and count < max(map(len, self.under_way)):
                return []  # more may join it
        batch, rest = list(itertools.islice(self.waiting, count)), deque(itertools.islice(self.waiting, count, None))
        self.waiting, batch[0].batch = rest, batch
        self.under_way.append(batch)  # no signal is looked for between these two lines
        return batch


def _alike(call: Call, other: Call) -> bool:
    """Whether two calls may be joined. Those whose trees of arguments cannot be compared may not (a user's class of
    pytrees may raise, of what it has beside its children), and nobody else's call fails of it."""
    try:
        return bool(call.kind == other.kind)
    except Exception:
        return False


class _Here(threading.local):
    """Notes of this thread.

    Attributes:
        is_within: whether it is within a joined call, of any function, so that others may wait for it.
    """

    is_within = False


_here = _Here()


class JoinedCalls:
    """The threads of joined calls. One that others may wait for waits for none of them: what a signal handler, a
    destructor or the function itself calls within a joined call is computed at once, by itself.

    Args:
        run: computes a batch: takes its calls, gives an outcome for each.
        max_rows: of a batch; no call has more.
    """

    def __init__(self, run: Callable[[Sequence[Call]], Sequence[Any]], max_rows: int) -> None:
        self._run, self._max_rows = run, max_rows
        self._start()
        _all.add(self)

    def _start(self) -> None:
        self._queue, self._lock = CallQueue(self._max_rows), threading.Lock()

    def outcome(self, call: Call) -> Any:
        """Has a call computed, with others; waits for its outcome. Raises what its computation raised."""
        if _here.is_within:
            return self._run([call])[0]
        _here.is_within = True  # no signal is looked for between here and `try`
        try:
            with self._lock:
                self._wake(self._queue.enter(call))
            call.woken.get()
            if call.batch:
                self._compute(call)
        except BaseException:  # Ctrl-C came to this thread, not to the others
            self._give_up(call)
            raise
        finally:
            _here.is_within = False
        if call.error is not None:
            raise call.error
        return call.outcome

    def _wake(self, batch: list[Call]) -> None:
        """Has the thread of its first call run a batch. The caller has the lock."""
        if batch:
            batch[0].woken.put(None)

    def _compute(self, call: Call) -> None:
        batch = call.batch
        try:
            for one, outcome in zip(batch, self._run(batch), strict=True):
                one.outcome, one.error = outcome, None
        except Exception as error:
            for one in batch:
                one.error = error
        call.is_computed = True
        self._finish(call)

    def _finish(self, call: Call) -> None:
        """Wakes a batch that is computed, and has the next one leave; again, where Ctrl-C came between."""
        for one in call.batch:
            one.woken.put(None)
        with self._lock:
            self._wake(self._queue.ended(call.batch))
            call.batch = []

    def _give_up(self, call: Call) -> None:
        """Its thread does not wait any more, nor compute: what it was to run, another one runs."""
        if call.is_computed and call.batch:
            self._finish(call)
        with self._lock:
            call.is_gone = True
            if not self._queue.leave(call) and call.batch:
                rest = [one for one in call.batch if not one.is_gone]
                if rest:
                    self._queue.shrunk(call.batch, rest)
                else:
                    self._queue.ended(call.batch)
            for batch in self._queue.under_way:
                self._wake(batch)  # once more does no harm, and one of them may have left just now


_all: weakref.WeakSet[JoinedCalls] = weakref.WeakSet()


def _forked() -> None:
    """Starts with no calls, in a child: it has none of the threads that have calls under way, or the lock."""
    for joined in _all:
        joined._start()


os.register_at_fork(after_in_child=_forked)
