"""The questions that a session asks: the cluster's state, why something waits, what compilers say, for shards."""

from __future__ import annotations

import contextlib
import json
import os
from functools import partial
from typing import Any

import numpy as np

from pathways_ray import limits
from pathways_ray.client import shown
from pathways_ray.client.array import Array
from pathways_ray.client.buffer import PENDING, BufferRecord
from pathways_ray.client.connection import Connection
from pathways_ray.client.core import ClientCore
from pathways_ray.client.data import DataLinks
from pathways_ray.client.driver import Driver
from pathways_ray.client.events import Renewing
from pathways_ray.client.fetches import Fetches
from pathways_ray.client.proxy_process import ProxyProcess
from pathways_ray.client.questions import Done, Question, read
from pathways_ray.client.reading import reading
from pathways_ray.client.why import EXPLAIN_WITHIN_S, why
from pathways_ray.errors import PathwaysError, UsageError
from pathways_ray.observe.computations import REPORTS, Computation, each_once
from pathways_ray.observe.why import WHY, Why
from pathways_ray.transport import messages as wire
from pathways_ray.transport.shared_memory import SharedFile

EXPLAINED_FROM_S = 1.0
"""A wait that ends by its timeout says why from this long on: shorter ones are looks, of which there may be many."""

_EXPLAIN_LIMIT_S = 180.0
"""Explaining a registered program waits this long for it to be compiled."""

_NOTHING = contextlib.nullcontext()


class SessionQuestions:
    """The part of a session (`client.session.Session`) that asks, and launches nothing."""

    id: int
    url: str
    _ca: str | bytes | os.PathLike[str] | None
    _core: ClientCore
    _connection: Connection
    _data: DataLinks
    _driver: Driver
    _fetches: Fetches

    def status(self) -> dict[str, Any]:
        """The state of the whole cluster, as JSON has it.

            print(session.status()["islands"])

        Islands, devices, slices, sessions and the number of live buffers.
        """
        self._driver.check_open()
        reply = self._connection.call(wire.Status(self.id))
        assert isinstance(reply, wire.StatusReply)
        return dict(json.loads(reply.text))

    def why(self, record: BufferRecord, limit_s: float = limits.DEFAULT_TIMEOUT_S) -> Why:
        """See `pw.Array.why`."""

        def ask(subject: str, number: int) -> Why:
            self._driver.check_open()
            reply = self._connection.call(wire.Look(self.id, subject, number, self.id), limit_s)
            assert isinstance(reply, wire.StatusReply)
            return WHY.decode(reply.text)

        return why(self._core, record, ask, self._driver.hold_text())

    def computations(self, program: int, text: bool = False) -> list[Computation]:
        """The computations of a program that hosts have compiled, with what their compilers say, and with `text` their
        code."""
        self._driver.check_open()
        reply = self._connection.call(wire.Look(self.id, "code" if text else "computations", program, self.id))
        assert isinstance(reply, wire.StatusReply)
        return each_once(REPORTS.decode(reply.text))

    def proxy(self, devices: int = 0, name: str = "proxy") -> ProxyProcess:
        """A proxy of the cluster, by which unmodified JAX programs use it, as this session's tenant.

            with session.proxy(devices=4) as proxy:
                subprocess.run(["python", "train.py"], env=os.environ | proxy.env)

        Each program that attaches gets a session and devices of its own.

        Args:
            devices: of each program; 0 stands for all of one island.
            name: of the sessions, shown in status.

        Raises:
            UsageError: the CA certificates of this session are bytes, which the proxy cannot be told.
            ControllerLost: it did not start.
        """
        self._driver.check_open()
        if isinstance(self._ca, bytes):
            raise UsageError("a proxy takes the CA certificates from a file: pass ca= as a path, or set PATHWAYS_CA")
        return ProxyProcess(self.url, self._connection.token, str(self._ca or ""), devices, name)

    def explain(self, program: int, graph: bytes) -> wire.Explained:
        """The controller's placement of a program; waits until it is compiled when it is registered."""
        self._driver.call(Renewing(program))
        self._driver.flush(limits.DEFAULT_TIMEOUT_S)
        self._driver.check_open()
        reply = self._connection.call(wire.Explain(self.id, program, graph), _EXPLAIN_LIMIT_S)
        assert isinstance(reply, wire.Explained)
        return reply

    def await_outcomes(self) -> None:
        """Waits until the launches have outcomes that hosts were handed before they were sent, or whose results are
        there, so that the records of all processes have them; one second at most."""
        core = self._core
        self._driver.hurry()
        self._driver.wait_until(lambda: not core.early.handed and not core.are_some_there(), 1.0)

    def explain_timeout(self, error: BaseException, record: BufferRecord, timeout: float | None) -> None:
        """Adds to the end of a wait of a second or more why it was not over, if the controller says so within half of
        that time."""
        if timeout is not None and timeout >= EXPLAINED_FROM_S:
            with contextlib.suppress(PathwaysError):
                error.add_note(str(self.why(record, min(EXPLAIN_WITHIN_S, timeout / 2))))

    def lasting(self, record: BufferRecord) -> contextlib.AbstractContextManager[None]:
        """A wait for a buffer, as `pw.progress()` shows it."""
        if shown.waits is None or record.state is not PENDING:
            return _NOTHING
        return shown.waits.waiting(partial(self.why, record, EXPLAIN_WITHIN_S))

    # --- shards, also for a loop that does not wait -------------------------------------------------------------------

    def fetch_shard(self, array: Array, place: int, into: SharedFile | None = None) -> np.ndarray[Any, Any]:
        """The shard of an array on device number `place` of its slice; a file in memory of its size may take it."""
        self._before_fetch()
        return reading(self._driver, self._fetches.shard, array._buffer.record, array._type, place, into)

    def _before_fetch(self) -> None:
        """Hosts answer when the value is there. So nobody waits here for the queue: what is in it may be that of other
        threads, whose uploads follow each other without end."""
        if self._core.ended is not None:
            self._driver.check_not_ended()
        if self._core.queue:
            self._driver.sweep()

    def ask_for_shard(self, array: Array, place: int, done: Done) -> Question | None:
        """Asks for the shard of an array on device number `place` of its slice: `done` gets it, from the thread that
        reads. The loop polls `answers` and calls `read_answers`. None where it has to be fetched."""
        return self._fetches.ask_for_shard(array._buffer.record, array._type, place, done)

    def hasten(self, array: Array) -> Question | None:
        """Has watchers hear soon whether an array is there for which somebody waits; see `Fetches.hasten`."""
        record = array._buffer.record
        return self._fetches.hasten(record) if record.early and record.state is PENDING else None

    @property
    def answers(self) -> int:
        """The number of a file that can be read when answers have come."""
        return self._data.reader.fileno()

    def read_answers(self) -> None:
        """Takes the answers that have come."""
        read(self._data)

    def take_back(self, question: Question) -> bool:
        """Gives a question up, such as that for an array that has failed; False when it has been answered."""
        return self._fetches.take_back(question)
