"""The inbox of a dispatcher: batches of events, and the turn to handle one.

The dispatcher takes them in order. To wake it takes longer than most events do, so a thread that has one may handle it
itself while the dispatcher has nothing to do: who waits for what comes of it waits for no other thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from pathways_ray.executor.run.instructions import Event
from pathways_ray.executor.threads import ending_with_process
from pathways_ray.transport.messages import Drop


class Read(tuple[Event, ...]):
    """A batch that was read for the dispatcher, at this time of `time.perf_counter`."""

    at: float


class FromScheduler(Read):
    """A batch of the scheduler's. These are handled in the order in which they come, in whatever thread."""


class FromLog(Read):
    """Entries of the log of the host that leads the island: the same, read by another thread."""


Source = type[FromScheduler] | type[FromLog]


class Inbox(queue.SimpleQueue[Sequence[Event]]):
    """Batches that wait for the dispatcher; any thread may put one.

    Args:
        handle: handles a batch. It is called by one thread at a time, the one that has the turn.
    """

    def __init__(self, handle: Callable[[Sequence[Event]], None]) -> None:
        self._handle, self._handle_here = handle, ending_with_process(handle)
        self.turn = threading.Lock()
        self.at_work = False
        """Whether the dispatcher has taken a batch out that is not handled yet."""
        self._read: dict[Source, int] = {FromScheduler: 0, FromLog: 0}
        """Batches for the dispatcher, counted by the threads that read."""
        self._handled: dict[Source, int] = {FromScheduler: 0, FromLog: 0}
        """Those of these that the dispatcher has handled, counted by it."""

    def handle(self, batch: Sequence[Event]) -> None:
        """Handles what was taken out. For the dispatcher."""
        self.at_work = True  # from here on it has the next turn, however many calls are handed over
        with self.turn:
            self._handle(batch)
        self.at_work = False
        if (source := type(batch)) is FromScheduler or source is FromLog:
            self._handled[source] += 1

    def read(self, batch: Sequence[Event], source: Source = FromScheduler) -> bool:
        """Takes messages of one source, and handles a lone one, or one with a drop, if all before it are; whether it
        did. For the thread that reads them. While it handles one that takes long, as a collective does that runs within
        its call, nobody reads: the end of the connection is seen only afterwards, and heartbeats go on, which are
        another thread's. So entries of the log are left to the dispatcher: the loop that reads them serves clients as
        well, and would be silent until all hosts have come to the collective."""
        lone = source is FromScheduler and (len(batch) == 1 or (len(batch) == 2 and Drop in map(type, batch)))
        if lone and self._read[source] == self._handled[source] and self.handles_here(batch):
            return True
        self._read[source] += 1
        left = source(batch)
        left.at = time.perf_counter()
        self.put(left)
        return False

    def handles_here(self, batch: Sequence[Event]) -> bool:
        """Handles events in this thread, unless the dispatcher has something to do; whether it did."""
        if self.at_work or not self.empty() or not self.turn.acquire(blocking=False):
            return False
        try:
            self._handle_here(batch)
        finally:
            self.turn.release()
        return True
