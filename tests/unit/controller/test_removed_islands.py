"""Islands that the operator drains and removes, as the controller sees them."""

from __future__ import annotations

from pathways_ray.controller.events import CallManager, CloseIsland, IslandConnected, IslandMessages
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure
from pathways_ray.observe.diagnosis import LOST
from pathways_ray.transport.messages import (
    Accepted,
    DrainIsland,
    HostUp,
    IslandUp,
    Refused,
    RemoveIsland,
    UndrainIsland,
    encode,
)
from tests.unit.controller.core_harness import CoreHarness, of, reply
from tests.unit.controller.harness import ISLAND_OF_HOST


def test_the_operator_alone_drains_and_removes() -> None:
    core = CoreHarness(hosts=True)
    core.open_session()
    for caller in (Tenant("alice"), 1):
        for request in (DrainIsland(0, 1, 5.0), UndrainIsland(0, 1), RemoveIsland(0, 1)):
            found = reply(core.request(caller, request))
            assert isinstance(found, Refused)
            assert found.failure.kind == "AuthenticationError"
    asked = core.request(None, DrainIsland(0, 1, 5.0))
    assert [(c.method, c.arguments) for c in of(CallManager, asked)] == [("drain_island", (1, 5.0, ""))]
    assert reply(core.answered(asked, encode(Accepted()))) == Accepted()
    assert core.core.requests.changes.moves.draining == {1}
    back = core.request(None, UndrainIsland(0, 1))
    assert [(c.method, c.arguments) for c in of(CallManager, back)] == [("undrain_island", (1,))]
    assert reply(core.answered(back, encode(Accepted()))) == Accepted()
    assert core.core.requests.changes.moves.draining == set(), "its slices need not move any more"


def test_a_drain_that_a_lost_call_took_back_is_over() -> None:
    """
    1. The answer to a call that takes a drain back is lost. Asked again, there is nothing to take back.
    2. The controller no longer has the island emptied. Of one that it has not, it passes the refusal on.
    """
    core = CoreHarness(hosts=True)
    core.answered(core.request(None, DrainIsland(0, 1, 5.0)), encode(Accepted()))
    refused = Refused(Failure("UsageError", "island 1 is not draining; there is nothing to take back"))
    assert reply(core.answered(core.request(None, UndrainIsland(0, 1)), encode(refused))) == Accepted()
    assert core.core.requests.changes.moves.draining == set()
    assert reply(core.answered(core.request(None, UndrainIsland(0, 1)), encode(refused))) == refused


def test_an_island_that_stays_is_not_forgotten() -> None:
    core = CoreHarness(hosts=True)
    asked = core.request(None, RemoveIsland(0, 0))
    refused = Refused(Failure("UsageError", "island 0 is the last one"))
    assert reply(core.answered(asked, encode(refused))) == refused
    assert set(core.core.launches.hosts) == set(ISLAND_OF_HOST)


def test_what_a_scheduler_said_before_its_island_was_ended_brings_no_host_back() -> None:
    """It comes late, by a stream that was opened then; nobody would say any more that these hosts are gone."""
    core = CoreHarness(hosts=True)
    assert reply(core.answered(core.request(None, RemoveIsland(0, 1)), encode(Accepted()))) == Accepted()
    there = {host for host, island in ISLAND_OF_HOST.items() if island != 1}
    assert set(core.core.launches.hosts) == there
    assert core.handle(IslandConnected(77, IslandUp(1, "s"))) == [CloseIsland(77)]
    late = HostUp(2, 9, "t", "d", 2, 1)
    assert core.handle(IslandMessages(77, 1, [late])) == [CloseIsland(77)]
    assert set(core.core.launches.hosts) == there


def test_what_was_asked_for_is_no_loss() -> None:
    """`status --diagnose` and an alert count the events that are losses."""
    core = CoreHarness(hosts=True)
    core.answered(core.request(None, RemoveIsland(0, 1)), encode(Accepted()))
    noted = [entry.event for entry in core.core.story.lifecycle]
    assert LOST.isdisjoint(noted)
    assert {"scheduler ended", "host ended"} <= set(noted)
