"""The calls of the protocol: the stream of requests, and those that bring and fetch bytes beside it.

They come on a connection of the client's (`wire`), and are worked off by its reader in the order in which they come.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from pathways_ray.errors import PathwaysError
from pathways_ray.proxy import events as do
from pathways_ray.proxy.arrays import Code, Refused, Status
from pathways_ray.proxy.connection import Connection, Opened, Write
from pathways_ray.proxy.descriptors import messages
from pathways_ray.proxy.folders import folder_of, taken
from pathways_ray.proxy.handover import Handovers
from pathways_ray.proxy.http2 import Called, Event, Finished, Gone, Message
from pathways_ray.proxy.readers import Readers
from pathways_ray.proxy.wire import Wire

SERVICE = "xla.ifrt.proxy.GrpcIfrtService"

FIRST_VERSION, LAST_VERSION = 16, 25
"""Versions of the protocol that are known here; JAX 0.8 to 0.10 speak them."""

LAST_FORMAT = 3
"""The last version of the serialised parts."""

CHUNK_BYTES = 1 << 20
"""Bytes of one message of a transfer, as the client's own."""

MAX_MESSAGE_BYTES, MAX_QUESTION_BYTES = 1 << 30, 1 << 14
"""Bytes of a request, which may be a program with its constants or a part of a transfer; of a call that only asks."""

GIVEN_UP = Status(Code.CANCELLED, "the client has given up the call that was to bring the bytes of an array")

TOKEN = "token"
"""The key of the client's data under which it may show its right to attach."""

FOLDER = "folder"
"""The key under which it may name the folder in which it leaves big arrays."""

_STORE_METADATA, _SESSION_METADATA = (
    "ifrt-proxy-grpc-host-buffer-store-metadata-bin",
    "ifrt-proxy-grpc-ifrt-session-metadata-bin",
)


class Attached:
    """The clients of a proxy.

    Args:
        open_session, token: see `server.ProxyServer`.
        readers: read the programs of clients.
    """

    def __init__(self, open_session: Callable[[], Opened], readers: Readers, token: str) -> None:
        self.open_session = open_session
        self.readers = readers
        self.handovers = Handovers()
        self._token = token.encode()
        self.connections: dict[int, Connection] = {}
        self._closed = False
        self._numbers = iter(lambda: secrets.randbits(63), 0)  # who knows one may bring and fetch bytes

    def attach(
        self, said: Said, write: Write, write_later: Write, leave: Callable[[], None], end: Callable[[], None]
    ) -> Connection:
        """A further client; see `Connection`.

        Raises:
            Refused: it did not show the token, or shares what it may not, or the cluster has no session for it.
        """
        if self._token and not hmac.compare_digest(said.token, self._token):
            raise Refused(Code.UNAUTHENTICATED, "the token of this proxy is missing or wrong")
        folder = folder_of(said.folder)
        try:
            opened, number = self.open_session(), next(self._numbers)
            try:
                handover = self.handovers.open()
                connection = Connection(number, opened, self.readers, handover, write, write_later, leave, end)
            except BaseException:
                opened[0].close()
                raise
        except PathwaysError as error:
            raise Refused(Code.RESOURCE_EXHAUSTED, f"{type(error).__name__}: {error}") from None
        connection.folder = folder
        self.connections[connection.number] = connection
        if self._closed:
            self.close()
        return connection

    def find(self, number: int) -> Connection:
        """Raises `Refused` for a client that is not attached."""
        found = self.connections.get(number)
        if found is None:
            raise Refused(Code.NOT_FOUND, f"there is no client with session {number}")
        return found

    def leave(self, connection: Connection) -> None:
        """Ends a client's session. That may take some seconds, so another thread does it."""
        if self.connections.pop(connection.number, None) is not None:
            threading.Thread(target=connection.close, name="pathways-proxy-close", daemon=True).start()

    def close(self) -> None:
        """Ends all sessions, and those that are still to come."""
        self._closed = True
        while self.connections:
            with contextlib.suppress(KeyError):
                self.connections.popitem()[1].close(remove_within_s=0.0)
        self.handovers.close()


class Said(NamedTuple):
    """A client's words about itself when it attaches."""

    token: bytes = b""
    folder: str = ""


class _Store:
    """Bytes of a host buffer that are coming."""

    def __init__(self, said: Any, connection: Connection) -> None:
        self.said, self.connection = said, connection
        self.data = bytearray()
        self._reserved = 0

    def reserve(self) -> None:
        """Raises `Refused` where there is no room for what was announced."""
        self.connection.host_buffers.reserve(self.said.buffer_size)
        self._reserved = self.said.buffer_size

    def release(self) -> None:
        self.connection.host_buffers.release(self._reserved)
        self._reserved = 0

    def check(self, over: bool) -> None:
        came, announced = len(self.data), self.said.buffer_size
        if came > announced or (over and came < announced):
            raise Refused(Code.DATA_LOSS, f"{came} bytes came, and {announced} were announced")


