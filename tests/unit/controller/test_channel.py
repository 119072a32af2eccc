"""The client's channel: its table of states, and the core's answers to connections that come and go."""

from __future__ import annotations

import re

import pytest

from pathways_ray.controller.channel import CARRIER, CHANNEL, Carrier, Channel, ChannelEvent, ChannelState
from pathways_ray.controller.events import (
    CallManager,
    ClientGarbled,
    ClientMessages,
    CloseChannel,
    Event,
    LinkEnded,
    LinkOpened,
    OpenChannel,
    StreamEnded,
    StreamOpened,
    SwitchToLink,
    Tick,
)
from pathways_ray.controller.state import SendClient
from pathways_ray.errors import WireError
from pathways_ray.transport.messages import Free, SessionEnded, Upgrade
from tests.unit.controller.core_harness import CoreHarness

UPGRADE = ClientMessages(1, Carrier.STREAM, 1, [Upgrade()])


def test_the_table_is_whole() -> None:
    assert CHANNEL.keys() == set(ChannelState)
    assert {state for row in CHANNEL.values() for state in row.values()} == set(ChannelState) - {ChannelState.OPENED}
    assert CHANNEL[ChannelState.CLOSED] == {}
    assert CARRIER.keys() == {state for state, row in CHANNEL.items() if ChannelEvent.STREAM_ENDED in row}


def test_an_event_out_of_order_is_named_with_its_state() -> None:
    channel = Channel()
    with pytest.raises(WireError, match=r"that is opened is out of order: it asks for the upgrade"):
        channel.apply(ChannelEvent.UPGRADE)


def opened(*events: Event) -> CoreHarness:
    """A core with session 1 after some events."""
    core = CoreHarness()
    assert core.open_session()[0] == OpenChannel(1)
    for event in events:
        core.handle(event)
    return core


def closing(core: CoreHarness, event: Event) -> bool:
    """Whether an event closes the session: what it held is freed, and the connections go."""
    commands = core.handle(event)
    closed = any(isinstance(command, CloseChannel) for command in commands)
    assert closed == (CallManager("release_session", (1,)) in commands)
    assert closed == (1 not in core.core.launches.sessions)
    return closed


def test_messages_take_the_stream_and_after_the_upgrade_the_link() -> None:
    core = opened(StreamOpened(1), LinkOpened(1))
    assert core.handle(ClientMessages(1, Carrier.STREAM, 1, [Free((1,))])) == []
    assert core.handle(UPGRADE) == [SwitchToLink(1)]
    assert core.handle(ClientMessages(1, Carrier.LINK, 1, [Free((1,))])) == []
    assert core.state() is ChannelState.ON_LINK


def test_a_link_that_ends_before_the_upgrade_is_ignored() -> None:
    core = opened(StreamOpened(1), LinkOpened(1), LinkEnded(1))
    assert core.state() is ChannelState.ON_STREAM
    assert core.handle(ClientMessages(1, Carrier.STREAM, 1, [Free((1,))])) == []


@pytest.mark.parametrize("end", [StreamEnded(1), LinkEnded(1)])
def test_after_the_upgrade_the_end_of_either_ends_the_session(end: Event) -> None:
    assert closing(opened(StreamOpened(1), LinkOpened(1), UPGRADE), end)


@pytest.mark.parametrize("before", [(), (LinkOpened(1),)])
def test_the_end_of_the_stream_ends_the_session(before: tuple[Event, ...]) -> None:
    assert closing(opened(StreamOpened(1), *before), StreamEnded(1))


@pytest.mark.parametrize(
    ("before", "event", "reason"),
    [
        ((), UPGRADE, "messages by the stream of a session that is opened"),
        ((StreamOpened(1),), UPGRADE, "out of order: it asks for the upgrade"),
        (
            (StreamOpened(1), LinkOpened(1), UPGRADE),
            UPGRADE,
            "messages by the stream of a session that is on its direct",
        ),
        (
            (StreamOpened(1), LinkOpened(1)),
            ClientMessages(1, Carrier.STREAM, 1, [Upgrade(), Free((1,))]),
            "messages by the stream after the upgrade",
        ),
        (
            (StreamOpened(1), LinkOpened(1)),
            ClientMessages(1, Carrier.LINK, 1, [Free((1,))]),
            "messages by the direct link of a session that is on its stream",
        ),
        ((StreamOpened(1), LinkOpened(1)), LinkOpened(1), "out of order: its direct link opens"),
        ((StreamOpened(1),), ClientGarbled(1, "batch of 3 bytes refused"), "batch of 3 bytes refused"),
    ],
)
def test_what_is_out_of_order_ends_the_session_with_a_reason(
    before: tuple[Event, ...], event: Event, reason: str
) -> None:
    core = opened(*before)
    commands = core.handle(event)
    said = [c.message for c in commands if isinstance(c, SendClient) and isinstance(c.message, SessionEnded)]
    assert len(said) == 1
    assert re.search(reason, said[0].reason), said[0].reason
    assert commands.index(SendClient(1, said[0])) < commands.index(CloseChannel(1, True))
    assert core.handle(event) == [], "a session that is closed hears nothing"


def test_a_session_whose_stream_does_not_come_is_closed() -> None:
    core = opened()
    core.now = 19.0
    assert not closing(core, Tick())
    core.now = 21.0
    assert closing(core, Tick())
    streaming = opened(StreamOpened(1))
    streaming.now = 21.0
    assert not closing(streaming, Tick())
