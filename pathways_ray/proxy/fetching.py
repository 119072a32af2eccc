"""The values of arrays on their way to a proxy's client: as host buffers, or big ones in files in memory.

Small ones are asked for without a thread that waits (`client.questions`). What cannot be had so is fetched by one of a
few threads, which also finds out why a value does not come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from pathways_ray.client.array import Array
from pathways_ray.client.buffer import DELETED, FAILED, PENDING
from pathways_ray.client.questions import Question
from pathways_ray.client.session import Session
from pathways_ray.errors import Failure, PathwaysError, to_failure
from pathways_ray.ir.regions import shard_shape
from pathways_ray.jax_types import dtype_named
from pathways_ray.proxy import events as do
from pathways_ray.proxy.arrays import Code, Refused, Status
from pathways_ray.proxy.handover import Handover
from pathways_ray.proxy.reading import SMALL_BYTES
from pathways_ray.proxy.statuses import status_of
from pathways_ray.proxy.strides import written
from pathways_ray.transport.shared_memory import SharedFile

FETCHERS = 16
"""Threads that wait for values; each has one on its way."""


class Fetcher:
    """Brings values to one client.

    Args:
        host_buffers: the client's bytes by its names.
        handover: takes files for the client.
        tell: takes an event to the core; called by threads of this object's own.
        look: has somebody call `asked` soon; called by any thread.
    """

    def __init__(
        self,
        session: Session,
        host_buffers: Any,
        handover: Handover,
        tell: Callable[[do.Event], None],
        look: Callable[[], None],
    ) -> None:
        self.session, self.host_buffers, self.handover = session, host_buffers, handover
        self.tell, self.look = tell, look
        self.questions: dict[int, tuple[Question, do.Fetch | do.HandOver, Array]] = {}
        self._answers: deque[tuple[do.Fetch | do.HandOver, Array, do.Event | None]] = deque()
        self._threads = ThreadPoolExecutor(FETCHERS, "pathways-proxy-fetch")

    def close(self) -> None:
        """Ends the threads once they see that the session has ended, and the files for the client."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.handover.close()

    def fetch(self, command: do.Fetch, array: Array) -> None:
        """Has a shard as a host buffer, which is expected already, and says that it is settled."""
        self._ask(command, array)

    def _ask(self, command: do.Fetch | do.HandOver, array: Array) -> None:
        question = self.session.ask_for_shard(array, command.place, partial(self._answered, command, array))
        if question is None:
            self._wait(command, array)
        else:
            self.questions[command.ticket] = question, command, array

    def _wait(self, command: do.Fetch | do.HandOver, array: Array) -> None:
        """Has a thread fetch a value."""
        if isinstance(command, do.Fetch):
            self._threads.submit(self._fetched, command, array)
        else:
            self._threads.submit(self._handed, command, array)

    def _answered(self, command: do.Fetch | do.HandOver, array: Array, value: np.ndarray[Any, Any] | None) -> None:
        """Takes the answer to a question; called by any thread."""
        event: do.Event | None = None
        if value is not None and isinstance(command, do.HandOver):
            self.handover.give(command.number, bytes(written(value, ())))
            event = do.Settled(command.ticket)
        elif value is not None and isinstance(command, do.Fetch):
            try:
                self.host_buffers.arrived(command.handle, written(value, command.strides))
                event = do.Settled(command.ticket)
            except Refused as refused:
                event = self.missed(command, refused.status)
        self._answers.append((command, array, event))
        self.look()

    def asked(self, ended: bool) -> list[do.Event]:
        """The events of questions that were answered. What cannot be answered is fetched: that says why."""
        events: list[do.Event] = []
        for question, command, array in list(self.questions.values()):
            record = array._buffer.record
            if (ended or record.failure is not None or record.state is DELETED) and self.session.take_back(question):
                self._answers.append((command, array, None))
        while self._answers:
            command, array, event = self._answers.popleft()
            self.questions.pop(command.ticket, None)
            if event is not None:
                events.append(event)
            else:
                self._wait(command, array)
        return events

    def _fetched(self, command: do.Fetch, array: Array) -> None:
        try:
            value = self.session.fetch_shard(array, command.place)
            self.host_buffers.arrived(command.handle, written(value, command.strides))
            event = do.Settled(command.ticket)
        except PathwaysError as error:
            event = self.missed(command, status_of(error.failure or to_failure(error)))
        except Refused as refused:
            event = self.missed(command, refused.status)
        except Exception as error:  # lest the client waits without end
            event = self.missed(command, Status(Code.INTERNAL, f"{type(error).__name__}: {error}"))
        self.tell(event)

    def missed(self, command: do.Fetch, status: Status) -> do.Settled:
        """The event of a fetch that failed."""
        self.host_buffers.arrived(command.handle, status)
        if not command.early:  # its answer says so
            self.host_buffers.drop(command.handle)
        return do.Settled(command.ticket, status)

    def hand_over(self, command: do.HandOver, array: Array | None) -> None:
        """Gives the client a shard in a file. Without an array, or where it does not come, it gets none: it asks in the
        ordinary way then, and hears why."""
        if array is None:
            self.handover.give(command.number, None)
        elif array._type.array.nbytes <= SMALL_BYTES:
            self._ask(command, array)
        else:
            self._threads.submit(self._handed, command, array)

    def _handed(self, command: do.HandOver, array: Array) -> None:
        file = None
        try:
            kind = array._type
            assert kind.slice is not None
            shape = shard_shape(kind.array, kind.spec, kind.slice.placed.mesh)
            made = SharedFile.create(int(np.prod(shape)) * dtype_named(kind.array.dtype).itemsize)
            self.session.fetch_shard(array, command.place, made)
            file = made
        except (PathwaysError, OSError):
            pass
        finally:
            self.handover.give(command.number, file)
            self.tell(do.Settled(command.ticket))


def outcome(arrays: Sequence[Array]) -> Status | tuple[()] | None:
    """The failure of one of some arrays, () once all are there, None before."""
    pending = False
    for array in arrays:
        record = array._buffer.record
        if record.state is FAILED:
            return status_of(record.failure or Failure("InternalError", "it failed"))
        pending = pending or record.state is PENDING or (record.state is DELETED and record.donated is PENDING)
    return None if pending else ()
