"""A session: the public face of a client's connection to a cluster.

The session joins four parts: `core` decides, `connection` and `data` talk to the controller and to hosts, and `driver`
executes the core's commands and has threads wait for its outcomes.

Nothing waits for a reply on the way of a launch. Ids of programs, launches and buffers are made here, and a launch
leaves in the thread that calls it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Sequence
from html import escape
from itertools import repeat
from typing import Any, Self

import numpy as np

from pathways_ray import limits
from pathways_ray.client import notebook, shown
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.array import Array
from pathways_ray.client.buffer import DELETED, Buffer, BufferRecord, Guard
from pathways_ray.client.callback_thread import CallbackThread
from pathways_ray.client.connection import Connection
from pathways_ray.client.core import ClientCore
from pathways_ray.client.data import DataLinks
from pathways_ray.client.debug_calls import DebugCalls
from pathways_ray.client.driver import Driver
from pathways_ray.client.events import Closing, Forked, Registered
from pathways_ray.client.fetches import CAUSE_LIMIT_S, Fetches
from pathways_ray.client.gpu_memory import leave_gpu_memory
from pathways_ray.client.guards import made_again
from pathways_ray.client.interrupted import check_not_mine, interrupt_again, is_mine, new_lock
from pathways_ray.client.mover import Mover
from pathways_ray.client.priorities import PRIORITY
from pathways_ray.client.reading import reading
from pathways_ray.client.resumption import Resumption
from pathways_ray.client.served import ServedCall, Server, values_of
from pathways_ray.client.session_questions import SessionQuestions
from pathways_ray.client.session_slices import SliceCalls
from pathways_ray.client.slices import array_belongs
from pathways_ray.client.uploads import UploadCalls
from pathways_ray.errors import BufferDeleted, ForeignArray, PathwaysError, WaitTimeout
from pathways_ray.ir.graph import Graph
from pathways_ray.observe.client_trace import ClientTrace
from pathways_ray.transport import messages as wire
from pathways_ray.transport.thread_links import is_writing

_EXPORT_PLATFORMS = {"gpu": "cuda"}
"""The platforms that `jax.export` calls by another name than devices do."""


def exported_for(*platforms: str) -> tuple[str, ...]:
    """Platforms of devices, by the names that `jax.export` has for them."""
    return tuple(_EXPORT_PLATFORMS.get(platform, platform) for platform in platforms)


_CLOSE_LIMIT_S = 5.0
"""Closing waits this long for the controller's answer; the stream's end has the same effect."""


class Session(SessionQuestions, SliceCalls, UploadCalls):
    """A connection to a cluster, made by `pw.init` and `pw.connect`.

        with pw.connect(url, token) as session:
            print(session.status()["sessions"])

    It ends with the block, and its slices and arrays with it.
    """

    def __init__(
        self,
        core: ClientCore,
        connection: Connection,
        data: DataLinks,
        platforms: tuple[str, ...],
        trusted: bool = False,
        ca: str | bytes | os.PathLike[str] | None = None,
        name: str = "",
    ) -> None:
        self.id = core.session
        self.url = connection.url
        self.platforms = platforms
        self.trusted = trusted
        self._core, self._connection, self._data = core, connection, data
        self._ca = ca
        self._driver = Driver(core, connection, data)
        self._fetches = Fetches(core, data, self._driver)
        # For handles (`BufferOwner`), without a call between.
        self.free, self.delete, self.cancel = self._driver.free, self._driver.delete, self._driver.cancel
        self.hurry = self._driver.hurry
        self.watch, self.unwatch = self._driver.watchers.append, self._driver.watchers.remove
        self.debug_calls, self.callbacks = DebugCalls(), CallbackThread()
        self._mover = Mover(core, connection, self._driver)
        reach = (self._mover.slices_held, self._mover.place, self._connect)
        self._driver.resume = Resumption(core, connection, self._driver, name, *reach).begin
        self.move_slice = self._mover.move
        self.guards: weakref.WeakValueDictionary[int, Guard] = weakref.WeakValueDictionary()
        self._knowing, self._released = weakref.WeakValueDictionary(), weakref.WeakValueDictionary()
        self._process, self._closes = os.getpid(), False
        self._making_default_slice = new_lock()

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
            core = ClientCore(opened.session, opened.max_launches, opened.fusion, opened.coalesce)
            data = DataLinks(opened.session, opened.data_token, opened.hosts, connection.data_trust)
            core.resume_tag, core.frees_in_turn = opened.resume_tag, data.living.has_quota
            platforms = exported_for(*opened.platforms)
            if "cuda" in platforms:
                leave_gpu_memory()
            session = cls(core, connection, data, platforms, opened.trusted, ca, name)
            session._connect(timeout)
        except BaseException:
            connection.close()
            raise
        return session

    def _connect(self, timeout: float = 10.0) -> None:
        core, driver = self._core, self._driver
        self._connection.start(core.under_way, core.composed, driver.received, driver.disconnected, timeout)

    def wait_for_islands(self) -> None:
        """Has the session, when it has given way, wait for an island that can hold its slices for as long as it takes:
        for programs that cannot call `resume`."""
        self._mover.return_limit_s = math.inf

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
        self._driver.check_open()

    def register(self, graph: Graph, encoded: bytes, functions: dict[str, bytes]) -> int:
        """Sends a program before its first launch; returns its number."""
        self._driver.check_active()
        number = self._core.new_program()
        self._driver.call(Registered(number, graph, encoded, functions))
        return number

    def unregister(self, program: int) -> None:
        """Drops a program that is launched no more. Safe in a destructor: the next registration sends it."""
        self._core.dropped.append(program)

    def launch(
        self,
        program: int,
        arguments: list[BufferRecord],
        results: tuple[ArgumentType, ...],
        donated: Sequence[BufferRecord] = (),
        why: str = "",
        inline: tuple[wire.InlineArgument, ...] = (),
    ) -> list[Array]:
        """Sends one launch, behind the uploads of its arguments; returns handles to its results at once. It may take
        the memory of the `donated` ones, and carries the `inline` ones.

        Waits only when the session has too many launches without an outcome.
        """
        core, driver = self._core, self._driver
        if core.ended is not None:
            self.check_open()
        if core.is_full:
            driver.wait_for_room()
        check_not_mine(*driver.locks)
        while True:
            if driver.suspension is not None:
                driver.check_not_suspended()
            with driver.sending:
                if driver.suspension is not None:  # since the look
                    continue
                if core.trace is not None:
                    core.trace.now = time.monotonic()
                made = core.new_buffers(len(results), results, program)
                try:
                    arrays = list(map(Array, map(Buffer, repeat(self), made), results))
                    message = core.launch(program, arguments, made, donated, why, PRIORITY.get(), inline)
                    if message is None:
                        driver.release_queue()
                    elif type(message) is wire.EarlyLaunch:
                        driver.hand_over(message)
                    else:
                        self._connection.outbox.send(message)
                except BaseException:  # Ctrl-C: who called it has no handle to what it makes
                    driver.do(core.interrupted(made))
                    self._let_go(donated)
                    raise
            break
        if core.queue:
            driver.sweep()
        if donated:  # other threads may wait for them
            self._let_go(donated)
            driver.wake_all()
        return arrays

    def _let_go(self, donated: Sequence[BufferRecord]) -> None:
        """Drops the values of arrays that are gone for their user, with what was asked for."""
        for record in donated:
            self._driver.siblings.forget(record.id)
            self._data.ahead.drop(record.id)

    def server_of(self, program: int) -> Server | None:
        """The host that may be asked for the values of a call, where nothing of the session stands against it."""
        core, driver = self._core, self._driver
        if program in core.renewals.stale or driver.suspension is not None or driver.held or core.ended is not None:
            return None
        if core.trace is not None or PRIORITY.get() or is_writing():
            return None
        found = core.early.server_of(program)
        return None if found is None else Server(*found)

    def served(self, program: int, call: ServedCall) -> Sequence[Any] | None:
        """The values of a call, which its host says; None where it has to be launched. Waits for them."""
        values = values_of(self._data, call, self._driver.check_not_ended)
        if values is None or isinstance(values, PathwaysError):
            self._core.early.served(program, False)
            return None
        self._core.early.served(program, True)
        return values

    def carries(self, program: int) -> int:
        """Bytes of arguments that the next launch of a program carries at most."""
        return self._core.carries(program, PRIORITY.get())

    def free_again(self, record: BufferRecord) -> None:
        """Frees a buffer where Ctrl-C has come in its destructor, which loses that. Twice does no harm."""
        interrupt_again()
        record.dropped = True
        if record.state is not DELETED:
            self.free(record)

    def check_mine(self, buffer: Buffer) -> None:
        """Raises unless the buffer may be an argument of a launch of this session. One that was lost is made again, if
        it is of an elastic step."""
        if buffer.session is not self:
            raise ForeignArray(f"the array {array_belongs(buffer.session.closed_because)}")
        self.settle(buffer.record)
        if buffer.record.state is DELETED:
            raise BufferDeleted(f"the array cannot be an argument: {buffer.record.why_deleted}")
        if buffer.is_lost:
            made_again(buffer)

    def settle(self, record: BufferRecord) -> None:
        """Waits until it is known whether a failed launch took the memory of a donated array."""
        if record.undecided:
            self._driver.wait_until(lambda: not record.undecided, CAUSE_LIMIT_S)

    def set_trace(self, trace: ClientTrace | None) -> None:
        """Notes launches in a trace from now on, or no longer."""
        self._core.trace = trace

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, record: BufferRecord, timeout: float | None = None, there: bool = False) -> None:
        """Waits for the outcome of a buffer, or until it is `there`; raises its failure. A timeout of a second or more
        says why."""
        check_not_mine(*self._driver.locks)
        try:
            with self.lasting(record):
                self._driver.wait(record, timeout, there)
        except WaitTimeout as error:
            self.explain_timeout(error, record, timeout)
            raise

    def wait_there(self, record: BufferRecord, until: float | None) -> bool:
        """Waits until the hosts of a buffer have it, perhaps only `until` a time of `time.monotonic`; false where its
        outcome has to be waited for, as in a signal handler that has interrupted a call of its thread."""
        if any(map(is_mine, self._driver.locks)) or is_writing():
            return False
        return self._driver.wait_there(record, until)

    def flush(self, timeout: float = limits.DEFAULT_TIMEOUT_S) -> None:
        """Waits until everything that was called before is on its way."""
        self._driver.flush(timeout)

    def fetch(self, array: Array) -> np.ndarray[Any, Any]:
        """The array's value. The request goes to the hosts at once and is answered when the data is there."""
        if self._core.ended is not None or self._core.queue:
            self._before_fetch()
        record, kind = array._buffer.record, array._type
        if shown.waits is None:
            return reading(self._driver, self._fetches.value, record, kind)
        with self.lasting(record):
            return reading(self._driver, self._fetches.value, record, kind)

    # --- the end ------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        closed = self.closed_because
        return f"pw.Session({self.id} of {self.url}{f', closed: {closed}' if closed else ''})"

    def _repr_html_(self) -> str:
        """The cluster in a notebook: islands, hosts and devices, and who holds these now."""
        with contextlib.suppress(PathwaysError):
            return notebook.cluster_html(self.url, self.id, self.status())
        return f"<p>{escape(repr(self))}</p>"  # it is closed, or the controller is away

    def leave_to_parent(self) -> None:
        """Ends the session in a fork, which has the sockets of its parent and none of the threads that read them. Takes
        no lock, since a thread that is not here may have it."""
        self._core.handle(Forked(), 0.0)

    def close(self) -> None:
        """Ends the session: its slices, programs and arrays on the cluster are freed, its open futures fail with
        `SessionClosed`."""
        if self._closes or os.getpid() != self._process:
            return  # a fork has the sockets of its parent, whose session goes on
        self._closes = True
        try:
            try:
                self.debug_calls.close()
                self.callbacks.flush()
                self._driver.handle(Closing())
                with contextlib.suppress(PathwaysError):  # the stream's end has the same effect
                    if not self.closed_because and not self._core.away:
                        self._connection.call(wire.CloseSession(self.id), _CLOSE_LIMIT_S)
            finally:
                self._hang_up()
        except BaseException:  # Ctrl-C ends the session all the same; a second call does what is left
            self._closes = False
            raise

    def _hang_up(self) -> None:
        self._driver.handle(Closing())  # if Ctrl-C came before that: no other controller is looked for
        self._driver.disconnected("it was shut down")
        self.callbacks.close()
        self._mover.close()
        self._connection.close()
        self.forget_programs()
        self._core.renewals.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
