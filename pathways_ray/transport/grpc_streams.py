"""gRPC, for unauthenticated peers: the service for clients, and the stream of those that reach no link.

gRPC costs some 70 us a message from process to process, but passes gateways, checks HTTP/2 frames of any peer in C++,
and its own threads answer pings however busy Python is: by them both ends see that the other one lives.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc

from pathways_ray import limits
from pathways_ray.transport import tls as certificates
from pathways_ray.transport.batcher import Batcher
from pathways_ray.transport.endpoints import Tls, joined
from pathways_ray.transport.messages import Message
from pathways_ray.transport.tls import Trust

OPTIONS = {
    "grpc.max_receive_message_length": limits.MAX_MESSAGE_BYTES,
    "grpc.max_send_message_length": limits.MAX_MESSAGE_BYTES,
    "grpc.so_reuseport": 0,
    # A client that is stopped, or whose machine is gone, holds slices and memory for 7 s at most; and one whose
    # controller is stopped learns of it as soon.
    "grpc.keepalive_time_ms": 3_000,
    "grpc.keepalive_timeout_ms": 4_000,
    # This one counts: the one above is not looked at unless it is shorter (seen in gRPC 1.85, where it is 60 s).
    "grpc.http2.ping_timeout_ms": 4_000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.http2.min_ping_interval_without_data_ms": 5_000,
    "grpc.http2.max_ping_strikes": 0,
    # A channel must not share its connection with another one of this process, or two sessions would share fate.
    "grpc.use_local_subchannel_pool": 1,
}

Handler = Callable[[grpc.aio.ServicerContext], Awaitable[None]]


class GrpcOutbox:
    """Outgoing messages of a client's stream, put by any thread; iterate it as the request iterator of a gRPC call.

    Args:
        depth: the number of launches under way beyond the stream.
        compose: says the same in fewer messages, where some have gathered.
    """

    def __init__(
        self,
        depth: Callable[[], int] = lambda: 0,
        compose: Callable[[list[Message]], list[Message]] | None = None,
    ) -> None:
        self._batcher = Batcher(depth, compose)
        self.put = self._batcher.put
        # Putting into a SimpleQueue cannot wait for this very thread, as setting an Event in a destructor could.
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False

    def send(self, message: Message) -> None:
        self._batcher.put(message)
        self._call()

    send_later = send

    def leave(self) -> None:
        """Has what was put leave: here everything does as soon as it can."""
        self._call()

    linger = hurry = leave

    def close(self) -> None:
        """Ends the stream once the messages sent before have gone out."""
        self._closed = True
        self._call()

    def _call(self) -> None:
        if self._calls.empty():  # no flag: Ctrl-C between setting it and calling would leave it set
            self._calls.put(None)

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self._calls.get()
            closed = self._closed  # before the messages are taken: those sent before it was closed are among them
            while batches := self._batcher.take():
                yield from batches
            if closed:
                return
            if pause := self._batcher.gather_s():
                time.sleep(pause)


def channel(address: str, trust: Trust | None = None) -> grpc.Channel:
    """A client's channel, encrypted where `trust` is given; the caller closes it."""
    options = list(OPTIONS.items())
    if trust is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, trust.credentials(), [*options, *trust.options()])


def stream_call(connection: grpc.Channel, method: str, outbox: GrpcOutbox, metadata: dict[str, str]) -> grpc.Call:
    """Opens a bidirectional stream of raw batches; iterate the call for the batches that come in."""
    return connection.stream_stream(method)(iter(outbox), metadata=tuple(metadata.items()))


def metadata_of(context: grpc.aio.ServicerContext) -> dict[str, str]:
    """The metadata of a call that are text."""
    return {key: value for key, value in (context.invocation_metadata() or ()) if isinstance(value, str)}


ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError)
"""Errors of a stream at the server once it has ended."""


async def reading(context: grpc.aio.ServicerContext) -> bytes | None:
    """The next batch of a stream, or None at its end, whatever ended it."""
    try:
        data = await context.read()
    except ENDED:
        return None
    return None if data is grpc.aio.EOF else data


async def serve(
    streams: dict[str, Handler], bind: str, port: int = 0, tls: Tls | None = None
) -> tuple[grpc.aio.Server, str]:
    """Starts a server on a port (0: a free one) of address `bind`; returns it and `address:port`.

    A call with one request and one reply is a stream too, so that its handler can look at the caller before it reads
    anything.

    Raises:
        OSError: the port is taken, or the address is not one of this machine.
        UsageError: a file of `tls` cannot be read.
    """
    server = grpc.aio.server(options=list(OPTIONS.items()))
    services: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
    for path, stream in streams.items():
        _, service, method = path.split("/")
        services.setdefault(service, {})[method] = grpc.stream_stream_rpc_method_handler(_adapted(stream))
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


def _adapted(handler: Handler) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]:
    async def handle(_requests: Any, context: grpc.aio.ServicerContext) -> None:
        await handler(context)

    return handle
