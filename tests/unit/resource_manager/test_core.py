"""The resource manager's core as events and commands: addresses, joining, incarnations, liveness, waiting requests."""

from __future__ import annotations

from typing import Any

import msgspec

from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import SliceType
from pathways_ray.limits import LOST_AFTER_S
from pathways_ray.resource_manager.controllers import MAX_CONTROLLER_SILENCE_S, MAX_CONTROLLER_START_S
from pathways_ray.resource_manager.core import GATHER_S, MAX_REJOIN_S, ManagerCore
from pathways_ray.resource_manager.events import (
    Answer,
    Command,
    ControllerAsks,
    ControllerHolds,
    ControllerServes,
    ControllerStarts,
    DrainRequested,
    EndIsland,
    FromController,
    HostLeft,
    HostServes,
    Inquired,
    IslandRemoved,
    JoinRequested,
    KillController,
    KillHost,
    KillProcess,
    KillRequested,
    LookedUp,
    Published,
    RemoveRequested,
    SessionReleased,
    SliceReleased,
    SliceRequested,
    SlicesHeld,
    Ticked,
    Withdrawn,
)
from pathways_ray.resource_manager.slice_requests import SliceRequest
from pathways_ray.story import LIFECYCLE_ENTRIES, NOTES_AT_ONCE, Entry
from pathways_ray.transport.messages import (
    Accepted,
    HeldSlice,
    HeldSlices,
    Holdings,
    HostInfo,
    JoinReply,
    KnownHost,
    NotYet,
    Refused,
    SliceCreated,
)

ISLANDS = {0: [0, 1], 1: [2]}


def join(token: int, host: int, pid: int = 0) -> JoinRequested:
    """A request of a host of `ISLANDS`, with two devices; its process is `100 * host` unless it says otherwise."""
    island = 0 if host < 2 else 1
    return JoinRequested(token, HostInfo(host, island, "cpu", 2, f"node-{host}", pid or 100 * host, f"at-{host}"))


def request(token: int, session: int = 1, size: int = 2, island: int = -1) -> SliceRequested:
    return SliceRequested(token, session, SliceRequest((size,), ("x",), island))


def fresh(islands: dict[int, list[int]] | None = None) -> ManagerCore:
    """A core with a controller and a scheduler for each island, and no hosts yet."""
    core = ManagerCore(ISLANDS if islands is None else islands, "secret")
    core.handle(ControllerServes("first", "c:1", "controller"), 0.0)
    for island in core.islands:
        core.handle(Published(f"scheduler-{island}", f"s{island}:1"), 0.0)
    return core


def running() -> ManagerCore:
    """The same with all hosts."""
    core = fresh()
    for token, host in ((1, 0), (2, 1), (3, 2)):
        core.handle(join(token, host), 0.0)
    for host in (0, 1, 2):
        core.handle(HostServes(KnownHost(join(0, host).host, 1)), 0.0)
    return core


def serving(core: ManagerCore, until: float, incarnation: str = "first", start: float = 0.0) -> list[Command]:
    """Time passes by the second, and the controller says each time that it serves."""
    commands: list[Command] = []
    now = start
    while (now := now + 1.0) <= until:
        commands += core.handle(ControllerServes(incarnation, "c:1", "controller"), now)
        commands += core.handle(Ticked(), now)
    return commands


def silent(core: ManagerCore, start: float, until: float) -> list[Command]:
    """Time passes by the second, and nothing is heard."""
    return [c for k in range(round(until - start)) for c in core.handle(Ticked(), start + 1.0 + k)]


# --- addresses --------------------------------------------------------------------------------------------------------


def test_a_lookup_waits_for_its_address() -> None:
    core = ManagerCore(ISLANDS)
    assert core.handle(LookedUp(1, "controller"), 0.0) == []
    assert core.handle(LookedUp(2, "scheduler-0"), 0.0) == []
    assert core.handle(ControllerServes("first", "c:1", "controller"), 1.0) == [Answer(1, "c:1")]
    assert core.handle(Published("scheduler-0", "s:1"), 1.0) == [Answer(2, "s:1")]
    assert core.handle(LookedUp(3, "scheduler-0"), 2.0) == [Answer(3, "s:1")], "later ones are answered at once"


def test_an_address_is_withdrawn_by_those_who_know_it_alone() -> None:
    """Who saw the end of a process may be slower than its successor."""
    core = fresh()
    core.handle(Published("scheduler-0", "s0:2"), 1.0)
    core.handle(Withdrawn("scheduler-0", "s0:1"), 1.0)
    assert core.handle(LookedUp(1, "scheduler-0"), 1.0) == [Answer(1, "s0:2")]
    core.handle(Withdrawn("scheduler-0", "s0:2"), 1.0)
    assert core.handle(LookedUp(2, "scheduler-0"), 1.0) == []