class Standing(IntEnum):
    """Steps of what is known of a connection: nobody has called yet; somebody has, and may be about to attach; a client
    is attached here, or brings and fetches its bytes, for which it has a connection of their own."""

    SILENT = 0
    CALLED = 1
    USED = 2


class Calls:
    """The calls of one client's connection."""

    def __init__(self, attached: Attached, connection: socket.socket, ended: Callable[[], None]) -> None:
        self._attached = attached
        self._messages = messages()
        self._closed = ended
        self.wire = Wire(connection, _LIMITS, self._take, self._ended)
        self._clients: dict[int, Connection] = {}
        self._stores: dict[int, _Store] = {}
        self._questions: dict[int, Callable[[Calls, int, bytes], None]] = {}
        self._called_before = False
        self._bytes_of = 0  # the session whose bytes were last brought or fetched here

    @property
    def standing(self) -> Standing:
        """Says which connections give up their places first, where none are left."""
        if self._clients or self._bytes_of in self._attached.connections:
            return Standing.USED
        return Standing.CALLED if self._called_before else Standing.SILENT

    def _find(self, number: int) -> Connection:
        """The client whose bytes go here, which may have attached on another connection. Raises `Refused`."""
        found = self._attached.find(number)
        self._bytes_of = number
        return found

    def _take(self, events: Sequence[Event]) -> None:
        at, count = 0, len(events)
        while at < count:
            event = events[at]
            at += 1
            stream = event.stream
            if type(event) is Message and stream in self._clients:
                found = [event.data]
                while at < count and type(other := events[at]) is Message and other.stream == stream:
                    found.append(other.data)
                    at += 1
                self._requests(stream, found)
                continue
            try:
                _TAKEN[type(event)](self, event)
            except Refused as refused:
                self.wire.finish(stream, *refused.status)
                self._forget(stream, refused.status)

    def _requests(self, stream: int, found: Sequence[bytes]) -> None:
        try:
            self._clients[stream].requests(found)
        except Exception as error:  # of bytes that are no request
            self.wire.finish(stream, Code.INTERNAL, f"a request cannot be read: {error}")
            self._forget(stream)

    def _called(self, event: Called) -> None:
        stream, name = event.stream, event.path.rpartition("/")[2]
        self._called_before = True
        if name in _QUESTIONS:
            self._questions[stream] = _QUESTIONS[name]
        elif name == "IfrtSession":
            client = self._clients[stream] = self._attached.attach(
                self._said(event),
                partial(self.wire.send, stream),
                partial(self.wire.send_later, stream),
                self.wire.flush,
                partial(self._end, stream),
            )
            session = client.carrier.session
            self.wire.watch(session.answers, session.read_answers)
        else:
            try:
                said = self._messages.GrpcHostBufferStoreMetadata.FromString(event.metadata[_STORE_METADATA])
            except Exception as error:
                raise Refused(Code.INVALID_ARGUMENT, f"the metadata cannot be read: {error}") from None
            store = self._stores[stream] = _Store(said, self._find(said.session_id))
            store.reserve()

    def _said(self, event: Called) -> Said:
        with contextlib.suppress(Exception):  # whatever bytes those are
            data = event.metadata.get(_SESSION_METADATA, b"")
            said = self._messages.GrpcIfrtSessionMetadata.FromString(data).initialization_data.attributes
            shown, folder = (said[key].string_value if key in said else b"" for key in (TOKEN, FOLDER))
            return Said(shown, folder.decode())
        return Said()

    def _came(self, event: Message) -> None:
        if store := self._stores.get(event.stream):
            try:
                store.data += self._messages.GrpcHostBufferStoreRequest.FromString(event.data).data
            except Exception as error:
                raise Refused(Code.INVALID_ARGUMENT, f"a part of a host buffer cannot be read: {error}") from None
            store.connection.bytes_came = time.monotonic()
            store.check(over=False)
        elif question := self._questions.pop(event.stream, None):
            try:
                question(self, event.stream, event.data)
            except Refused:
                raise
            except Exception as error:
                raise Refused(Code.INVALID_ARGUMENT, f"the call failed: {type(error).__name__}: {error}") from None

    def _finished(self, event: Finished) -> None:
        stream = event.stream
        if store := self._stores.get(stream):
            store.check(over=True)
            store.release()
            store.connection.host_buffers.keep(store.said.handle, store.data)
            del self._stores[stream]
            store.connection.handle(do.Stored(store.said.handle))
            self._answer(stream, self._messages.GrpcHostBufferStoreResponse())
        elif stream in self._clients:
            self._end(stream)

    def _gone(self, event: Gone) -> None:
        self._forget(event.stream)

    def _forget(self, stream: int, why: Status = GIVEN_UP) -> None:
        if store := self._stores.pop(stream, None):
            store.release()
            store.connection.handle(do.Stored(store.said.handle, why))
        self._questions.pop(stream, None)
        if client := self._clients.pop(stream, None):
            self.wire.unwatch(client.carrier.session.answers)
            self._attached.leave(client)

    def _end(self, stream: int) -> None:
        """Ends the stream of a client whose session is over; any thread may call it."""
        self.wire.finish(stream)
        self._forget(stream)

    def run(self) -> None:
        """Works off what comes, until the connection is over. Bytes that were on their way come no more: the client may
        live on, on another connection."""
        try:
            self.wire.run()
        finally:
            for stream in list(self._stores):
                self._forget(stream)

    def _ended(self) -> None:
        """Ends the sessions of the connection; any thread may call it."""
        for client in list(self._clients.values()):
            self._attached.leave(client)
        self._closed()

    def _answer(self, stream: int, message: Any) -> None:
        self.wire.send(stream, message.SerializeToString())
        self.wire.finish(stream)

    # --- calls with one message ---------------------------------------------------------------------------------------

    def _version(self, stream: int, data: bytes) -> None:
        request = self._messages.GrpcGetVersionRequest.FromString(data)
        first, last = request.min_version, request.max_version
        version = min(last.protocol_version, LAST_VERSION)
        if version < max(first.protocol_version, FIRST_VERSION) or first.ifrt_serdes_version_number > LAST_FORMAT:
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"the client speaks versions {first.protocol_version} to {last.protocol_version} of the protocol, this "
                f"proxy {FIRST_VERSION} to {LAST_VERSION}, which are those of JAX 0.8 to 0.10",
            )
        made = self._messages.GrpcGetVersionResponse()
        made.version.protocol_version = version
        made.version.ifrt_serdes_version_number = min(last.ifrt_serdes_version_number, LAST_FORMAT)
        self._answer(stream, made)

    def _read_from_disk(self, stream: int, data: bytes) -> None:
        """Takes bytes that the client has left in a file."""
        said = self._messages.GrpcHostBufferReadFromDiskRequest.FromString(data).metadata
        connection = self._find(said.session_id)
        if connection.folder is None:
            raise Refused(Code.UNIMPLEMENTED, "the client has named no folder that it shares")
        try:
            found = taken(connection.folder, said.handle, said.buffer_size)
            connection.host_buffers.keep(said.handle, found)
        except (OSError, ValueError, Refused) as error:
            why = Status(Code.DATA_LOSS, f"array {said.handle} cannot be taken from its file: {error}")
            connection.handle(do.Stored(said.handle, why))
            raise Refused(*why) from None
        connection.handle(do.Stored(said.handle))
        self._answer(stream, self._messages.GrpcHostBufferReadFromDiskResponse())

    def _look_up(self, stream: int, data: bytes) -> None:
        request = self._messages.GrpcHostBufferLookupRequest.FromString(data)
        field = self._messages.GrpcHostBufferLookupResponse.DESCRIPTOR.fields_by_name["data"].number

        def serve(found: Any) -> None:
            if isinstance(found, Status):
                self.wire.finish(stream, *found)
                return
            view = memoryview(found)
            for start in range(0, len(view), CHUNK_BYTES):
                part = view[start : start + CHUNK_BYTES]  # as it lies: copied by the kernel alone
                self.wire.send(stream, _head(field, len(part)), part)
            self.wire.finish(stream)

        self._find(request.session_id).host_buffers.look_up(request.handle, serve)

    def _delete(self, stream: int, data: bytes) -> None:
        request = self._messages.GrpcHostBufferDeleteRequest.FromString(data)
        self._find(request.session_id).host_buffers.drop(request.handle)
        self._answer(stream, self._messages.GrpcHostBufferDeleteResponse())


def _head(field: int, size: int) -> bytes:
    """The beginning of a message that consists of bytes."""
    found = bytearray((field << 3 | 2,))
    while size >= 0x80:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    found.append(size)
    return bytes(found)


_TAKEN: Mapping[type, Callable[[Calls, Any], None]] = {
    Called: Calls._called,
    Message: Calls._came,
    Finished: Calls._finished,
    Gone: Calls._gone,
}

_QUESTIONS: Mapping[str, Callable[[Calls, int, bytes], None]] = {
    "GetVersion": Calls._version,
    "HostBufferReadFromDisk": Calls._read_from_disk,
    "HostBufferLookup": Calls._look_up,
    "HostBufferDelete": Calls._delete,
}

_LIMITS = {f"/{SERVICE}/{name}": MAX_QUESTION_BYTES for name in _QUESTIONS} | {
    f"/{SERVICE}/{name}": MAX_MESSAGE_BYTES for name in ("IfrtSession", "HostBufferStore")
}
