"""A session whose controller and hosts are the test: messages are recorded, calls and fetches answered by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from pathways_ray.client.ahead import Ahead
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.buffer import Upload
from pathways_ray.client.core import ClientCore
from pathways_ray.client.living import LivingUploads
from pathways_ray.client.session import Session
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import Failure
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport.capabilities import data_token
from pathways_ray.transport.messages import Accepted, CreateSlice, Message, Reply, SliceCreated
from tests.unit.helpers import placed

LIMIT_S = 20.0
VECTOR = ArrayType((2,), "float32")


class Controller:
    """In place of a connection. `sent` has the messages, `calls` the requests, `answers` replies or errors to them;
    `patient` says of each request whether it would wait for another controller."""

    url = "grpc://nowhere:1"

    def __init__(self) -> None:
        self.outbox = self
        self.sent: list[Message] = []
        self.calls: list[Any] = []
        self.patient: list[bool] = []
        self.timeouts: list[float] = []
        self.answers: dict[type, Any] = {}
        self.closed = False
        self.unexpected: BaseException = RuntimeError("what nobody has thought of")

    def send(self, message: Message) -> None:
        self.sent.append(message)

    send_later = send

    @property
    def put(self) -> Callable[[Message], None]:
        return self.sent.append

    def call(self, request: Any, timeout: float = 0.0, patient: bool = True) -> Reply:
        self.calls.append(request)
        self.patient.append(patient)
        self.timeouts.append(timeout)
        found = self.answers.get(type(request))
        if callable(found):
            found = found(request)
        if isinstance(found, Exception):
            raise found
        if found is None and isinstance(request, CreateSlice):
            found = SliceCreated(placed(len(self.calls), ["0.0", "0.1"]), "tag")
        return found or Accepted()

    def unsettle(self) -> None:
        pass

    give_up = hurry = leave = linger = unsettle

    def resume_session(self, request: Any, timeout: float) -> Any:
        raise self.unexpected

    def close(self) -> None:
        self.closed = True

    def take(self) -> list[Message]:
        found, self.sent = self.sent, []
        return found


class Hosts:
    """In place of the data streams. `uploads` has the callbacks of those under way, by buffer."""

    def __init__(self) -> None:
        self.ahead = Ahead()
        self.living = LivingUploads(data_token("", 1, None))
        self.changing = threading.RLock()
        self.uploads: dict[int, tuple[Upload, Callable[[Upload, int, Failure | None], None]]] = {}
        self.arrays: dict[int, np.ndarray] = {}
        self.moved: list[Any] = []
        self.failure: Failure | None = None
        self.while_sending: Callable[[], Any] = lambda: None
        self.fetched: Callable[[int], Any] = lambda buffer: np.zeros(2, np.float32)

    def upload(self, buffer: int, array: np.ndarray, *rest: Any) -> Upload:
        upload = Upload({0})
        *_, acknowledge, begun = rest
        self.arrays[buffer] = array
        self.uploads[buffer] = (upload, acknowledge)
        begun(upload)
        self.while_sending()
        return upload

    def acknowledge(self, buffer: int, failure: Failure | None = None) -> None:
        upload, acknowledge = self.uploads.pop(buffer)
        acknowledge(upload, 0, failure)

    def fetch(self, buffer: int, cover: Any, check: Callable[[], None]) -> Any:
        check()
        return self.fetched(buffer)

    def link_of(self, host: int) -> None:
        """No host was spoken to."""

    open = link_of

    def wake(self) -> None:
        pass

    look = wake

    def host_changed(self, address: Any) -> None:
        self.moved.append(address)

    def close(self, failure: Failure) -> None:
        self.failure = failure


class Offline:
    """A session of `max_launches`, with the ends of its connections in the hands of the test."""

    def __init__(self, max_launches: int = 16) -> None:
        self.controller, self.hosts = Controller(), Hosts()
        core = ClientCore(7, max_launches)
        self.session = Session(core, self.controller, self.hosts, ("cpu",))  # type: ignore[arg-type]
        self.where = VirtualSlice(self.session, placed(1, ["0.0", "0.1"]), "")
        self.kind = ArgumentType.of(VECTOR, False, self.where, ())

    def say(self, *messages: Message) -> None:
        """The controller says this; the reader's thread takes it."""
        for message in messages:
            self.session._driver.handle(message)


class Background:
    """A call in a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> Any:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error
        return self.result