# --- joining ----------------------------------------------------------------------------------------------------------


def test_the_hosts_of_an_island_join_together() -> None:
    """
    1. Host 1 comes first and waits. Host 2 is the only one of its island and does not.
    2. Host 0 completes island 0: both get one epoch, and the coordinator that the first of them offered.
    """
    core = fresh()
    assert core.handle(join(1, 1), 0.0) == []
    assert core.handle(join(2, 2), 0.0) == [Answer(2, JoinReply(1, "s1:1", "secret", ""))]
    reply = JoinReply(1, "s0:1", "secret", "at-0")
    assert core.handle(join(3, 0), 0.0) == [Answer(3, reply), Answer(1, reply)]


def test_a_host_waits_for_the_scheduler_of_its_island() -> None:
    core = ManagerCore(ISLANDS)
    assert core.handle(join(1, 2), 0.0) == []
    assert core.handle(Published("scheduler-1", "s1:1"), 0.0) == [Answer(1, JoinReply(1, "s1:1", "", ""))]


def test_a_host_that_comes_again_takes_its_group_with_it() -> None:
    """
    1. Host 0 restarts. Host 1, which is of its old group, is killed.
    2. It restarts as well: both are up under the next epoch.
    """
    core = running()
    (kill,) = core.handle(join(4, 0, pid=7), 1.0)
    assert kill == KillProcess("node-1", 100, "a member of its group restarted", 1)
    answers = core.handle(join(5, 1, pid=8), 2.0)
    assert answers == [Answer(token, JoinReply(2, "s0:1", "secret", "at-0")) for token in (4, 5)]
    assert [core.inventory.hosts[host].pid for host in (0, 1)] == [7, 8]


def test_a_host_that_dies_while_it_waits_is_replaced_by_its_successor() -> None:
    core = fresh()
    assert core.handle(join(1, 0, pid=7), 0.0) == []
    assert core.handle(join(2, 0, pid=8), 0.0) == [Answer(1, None)], "or its call would be kept for ever"
    assert {answer.token for answer in core.handle(join(3, 1), 0.0) if isinstance(answer, Answer)} == {2, 3}
    assert core.inventory.hosts[0].pid == 8


def test_a_restarted_resource_manager_gives_higher_epochs_than_before() -> None:
    core = ManagerCore({0: [0]}, last_epoch=1000)
    core.handle(Published("scheduler-0", "s:1"), 0.0)
    assert core.handle(join(1, 0), 0.0) == [Answer(1, JoinReply(1001, "s:1", "", ""))]


def test_a_host_is_killed_under_the_epoch_it_has() -> None:
    core = running()
    assert core.handle(KillRequested(1, 1), 0.0) == [KillProcess("node-1", 100, "its scheduler cannot use it", 1)]
    assert core.handle(KillRequested(1, 2), 0.0) == []
    assert core.handle(KillRequested(9, 1), 0.0) == []


def test_a_host_that_left_is_not_up() -> None:
    core = running()
    core.handle(HostLeft(2, 1), 0.0)
    assert [host.up for host in core.inventory.hosts.values()] == [True, True, False]


# --- controllers ------------------------------------------------------------------------------------------------------


def test_a_controller_that_falls_silent_is_killed_once() -> None:
    """
    1. It says every second that it serves, for a minute. Then it is stopped.
    2. After the limit it is killed by the name it gave. Ray restarts it, which takes time: it is not killed again.
    """
    core = running()
    assert serving(core, 60.0) == []
    assert silent(core, 60.0, 60.0 + MAX_CONTROLLER_SILENCE_S) == []
    assert core.handle(Ticked(), 91.0) == [KillController("controller", "it did not answer for 30 s")]
    assert silent(core, 91.0, 200.0) == []
    assert serving(core, 260.0, "second", start=200.0) == []


def test_the_successor_of_a_silent_controller_is_not_killed_for_being_slow() -> None:
    """
    1. The first controller dies. Its successor begins at once, and takes a minute to start.
    2. After the limit the first one's process is killed, should it be there still; and nothing else.
    3. One that does not come to serve at all is killed two minutes after it began.
    """
    core = running()
    core.handle(ControllerServes("first", "c:1", "controller", (), 70, 1), 0.0)
    core.handle(ControllerStarts(80, 5), 2.0)
    assert silent(core, 2.0, 70.0) == [KillController("controller", "it did not answer for 30 s", 70, 1)]
    assert serving(core, 80.0, "second", start=70.0) == []
    core = running()
    core.handle(ControllerStarts(80, 5), 2.0)
    killed = [c for c in silent(core, 2.0, 130.0) if isinstance(c, KillController)]
    assert [command.pid for command in killed] == [0, 80]


