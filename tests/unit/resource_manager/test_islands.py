"""Islands that are added, drained and removed, as the resource manager decides."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from pathways_ray import limits
from pathways_ray.client.notebook import cluster_html
from pathways_ray.controller.status import logs
from pathways_ray.dashboard.sections import sections
from pathways_ray.errors import TooLarge, UsageError
from pathways_ray.observe.diagnosis import findings
from pathways_ray.observe.tables import tables
from pathways_ray.resource_manager.allocation import IslandState
from pathways_ray.resource_manager.core import ManagerCore
from pathways_ray.resource_manager.events import (
    Answer,
    ControllerHolds,
    ControllerServes,
    DrainRequested,
    EndIsland,
    HostServes,
    IslandAdded,
    IslandRemoved,
    JoinRequested,
    Keep,
    KillHost,
    Published,
    RemoveRequested,
    Ticked,
    UndrainRequested,
)
from pathways_ray.resource_manager.islands import KeptIslands
from pathways_ray.resource_manager.status import status
from pathways_ray.transport.messages import (
    Accepted,
    Holdings,
    HostInfo,
    JoinReply,
    KnownHost,
    Refused,
    SliceCreated,
)
from tests.unit.resource_manager.test_core import request, running


def answer(core: ManagerCore, event: Any, now: float = 1.0) -> Any:
    (found,) = [c.value for c in core.handle(event, now) if isinstance(c, Answer)]
    return found


def test_an_added_island_takes_the_next_slice_when_its_hosts_have_joined() -> None:
    core = running()
    for token in (1, 2, 3):
        core.handle(request(token, size=1), 1.0)
    assert answer(core, IslandAdded(4, 2)) == (2, (3, 4))
    core.handle(Published("scheduler-2", "s2:1"), 1.0)
    for host in (3, 4):
        info = HostInfo(host, 2, "cpu", 2, "node", 300 + host, "", (3, 4))
        core.handle(JoinRequested(10 + host, info), 1.0)
    found = answer(core, request(5, size=4))
    assert isinstance(found, SliceCreated)
    assert found.placed.island == 2


def test_an_island_that_never_formed_is_in_the_status_with_its_hosts() -> None:
    """It would be missing from diagnosis and metrics else, as one that nobody has asked for."""
    core = running()
    core.handle(IslandAdded(4, 2), 1.0)
    *formed, found = status(core.inventory, core.shared.numbers)["islands"]
    assert [one["island"] for one in formed] == [0, 1]
    assert (found["island"], found["state"], found["tenant"], found["platform"]) == (2, "away", "", "")
    assert [(host["host"], host["up"], host["devices"]) for host in found["hosts"]] == [(3, False, []), (4, False, [])]
    core.handle(DrainRequested(5, 2, 60.0, "moved"), 1.0)
    found = status(core.inventory, core.shared.numbers)["islands"][-1]
    assert (found["state"], found["reason"], found["drain_left_s"]) == ("draining", "moved", 60.0)
    assert found.keys() == formed[0].keys()
    looked = {
        "status": {"islands": json.loads(json.dumps([*formed, found])), "slices": []},
        "islands": {"0": {}, "1": {}},
    }
    assert "island 2 is draining: host 3, 4 of 2 is down" in [one.what for one in findings(looked)]
    assert sections(looked)["devices"][2]["hosts"] == [{"host": host, "up": False, "devices": []} for host in (3, 4)]
    assert [row[:4] for row in tables(looked)["devices"].rows][-2:] == [
        ("2 draining: moved", host, "-", "down") for host in ("3", "4")
    ]
    assert "host 4 down" in cluster_html("", 1, looked["status"])
    (away,) = [one for one in logs(looked["status"]["islands"], "logs", "n") if one["process"] == "scheduler 2"]
    assert away["node"] == "n"
    assert all(one["node"] for one in logs(looked["status"]["islands"], "logs", "n"))


def test_a_drained_island_gets_no_slice_and_keeps_those_that_it_has() -> None:
    core = running()
    assert answer(core, request(1, size=2, island=1)).placed.island == 1
    assert answer(core, DrainRequested(2, 1, 60.0)) == Accepted()
    assert core.inventory.state_of(1) is IslandState.DRAINING
    assert answer(core, request(3, size=1)).placed.island == 0
    refused = answer(core, request(4, size=1, island=1))
    assert isinstance(refused, Refused)
    assert "island 1 with 2 cpu devices on 1 host(s), which is draining" in refused.failure.message
    assert {placed.placed.island for placed in core.inventory.slices.values()} == {0, 1}


@pytest.mark.parametrize("asked", [True, False])
def test_hosts_that_never_joined_are_not_killed_once_their_island_is_removed(asked: bool) -> None:
    """
    1. A resource manager follows another one. It watches all hosts, of which one does not join.
    2. The island of that host is removed, by the operator, or since it did not start.
    """
    core = ManagerCore(KeptIslands.first({0: [0], 1: [1]}), last_epoch=5, controller="controller")

    def serve(now: float) -> None:
        core.handle(ControllerServes("c1", "c:1", "controller", (), 1, 1), now)

    serve(1.0)
    here = KnownHost(HostInfo(0, 0, "cpu", 2, "node", 300, "", (0,)), 5, True)
    core.handle(ControllerHolds("c1", Holdings((here,), ((0, "s0:1"),), (), 0, 1)), 1.0)
    core.handle(RemoveRequested(1, 1) if asked else IslandRemoved(1), 2.0)
    killed: list[Any] = []
    for second in range(3, 200):
        serve(float(second))
        killed += [c for c in core.handle(Ticked(), float(second)) if isinstance(c, KillHost)]
    assert killed == []


def test_an_island_with_slices_is_removed_when_the_deadline_of_its_drain_is_over() -> None:
    core = running()
    core.handle(request(1, size=2, island=1), 1.0)
    core.handle(DrainRequested(2, 1, 60.0), 1.0)
    early = answer(core, RemoveRequested(3, 1), 60.0)
    assert isinstance(early, Refused)
    assert early.failure.kind == "UsageError"
    assert "island 1 still has 1 slice(s): 1 of session 1" in early.failure.message
    commands = core.handle(RemoveRequested(4, 1), 61.5)
    kept = Keep(KeptIslands({0: (0, 1)}, (), 2, 3))
    assert commands == [kept, EndIsland(1, (2,)), Answer(4, Accepted())]
    assert core.inventory.slices == {}
    assert 2 not in core.inventory.hosts


def test_one_that_was_removed_may_be_again_for_the_answer_may_have_been_lost() -> None:
    core = running()
    (kept,) = [c.islands for c in core.handle(RemoveRequested(1, 1), 1.0) if isinstance(c, Keep)]
    again = ManagerCore(kept, "secret")
    again.handle(JoinRequested(2, HostInfo(0, 0, "cpu", 2, "node", 300, "", (0, 1))), 2.0)
    assert answer(again, RemoveRequested(3, 1), 3.0) == Accepted()
    assert isinstance(answer(again, RemoveRequested(4, 2), 3.0), Refused), "there was none"


def test_an_island_that_is_only_being_started_does_not_count_as_another_one() -> None:
    core = running()
    core.handle(RemoveRequested(1, 1), 1.0)
    core.handle(IslandAdded(2, 1), 1.0)
    for event in (DrainRequested(3, 0, 60.0), RemoveRequested(4, 0)):
        refused = answer(core, event)
        assert isinstance(refused, Refused)
        assert "island 0 is the last one that takes slices" in refused.failure.message
    core.handle(IslandRemoved(2), 1.0)  # it could not be started
    assert core.shared.kept().members == {0: (0, 1)}
    assert answer(core, request(5, size=1)).placed.island == 0


def test_a_drain_can_be_taken_back() -> None:
    core = running()
    core.handle(DrainRequested(1, 1, 60.0, "its node is drained"), 1.0)
    assert core.inventory.drained_for == {1: "its node is drained"}
    assert answer(core, UndrainRequested(2, 1)) == Accepted()
    assert (core.inventory.state_of(1), core.inventory.drained_for) == (IslandState.UP, {})
    assert answer(core, request(3, size=2, island=1)).placed.island == 1
    refused = answer(core, UndrainRequested(4, 1))
    assert isinstance(refused, Refused)
    assert refused.failure.message == "island 1 is not draining; there is nothing to take back"


def test_what_an_island_was_started_as_is_kept_for_a_successor() -> None:
    core = ManagerCore(KeptIslands.first({0: [0]}, {0: b"a"}))
    (kept,) = [c.islands for c in core.handle(IslandAdded(1, 1, b"b"), 1.0) if isinstance(c, Keep)]
    assert kept.specs == {0: b"a", 1: b"b"}
    assert ManagerCore(kept).shared.kept().specs == kept.specs
    core.handle(HostServes(KnownHost(HostInfo(1, 1, "cpu", 2, "node", 300, "", (1,)), 1, True)), 1.0)
    core.handle(DrainRequested(2, 0, 1.0), 1.0)
    core.handle(RemoveRequested(3, 0), 1.0)
    assert core.shared.specs == {1: b"b"}


def test_what_was_removed_does_not_join_again_and_numbers_go_on() -> None:
    core = running()
    core.handle(RemoveRequested(1, 1), 1.0)
    late = JoinRequested(2, HostInfo(2, 1, "cpu", 2, "node", 999, "", (2,)))
    assert answer(core, late) == JoinReply(0, "", "", "", ())
    assert answer(core, IslandAdded(3, 1)) == (2, (3,))


def test_a_successor_knows_what_came_went_and_is_drained() -> None:
    core = running()
    core.handle(IslandAdded(1, 1), 1.0)
    (kept,) = [c.islands for c in core.handle(DrainRequested(2, 0, 5.0), 1.0) if isinstance(c, Keep)]
    assert kept == KeptIslands({0: (0, 1), 1: (2,), 2: (3,)}, (0,), 3, 4, drains={0: (6.0, "")})
    again = ManagerCore(kept, "secret")
    assert again.inventory.draining == {0: 6.0}
    assert answer(again, IslandAdded(1, 1)) == (3, (4,))


def test_a_successor_knows_until_when_an_island_is_drained_and_why() -> None:
    """The list is kept by the clock of all machines, and read by the successor's own."""
    core = running()
    (kept,) = [c.islands for c in core.handle(DrainRequested(2, 1, 30.0, "repairs"), 1.0) if isinstance(c, Keep)]
    written = msgspec.msgpack.encode(kept.by_clock(1000.0))
    found = msgspec.msgpack.decode(written, type=KeptIslands).by_clock(-900.0)
    again = ManagerCore(found, "secret")
    assert (again.inventory.draining, again.inventory.drained_for) == ({1: 131.0}, {1: "repairs"})
    again.handle(UndrainRequested(3, 1), 100.0)
    assert again.shared.kept().drains == {}


