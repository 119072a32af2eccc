"""The door of a proxy: the protocol's calls, on a socket that only its owner reaches.

A client opens one stream of requests and answers, and brings and fetches bytes by calls beside it. Each stream has a
session of the runtime, with slices of its own; when the stream ends, whatever ends it, the session does, and all is
free.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import mmap
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from pathways_ray.client.session import Session
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import PathwaysError, UsageError
from pathways_ray.proxy import events as do
from pathways_ray.proxy.arrays import Code, Refused, Status
from pathways_ray.proxy.carrier import MEMORY_KINDS, Carrier
from pathways_ray.proxy.codec import Reader
from pathways_ray.proxy.core import ProxyCore
from pathways_ray.proxy.descriptors import messages
from pathways_ray.proxy.host_buffers import HostBuffers

_log = logging.getLogger(__name__)

SERVICE = "xla.ifrt.proxy.GrpcIfrtService"

FIRST_VERSION, LAST_VERSION = 16, 25
"""Versions of the protocol that are known here; JAX 0.8 to 0.10 speak them."""

LAST_FORMAT = 3
"""The last version of the serialised parts."""

CHUNK_BYTES = 1 << 20
"""Bytes of one message of a transfer, as the client's own."""

CALLS = 64
"""Calls at a time: a client's stream, and its transfers."""

TOKEN = "token"
"""The key of the client's data under which it may show its right to attach."""

_STORE_METADATA, _SESSION_METADATA = (
    "ifrt-proxy-grpc-host-buffer-store-metadata-bin",
    "ifrt-proxy-grpc-ifrt-session-metadata-bin",
)

Opened = tuple[Session, list[VirtualSlice]]


class Connection:
    """One client: its core, the carrier to the runtime, and the answers on their way."""

    def __init__(self, number: int, opened: Opened) -> None:
        self.number = number
        session, wholes = opened
        self.messages = messages()
        self.host_buffers = HostBuffers()
        self.carrier = Carrier(session, wholes, self.messages, self.host_buffers, self.handle)
        self.core = ProxyCore(Reader(self.messages), range(len(self.carrier.origins)))
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ended = False
        self._lock = threading.Lock()
        self._look = False
        self._numbers = itertools.count()
        session.watch(self._changed)

    def handle(self, event: do.Event) -> None:
        """Takes an event to the core, and carries out what it decides."""
        with self._lock:
            self._carry_out(event)
        self._sweep()

    def request(self, request: do.Requested) -> None:
        """Takes a request; one that trips over a mistake of ours gets that for an answer, and others go on."""
        try:
            self.handle(request)
        except Exception as error:
            _log.exception("request %s failed", request.kind)
            status = Status(Code.INTERNAL, f"{request.kind} failed in the proxy: {type(error).__name__}: {error}")
            self._answer(do.Reply(request.op, request.context, status=status))

    def _carry_out(self, event: do.Event) -> None:
        following = [event]
        while following:
            for command in self.core.handle(following.pop(0)):
                if isinstance(command, do.Reply):
                    self._answer(command)
                else:
                    following += self.carrier.carry_out(command)

    def _answer(self, reply: do.Reply) -> None:
        if reply.kind == "init_response":
            reply = reply._replace(body=self._introduction())
        # An answer that the client does not count has a number that never comes, so that it is not waited for.
        number = next(self._numbers) if reply.counted else 1 << 60
        self.answers.put(self.carrier.writer.response(reply, number))

    def _changed(self) -> None:
        """Notes that arrays may have got their outcomes. Called by threads of the session, so it does not wait: the
        holder of the lock looks when done."""
        self._look = True
        self._sweep()

    def _sweep(self) -> None:
        while self._look and self._lock.acquire(blocking=False):
            try:
                self._look = False
                for event in self.carrier.settled():
                    self._carry_out(event)
                if self.carrier.session.closed_because:
                    self.answers.put(None)  # the client sees the end, and may attach again
            finally:
                self._lock.release()

    def close(self) -> None:
        """Ends the session, and the answers."""
        if not self.ended:
            self.ended = True
            self.answers.put(None)
            self.carrier.close()

    def _introduction(self) -> Any:
        """The devices and memories of the client."""
        made = self.messages.InitResponse(
            session_id=self.number,
            platform_name=self.carrier.session.platforms[0],
            platform_version="pathways-ray",
            platform_id=1,
            process_index=0,
            runtime_type="pathways-ray",
        )
        islands: list[VirtualSlice] = []
        for number, (whole, place) in enumerate(self.carrier.origins):
            if whole not in islands:
                islands.append(whole)
            text = f"PathwaysDevice(id={number}, at={whole.devices[place]})"
            device = made.all_devices.add(
                id=number,
                local_device_id=number,
                local_hardware_id=number,
                platform_name=made.platform_name,
                device_kind=made.platform_name,
                default_memory_id=number * len(MEMORY_KINDS),
                debug_string=text,
                to_string=text,
            )
            if self.carrier.origins[-1][0] is not self.carrier.origins[0][0]:
                device.attributes.attributes["slice_index"].int64_value = len(islands) - 1
            made.primary_device_ids.append(number)
            made.addressable_device_ids.append(number)
            for k, kind in enumerate(MEMORY_KINDS):
                memory = number * len(MEMORY_KINDS) + k
                device.memory_ids.append(memory)
                text = f"{kind} of device {number}"
                made.memories.add(
                    id=memory,
                    memory_space_kind=kind,
                    kind_id=k,
                    device_ids=[number],
                    debug_string=text,
                    to_string=text,
                )
        for key, said in (("supports_executable_serialization", False), ("serialize_with_sdy", True)):
            made.client_attributes.attributes[key].bool_value = said
        return made