def test_a_controller_that_starts_with_its_resource_manager_gets_its_time() -> None:
    core = ManagerCore(ISLANDS, controller="controller")
    core.handle(ControllerStarts(80, 5), 1.0)
    assert [c for c in silent(core, 1.0, 100.0) if isinstance(c, KillController)] == []


def test_the_watch_over_a_new_controller_is_over_that_controller() -> None:
    """Schedulers are published when it comes, and its own name is another one than before."""
    core = running()
    serving(core, 3.0)
    core.handle(ControllerServes("second", "c:2", "controller of the other name"), 4.0)
    core.handle(Published("scheduler-0", "s0:2"), 4.0)
    for host in (0, 1, 2):  # that were killed, and have joined again
        core.handle(join(10 + host, host), 4.0)
    killed = [c for c in silent(core, 4.0, 50.0) if isinstance(c, KillController)]
    assert [command.actor for command in killed] == ["controller of the other name"]


def test_a_controller_that_serves_is_awaited_no_more() -> None:
    core, commands = fresh(), list[Command]()
    core.handle(ControllerStarts(80, 5), 1.0)
    for second in range(2, round(MAX_CONTROLLER_START_S) + 5):
        core.handle(ControllerServes("second", "c:2", "controller", (), 80, 5), float(second))
        commands += core.handle(Ticked(), float(second))
    assert not [command for command in commands if isinstance(command, KillController)]


def test_a_resource_manager_that_did_not_run_itself_kills_no_controller() -> None:
    core = running()
    serving(core, 10.0)
    assert core.handle(Ticked(), 100.0) == []
    assert silent(core, 100.0, 100.0 + MAX_CONTROLLER_SILENCE_S) == []
    assert [type(c) for c in core.handle(Ticked(), 131.0)] == [KillController]


def test_a_new_controller_finds_the_slices_that_there_are_and_no_host_up() -> None:
    """It says which sessions have ended, and of each host that it is up."""
    core = running()
    core.handle(request(4), 1.0)
    (placed,) = (one.placed for one in core.inventory.slices.values())
    assert core.handle(ControllerServes("second", "c:2", "controller"), 2.0) == []
    core.inventory.draining[0] = 60.0
    assert core.inventory.held_slices() == HeldSlices((HeldSlice(1, placed),), 1, (0,))
    assert not any(host.up for host in core.inventory.hosts.values())
    assert core.handle(LookedUp(5, "controller"), 2.0) == [Answer(5, "c:2")]
    assert core.handle(LookedUp(6, "scheduler-0"), 2.0) == [], "the schedulers are those of the old controller"


def test_a_late_call_of_a_controller_that_is_gone_changes_nothing() -> None:
    core = running()
    core.handle(ControllerServes("second", "c:2", "controller"), 2.0)
    for island in (0, 1):
        core.handle(Published(f"scheduler-{island}", f"s{island}:2"), 2.0)
    for token, host in ((6, 0), (7, 1), (8, 2)):
        core.handle(join(token, host), 2.0)
    core.handle(request(4), 2.0)
    assert core.handle(ControllerServes("first", "c:1", "controller"), 2.0) == []
    assert core.handle(LookedUp(5, "controller"), 2.0) == [Answer(5, "c:2")]
    assert core.inventory.slices
    assert silent(core, 2.0, 32.0) == [], "nor is it watched"


# --- hosts of a scheduler that is gone --------------------------------------------------------------------------------


def test_a_host_that_does_not_join_a_new_scheduler_is_killed() -> None:
    """
    1. The scheduler of island 1 restarts. Its host is stopped, so it cannot see that the link has ended.
    2. Nobody else knows it: the new scheduler has never heard of it. It is killed after the limit, and
       again after as long: a call may be lost.
    """
    core = running()
    serving(core, 5.0)
    core.handle(Published("scheduler-1", "s1:2"), 5.0)
    assert serving(core, 5.0 + MAX_REJOIN_S, start=5.0) == []
    (kill,) = serving(core, 36.0, start=35.0)
    assert kill == KillProcess("node-2", 200, "it did not join its new scheduler for 30 s", 2)
    assert serving(core, 66.0, start=36.0) == []
    assert serving(core, 67.0, start=66.0) == [kill]


def test_hosts_that_join_the_new_scheduler_are_not_killed() -> None:
    """
    1. The scheduler of island 0 restarts; its hosts come back before and after it does.
    2. The address comes twice, as a call that is repeated.
    """
    core = running()
    serving(core, 5.0)
    core.handle(Withdrawn("scheduler-0", "s0:1"), 5.0)
    core.handle(join(4, 0, pid=7), 5.0)
    core.handle(Published("scheduler-0", "s0:2"), 6.0)
    assert len(core.handle(join(5, 1, pid=8), 7.0)) == 2
    core.handle(Published("scheduler-0", "s0:2"), 8.0)
    assert serving(core, 100.0, start=8.0) == []


