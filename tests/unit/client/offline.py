"""A session whose controller and hosts are the test: messages are recorded, calls and fetches answered by hand."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathways_ray.client.ahead import Ahead
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.buffer import Upload
from pathways_ray.client.core import ClientCore
from pathways_ray.client.data_link import Sent
from pathways_ray.client.living import LivingUploads
from pathways_ray.client.local_reader import LocalReader
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


class Link:
    """In place of the stream to host 0, for uploads that leave together."""

    host, epoch, dead = 0, 1, None

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.uploads: dict[int, Sent] = {}

    def send(self, messages: Sequence[Any]) -> None:
        self._hosts.batches.append([one.buffer for one in messages])
        for one in messages:
            (data,) = one.whole
            self._hosts.arrays[one.buffer] = np.frombuffer(data, one.type.dtype).reshape(one.type.shape)
            self._hosts.uploads[one.buffer] = self.uploads.pop(one.request)
        self._hosts.while_sending()

    def give_up(self, request: int) -> None:
        if (sent := self.uploads.pop(request, None)) is not None:
            sent.acknowledge(sent.upload, 0, Failure("Cancelled", "the put was interrupted"))


class Hosts:
    """In place of the data streams. `uploads` has the callbacks of those under way, by buffer; `batches` the buffers of
    those that left together."""

    def __init__(self) -> None:
        self.ahead = Ahead()
        self.living = LivingUploads(data_token("", 1, None))
        self.changing = threading.RLock()
        self.uploads: dict[int, tuple[Upload, Callable[[Upload, int, Failure | None], None]]] = {}
        self.arrays: dict[int, np.ndarray] = {}
        self.batches: list[list[int]] = []
        self.moved: list[Any] = []
        self._link, self._requests = Link(self), itertools.count(1)
        self.reader, self.awaited = LocalReader(), dict[int, tuple[Callable[[], bool], Callable[[], None]]]()
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

    def link_to(self, host: int) -> Link:
        return self._link

    def new_request(self) -> int:
        return next(self._requests)

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
        self.reader.wake_all()

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
