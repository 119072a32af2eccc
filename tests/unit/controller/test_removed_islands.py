"""Islands that the operator drains and removes, as the controller sees them."""

from __future__ import annotations

from pathways_ray.controller.events import CallManager, StreamOpened
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import (
    Accepted,
    CloseSession,
    DrainIsland,
    Refused,
    RemoveIsland,
    SessionEnded,
    encode,
)
from tests.unit.controller.core_harness import CoreHarness, of, reply, sent
from tests.unit.controller.harness import ISLAND_OF_HOST, SLICES


def test_the_operator_alone_drains_and_removes() -> None:
    core = CoreHarness(hosts=True)
    core.open_session()
    for caller in (Tenant("alice"), 1):
        for request in (DrainIsland(0, 1, 5.0), RemoveIsland(0, 1)):
            found = reply(core.request(caller, request))
            assert isinstance(found, Refused)
            assert found.failure.kind == "AuthenticationError"
    asked = core.request(None, DrainIsland(0, 1, 5.0))
    assert [(c.method, c.arguments) for c in of(CallManager, asked)] == [("drain_island", (1, 5.0))]
    assert reply(core.answered(asked, encode(Accepted()))) == Accepted()


def test_an_island_that_was_removed_is_forgotten_and_sessions_with_slices_there_end() -> None:
    core = CoreHarness(hosts=True)
    for session in (1, 2):
        core.open_session()
        core.handle(StreamOpened(session))
    gone = SLICES[0].island
    core.core.launches.add_slice(1, SLICES[0])
    asked = core.request(None, RemoveIsland(0, gone))
    assert [(c.method, c.arguments) for c in of(CallManager, asked)] == [("end_island", (gone,))]
    commands = core.answered(asked, encode(Accepted()))
    assert reply(commands) == Accepted()
    ended = [message for message in sent(commands) if isinstance(message, SessionEnded)]
    assert ended == [SessionEnded(f"island {gone} was removed, where it had a slice")]
    left = {host for host, island in ISLAND_OF_HOST.items() if island != gone}
    assert set(core.core.launches.hosts) == left
    assert gone not in core.core.watch.absent
    assert reply(core.request(2, CloseSession(2))) == Accepted()


def test_an_island_that_stays_is_not_forgotten() -> None:
    core = CoreHarness(hosts=True)
    asked = core.request(None, RemoveIsland(0, 0))
    refused = Refused(Failure("UsageError", "island 0 is the last one"))
    assert reply(core.answered(asked, encode(refused))) == refused
    assert set(core.core.launches.hosts) == set(ISLAND_OF_HOST)