# --- slices -----------------------------------------------------------------------------------------------------------


def created(commands: list[Command]) -> dict[int, Any]:
    return {c.token: c.value for c in commands if isinstance(c, Answer) and isinstance(c.value, SliceCreated | Refused)}


def early(token: int, island: int = -1) -> SliceRequested:
    """A request that may be answered with `NotYet`."""
    return request(token, island=island)._replace(final=False)


def test_a_slice_is_mapped_at_once_when_all_islands_are_known() -> None:
    answers = created(running().handle(request(4), 1.0))
    assert isinstance(answers[4], SliceCreated)


def test_a_slice_that_is_refused_is_noted_in_brief() -> None:
    """A client may ask for a part with thousands of devices, which the refusal names."""
    core = running()
    places = tuple(range(4096))
    number = created(core.handle(SliceRequested(2, 1, SliceRequest((2,), ("x",))), 1.0))[2].placed.mesh.id
    core.handle(SliceRequested(3, 1, SliceRequest((4096,), ("x",), within=number, places=places)), 1.0)
    (entry,) = [entry for entry in core.story.entries() if entry.event == "slice refused"]
    assert entry.detail.startswith("places (0, 1, 2")
    assert len(entry.detail) == 500


def test_a_session_that_asks_for_slices_without_end_does_not_fill_the_log() -> None:
    """What others did stays in the story; all are counted."""
    core = running()
    logged: list[Entry] = []
    core.story.sink = logged.append
    core.handle(request(1, session=2), 0.0)
    for token in range(2, 2 * LIFECYCLE_ENTRIES):
        core.handle(request(token), 0.0)
        core.handle(SliceReleased(token, 1, token), 0.0)
    assert core.story.counts["slice mapped"] == 2 * LIFECYCLE_ENTRIES - 1
    assert len(logged) <= NOTES_AT_ONCE + 1
    assert {entry.session for entry in core.story.lifecycle if entry.event == "slice mapped"} == {1, 2}


def test_a_slice_waits_until_all_islands_have_joined() -> None:
    """Hosts join within seconds of each other; the first island is not to get all slices. Nothing waits here: the
    answer is to ask again."""
    core = fresh()
    core.handle(join(1, 0), 0.0)
    core.handle(join(2, 1), 0.0)
    assert core.handle(early(3), 1.0) == [Answer(3, NotYet())]
    assert created(core.handle(join(4, 2), 3.0)) == {}
    assert isinstance(created(core.handle(early(5), 3.0))[5], SliceCreated)


def test_a_slice_does_not_wait_for_an_island_that_it_can_do_without() -> None:
    """Island 1 does not come. One for island 0 goes at once, one for either after some seconds."""
    core = fresh()
    core.handle(join(1, 0), 0.0)
    core.handle(join(2, 1), 0.0)
    assert isinstance(created(core.handle(early(3, island=0), 0.5))[3], SliceCreated)
    assert core.handle(early(4), GATHER_S - 1) == [Answer(4, NotYet())]
    assert isinstance(created(core.handle(early(5), GATHER_S))[5], SliceCreated)


def test_a_slice_waits_for_its_only_island_until_the_controller_asks_for_the_last_time() -> None:
    """
    1. Island 1 has not joined: a request for it is to be asked again, also when hosts have had time to gather.
    2. The controller asks for the last time. Island 1 still is not there.
    3. It has joined.
    """
    core = fresh()
    core.handle(join(1, 0), 0.0)
    core.handle(join(2, 1), 0.0)
    for now in (0.0, MAX_REJOIN_S - 1.0):
        assert core.handle(early(3, island=1), now) == [Answer(3, NotYet())]
    answer = created(core.handle(request(4, island=1), MAX_REJOIN_S))[4]
    assert isinstance(answer, Refused)
    assert "no island can hold" in answer.failure.message
    assert "island 1, whose hosts have not joined" in answer.failure.message
    core.handle(join(6, 2), 31.0)
    assert isinstance(created(core.handle(early(7, island=1), 31.0))[7], SliceCreated)