def test_a_list_of_islands_that_an_older_manager_kept_can_be_read() -> None:
    old = msgspec.msgpack.encode({"members": {0: (0,), 1: (1,)}, "draining": (1,), "next_island": 2, "next_host": 2})
    again = ManagerCore(msgspec.msgpack.decode(old, type=KeptIslands).by_clock(5.0), "secret")
    assert (again.inventory.draining, again.inventory.drained_for) == ({1: math.inf}, {1: ""})


def test_numbers_of_hosts_come_back_once_all_were_used() -> None:
    core = running()
    core.shared.next_host = limits.MAX_HOSTS - 1
    assert answer(core, IslandAdded(1, 1)) == (2, (limits.MAX_HOSTS - 1,))
    assert answer(core, IslandAdded(2, 2)) == (3, (3, 4))
    core.islands[9] = tuple(range(5, limits.MAX_HOSTS - 1))
    with pytest.raises(TooLarge, match="1 more would be over the 4096"):
        core.shared.add(1)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (DrainRequested(1, 7, 1.0), "there is no island 7 that could be drained; there are islands 0, 1"),
        (RemoveRequested(1, 7), "there is no island 7 that could be removed; there are islands 0, 1"),
        (DrainRequested(1, 0, -1.0), "the deadline of a drain is a number of seconds from now, not -1.0"),
        (DrainRequested(1, 0, math.nan), "not nan"),
        (IslandAdded(1, 0), "an island has 1 to 512 hosts, not 0"),
    ],
)
def test_what_cannot_be_says_why(event: Any, why: str) -> None:
    core = running()
    refused = answer(core, event)
    assert isinstance(refused, Refused)
    assert (refused.failure.kind, why in refused.failure.message) == ("UsageError", True)
    assert core.inventory.draining == {}


def test_the_last_island_that_takes_slices_stays() -> None:
    core = running()
    core.handle(DrainRequested(1, 0, 1.0), 1.0)
    for event in (DrainRequested(2, 1, 1.0, "its node ends"), RemoveRequested(2, 1)):
        refused = answer(core, event)
        assert isinstance(refused, Refused)
        assert "island 1 is the last one that takes slices" in refused.failure.message
    assert core.inventory.drained_for == {0: "", 1: "its node ends"}, "status says so all the same"
    core.handle(JoinRequested(3, HostInfo(2, 1, "cpu", 2, "another node", 300, "")), 2.0)
    assert core.inventory.drained_for == {0: ""}, "it is elsewhere now"
    with pytest.raises(UsageError):
        core.shared.drain(1, 1.0)
