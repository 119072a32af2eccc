"""Slices of sessions that come back to another controller, when their islands have ended or come late."""

from __future__ import annotations

from pathways_ray.controller.events import CallManager, ManagerKnows, ManagerMissed, StreamOpened, TenantsRead
from pathways_ray.controller.tenants import Tenant, TenantBook, token_digest
from pathways_ray.transport.messages import (
    HostDown,
    HostInfo,
    HostUp,
    IslandOutcomes,
    LaunchFailed,
    Refused,
    SessionEnded,
    SessionResumed,
    Unanswered,
    Vacate,
)
from tests.unit.controller.core_harness import of, reply, sent
from tests.unit.controller.harness import ISLAND_OF_HOST
from tests.unit.controller.test_takeover import ALICE, BOTH, SESSION, Successor, holding, kept, on, outcome

OWN = on(8, 7, 40)
"""A slice on an island that alice had for herself."""


def isolated() -> Successor:
    """A controller that follows another one, with islands for tenants; the resource manager knew slice 8."""
    front = Successor((OWN,))
    book = TenantBook(((ALICE, token_digest("the token of alice")), (Tenant("bob"), token_digest("that of bob"))))
    front.core.requests.isolation.enabled = True
    front.handle(TenantsRead(book, "tenants.json", ""))
    front.all_come()
    front.tick(11.0)
    return front


def joins(front: Successor, island: int, tenant: str) -> list[object]:
    """Host 40 comes to an island of a tenant; what is sent to clients and islands."""
    info = HostInfo(40, island, "cpu", 2, "node", 7, "", (40,), tenant, 0)
    commands = front.connect(island)
    return sent(commands + front.from_island(island, HostUp(40, 9, "t", "d", 2, 7, info=info)))


def test_a_slice_does_not_come_back_on_hosts_of_another_tenant() -> None:
    """Its tag is right: island and host had these numbers when alice had them."""
    front = isolated()
    joins(front, 7, "bob")
    found = reply(front.ask(slices=(OWN,)))
    assert isinstance(found, Refused)
    assert found.failure.kind == "SessionClosed"
    assert "hosts of its slice 8 are not on island 7 any more, or not its tenant's" in found.failure.message
    assert SESSION not in front.core.launches.sessions


def test_a_slice_comes_back_on_the_island_of_its_tenant() -> None:
    front = isolated()
    joins(front, 7, "alice")
    assert isinstance(reply(front.ask(slices=(OWN,))), SessionResumed)


def test_a_session_ends_whose_host_gave_its_number_to_another_island() -> None:
    """It came back before that one was there."""
    front = isolated()
    assert isinstance(reply(front.ask(slices=(OWN,))), SessionResumed)
    front.handle(StreamOpened(SESSION))
    text = "host 40 of a slice of the session is gone, and its number went to island 8"
    assert SessionEnded(text) in joins(front, 8, "bob")
    assert SESSION not in front.core.launches.sessions
    assert front.core.launches.hosts[40].island == 8


def test_an_island_that_comes_late_is_used_again() -> None:
    """
    1. The resource manager knew its slice. Nobody has heard of the island when the session comes back: it has to move.
    2. The island comes. Nothing has to move, and its hosts are waited for. It stays when the slice is given back.
    """
    front = isolated()
    assert isinstance(reply(front.ask(slices=(OWN,))), SessionResumed)
    front.handle(StreamOpened(SESSION))
    moves = front.core.requests.changes.moves
    assert Vacate((8,)) in sent(front.tick(16.0))
    assert moves.leaving(7) == "was removed"
    front.connect(7)
    assert moves.leaving(7) == ""
    assert front.core.launches.hosts[40].down_since == front.now
    joins(front, 7, "alice")
    assert not [m for m in sent(front.tick(17.0)) if isinstance(m, Vacate)]
    front.core.launches.remove_slice(SESSION, 8)
    front.tick(23.0)
    assert 40 in front.core.launches.hosts


def test_hosts_are_waited_for_whose_scheduler_has_come() -> None:
    """An island whose scheduler was there before the session is none of those that were removed."""
    front = isolated()
    front.connect(7)
    front.ask(slices=(OWN,))
    assert front.core.requests.changes.moves.leaving(7) == ""


def test_slices_that_the_resource_manager_missed_are_told_again_as_they_are_by_then() -> None:
    """
    1. A session has come back; the resource manager lives, and has not heard which slices it has.
    2. It hears so with the next answer: without one that was given back since.
    """
    front = Successor()
    front.all_come()
    commands = front.ask()
    (call,) = [c for c in of(CallManager, commands) if c.method == "hold_slices"]
    front.answering = False
    front.handle(ManagerMissed(call))
    front.core.launches.remove_slice(SESSION, 1)
    again = holding(front.handle(ManagerKnows("manager 1")))
    assert ([one.placed for one in again.slices], again.last_slice) == ([BOTH], 9)
    assert front.handle(ManagerKnows("manager 1")) == []


def test_a_launch_of_before_that_is_over_its_limit_fails_for_that() -> None:
    """Others fail with the hosts that end for it."""
    front = Successor()
    front.all_come()
    island = ISLAND_OF_HOST[0]
    front.from_island(island, IslandOutcomes((outcome(1, runs=True), outcome(2, runs=True))))
    front.ask(unanswered=(Unanswered(1, (21,), (kept(21),)), Unanswered(2, (22,), (kept(22),))))
    down = HostDown(0, 5, "launch 1001 has run for 60 s", "LaunchTimeout", (1001,))
    failed = [m for m in sent(front.from_island(island, down)) if isinstance(m, LaunchFailed)]
    assert {one.launch: one.failure.kind for one in failed} == {1: "LaunchTimeout", 2: "HostLost"}