def test_a_malformed_slice_is_refused_at_once_where_another_one_would_wait() -> None:
    """
    1. Island 1 has not joined. Sizes below 1 are refused, and the next question is answered: an exception would have
       left both without an answer.
    2. So it is with those that waited for a controller to say what it holds.
    """
    bad = [
        SliceRequest((-1, -4), ("x", "y")),
        SliceRequest((-1, -4), ("x", "y"), within=1, places=(0, 1)),
        SliceRequest((-1, -4), ("x", "y"), memory=1),
    ]
    core = fresh()
    core.handle(join(1, 0), 0.0)
    core.handle(join(2, 1), 0.0)
    for wanted in bad:
        (answer,) = core.handle(SliceRequested(3, 1, wanted, final=False), GATHER_S)
        assert isinstance(answer, Answer)
        assert isinstance(answer.value, Refused)

    core = ManagerCore({**ISLANDS, 5: [9]}, "secret", controller="c")
    core.handle(ControllerServes("first", "c:1", "controller"), 0.0)
    for token, wanted in enumerate(bad):
        assert core.handle(SliceRequested(token, 1, wanted, final=False), 0.1) == []
    core.handle(request(77, session=2), 0.2)
    hosts = tuple(KnownHost(join(0, host).host, 1) for host in (0, 1, 2))
    held = Holdings(hosts, ((0, "s0"), (1, "s1")), (), 3, 1)
    answers = created(core.handle(ControllerHolds("first", held), GATHER_S + 1.0))
    assert [type(answers[token]) for token in (0, 1, 2, 77)] == [Refused, Refused, Refused, SliceCreated]


def test_slices_go_to_islands_that_are_up_and_never_to_lost_ones() -> None:
    """
    1. Island 1 loses its host. A slice that fits island 0 goes there, though it is the more loaded one; one that only
       island 1 can hold goes to it, since its host is expected back.
    2. It does not come back: the island is lost, and such a request is refused at once, with the state of the island.
    3. It comes back all the same: the island is up, and gets slices again.
    """
    core = running()
    for token in (4, 5):
        core.handle(request(token, island=0), 1.0)
    core.handle(HostLeft(2, 1), 6.0)
    placed = created([c for k in (6, 7) for c in core.handle(request(k, island=-1 if k == 6 else 1), 7.0)])
    assert [placed[token].placed.island for token in (6, 7)] == [0, 1]
    serving(core, 6.0 + LOST_AFTER_S + 1.0, start=7.0)
    refused = created(core.handle(request(8, island=1), 130.0))[8]
    assert isinstance(refused, Refused)
    assert "island 1 with 2 cpu devices on 1 host(s), which is lost" in refused.failure.message
    core.handle(join(9, 2, pid=7), 131.0)
    assert isinstance(created(core.handle(request(10, island=1), 132.0))[10], SliceCreated)


def test_hosts_do_not_wait_for_ever_for_a_member_of_their_island() -> None:
    """Host 1 never joins. Host 0 is sent away, and starts anew."""
    core = fresh()
    assert core.handle(join(1, 0), 0.0) == []
    assert serving(core, LOST_AFTER_S) == []
    commands = serving(core, LOST_AFTER_S + 2.0, start=LOST_AFTER_S)
    assert Answer(1, JoinReply(0, "", "", "", (1,))) in commands
    assert {command.host for command in commands if isinstance(command, KillHost)} == {1, 2}, "they may be stopped"
    assert core.handle(join(2, 0, pid=8), 130.0) == []


def test_a_host_that_joins_and_does_not_serve_is_killed() -> None:
    """Host 2 is stopped between the answer to its join and its scheduler, which has never heard of it."""
    core = fresh()
    for token, host in ((1, 0), (2, 1), (3, 2)):
        core.handle(join(token, host), 0.0)
    for host in (0, 1):
        core.handle(HostServes(KnownHost(join(0, host).host, 1)), 1.0)
    assert serving(core, LOST_AFTER_S) == []
    (kill,) = serving(core, LOST_AFTER_S + 1.0, start=LOST_AFTER_S)
    assert kill == KillProcess("node-2", 200, "it joined its island, and does not serve", 2)


def test_a_restarted_manager_has_those_killed_of_whom_it_never_hears() -> None:
    """Host 2 joins it. The controller and the other hosts may have been stopped before it began."""
    core = ManagerCore(ISLANDS, controller="controller")
    core.handle(Published("scheduler-1", "s1:1"), 0.0)
    core.handle(join(1, 2), 1.0)
    assert silent(core, 1.0, MAX_CONTROLLER_SILENCE_S) == []
    assert silent(core, MAX_CONTROLLER_SILENCE_S, MAX_CONTROLLER_SILENCE_S + 1) == [
        KillController("controller", "it did not answer for 30 s"),
        *(KillHost(host, "it did not join its new scheduler for 30 s") for host in (0, 1)),
    ]