class ProxyServer:
    """Serves clients of one tenant.

    Args:
        open_session: a session of the tenant with the slices that a client gets.
        target: where to listen: `unix:path`, or `address:port`.
        token: what clients have to show on a port; sockets in a folder of the owner's need none.
        shared: a folder of the owner's alone in which clients leave big arrays.
    """

    def __init__(
        self, open_session: Callable[[], Opened], target: str, token: str = "", shared: Path | None = None
    ) -> None:
        self._open_session = open_session
        self._shared = shared
        self._token = token
        self._connections: dict[int, Connection] = {}
        self._numbers = iter(lambda: secrets.randbits(63), 0)  # who knows one may bring and fetch bytes
        self._messages = messages()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(CALLS, "pathways-proxy"),
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 3_000),
                ("grpc.keepalive_timeout_ms", 4_000),
                ("grpc.http2.max_pings_without_data", 0),
            ],
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._handlers()),))
        try:
            self.port = self._server.add_insecure_port(target)
        except RuntimeError as error:
            raise UsageError(f"cannot listen at {target}: {error}") from None

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        """Ends all connections, and their sessions."""
        for connection in list(self._connections.values()):
            connection.close()
        self._server.stop(1.0).wait(5.0)

    @property
    def clients(self) -> int:
        """Clients that are attached."""
        return len(self._connections)

    def _handlers(self) -> dict[str, Any]:
        m = self._messages

        def written(message: Any) -> bytes:
            return bytes(message.SerializeToString())

        return {
            "GetVersion": grpc.unary_unary_rpc_method_handler(
                self._version, m.GrpcGetVersionRequest.FromString, written
            ),
            "IfrtSession": grpc.stream_stream_rpc_method_handler(self._session, m.IfrtRequest.FromString, written),
            "HostBufferStore": grpc.stream_unary_rpc_method_handler(
                self._store, m.GrpcHostBufferStoreRequest.FromString, written
            ),
            "HostBufferReadFromDisk": grpc.unary_unary_rpc_method_handler(
                self._read_from_disk, m.GrpcHostBufferReadFromDiskRequest.FromString, written
            ),
            "HostBufferLookup": grpc.unary_stream_rpc_method_handler(
                self._look_up, m.GrpcHostBufferLookupRequest.FromString, written
            ),
            "HostBufferDelete": grpc.unary_unary_rpc_method_handler(
                self._delete, m.GrpcHostBufferDeleteRequest.FromString, written
            ),
        }

    # --- calls --------------------------------------------------------------------------------------------------------

    def _version(self, request: Any, context: grpc.ServicerContext) -> Any:
        first, last = request.min_version, request.max_version
        version = min(last.protocol_version, LAST_VERSION)
        if version < max(first.protocol_version, FIRST_VERSION) or first.ifrt_serdes_version_number > LAST_FORMAT:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the client speaks versions {first.protocol_version} to {last.protocol_version} of the protocol, this "
                f"proxy {FIRST_VERSION} to {LAST_VERSION}, which are those of JAX 0.8 to 0.10",
            )
        made = self._messages.GrpcGetVersionResponse()
        made.version.protocol_version = version
        made.version.ifrt_serdes_version_number = min(last.ifrt_serdes_version_number, LAST_FORMAT)
        return made

    def _admit(self, context: grpc.ServicerContext) -> None:
        """Ends a call of a client that does not show the token."""
        shown = b""
        data = _metadata(context).get(_SESSION_METADATA, b"")
        with contextlib.suppress(Exception):  # whatever bytes those are
            said = self._messages.GrpcIfrtSessionMetadata.FromString(data).initialization_data.attributes
            shown = said[TOKEN].string_value if TOKEN in said else b""
        if self._token and not hmac.compare_digest(shown, self._token.encode()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token of this proxy is missing or wrong")

    def _session(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        self._admit(context)
        try:
            connection = Connection(next(self._numbers), self._open_session())
        except PathwaysError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{type(error).__name__}: {error}")
            return
        self._connections[connection.number] = connection
        context.add_callback(lambda: self._ended(connection))
        reader = threading.Thread(target=self._read, args=(connection, requests), daemon=True)
        reader.name = f"pathways-proxy-read-{connection.number}"
        reader.start()
        while (answer := connection.answers.get()) is not None:
            yield answer

    def _read(self, connection: Connection, requests: Iterator[Any]) -> None:
        with contextlib.suppress(Exception):  # the stream ended, in whatever way
            for request in requests:
                kind = request.WhichOneof("request") or ""
                about = request.request_metadata
                body = getattr(request, kind) if kind else None
                connection.request(do.Requested(about.op_id, about.user_context_id, kind, body))
        self._ended(connection)

    def _ended(self, connection: Connection) -> None:
        self._connections.pop(connection.number, None)
        threading.Thread(target=connection.close, name="pathways-proxy-close", daemon=True).start()

    def _find(self, number: int, context: grpc.ServicerContext) -> Connection:
        found = self._connections.get(number)
        if found is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no client with session {number}")
            raise AssertionError("abort raises")
        return found

    def _store(self, parts: Iterator[Any], context: grpc.ServicerContext) -> Any:
        try:
            said = self._messages.GrpcHostBufferStoreMetadata.FromString(_metadata(context)[_STORE_METADATA])
        except Exception as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the metadata cannot be read: {error}")
            raise
        connection = self._find(said.session_id, context)
        data = bytearray()
        for part in parts:
            data += part.data
            if len(data) > said.buffer_size:
                break
        if len(data) != said.buffer_size:
            text = f"{len(data)} bytes came, and {said.buffer_size} were announced"
            context.abort(grpc.StatusCode.DATA_LOSS, text)
        try:
            connection.host_buffers.keep(said.handle, data)
        except Refused as refused:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(refused))
        connection.handle(do.Stored(said.handle))
        return self._messages.GrpcHostBufferStoreResponse()

    def _read_from_disk(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Takes bytes that the client has left in a file, whose name follows from that of the host buffer."""
        said = request.metadata
        connection = self._find(said.session_id, context)
        if self._shared is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "this proxy shares no folder with its clients")
            raise AssertionError("abort raises")
        path = self._shared / f"lt_{said.handle}"
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            path.unlink()
            if len(data) != said.buffer_size:
                raise ValueError(f"it has {len(data)} bytes, and {said.buffer_size} were announced")
            connection.host_buffers.keep(said.handle, data)
        except (OSError, ValueError, Refused) as error:
            context.abort(grpc.StatusCode.DATA_LOSS, f"{path} cannot be taken: {error}")
        connection.handle(do.Stored(said.handle))
        return self._messages.GrpcHostBufferReadFromDiskResponse()

    def _look_up(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        connection = self._find(request.session_id, context)
        try:
            data = memoryview(connection.host_buffers.bytes_of(request.handle))
        except Refused as refused:
            context.abort(grpc.StatusCode.NOT_FOUND, str(refused))
            return
        for start in range(0, max(len(data), 1), CHUNK_BYTES):
            yield self._messages.GrpcHostBufferLookupResponse(data=bytes(data[start : start + CHUNK_BYTES]))

    def _delete(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._find(request.session_id, context).host_buffers.drop(request.handle)
        return self._messages.GrpcHostBufferDeleteResponse()


def _metadata(context: grpc.ServicerContext) -> dict[str, bytes]:
    return {key: value for key, value in context.invocation_metadata() if isinstance(value, bytes)}
