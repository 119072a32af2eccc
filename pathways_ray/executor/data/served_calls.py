"""Calls that a host serves: it computes them for their values alone, which it sends, and keeps nothing of them.

A call whose results nobody keeps, as that of a model that is asked for its values, need not be launched: nothing has to
be numbered, stored or dropped for it. So its client asks the host (`ServeCall`), under the conditions of early launches
(`executor.run.early`), and where these do not hold, or anything goes wrong, launches it as others are.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pathways_ray import limits
from pathways_ray.errors import Failure, WireError
from pathways_ray.executor.data.client_stream import ClientStream
from pathways_ray.executor.data.shard_reader import ShardReader
from pathways_ray.executor.run.instructions import Called
from pathways_ray.transport import messages as wire
from pathways_ray.transport.local_sockets import LocalServer

MAX_UNREAD = 64
"""Messages that wait for a client to read them, behind which its calls are left to be launched: answers are larger than
what waits otherwise."""


class ServedCalls:
    """Joins the clients that ask for values with the dispatcher, which decides; made on the data server's loop.

    Args:
        may: whether a client may have calls served.
        hand: takes a call to the dispatcher, and returns whether it could.
    """

    def __init__(
        self,
        reader: ShardReader,
        local: LocalServer[ClientStream],
        may: Callable[[ClientStream], bool],
        hand: Callable[[Called], bool],
    ) -> None:
        self._reader = reader
        self._local = local
        self._may, self._hand = may, hand
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[ClientStream, socket.socket | None]] = {}

    def take(self, stream: ClientStream, message: wire.ServeCall, local: socket.socket | None = None) -> None:
        """A client asks for the values of a call, by its local socket or by its stream. Raises `WireError` where it
        asks for none."""
        if not message.requests:
            raise WireError("a call that is made for its values asks for none")
        called = Called(stream.session, stream.grant.tenant, message, next(self._numbers))
        self._asked[called.number] = stream, local
        most = len(self._reader.devices)
        few = self.has_room(stream) and max(map(len, message.devices), default=0) <= most
        if not self._may(stream) or not few or not self._hand(called):
            self.leave(called)

    def has_room(self, stream: ClientStream) -> bool:
        """Whether a client reads what it gets, so that its calls may be served."""
        return stream.outbox.has_room(MAX_UNREAD)

    def answer(self, called: Called, completing: Sequence[Any], values: Sequence[Any]) -> None:
        """Sends the values of a call, which are there; for any thread. Where anything of it has failed, also what is no
        result, its launch would: then it has to be launched.

        Args:
            completing: what is ready, or has failed, once the call is over.
        """
        message = called.message
        answer: list[wire.Message] = []
        try:
            for value in completing:
                value.block_until_ready()
            size = 0
            for value in values:
                size += math.prod(value.shape) * value.dtype.itemsize  # `nbytes` asks NumPy, in seven calls
            if size > limits.MAX_SERVED_BYTES:
                return self.leave(called)
            self._reader.begin_copies(values)
            for request, devices, value in zip(message.requests, message.devices, values, strict=True):
                answer += self._reader.parts(request, value, devices)
        except Exception:  # whatever it is: its launch says it
            return self.leave(called)
        self._send(called, answer)

    def leave(self, called: Called) -> None:
        """Tells a client that its call has to be launched; for any thread."""
        text = "the host does not serve the call now; it has to be launched"
        self._send(called, [wire.DataFailed(called.message.requests[0], Failure("NotServed", text))])

    def _send(self, called: Called, answer: Sequence[wire.Message]) -> None:
        stream, local = self._asked.pop(called.number)
        if local is not None and self._local.send(local, wire.encode(answer)):
            return
        if threading.get_ident() == self._thread:  # at once, so that it counts before the next call of its batch comes
            self._send_by_stream(stream, answer)
        else:
            self._loop.call_soon_threadsafe(self._send_by_stream, stream, answer)

    def _send_by_stream(self, stream: ClientStream, answer: Sequence[wire.Message]) -> None:
        for message in answer:
            stream.outbox.send(message)