def holding(core: ManagerCore, session: int = 1) -> ControllerHolds:
    """What the controller of a running core holds, with a slice for a session."""
    core.handle(request(40, session), 1.0)
    hosts = tuple(KnownHost(join(0, host).host, record.epoch) for host, record in core.inventory.hosts.items())
    slices = tuple(HeldSlice(r.session, r.placed, "mine") for r in core.inventory.slices.values())
    return ControllerHolds("first", Holdings(hosts, ((0, "s0:1"), (1, "s1:1")), slices, 7))


def successor(core: ManagerCore) -> ManagerCore:
    """Another one, after the death of a running core; the controller has found it."""
    made = ManagerCore(core.shared.kept(), "secret", last_epoch=1000, controller="controller")
    made.handle(ControllerServes("first", "c:1", "controller"), 10.0)
    return made


def test_a_restarted_manager_knows_what_the_controller_holds_and_kills_nobody() -> None:
    """
    1. It dies. Its successor waits with questions about slices until the controller has said what it holds.
    2. Hosts, schedulers and slices are as before; slices that follow have other numbers. Nobody is killed.
    3. What comes late of a controller that is over changes nothing.
    """
    before = running()
    told = holding(before)
    after = successor(before)
    assert after.handle(request(1, 2), 10.0) == []
    assert after.handle(SliceReleased(2, 1, told.holdings.slices[0].placed.mesh.id), 10.0) == []
    assert after.handle(Inquired(3), 10.0) == []
    assert after.handle(LookedUp(4, "scheduler-0"), 10.0) == []
    assert after.handle(ControllerHolds("another", told.holdings), 11.0) == []
    address, created, released, known = after.handle(told, 11.0)
    assert (address, released, known) == (Answer(4, "s0:1"), Answer(2, True), Answer(3, True))
    assert isinstance(created, Answer)
    assert isinstance(created.value, SliceCreated)
    assert created.value.placed.mesh.id == 8
    assert {h.host: (h.epoch, h.up) for h in after.inventory.hosts.values()} == {
        0: (1, True),
        1: (1, True),
        2: (1, True),
    }
    assert after.inventory.load() == {
        device: int(device in created.value.placed.devices) for device in before.inventory.load()
    }
    assert serving(after, 100.0, start=11.0) == []
    assert after.handle(told, 100.0) == []
    assert len(after.inventory.slices) == 1, "slices are mapped here from then on"


def test_a_list_of_the_controller_that_comes_twice_takes_no_news_back() -> None:
    """The second time it is older than the word that a host is back; a later list is not."""
    before = running()
    told = holding(before)
    zero, one, two = told.holdings.hosts
    gone = msgspec.structs.replace(two, up=False)
    first = ControllerHolds("first", msgspec.structs.replace(told.holdings, hosts=(zero, one, gone)))
    after = successor(before)
    after.handle(first, 11.0)
    after.handle(HostServes(two), 12.0)
    after.handle(first, 12.1)
    assert after.inventory.hosts[2].up
    after.handle(ControllerHolds("first", msgspec.structs.replace(first.holdings, number=2)), 13.0)
    assert not after.inventory.hosts[2].up


def test_each_controller_numbers_its_lists_by_itself() -> None:
    core = running()
    told = holding(core).holdings
    gone = msgspec.structs.replace(told.hosts[2], up=False)
    core.handle(ControllerHolds("first", msgspec.structs.replace(told, number=2)), 1.0)
    core.handle(ControllerServes("second", "c:2", "controller"), 2.0)
    core.handle(ControllerHolds("second", msgspec.structs.replace(told, hosts=(*told.hosts[:2], gone))), 3.0)
    assert [core.inventory.hosts[host].up for host in (0, 1, 2)] == [True, True, False]


def test_a_restarted_manager_goes_on_with_hosts_that_come_and_go() -> None:
    """
    1. The controller has lost host 2, and knew no host 1: it had joined, and its scheduler had not seen it.
    2. Host 1 serves. Host 2 is expected, and killed when it does not come; an old word of it changes nothing.
    3. Host 0 restarts: host 1, which is of its group, is killed, and both get an epoch that is new to everybody.
    """
    before = running()
    told = holding(before).holdings
    zero, one, two = told.hosts
    after = successor(before)
    heard = msgspec.structs.replace(told, hosts=(zero, msgspec.structs.replace(two, up=False)))
    after.handle(ControllerHolds("first", heard), 11.0)
    assert after.handle(HostServes(one), 12.0) == []
    killed = [c for c in serving(after, 60.0, start=12.0) if isinstance(c, KillProcess)]
    assert [command.host for command in killed] == [2]
    (answer,) = after.handle(join(5, 2, pid=8), 60.0)
    assert answer == Answer(5, JoinReply(1001, "s1:1", "secret", ""))
    assert after.handle(HostServes(two), 61.0) == []
    assert after.inventory.hosts[2].epoch == 1001
    (kill,) = after.handle(join(6, 0, pid=8), 61.0)
    assert kill == KillProcess("node-1", 100, "a member of its group restarted", 1)
    answers = after.handle(join(7, 1, pid=9), 62.0)
    assert [c.value.epoch for c in answers if isinstance(c, Answer) and isinstance(c.value, JoinReply)] == [1001, 1001]


