"""gRPC streams that batch by themselves.

A sender puts messages into an outbox at any time; all that is there when the stream is free goes in one gRPC message. A
gRPC message costs some 100 us of Python on each side whatever is in it, so a stream that has plenty of work under way
beyond it (`depth`) pauses for a millisecond between two messages: nobody downstream can run dry in that time. A lone
message, or one of few, leaves at once.

Outboxes: `AsyncOutbox` for processes whose decisions run on an event loop (controller, schedulers, a host's data
server), `ThreadOutbox` for a client's threads. Those of links are `fan_out.FanOut` and `thread_links.Outbox`.
"""

from __future__ import annotations

import asyncio
import hmac
import queue
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from pathways_ray import limits
from pathways_ray.transport import tls as certificates
from pathways_ray.transport.endpoints import Tls, joined
from pathways_ray.transport.messages import Message, encode
from pathways_ray.transport.tls import Trust

if TYPE_CHECKING:
    from pathways_ray.transport.links import AsyncLink

BATCH_BYTES = 8 << 20
"""A batch is closed when it reaches this size, so that arrays do not pile up in one message."""

DEEP = 8
"""With more than this many launches under way beyond a stream, its messages are gathered."""

PAUSE_S = 0.001
"""How long they are gathered."""

VERY_DEEP = 64
"""With more than this many launches under way the devices have work for longer than a long pause."""

LONG_PAUSE_S = 0.003
"""How long messages are gathered then. Not for what opens the window of an island (`fan_out`): it would run dry."""

OPTIONS = [
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # This one counts: the one above is not looked at unless it is shorter (seen in gRPC 1.85, where it is 60 s).
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A channel must not share its connection with another one of this process, or two sessions would share fate.
    ("grpc.use_local_subchannel_pool", 1),
]

