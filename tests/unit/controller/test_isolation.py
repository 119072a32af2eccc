"""Tenants with islands for themselves, as the controller decides: who needs some, and what ends with them."""

from __future__ import annotations

import msgspec
import pytest

from pathways_ray.controller.channel import ChannelState
from pathways_ray.controller.events import (
    AnswerCall,
    CallManager,
    IslandDisconnected,
    IslandsHeld,
    StreamOpened,
    TenantsRead,
    WantIslands,
)
from pathways_ray.controller.isolation import IDLE_LIMIT_S, REPEAT_S, START_LIMIT_S
from pathways_ray.controller.tenants import Tenant, TenantBook, token_digest
from pathways_ray.observe.diagnosis import LOST
from pathways_ray.resource_manager.core import MAX_REJOIN_S
from pathways_ray.transport.messages import (
    CloseSession,
    CreateSlice,
    HostDown,
    HostUp,
    NotYet,
    SessionEnded,
    SliceCreated,
    encode,
)
from tests.unit.controller.core_harness import CoreHarness, of, sent
from tests.unit.controller.harness import SLICES

ALICE, BOB = Tenant("alice"), Tenant("bob")
BOOK = TenantBook(((ALICE, token_digest("the token of alice")), (BOB, token_digest("the token of bob"))))


def isolated() -> CoreHarness:
    core = CoreHarness(hosts=True)
    core.core.requests.isolation.enabled = True
    core.handle(TenantsRead(BOOK, "tenants.json", ""))
    return core


def wanted(core: CoreHarness, seconds: float) -> list[tuple[str, ...]]:
    """The lists that are sent while time passes."""
    found = []
    for _ in range(int(seconds)):
        found += [command.tenants for command in of(WantIslands, core.tick(core.now + 1))]
    return found


def test_a_tenant_gets_islands_with_its_first_session() -> None:
    core = isolated()
    assert of(WantIslands, core.open_session(ALICE)) == [WantIslands(("alice",))]
    assert of(WantIslands, core.open_session(ALICE)) == []
    assert of(WantIslands, core.open_session(BOB)) == [WantIslands(("alice", "bob"))]
    (call,) = of(CallManager, core.request(1, CreateSlice(1, (2,), ("x",), 0, "", "")))
    assert call.arguments[6] == "alice"


def test_a_slice_waits_for_as_long_as_the_islands_of_its_tenant_may_take_to_start() -> None:
    """It was refused after 30 s, while they started on a busy machine, for up to 60 s."""
    core = isolated()
    core.open_session(ALICE)
    core.handle(StreamOpened(1))
    commands = core.request(1, CreateSlice(1, (2,), ("x",), 0, "", ""))
    while not (asked := [c for c in of(CallManager, commands) if c.method == "create_slice"])[0].arguments[-1]:
        assert of(AnswerCall, core.answered(asked, encode(NotYet()))) == []
        commands = core.tick(core.now + 1)
    assert core.now == MAX_REJOIN_S + START_LIMIT_S


def test_the_operator_uses_the_islands_of_all() -> None:
    core = isolated()
    assert of(WantIslands, core.open_session()) == []
    (call,) = of(CallManager, core.request(1, CreateSlice(1, (2,), ("x",), 0, "", "")))
    assert call.arguments[6] == ""


def test_without_isolation_nobody_has_islands() -> None:
    core = CoreHarness(hosts=True)
    core.handle(TenantsRead(BOOK, "tenants.json", ""))
    assert of(WantIslands, core.open_session(ALICE)) == []
    assert wanted(core, 2 * REPEAT_S) == []


def test_islands_stay_for_a_while_after_the_last_session() -> None:
    """The list is repeated, so that whoever starts the islands may restart; it is shorter once the tenant was idle."""
    core = isolated()
    core.open_session(ALICE)
    assert wanted(core, 3 * REPEAT_S) == [("alice",)] * 3
    core.request(1, CloseSession(1))
    lists = wanted(core, IDLE_LIMIT_S + 2 * REPEAT_S)
    assert lists[-1] == ()
    assert lists.count(("alice",)) >= IDLE_LIMIT_S / REPEAT_S - 1


@pytest.mark.parametrize("needed", [False, True])
def test_islands_of_a_tenant_that_was_idle_are_no_loss(needed: bool) -> None:
    """Their processes are heard to end before the answer that says so: a host of it first, and then the scheduler."""
    core = isolated()
    core.open_session(ALICE)
    core.connect(7)
    core.from_island(
        7, HostUp(70, 1, "transfer-70", "data-70", 2, 170), HostUp(71, 1, "transfer-71", "data-71", 2, 171)
    )
    core.handle(IslandsHeld({"alice": (7,)}, {}))
    if not needed:
        core.request(1, CloseSession(1))
        core.core.requests.isolation.tick((), core.now + IDLE_LIMIT_S + 1)
    core.from_island(7, HostDown(70, 1, "its process has ended"))
    core.handle(IslandDisconnected(7, 7, "scheduler-7"))
    noted = {entry.event for entry in core.core.story.lifecycle}
    assert {"scheduler ended", "host ended"}.issubset(noted) is not needed
    assert LOST.isdisjoint(noted) is not needed


def test_sessions_end_with_their_islands() -> None:
    """The controller forgets an island that is gone: nobody waits for its hosts, and its scheduler is not expected."""
    core = isolated()
    core.open_session(ALICE)
    core.open_session(BOB)
    core.handle(StreamOpened(1))
    core.handle(StreamOpened(2))
    core.connect(7)
    core.from_island(7, HostUp(70, 1, "transfer-70", "data-70", 2, 170))
    core.core.launches.sessions[1].slices[9] = msgspec.structs.replace(SLICES[0], island=7)
    assert core.handle(IslandsHeld({"alice": (7,), "bob": (8,)}, {})) == []
    ended = [m for m in sent(core.handle(IslandsHeld({"bob": (8,)}, {}))) if isinstance(m, SessionEnded)]
    assert ended == [SessionEnded("the processes of tenant 'alice' have ended")]
    assert 70 not in core.core.launches.hosts
    assert 7 not in core.core.watch.absent
    assert core.state(2) is ChannelState.ON_STREAM


def test_a_slice_on_an_island_that_has_ended_since_is_asked_for_again() -> None:
    """The session had no slice there when the island ended, so it goes on: what it launched would wait without end."""
    core = isolated()
    core.open_session(ALICE)
    asked = core.request(1, CreateSlice(1, (2,), ("x",), 0, "", ""))
    core.handle(IslandsHeld({"alice": (7,)}, {}))
    core.handle(IslandsHeld({}, {}))
    mapped = msgspec.structs.replace(SLICES[0], island=7)
    assert of(AnswerCall, core.answered(asked, encode(SliceCreated(mapped, "")))) == []
    assert 9 not in core.core.launches.sessions[1].slices
    again = core.tick(core.now + 1)
    found = msgspec.structs.replace(SLICES[0], island=9)
    (answer,) = of(AnswerCall, core.answered(again, encode(SliceCreated(found, ""))))
    assert isinstance(answer.reply, SliceCreated)
    assert answer.reply.placed.island == 9


def test_a_tenant_whose_processes_cannot_start_hears_why() -> None:
    core = isolated()
    core.open_session(ALICE)
    core.handle(StreamOpened(1))
    ended = [m for m in sent(core.handle(IslandsHeld({}, {"alice": "no room"}))) if isinstance(m, SessionEnded)]
    assert ended == [SessionEnded("the processes of tenant 'alice' could not start: no room")]
    assert of(WantIslands, core.open_session(ALICE)) == [WantIslands(("alice",))], "the next session tries again"
