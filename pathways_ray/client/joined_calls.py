"""Calls of several threads that are computed as one batch, as `pw.padded(…, join_calls=True)` has it.

A call that comes while no batch is under way leaves at once. What comes meanwhile gathers, and leaves as a second batch
once it has as many calls as the first, or with the end of that: as many calls as fit, in the thread of the first of
them. So threads that come back from a batch one by one leave together again, in two batches that take turns.
`CallQueue` decides, `JoinedCalls` has the threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from pathways_ray.errors import PathwaysError

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
    """

    def __init__(self, kind: Hashable, rows: int, arguments: Sequence[Any]) -> None:
        self.kind, self.rows, self.arguments = kind, rows, arguments
        self.batch: list[Call] = []
        self.outcome: Any = None
        self.error: BaseException | None = None
        self.woken = threading.Event()


class CallQueue:
    """The calls that wait, and those of each batch that is `under_way`, by their number. Pure.

    Args:
        max_rows: of a batch.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.waiting: deque[Call] = deque()
        self.under_way: list[int] = []

    def enter(self, call: Call) -> list[Call]:
        """Takes a call; returns the batch that leaves now, if one does."""
        self.waiting.append(call)
        return self._next()

    def ended(self, calls: int) -> list[Call]:
        """Takes the end of a batch of so many calls; returns the one that leaves now, if one does."""
        self.under_way.remove(calls)
        return self._next()

    def shrunk(self, calls: int) -> None:
        """A batch of so many calls goes on without one of them."""
        self.under_way[self.under_way.index(calls)] -= 1

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
            if self.under_way and count < max(self.under_way):
                return []  # more may join it
        self.under_way.append(count)
        return [self.waiting.popleft() for _ in range(count)]


def _alike(call: Call, other: Call) -> bool:
    """Whether two calls may be joined. Those whose trees of arguments cannot be compared may not (a user's class of
    pytrees may raise, of what it has beside its children), and nobody else's call fails of it."""
    try:
        return bool(call.kind == other.kind)
    except Exception:
        return False


class JoinedCalls:
    """The threads of joined calls.

    Args:
        run: computes a batch: takes its calls, gives an outcome for each.
        max_rows: of a batch; no call has more.
    """

    def __init__(self, run: Callable[[Sequence[Call]], Sequence[Any]], max_rows: int) -> None:
        self._run = run
        self._queue = CallQueue(max_rows)
        self._lock = threading.Lock()

    def outcome(self, call: Call) -> Any:
        """Has a call computed, with others; waits for its outcome. Raises what its computation raised."""
        try:
            with self._lock:
                self._hand_over(self._queue.enter(call))
            call.woken.wait()
        except BaseException:  # Ctrl-C
            self._give_up(call)
            raise
        if call.batch:
            self._compute(call)
        if call.error is not None:
            raise call.error
        return call.outcome

    def _hand_over(self, batch: list[Call]) -> None:
        """Has the thread of its first call run a batch. The caller has the lock."""
        if batch:
            batch[0].batch = batch
            batch[0].woken.set()

    def _compute(self, call: Call) -> None:
        batch, call.batch = call.batch, []
        others = [one for one in batch if one is not call]
        try:
            for one, outcome in zip(batch, self._run(batch), strict=True):
                one.outcome = outcome
        except Exception as error:
            for one in batch:
                one.error = error
        except BaseException as error:  # Ctrl-C came to this thread, not to the others
            for one in others:
                one.error = PathwaysError(f"the call that this one was joined with was interrupted: {error!r}")
            raise
        finally:
            for one in others:
                one.woken.set()
            with self._lock:
                self._hand_over(self._queue.ended(len(batch)))

    def _give_up(self, call: Call) -> None:
        """Its thread does not wait any more: what it was to run, another one runs."""
        with self._lock:
            if self._queue.leave(call) or not call.batch:
                return
            rest = [one for one in call.batch if one is not call]
            if rest:
                self._queue.shrunk(len(call.batch))
            self._hand_over(rest if rest else self._queue.ended(1))