# Clients are strangers: one that is stopped, or whose machine is gone, holds slices and memory for 7 s at most; and one
# whose controller is stopped hears of it as soon. gRPC's own threads answer the pings, however busy Python is.
FACING_CLIENTS = [
    ("grpc.keepalive_time_ms", 3_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
]

CALL = "/pathways.Front/Call"
CLIENT_STREAM = "/pathways.Front/Stream"
ISLAND_STREAM = "/pathways.Link/Island"
HOST_STREAM = "/pathways.Link/Host"
DATA_STREAM = "/pathways.Data/Stream"


def batches(messages: Iterable[Message]) -> Iterator[bytes]:
    """Encodes messages into as few batches as `BATCH_BYTES` allows: MessagePack arrays, header first."""
    for count, bodies in grouped((1, encode(message)) for message in messages):
        yield header(count) + bodies


def grouped(bodies: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Joins encoded messages into as few groups as `BATCH_BYTES` allows; each comes with its number of messages."""
    group: list[bytes] = []
    count, size = 0, 0
    for number, body in bodies:
        if group and size + len(body) > BATCH_BYTES:
            yield count, b"".join(group)
            group, count, size = [], 0, 0
        count += number
        size += len(body)
        group.append(body)
    if group:
        yield count, b"".join(group)


def header(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def pause_s(depth: int) -> float:
    """How long a stream gathers messages after it has sent some; 0 when it sends them as they come.

    Args:
        depth: launches under way beyond the stream.
    """
    if depth <= DEEP:
        return 0.0
    return PAUSE_S if depth <= VERY_DEEP else LONG_PAUSE_S


class AsyncOutbox:
    """Outgoing messages of one stream on an event loop.

    Args:
        depth: how many launches are under way beyond the stream.
    """

    def __init__(self, depth: Callable[[], int] = lambda: 0) -> None:
        self._depth = depth
        self._messages: list[Message] = []
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._closed = False
        self._link: AsyncLink | None = None
        self._scheduled = False

    def send(self, message: Message) -> None:
        self._messages.append(message)
        self._call()

    def _call(self) -> None:
        if self._link is None:
            self._wake.set()
        elif not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def room(self, most: int) -> None:
        """Waits while more than `most` messages wait for those before them to be taken by the other end."""
        while len(self._messages) > most:
            self._taken.clear()
            await self._taken.wait()

    def close(self) -> None:
        """What was sent before still goes out."""
        self._closed = True
        self._call()

    async def carry(self, link: AsyncLink) -> None:
        """The same as `pump` for a link, which takes a batch without a task to wait for it."""
        self._link = link
        self._call()
        try:
            self._wake.clear()
            await self._wake.wait()
        finally:
            self._link = None

    def _flush(self) -> None:
        link = self._link
        if link is not None and link.full:
            link.when_room(self._flush)
            return
        self._scheduled = False
        if link is None:
            self._wake.set()  # a stream may carry them instead
            return
        messages, self._messages = self._messages, []
        self._taken.set()
        for batch in batches(messages):
            link.put(batch)
        if self._closed:
            self._wake.set()
        elif messages and (pause := pause_s(self._depth())):
            self._scheduled = True
            asyncio.get_running_loop().call_later(pause, self._flush)

    async def pump(self, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Writes until closed. Run it as a task beside the reader of the same stream."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages, self._messages = self._messages, []
            self._taken.set()
            for batch in batches(messages):
                await write(batch)
            if self._closed and not self._messages:
                return
            if pause := pause_s(self._depth()):
                await asyncio.sleep(pause)


class ThreadOutbox:
    """Outgoing messages of one stream, put by any thread; iterate it as the request iterator of a gRPC call.

    Args:
        depth: how many launches are under way beyond the stream.
        composed: says the same in fewer messages, where some have gathered.
    """

    def __init__(
        self,
        depth: Callable[[], int] = lambda: 0,
        composed: Callable[[list[Message]], list[Message]] = lambda messages: messages,
    ) -> None:
        self._depth = depth
        self._composed = composed
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.send = self._queue.put
        self.send_later = self._queue.put

    def close(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[bytes]:
        while True:
            messages = [self._queue.get()]
            try:
                while len(messages) < 4096:
                    messages.append(self._queue.get_nowait())
            except queue.Empty:
                pass
            yield from batches(self._composed([m for m in messages if m is not None]))
            if None in messages:
                return
            if pause := pause_s(self._depth()):
                time.sleep(pause)


def channel(address: str, trust: Trust | None = None) -> grpc.Channel:
    """A client's channel with the options above, encrypted where `trust` is given; the caller closes it."""
    options = list({**dict(OPTIONS), **dict(FACING_CLIENTS)}.items())
    if trust is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, trust.credentials(), [*options, *trust.options()])


def stream_call(connection: grpc.Channel, method: str, outbox: ThreadOutbox, metadata: dict[str, str]) -> grpc.Call:
    """Opens a bidirectional stream of raw batches; iterate the call for what comes in."""
    return connection.stream_stream(method)(iter(outbox), metadata=tuple(metadata.items()))


def authorised(metadata: dict[str, str], secret: str) -> bool:
    """Whether the call carries the secret; compared in constant time."""
    return hmac.compare_digest(metadata.get("authorization", "").encode(), secret.encode())


class Context(Protocol):
    """What a handler has of a stream, be it gRPC's or a link (`transport.links`)."""

    async def read(self) -> Any: ...

    async def write(self, batch: bytes) -> Any: ...

    def invocation_metadata(self) -> Any: ...


def metadata_of(context: Context) -> dict[str, str]:
    return {key: value for key, value in (context.invocation_metadata() or ()) if isinstance(value, str)}


def session_of(metadata: dict[str, str]) -> int:
    """The session that a call names; 0, which is nobody's, when it names none."""
    text = metadata.get("session", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0


def bind_address(bind: str) -> str:
    """The address to serve on: `bind`, or where Ray reaches this machine when it is left open."""
    if bind:
        return bind
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


Handler = Callable[[grpc.aio.ServicerContext], Awaitable[None]]


async def serve(
    streams: dict[str, Handler], bind: str, port: int = 0, tls: Tls | None = None, *, facing_clients: bool = False
) -> tuple[grpc.aio.Server, str]:
    """Starts a server on a port (0: a free one) of address `bind`; returns it and `address:port`.

    A stream handler reads and writes raw batches through its context (`read()` gives `grpc.aio.EOF` at the end). A call
    with one request and one reply is a stream too, so that its handler can look at who calls before it reads anything.

    Raises:
        OSError: the port is taken, or the address is not one of this machine.
        UsageError: a file of `tls` cannot be read.
    """
    options = dict(OPTIONS)
    if facing_clients:
        options.update(FACING_CLIENTS)
    server = grpc.aio.server(options=list(options.items()))
    services: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
    for path, stream in streams.items():
        _, service, method = path.split("/")
        services.setdefault(service, {})[method] = grpc.stream_stream_rpc_method_handler(_stream_adapter(stream))
    for service, methods in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    try:
        if tls is None:
            port = server.add_insecure_port(joined(bind, port))
        else:
            port = server.add_secure_port(joined(bind, port), certificates.server_credentials(tls))
    except RuntimeError as error:
        raise OSError(f"cannot listen at {joined(bind, port)}: {error}") from None
    await server.start()
    return server, joined(bind, port)


def _stream_adapter(handler: Handler) -> Callable[[object, grpc.aio.ServicerContext], Awaitable[None]]:
    async def handle(_requests: object, context: grpc.aio.ServicerContext) -> None:
        await handler(context)

    return handle


async def reading(context: Any) -> bytes | None:
    """The next batch of a stream, or None at its end, whatever ended it."""
    try:
        data = await context.read()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        return None
    return None if data is grpc.aio.EOF else data
