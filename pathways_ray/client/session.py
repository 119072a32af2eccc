"""A session: the public face of a client's connection to a cluster.

The session joins three parts: `core` decides, `connection` and `data` talk to the controller and to hosts. It has the
threads' waiting: users wait here for outcomes and for room, and the threads of the connection wake them.

Nothing waits for a reply on the way of a launch. Ids of programs, launches and buffers are made here, and a launch
leaves in the thread that calls it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from pathways_ray import limits
from pathways_ray.client.argument_types import ArgumentType, array_type, to_numpy
from pathways_ray.client.array import Array
from pathways_ray.client.buffer import DELETED, PENDING, Buffer, BufferRecord, Upload
from pathways_ray.client.connection import Connection
from pathways_ray.client.core import (
    Called,
    ClientCore,
    CloseData,
    Closing,
    Command,
    Disconnected,
    Forked,
    Freed,
    MoveHost,
    Placed,
    Registered,
    ReleaseQueue,
    Send,
    SendLater,
    Uploaded,
    Wake,
)
from pathways_ray.client.data import DataLinks, FetchPlan
from pathways_ray.client.slices import VirtualSlice, island_of, mesh_of
from pathways_ray.errors import (
    BufferDeleted,
    Failure,
    ForeignArray,
    PathwaysError,
    SessionClosed,
    UsageError,
    WaitTimeout,
    from_failure,
)
from pathways_ray.ir.graph import Graph
from pathways_ray.ir.types import Spec, check_layout
from pathways_ray.transport.messages import (
    CloseSession,
    CreateSlice,
    Explain,
    Explained,
    Put,
    ReleaseSlice,
    SliceCreated,
    Status,
    StatusReply,
)

_EXPORT_PLATFORMS = {"gpu": "cuda"}
"""The platforms that `jax.export` calls by another name than devices do."""

_CAUSE_LIMIT_S = 10.0
"""A fetch that failed waits this long for the controller to name the cause."""

_CLOSE_LIMIT_S = 5.0
"""Closing waits this long for the controller's answer; the stream's end has the same effect."""

_EXPLAIN_LIMIT_S = 180.0
"""Explaining a registered program waits this long for it to be compiled."""

_WAIT_SLICE_S = 0.5
"""Waits wake up this often, so that Ctrl-C is seen and a dead reader leaves no thread waiting."""


class Session:
    """A connection to a cluster. Made by `pw.init` and `pw.connect`; a context manager that closes itself."""

    def __init__(self, core: ClientCore, connection: Connection, data: DataLinks, platforms: tuple[str, ...]) -> None:
        self.id = core.session
        self.url = connection.url
        self.platforms = platforms
        self._core, self._connection, self._data = core, connection, data
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._default_slice: VirtualSlice | None = None
        self._making_default_slice = False

    @classmethod
    def connect(
        cls,
        url: str,
        token: str,
        name: str = "",
        timeout: float = 10.0,
        ca: str | bytes | os.PathLike[str] | None = None,
    ) -> Self:
        """Opens a session; the arguments and errors are those of `pw.connect`."""
        connection = Connection(url, token, ca)
        try:
            opened = connection.open_session(name, timeout)
            core = ClientCore(opened.session, opened.max_launches)
            data = DataLinks(opened.session, opened.data_token, opened.hosts, connection.data_trust)
            session = cls(core, connection, data, tuple(_EXPORT_PLATFORMS.get(p, p) for p in opened.platforms))
            connection.start(core.pending.__len__, core.coalescer, session._handle, session._disconnected, timeout)
        except BaseException:
            connection.close()
            raise
        return session

    # --- slices and status --------------------------------------------------------------------------------------------

    def virtual_slice(
        self,
        shape: Sequence[int] | None = None,
        axes: Sequence[str] | None = None,
        *,
        island: int | None = None,
        platform: str | None = None,
        name: str = "",
    ) -> VirtualSlice:
        """See `pw.virtual_slice`."""
        sizes, names = mesh_of(shape, axes)
        number = island_of(island)
        if not isinstance(name, str) or not isinstance(platform, str | None):
            raise UsageError(f"name= and platform= of a slice are text, not {name!r} and {platform!r}")
        self.check_open()
        reply = self._connection.call(CreateSlice(self.id, sizes, names, number, platform or "", name))
        assert isinstance(reply, SliceCreated)
        return VirtualSlice(self, reply.placed, name, reply.slice_tag)

    def release_slice(self, released: VirtualSlice) -> None:
        """Gives a slice back to the cluster."""
        if not self.closed_because:
            self._connection.call(ReleaseSlice(self.id, released.id))

    def default_slice(self) -> VirtualSlice:
        """All devices of one island on one axis `x`; made when first needed, once for all threads."""
        with self._changed:
            while self._making_default_slice:
                self._changed.wait(_WAIT_SLICE_S)
            if self._default_slice is not None:
                return self._default_slice
            self._making_default_slice = True
        made = None
        try:
            made = self.virtual_slice(None, ("x",), name="default")
        finally:
            with self._changed:
                self._default_slice, self._making_default_slice = made, False
                self._changed.notify_all()
        return made

    def status(self) -> dict[str, Any]:
        """Islands, devices, slices, sessions and the number of live buffers of the whole cluster."""
        self.check_open()
        reply = self._connection.call(Status(self.id))
        assert isinstance(reply, StatusReply)
        found: dict[str, Any] = json.loads(reply.text)
        return found

    def explain(self, program: int, graph: bytes) -> Explained:
        """The controller's placement of a program; waits until it is compiled when it is registered."""
        self.flush()
        self.check_open()
        reply = self._connection.call(Explain(self.id, program, graph), _EXPLAIN_LIMIT_S)
        assert isinstance(reply, Explained)
        return reply

    # --- programs, launches, buffers ----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._core.closing

    @property
    def closed_because(self) -> str:
        """The reason why the session has ended; "" while it is open."""
        return self._core.closed_because

    def check_open(self) -> None:
        """Raises `SessionClosed` once the session has ended."""
        if self._core.ended is not None:
            raise SessionClosed(f"the session is closed: {self._core.closed_because}")

    def _check_not_ended(self) -> None:
        """Raises the failure that the session ended with, which took its arrays with it: those that were ready too."""
        if self._core.ended is not None:
            raise from_failure(self._core.ended)

    def register(self, graph: Graph, encoded: bytes, functions: dict[str, bytes]) -> int:
        """Sends a program before its first launch; returns its number."""
        self.check_open()
        number = self._core.new_program()
        self._handle_call(Registered(number, graph, encoded, functions))
        return number

    def launch(self, program: int, arguments: list[BufferRecord], results: tuple[ArgumentType, ...]) -> list[Array]:
        """Sends one launch, behind the uploads of its arguments; returns handles to its results at once.

        Waits only when the session has too many launches without an outcome.
        """
        core = self._core
        if core.ended is not None:
            self.check_open()
        if core.is_full:
            self._wait_for_room()
        with self._sending:
            made = core.new_buffers(len(results))
            arrays = [Array(Buffer(self, record), kind) for record, kind in zip(made, results, strict=True)]
            self._do(core.handle(Called(program, arguments, made), time.monotonic()))
        return arrays

    def put(self, value: Any, where: VirtualSlice, spec: Spec) -> Array:
        """Uploads an array to the devices of a slice; the handle may be used at once."""
        self.check_open()
        if where.released:
            raise UsageError(f"{where} was released; nothing can be put there")
        array, weak = to_numpy(value)
        kind = ArgumentType.of(array_type(array), weak, where, spec)
        check_layout(kind.array, spec, where.type, "put")
        with self._sending:
            (record,) = self._core.new_buffers(1)
        buffer = Buffer(self, record)
        record.upload = self._data.upload(
            record.id, array, kind.array, spec, where.placed, where.tag, partial(self._uploaded, record)
        )
        self._handle_call(Placed(Put(record.id, where.id, kind.array, spec)))
        return Array(buffer, kind)

    def free(self, record: BufferRecord) -> None:
        """Tells the cluster that no handle of a buffer is left, once its upload has ended; safe in a destructor."""
        self._do(self._core.handle(Freed(record), 0.0))

    def check_mine(self, buffer: Buffer) -> None:
        """Raises unless the buffer may be an argument of a launch of this session."""
        if buffer.session is not self:
            raise ForeignArray("the array belongs to another session; fetch it there and pass the NumPy array here")
        if buffer.record.state is DELETED:
            raise BufferDeleted(f"the array cannot be an argument: {buffer.record.why_deleted}")

    # --- events and commands ------------------------------------------------------------------------------------------

    def _handle(self, event: Any) -> None:
        self._do(self._core.handle(event, time.monotonic()))

    def _handle_call(self, event: Any) -> None:
        with self._sending:
            self._handle(event)

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Send():
                    self._connection.outbox.send(command.message)
                case SendLater():
                    self._connection.outbox.send_later(command.message)
                case Wake():
                    with self._changed:
                        self._changed.notify_all()
                    if command.fetches:
                        self._data.wake()
                case ReleaseQueue():
                    self._release_queue()
                case MoveHost():
                    self._data.host_changed(command.address)
                case CloseData():
                    self._data.close(command.failure)

    def _release_queue(self) -> None:
        """Sends what may leave the queue. The caller has `_sending`."""
        core = self._core
        while (commands := core.head(time.monotonic())) is not None:
            try:
                self._do(commands)
            finally:  # also when Ctrl-C comes after it
                core.remove_head()
        if not core.queue:
            with self._changed:
                self._changed.notify_all()

    def _uploaded(self, record: BufferRecord, upload: Upload, host: int, failure: Failure | None) -> None:
        self._handle_call(Uploaded(record, upload, host, failure))

    def _disconnected(self, reason: str) -> None:
        self._handle(Disconnected(reason))

    # --- waiting ------------------------------------------------------------------------------------------------------

    def flush(self, timeout: float = limits.DEFAULT_TIMEOUT_S) -> None:
        """Waits until everything that was called before is on its way."""
        deadline = time.monotonic() + timeout
        while self._core.queue:
            self.check_open()
            if time.monotonic() > deadline:
                raise WaitTimeout(f"uploads did not finish within {timeout:.0f} s")
            with self._sending:  # a destructor may have queued something when this was done last
                self._release_queue()
            self._wait_until(lambda: not self._core.queue, min(_WAIT_SLICE_S, timeout))

    def _wait_until(self, condition: Callable[[], object], limit_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._core.ended is not None, limit_s)

    def _wait_for_room(self) -> None:
        while not self._core.has_room and self._core.ended is None:
            self._wait_until(lambda: self._core.has_room, _WAIT_SLICE_S)
        self.check_open()

    def wait(self, record: BufferRecord, timeout: float | None = None) -> None:
        """Waits until a buffer has an outcome; raises its failure.

        Once the session has ended nothing is left to wait for, not even what was ready before.
        """
        self._check_not_ended()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while record.state is PENDING:
                self._check_not_ended()
                left = _WAIT_SLICE_S if deadline is None else min(_WAIT_SLICE_S, deadline - time.monotonic())
                if left <= 0:
                    raise WaitTimeout(f"the array was not ready within {timeout} s")
                self._changed.wait(left)
        if record.failure is not None:
            raise from_failure(record.failure)
        if record.state is DELETED:
            raise BufferDeleted(f"the array was deleted while it was waited for: {record.why_deleted}")

    def fetch(self, array: Array) -> np.ndarray[Any, Any]:
        """The array's value. The request goes to the hosts at once and is answered when the data is there."""
        self._check_not_ended()
        record, kind = array._buffer.record, array._type
        if self._core.queue:
            self.flush()
        if kind.cover is None:
            assert kind.slice is not None
            kind.cover = FetchPlan(kind.array, kind.spec, kind.slice.placed)
        try:
            return self._data.fetch(record.id, kind.cover, lambda: self._check_fetch(record))
        except PathwaysError as error:
            # The host saw a symptom; the controller knows the cause, and names it shortly after.
            if error.failure is not None and (record.state is PENDING or error.failure.kind == "HostLost"):
                self._wait_until(lambda: record.failure, _CAUSE_LIMIT_S)
            if record.failure is not None:
                raise from_failure(record.failure) from None
            raise

    def _check_fetch(self, record: BufferRecord) -> None:
        if record.failure is not None:
            raise from_failure(record.failure)
        if record.state is DELETED:
            raise BufferDeleted(f"the array was deleted while it was fetched: {record.why_deleted}")
        self._check_not_ended()

    # --- the end ------------------------------------------------------------------------------------------------------

    def leave_to_parent(self) -> None:
        """Ends the session in a fork, which has the sockets of its parent and none of the threads that read them. Takes
        no lock, since a thread that is not here may have it."""
        self._core.handle(Forked(), 0.0)

    def close(self) -> None:
        """Ends the session: its slices, programs and arrays on the cluster are freed, its open futures fail with
        `SessionClosed`."""
        if self.closed or os.getpid() != self._process:
            return  # a fork has the sockets of its parent, whose session goes on
        self._handle(Closing())
        with contextlib.suppress(PathwaysError):  # the stream's end has the same effect
            if not self.closed_because:
                self._connection.call(CloseSession(self.id), _CLOSE_LIMIT_S)
        self._disconnected("it was shut down")
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