def test_an_island_whose_end_was_cut_short_is_ended_by_the_successor() -> None:
    """The answer to its removal was lost as well: the controller asks again."""
    before = running()
    told = holding(before, session=1)
    before.handle(SessionReleased(41, 1), 2.0)
    before.handle(DrainRequested(42, 1, 0.0), 2.0)
    before.handle(RemoveRequested(43, 1), 3.0)
    after = successor(before)
    assert after.handle(RemoveRequested(44, 1), 10.0) == []
    commands = after.handle(told, 11.0)
    assert [type(c) for c in commands] == [EndIsland, Answer]
    assert commands[-1] == Answer(44, Accepted())
    assert {record.placed.island for record in after.inventory.slices.values()} <= {0}


def test_slices_are_given_back_one_by_one_or_with_their_session() -> None:
    core = running()
    for token in (4, 5, 6):
        core.handle(request(token), 1.0)
    assert core.handle(SliceReleased(7, 1, 1), 1.0) == [Answer(7, True)]
    assert core.handle(SliceReleased(8, 1, 1), 1.0) == [Answer(8, False)]
    assert core.handle(SessionReleased(9, 1), 1.0) == [Answer(9, 2)]
    assert core.inventory.slices == {}


def test_a_session_that_comes_back_has_the_slices_that_its_client_knows() -> None:
    """Two it did not know, one of them on an island that is gone; one lies elsewhere, one was given back."""
    core = running()
    core.handle(RemoveRequested(3, 1), 1.0)
    one, two = (PlacedSlice.on(SliceType(n, (1,), ("x",)), 0, [Device(0, n % 2)]) for n in (2, 30))
    gone = PlacedSlice.on(SliceType(31, (1,), ("x",)), 1, [Device(2, 0)])
    for token in (4, 5):
        core.handle(request(token), 1.0)
    found = HeldSlices((HeldSlice(1, one), HeldSlice(1, two, within=2), HeldSlice(1, gone)), 40)
    assert core.handle(SlicesHeld(7, 1, found), 1.0) == [Answer(7, True)]
    assert {key: record.placed for key, record in core.inventory.slices.items()} == {(1, 2): one, (1, 30): two}
    assert +core.inventory.held == {Device(0, 0): 1}
    (created,) = core.handle(request(8), 1.0)
    assert isinstance(created, Answer)
    assert isinstance(created.value, SliceCreated)
    assert created.value.placed.mesh.id == 41


def test_slices_that_came_after_a_session_stay_when_it_is_told_late_which_it_came_back_with() -> None:
    """The call did not get through at first, and the slice that the session asked for then did. What it holds is
    counted once."""
    core = running()
    core.handle(request(4), 1.0)
    (old,) = [record.placed for record in core.inventory.slices.values()]
    core.handle(SlicesHeld(5, 1, HeldSlices((), 20)), 1.0)
    core.handle(request(6), 1.0)
    found = HeldSlices((HeldSlice(1, old),), 20)
    for token in (7, 8):
        core.handle(SlicesHeld(token, 1, found), 1.0)
    assert sorted(core.inventory.slices) == [(1, old.mesh.id), (1, 21)]
    core.handle(SessionReleased(9, 1), 1.0)
    assert not +core.inventory.held


def test_what_a_controller_asked_for_as_it_died_is_free_once_its_session_comes_back() -> None:
    """The next controller has asked which slices there are before that, and knows of none."""
    core = running()
    core.handle(request(4), 1.0)
    core.handle(ControllerServes("second", "c:2", "controller"), 2.0)
    core.handle(request(5), 3.0)
    core.handle(SlicesHeld(6, 1, HeldSlices((), 0)), 4.0)
    assert sorted(core.inventory.slices) == [(1, 2)], "what the next one asked for stays"


