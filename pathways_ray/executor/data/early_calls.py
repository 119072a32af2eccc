"""Calls that clients hand to a host themselves, on the data server's loop: in, and what clients hear of them."""

from __future__ import annotations

from collections.abc import Callable, Set

from pathways_ray.executor.data.client_stream import ClientStream
from pathways_ray.executor.run.instructions import Handed
from pathways_ray.transport import messages as wire

MAX_UNREAD = 1024
"""Messages that wait for a client to read them, behind which it hears of no further call that was left to the
scheduler. It may hand over calls without end, by another stream than those that it does not read."""


class EarlyCalls:
    """Joins the streams of clients with the dispatcher, which decides.

    Args:
        hand: takes a call to the dispatcher, and returns whether it could.
    """

    def __init__(self, streams: Set[ClientStream], hand: Callable[[Handed], bool]) -> None:
        self._streams = streams
        self._hand = hand
        self._allowed = ""

    def opened(self, stream: ClientStream) -> None:
        """A client has a new stream."""
        if stream.grant.tenant == self._allowed:
            stream.outbox.send(wire.EarlyAllowed(True))

    def may(self, stream: ClientStream) -> bool:
        """Whether a client may hand over calls. One that may not does not get as far as the thread that serves all
        tenants."""
        return stream.grant.tenant == self._allowed

    def take(self, stream: ClientStream, message: wire.LaunchEarly) -> None:
        """A client hands over a call."""
        tenant = stream.grant.tenant
        handed = Handed(stream.session, tenant, message)
        if tenant != self._allowed or not self._hand(handed):
            self.refuse(handed)

    def allow(self, tenant: str) -> None:
        """Clients of the tenant that `tenant` stands for may hand over calls, and no others."""
        before, self._allowed = self._allowed, tenant
        for stream in self._streams:
            if before != tenant and stream.grant.tenant in (before, tenant):
                stream.outbox.send(wire.EarlyAllowed(stream.grant.tenant == tenant))

    def refuse(self, handed: Handed) -> None:
        """A call was left to the scheduler."""
        for stream in self._streams:
            if stream.session == handed.session and stream.outbox.has_room(MAX_UNREAD):
                stream.outbox.send(wire.EarlyRefused(handed.message.results))
