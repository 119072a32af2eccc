"""Calls of host functions on a host: one queue, one thread and one process for each session that has any.

A call waits in its session's thread for its arguments, which devices may still compute, then for the process. So the
thread that enqueues never waits, devices go on with other work, and a session's calls are made in the order in which
its launches have come to this host. What a call waits for never waits for a call behind it: its arguments are on the
device queues already.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from pathways_ray.errors import Failure
from pathways_ray.executor.calls.local import LocalPart
from pathways_ray.executor.calls.process import CallFailed, FunctionProcess
from pathways_ray.ir.graph import Part
from pathways_ray.ir.plan import Executable, NodeLabel, PlacedSlice
from pathways_ray.story import Entry

MAX_ENDED = 65_536
"""Sessions that have ended and are remembered: a launch of one may still come to a call."""


class Pending:
    """A call that was asked for (`PendingCall` of `executor.run.parts`). It is over once: who comes later changes
    nothing.

    Args:
        ended: is called, by any thread, when it is over.
    """

    looks_called = True

    def __init__(self, ended: Callable[[], None] = lambda: None) -> None:
        self._ended = ended
        self.failure: Failure | None = None
        self._values: list[jax.Array] = []
        self._over = threading.Event()
        self._lock = threading.Lock()

    def is_ready(self) -> bool:
        return self._over.is_set()

    def block_until_ready(self) -> Pending:
        self._over.wait()
        return self

    def values(self) -> list[Any]:
        return self._values

    def abandon(self, failure: Failure) -> None:
        self.finish(failure)

    def finish(self, came: list[jax.Array] | Failure) -> None:
        """The call is over, unless it was before."""
        with self._lock:
            if self._over.is_set():
                return
            if isinstance(came, Failure):
                self.failure = came
            else:
                self._values = came
            self._over.set()
        self._ended()


class LocalFunction:
    """A host function with what this host takes and gives of its arrays.

    Raises:
        CompileError: this host's shards of one of them are no block.
    """

    def __init__(
        self,
        host: int,
        executable: Executable,
        part: Part,
        placed: PlacedSlice,
        function: bytes,
        shardings: Sequence[NamedSharding],
        devices: list[jax.Device],
    ) -> None:
        self.name, self.digest, self.limit_s = part.name, part.function, part.host_limit_ms / 1000
        self.function, self.shardings, self.devices = function, shardings, devices
        inputs = zip(executable.inputs, executable.input_layouts, strict=True)
        outputs = zip(executable.outputs, executable.output_layouts, strict=True)
        self.inputs = [
            LocalPart(t, layout.spec, placed, host, f"input {k} of {part.name}") for k, (t, layout) in enumerate(inputs)
        ]
        self.outputs = [
            LocalPart(t, layout.spec, placed, host, f"output {k} of {part.name}")
            for k, (t, layout) in enumerate(outputs)
        ]

    def run(self, process: FunctionProcess, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """Waits for arrays, and calls the function on this host's part of them. Raises `CallFailed`."""
        try:
            parts = [part.gather(array) for part, array in zip(self.inputs, inputs, strict=True)]
        except Exception as error:  # of the computation that was to make it
            raise CallFailed(Failure("ExecutionError", str(error) or type(error).__name__)) from None
        kinds = [(part.type.dtype, part.shape) for part in self.outputs]
        made = process.call(self.name, self.digest, self.function, parts, kinds, self.limit_s)
        return [
            part.scatter(value, sharding, self.devices)
            for part, value, sharding in zip(self.outputs, made, self.shardings, strict=True)
        ]


class _Asked(NamedTuple):
    """A call in the queue of its session."""

    pending: Pending
    function: LocalFunction
    label: NodeLabel
    inputs: list[Any]


class _Session:
    """The calls of one session."""

    def __init__(self, host: int, session: int, printed: Callable[[str], None]) -> None:
        self.host = host
        self.process = FunctionProcess(printed)
        self.asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self.ended = False
        threading.Thread(target=self._run, name=f"calls of session {session}", daemon=True).start()

    def end(self) -> None:
        """Ends the process; calls that are left fail."""
        self.ended = True
        self.process.end()  # and not only killed: a call that waits for its arguments yet would start another one
        self.asked.put(None)

    def _run(self) -> None:
        while (asked := self.asked.get()) is not None:
            if not asked.pending.is_ready():
                asked.pending.finish(self._outcome(asked))
            del asked  # or its arrays would be kept until the next call comes
        self.process.close()

    def _outcome(self, asked: _Asked) -> list[jax.Array] | Failure:
        label = asked.label
        if self.ended:
            return Failure("SessionClosed", "the session has ended", label.name, label.where, self.host)
        try:
            return asked.function.run(self.process, asked.inputs)
        except CallFailed as error:
            found = error.failure
        except Exception as error:
            traceback.print_exc()
            found = Failure("ExecutionError", f"{type(error).__name__}: {error}")
        return Failure(found.kind, found.message, label.name, label.where, self.host, found.story)


class HostCalls:
    """The calls of host functions on this host. For the threads that dispatch and that prepare programs.

    Args:
        log: takes what functions print.
    """

    def __init__(self, host: int, log: Callable[[Entry], None] = lambda entry: None) -> None:
        self.host = host
        self.log = log
        self.on_end: Callable[[], None] = lambda: None
        """Called by any thread when a call is over."""
        self.sessions: dict[int, _Session] = {}
        self._ended: dict[int, None] = {}

    def function(
        self,
        executable: Executable,
        part: Part,
        placed: PlacedSlice,
        function: bytes,
        shardings: Sequence[NamedSharding],
        devices: list[jax.Device],
    ) -> Callable[[int, NodeLabel, list[Any]], Pending]:
        """A host function made ready (`HostFunction` of `executor.run.steps`)."""
        local = LocalFunction(self.host, executable, part, placed, function, shardings, devices)

        def call(session: int, label: NodeLabel, inputs: list[Any]) -> Pending:
            pending = Pending(self.on_end)
            self._ask(session, _Asked(pending, local, label, inputs))
            return pending

        return call

    def _ask(self, session: int, asked: _Asked) -> None:
        found = self.sessions.get(session)
        if found is None:
            if session in self._ended:
                asked.pending.finish(Failure("SessionClosed", "the session has ended", host=self.host))
                return
            found = self.sessions[session] = _Session(self.host, session, lambda line: self._printed(session, line))
        found.asked.put(asked)

    def _printed(self, session: int, line: str) -> None:
        self.log(Entry(time.monotonic(), "printed", line, session=session, host=self.host))

    def end(self, session: int) -> None:
        """Ends what a session has here."""
        self._ended[session] = None
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        found = self.sessions.pop(session, None)
        if found is not None:
            found.end()