def test_a_controller_whose_successor_has_asked_who_holds_slices_changes_nothing_any_more() -> None:
    """What it said as it died comes late, its word that it serves too; the one that asked has not served yet."""
    core = fresh()
    first, second = (ControllerServes(name, f"c:{name}", "controller", (), at, at) for name, at in (("a", 5), ("b", 9)))
    core.handle(first, 0.0)
    for island in core.islands:
        core.handle(Published(f"scheduler-{island}", f"s{island}:1"), 0.0)
    for token, host in ((1, 0), (2, 1), (3, 2)):
        core.handle(join(token, host), 0.0)
    core.handle(FromController(5, request(4)), 1.0)
    (told,) = core.handle(ControllerAsks(5, 9), 2.0)
    assert isinstance(told, Answer)
    assert isinstance(told.value, HeldSlices)
    assert len(told.value.slices) == 1
    late = (request(6), SliceReleased(7, 1, 1), SessionReleased(8, 1), SlicesHeld(9, 1, HeldSlices((), 9)))
    for now, serves in ((3.0, first), (4.0, second)):
        for question in late:
            assert core.handle(FromController(5, question), now) == [Answer(question.token, None)]
        core.handle(serves, now)
        assert core.inventory.held_slices() == told.value
    assert core.handle(FromController(9, SliceReleased(11, 1, 1)), 6.0) == [Answer(11, True)]


def test_what_controllers_said_that_died_unheard_comes_after_the_word_of_the_one_that_serves() -> None:
    """The resource manager was stopped meanwhile, and hears of three at once."""
    core = running()
    core.handle(ControllerServes("d", "c:d", "controller", (), 9, 9), 10.0)
    core.handle(HostServes(KnownHost(join(0, 0).host, 1)), 10.0)
    for name, started in (("b", 7), ("c", 8)):
        assert core.handle(ControllerServes(name, f"c:{name}", "controller", (), started, started), 10.1) == []
    assert core.addresses.known["controller"] == "c:d"
    assert core.inventory.hosts[0].up
    assert not [c for c in serving(core, 40.0, "d", start=10.1) if isinstance(c, KillController)]


def test_a_slice_of_a_tenant_whose_island_comes_late_is_there_with_its_parts() -> None:
    core = running()
    whole = PlacedSlice.on(SliceType(30, (2,), ("x",)), 7, [Device(40, 0), Device(40, 1)])
    core.handle(SlicesHeld(5, 1, HeldSlices((HeldSlice(1, whole),), 40)), 1.0)
    (created,) = core.handle(SliceRequested(6, 1, SliceRequest((1,), ("x",), within=30, places=(1,))), 1.0)
    assert isinstance(created, Answer)
    assert isinstance(created.value, SliceCreated)
    assert created.value.placed.devices == (Device(40, 1),)


# --- islands of tenants -----------------------------------------------------------------------------------------------


def alices(core: ManagerCore) -> ManagerCore:
    """Alice gets an island beside each of the two, with three hosts of the numbers 3 to 5."""
    for island, base, members in ((2, 0, (3, 4)), (3, 1, (5,))):
        core.handle(Published(f"scheduler-{island}", f"s{island}:1"), 0.0)
        for host in members:
            info = HostInfo(host, island, "cpu", 2, "node", 100 * host, "", members, "alice", base)
            core.handle(JoinRequested(10 + host, info), 0.0)
    return core


def placed(core: ManagerCore, tenant: str, island: int = -1, token: int = 50) -> int:
    """The island that a slice of a tenant is mapped to."""
    event = SliceRequested(token, 1, SliceRequest((2,), ("x",), island, tenant=tenant))
    (answer,) = core.handle(event, 0.0)
    assert isinstance(answer, Answer)
    assert isinstance(answer.value, SliceCreated), answer
    return answer.value.placed.island


def test_slices_of_a_tenant_lie_on_its_own_islands() -> None:
    """It may name them by their own numbers, or by those of the islands that they share devices with."""
    core = alices(running())
    assert [placed(core, "alice", island) for island in (0, 1, 2, 3)] == [2, 3, 2, 3]
    assert {placed(core, "") for _ in range(8)} == {0, 1}
    (answer,) = core.handle(SliceRequested(9, 1, SliceRequest((2,), ("x",), 2)), 0.0)
    assert isinstance(answer, Answer)
    assert isinstance(answer.value, Refused)


def test_a_slice_waits_for_the_islands_of_its_tenant() -> None:
    core = running()
    waiting = SliceRequested(9, 1, SliceRequest((2,), ("x",), tenant="alice"), final=False)
    assert core.handle(waiting, 0.0) == [Answer(9, NotYet())]
    assert placed(core, "") in (0, 1), "others do not wait"
    (answer,) = alices(core).handle(waiting, 0.0)
    assert isinstance(answer, Answer)
    assert isinstance(answer.value, SliceCreated)


def test_an_island_that_was_removed_is_forgotten_with_its_slices() -> None:
    """Its numbers may come again, for another tenant: under newer epochs."""
    core = alices(running())
    placed(core, "alice", 0)
    epoch = core.inventory.hosts[3].epoch
    core.handle(IslandRemoved(2), 0.0)
    assert 3 not in core.inventory.hosts
    assert not core.inventory.slices
    assert 2 not in core.islands
    alices(core)
    assert core.inventory.hosts[3].epoch > epoch
