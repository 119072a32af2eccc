"""The client's channel: the two connections of a session, as one table.

A client opens its gRPC stream, and may then dial a direct link to a second port. Until the upgrade the stream carries
the messages. The client sends `Upgrade` as its last message on the stream, the controller answers `Upgraded` as its own
last one there, and from then on messages go by the link; the stream stays open, since gRPC's pings show there that the
client lives. After the upgrade the end of either is the end of the session.
"""

from __future__ import annotations

from enum import StrEnum

from pathways_ray.errors import WireError


class Carrier(StrEnum):
    """A connection that messages come by."""

    STREAM = "stream"
    LINK = "direct link"


class ChannelState(StrEnum):
    """A session's connections."""

    OPENED = "opened"
    ON_STREAM = "on its stream"
    LINK_OPEN = "on its stream, its direct link open"
    ON_LINK = "on its direct link"
    CLOSED = "closed"


class ChannelEvent(StrEnum):
    """Events in the life of a channel."""

    STREAM_OPENED = "its stream opens"
    LINK_OPENED = "its direct link opens"
    UPGRADE = "it asks for the upgrade"
    STREAM_ENDED = "its stream ends"
    LINK_ENDED = "its direct link ends"
    SESSION_CLOSED = "its session is closed"


_S, _E = ChannelState, ChannelEvent

CHANNEL: dict[ChannelState, dict[ChannelEvent, ChannelState]] = {
    _S.OPENED: {_E.STREAM_OPENED: _S.ON_STREAM, _E.SESSION_CLOSED: _S.CLOSED},
    _S.ON_STREAM: {
        _E.LINK_OPENED: _S.LINK_OPEN,
        _E.STREAM_ENDED: _S.CLOSED,
        _E.SESSION_CLOSED: _S.CLOSED,
    },
    _S.LINK_OPEN: {
        _E.UPGRADE: _S.ON_LINK,
        _E.LINK_ENDED: _S.ON_STREAM,
        _E.STREAM_ENDED: _S.CLOSED,
        _E.SESSION_CLOSED: _S.CLOSED,
    },
    _S.ON_LINK: {
        _E.STREAM_ENDED: _S.CLOSED,
        _E.LINK_ENDED: _S.CLOSED,
        _E.SESSION_CLOSED: _S.CLOSED,
    },
    _S.CLOSED: {},
}

CARRIER = {
    _S.ON_STREAM: Carrier.STREAM,
    _S.LINK_OPEN: Carrier.STREAM,
    _S.ON_LINK: Carrier.LINK,
}
"""The connection that messages come by in a state."""


class Channel:
    """The channel of one session."""

    def __init__(self) -> None:
        self.state = ChannelState.OPENED

    def allows(self, event: ChannelEvent) -> bool:
        return event in CHANNEL[self.state]

    def apply(self, event: ChannelEvent) -> None:
        """Raises `WireError` for an event that is out of order."""
        following = CHANNEL[self.state].get(event)
        if following is None:
            raise WireError(f"a session that is {self.state} is out of order: {event}")
        self.state = following

    def check_carrier(self, carrier: Carrier) -> None:
        """Raises `WireError` for messages that come by the other connection."""
        if CARRIER.get(self.state) is not carrier:
            raise WireError(f"messages by the {carrier} of a session that is {self.state}")
