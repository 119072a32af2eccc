"""A controller that follows another one: what it learns, and the sessions that come back to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from pathways_ray import limits
from pathways_ray.controller.channel import Carrier
from pathways_ray.controller.events import (
    CallManager,
    ClientMessages,
    Command,
    IslandConnected,
    IslandDisconnected,
    StreamOpened,
    TenantsRead,
    WantIslands,
)
from pathways_ray.controller.programs import SEGMENT_BITS
from pathways_ray.controller.state import SendIsland
from pathways_ray.controller.status import Report, of_launches
from pathways_ray.controller.takeover import GATHER_LIMIT_S, MAX_NAMED, MAX_RESUME_BYTES, NUMBERS_APART, PROGRAMS_APART
from pathways_ray.controller.tenants import Quota, Tenant, TenantBook, token_digest
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import Block, Device, PlacedSlice
from pathways_ray.ir.types import SliceType
from pathways_ray.limits import HOST_ABSENCE_LIMIT_S
from pathways_ray.transport.capabilities import resume_tag, slice_tag
from pathways_ray.transport.messages import (
    VERSION,
    Abort,
    BuffersLost,
    Completed,
    Done,
    Drop,
    DropProgram,
    DropSession,
    HeldSlice,
    HeldSlices,
    Holds,
    HostDown,
    HostInfo,
    HostUp,
    IslandLaunch,
    IslandOutcome,
    IslandOutcomes,
    IslandUp,
    KeptBuffers,
    KnownSlice,
    Launch,
    LaunchFailed,
    Load,
    Peers,
    Program,
    Put,
    Ready,
    Refused,
    RemoveIsland,
    ResumeSession,
    SessionResumed,
    Stored,
    Unanswered,
    Vacate,
    encode,
)
from tests.unit.controller.core_harness import CoreHarness, of, reply, sent
from tests.unit.controller.harness import ISLAND_OF_HOST, SLICES, program_over
from tests.unit.controller.test_decisions import looping, planned
from tests.unit.helpers import VECTOR, placed

ALICE = Tenant("alice")
SESSION = 77
BOTH = SLICES[3]
"""A slice on hosts 0 and 1."""


class Successor(CoreHarness):
    """A controller that follows another one, under which session 77 of alice had slices 1 and 4, or others."""

    def __init__(
        self, slices: Sequence[PlacedSlice] = (SLICES[0], BOTH), draining: tuple[int, ...] = (), last: int = 9
    ) -> None:
        super().__init__()
        members: dict[int, list[int]] = {}
        for host, island in ISLAND_OF_HOST.items():
            members.setdefault(island, []).append(host)
        self.core.expect(members)
        held = tuple(HeldSlice(SESSION, placed, "mine") for placed in slices)
        self.core.take_over(HeldSlices(held, last, draining))

    def comes(self, host: int, holds: Holds | None = None) -> list[Command]:
        """The scheduler of a host joins, if it has not, and the host, which had epoch 5."""
        island = ISLAND_OF_HOST[host]
        self.connect(island)
        return self.from_island(island, HostUp(host, 5, f"t{host}", f"d{host}", 2, 100 + host, holds=holds))

    def join(self, island: int, sequence: int, program: int) -> None:
        self.handle(IslandConnected(island, IslandUp(island, "s", sequence, program)))

    def all_come(self, **held: Any) -> list[Command]:
        """All hosts join, with these buffers of the session, as in `h0`."""
        commands: list[Command] = []
        for host in ISLAND_OF_HOST:
            commands += self.comes(host, Holds({SESSION: tuple(held.get(f"h{host}", ()))}, (3,)))
        return commands

    def wait_until(self, time: float) -> list[Command]:
        """Time passes, and all schedulers that have come are heard of; the commands of the last tick."""
        commands: list[Command] = []
        while self.now < time:
            for island in list(self.core.islands.links):
                self.from_island(island)
            commands = self.tick(min(self.now + 1.0, time))
        return commands

    def ask(
        self,
        *kept: KeptBuffers,
        tenant: Tenant | None = ALICE,
        slices: Sequence[PlacedSlice | KnownSlice] = (SLICES[0], BOTH),
        **more: Any,
    ) -> Any:
        tag = more.get("tag", resume_tag("data secret", SESSION, "alice"))
        named = tuple(one if isinstance(one, KnownSlice) else known(one) for one in slices)
        version = more.get("version", VERSION)
        away = more.get("suspended", False), more.get("gives_way", False), more.get("unanswered", ())
        request = ResumeSession(version, SESSION, tag, "again", named, kept, 100, *away)
        return self.request(tenant, request, more.get("size", 10))


def known(placed: PlacedSlice, within: int = 0, session: int = SESSION) -> KnownSlice:
    return KnownSlice(placed, slice_tag("data secret", session, placed), "mine", within)


def holding(commands: list[Command]) -> HeldSlices:
    """The slices of the session, as the resource manager is told."""
    (call,) = [c for c in of(CallManager, commands) if c.method == "hold_slices"]
    assert call.arguments[0] == SESSION
    return msgspec.msgpack.decode(call.arguments[1], type=HeldSlices)


def kept(*numbers: int, slice: int = 1, arriving: bool = False) -> KeptBuffers:
    return KeptBuffers(slice, VECTOR, (), numbers, arriving)


def test_a_session_comes_back_with_what_is_there() -> None:
    """
    1. Of its arrays one is on both hosts of its slice, one on one of them, one nowhere. Hosts have one more.
    2. It is open under its number, with its slices and the first array; the others are lost, or dropped.
    """
    front = Successor()
    front.all_come(h0=(1, 2, 8), h1=(1,))
    commands = front.ask(kept(1, 2, 3, slice=4))
    found = reply(commands)
    assert isinstance(found, SessionResumed)
    assert found.lost == (2, 3)
    assert [made.placed for made in found.slices] == [SLICES[0], BOTH]
    assert all(made.slice_tag for made in found.slices)
    assert [host.host for host in found.hosts] == list(ISLAND_OF_HOST)
    session = front.core.launches.sessions[SESSION]
    assert list(session.buffers) == [1]
    assert not session.arriving
    assert session.names == {1: "mine", 4: "mine"}
    assert Drop(SESSION, (2, 8)) in sent(commands)
    assert front.core.clients.known[SESSION].tenant == ALICE


@pytest.mark.parametrize("comes", ["before", "after"])
def test_what_a_session_comes_back_with_takes_memory_from_others(comes: str) -> None:
    """
    1. Each device has room for six vectors. Session 77 had four of them on slice 1; a new session puts one there.
    2. Session 77 comes back, before a launch of the new one was admitted or after it.
    3. A launch has the room that is left, and the next one waits.
    """
    front = Successor(slices=SLICES[:1])
    for host, island in ISLAND_OF_HOST.items():
        holds = Holds({SESSION: (1, 2, 3, 4) if host == 0 else ()}, ())
        front.connect(island)
        front.from_island(island, HostUp(host, 5, "t", "d", 2, 100 + host, "", 6 * VECTOR.nbytes, holds=holds))
    front.tick(1.0)
    launches = front.core.launches

    def comes_back() -> None:
        resumed = reply(front.ask(kept(1, 2, 3, 4), slices=SLICES[:1]))
        assert isinstance(resumed, SessionResumed)
        assert resumed.lost == ()

    if comes == "before":
        comes_back()
    front.open_session(Tenant("bob"))
    number = max(front.core.clients.known)
    front.hold_slices(number)
    launches.register(number, 1, program_over(1, key=10**9, session=number))
    launches.ready(Ready(0, 10**9, 0))
    session = launches.sessions[number]
    launches.admission.call(session, Put(1, 1, VECTOR, ()))
    launches.stored(Stored(0, number, 1, 1, VECTOR, ()))

    def admitted(launch: int) -> bool:
        commands = launches.admission.call(session, Launch(launch, 1, (1,), 100 + launch))
        return any(isinstance(message, IslandLaunch) for message in sent([*commands]))

    assert admitted(1)
    if comes == "after":
        comes_back()
    assert not admitted(2), "six vectors are there"


def test_what_a_session_has_outlives_a_scheduler_that_dies_before_it_comes_back() -> None:
    """
    1. Hosts have said what they hold. The scheduler of host 0 dies, and the host says so again to the next one.
    2. Nothing of the session is dropped: it comes back with its array.
    """
    front = Successor()
    front.all_come(h0=(1,), h1=(1,))
    island = ISLAND_OF_HOST[0]
    front.handle(IslandDisconnected(island, island, "s"))
    front.connect(island, link=77)
    members = [host for host, at in ISLAND_OF_HOST.items() if at == island]
    again = [HostUp(h, 5, f"t{h}", f"d{h}", 2, 100 + h, holds=Holds({SESSION: (1,)}, ())) for h in members]
    commands = front.from_island(island, *again, link=77)
    assert not [message for message in sent(commands) if isinstance(message, DropSession)]
    resumed = reply(front.ask(kept(1, slice=4)))
    assert isinstance(resumed, SessionResumed)
    assert resumed.lost == ()


def test_launches_that_no_scheduler_knows_are_aborted_where_hosts_may_offer_something_for_them() -> None:
    """
    1. The scheduler of island 0 and the controller have died. Host 0 offers something for two launches: of one no
       scheduler knows, and the other one waits on island 1.
    2. Once all have come, host 0 hears that nobody takes the first one.
    """
    front = Successor()
    front.connect(ISLAND_OF_HOST[0])
    front.connect(1)
    front.from_island(1, IslandOutcomes((IslandOutcome(SESSION, 4, 1002, 9, 1, True),)))
    held = Holds({}, (9,), sequence=1002, offered=((1001, 9), (1002, 9)))
    commands = front.from_island(ISLAND_OF_HOST[0], HostUp(0, 5, "t0", "d0", 2, 100, holds=held))
    for host in ISLAND_OF_HOST:
        commands += front.comes(host, Holds({}, ())) if host else []
    aborted = [launch for message in sent(commands) if isinstance(message, Abort) for launch in message.launches]
    assert aborted == [(1001, 9)]


def test_a_suspended_session_stays_so_and_comes_back_to_other_devices() -> None:
    """
    1. Of its suspension the controller before may have died: what it still has of slices and arrays is given back.
    2. It is suspended, its slices named by their meshes. One is exchanged for a new one, and has its devices.
    """
    front = Successor()
    front.all_come(h0=(1, 2), h1=(1,))
    meshes = SLICES[0].mesh, BOTH.mesh
    commands = front.ask(suspended=True, gives_way=True)
    found = reply(commands)
    assert isinstance(found, SessionResumed)
    assert (found.slices, found.lost) == ((), ())
    assert holding(commands) == HeldSlices((), 9)
    assert Drop(SESSION, (1, 2)) in sent(commands)
    launches, moves = front.core.launches, front.core.requests.changes.moves
    session = launches.sessions[SESSION]
    assert (session.suspended, session.gives_way, session.slices, session.places) == (True, True, {}, {})
    new = PlacedSlice(SliceType(12, meshes[0].shape, meshes[0].axes), SLICES[1].island, SLICES[1].blocks)
    assert moves.refusal(session, [(1, 12)]) is not None, "it has no slice 12 yet"
    launches.add_slice(SESSION, new)
    assert not session.suspended
    assert moves.refusal(session, [(5, 12)]) is not None, "it never had a slice 5"
    assert moves.refusal(session, [(1, 12)]) is None
    moves.exchange(session, [(1, 12)])
    assert session.slices[1] == new.on_devices_of(meshes[0])


@pytest.mark.parametrize("named", [(SLICES[0], BOTH), ()])
def test_a_suspended_session_has_no_slices_whatever_its_client_says(named: tuple[PlacedSlice, ...]) -> None:
    front = Successor()
    front.all_come(h0=(1,))
    found = reply(front.ask(kept(1), slices=named, suspended=True))
    assert isinstance(found, SessionResumed)
    assert (found.slices, found.lost) == ((), (1,))


def outcome(launch: int, islands: int = 1, failure: Failure | None = None, runs: bool = False) -> IslandOutcome:
    return IslandOutcome(SESSION, launch, 1000 + launch, 9, islands, runs, failure)


def test_launches_of_before_have_the_outcome_that_schedulers_know() -> None:
    """
    1. Of those that the client names one is done on both its islands, one on one of two, one failed on one, one runs,
       one is unknown. The client hears so, and has the results of the first and the fourth.
    2. The fourth is over: the client hears of it once. What else its island reports concerns nobody.
    """
    failure = Failure("ExecutionError", "no")
    front = Successor()
    front.all_come(h0=(21, 22, 23, 24), h1=())
    here, there = ISLAND_OF_HOST[0], ISLAND_OF_HOST[3]
    assert here != there
    known = outcome(1, 2), outcome(2, 2), outcome(3, 2, failure), outcome(4, runs=True)
    front.from_island(here, IslandOutcomes(known))
    front.from_island(there, IslandOutcomes((outcome(1, 2),)))
    named = tuple(Unanswered(n, (20 + n,), (kept(20 + n),)) for n in range(1, 6))
    commands = front.ask(unanswered=named)
    found = reply(commands)
    assert isinstance(found, SessionResumed)
    assert (found.done, found.failed, found.running) == ((1,), ((3, failure),), (4,))
    session = front.core.launches.sessions[SESSION]
    assert sorted(session.buffers) == [21, 24]
    assert Drop(SESSION, (22, 23)) in sent(commands)
    assert sent(front.from_island(here, Done((1001, 1004)))) == [Completed((4,))]
    assert sent(front.from_island(here, Done((1004,)))) == []


def test_results_of_launches_that_ended_behind_what_their_hosts_said_are_there() -> None:
    """A launch may wait at its scheduler while hosts say what they hold. Results without a handle are dropped."""
    front = Successor()
    front.all_come(h0=(), h1=())
    here = ISLAND_OF_HOST[0]
    front.from_island(here, IslandOutcomes((outcome(1, runs=True), outcome(2, runs=True))))
    front.from_island(here, Done((1001, 1002)))
    commands = front.ask(unanswered=(Unanswered(1, (21,), (kept(21),)), Unanswered(2, (22,))))
    found = reply(commands)
    assert isinstance(found, SessionResumed)
    assert (found.done, found.lost) == ((1, 2), ())
    assert sorted(front.core.launches.sessions[SESSION].buffers) == [21]
    assert Drop(SESSION, (22,)) in sent(commands)


def test_a_launch_of_before_fails_with_the_island_that_it_runs_on() -> None:
    """So do its results here: what takes them fails for the same reason."""
    front = Successor()
    front.all_come(h0=(21,))
    front.from_island(ISLAND_OF_HOST[0], IslandOutcomes((outcome(1, runs=True),)))
    front.ask(unanswered=(Unanswered(1, (21,), (kept(21),)),))
    commands = front.from_island(ISLAND_OF_HOST[0], HostDown(0, 5, "it is gone"))
    (failed,) = [m for m in sent(commands) if isinstance(m, LaunchFailed)]
    assert (failed.launch, failed.failure.kind) == (1, "HostLost")
    assert not front.core.launches.sessions[SESSION].lives(21)


def test_what_a_launch_of_before_offers_is_taken_back_also_by_a_host_whose_scheduler_died_meanwhile() -> None:
    """It is over on island 0, and unknown elsewhere, so it is aborted. The scheduler may have died before it said so to
    its hosts: its successor is told again, before it drops the program, which takes back what it offers."""
    front = Successor()
    front.all_come()
    front.from_island(0, IslandOutcomes((outcome(1, islands=2),)))
    front.tick(front.now + 1.0)
    front.handle(IslandDisconnected(0, 0, "scheduler-0"))
    front.connect(0, link=7)
    holds = Holds({}, (9,))
    commands = [m for h in (0, 1) if ISLAND_OF_HOST[h] == 0 for m in _back(front, h, holds)]
    kinds = [type(m) for m in commands if isinstance(m, Abort | DropProgram)]
    assert kinds[:2] == [Abort, DropProgram]
    (abort, *_) = [m for m in commands if isinstance(m, Abort)]
    assert abort.launches == ((1001, 9),)


def test_a_launch_of_before_whose_island_is_lost_is_aborted_on_one_that_says_later_that_it_has_it() -> None:
    """It would wait there for what the lost one was to send."""
    front = Successor()
    island, later = ISLAND_OF_HOST[0], ISLAND_OF_HOST[3]
    for host in (0, 1, 2):
        front.comes(host, Holds({SESSION: ()}, ()))
    front.from_island(island, IslandOutcomes((outcome(1, islands=2, runs=True),)))
    front.handle(IslandDisconnected(island, island, "its scheduler"))
    front.connect(later)
    commands = front.from_island(later, IslandOutcomes((outcome(1, islands=2, runs=True), outcome(2, runs=True))))
    (abort,) = [m for m in sent(commands) if isinstance(m, Abort)]
    assert (abort.launches, abort.failure.kind) == (((1001, 9),), "HostLost")


def _back(front: Successor, host: int, holds: Holds) -> list[Any]:
    again = HostUp(host, 5, f"t{host}", f"d{host}", 2, 100 + host, holds=holds)
    return list(sent(front.from_island(0, again, link=7)))


def test_a_launch_of_before_fails_where_a_host_of_its_island_stays_away() -> None:
    """It went before this controller heard that it was there, so nothing that it has known is lost with it."""
    front = Successor()
    front.tick(1.0)
    for host in (0, 1, 2):
        front.comes(host, Holds({SESSION: ()}, ()))
    front.connect(ISLAND_OF_HOST[3])
    front.from_island(ISLAND_OF_HOST[3], IslandOutcomes((outcome(1, runs=True),)))
    front.wait_until(1.0 + GATHER_LIMIT_S)
    found = reply(front.ask(unanswered=(Unanswered(1, (21,), (kept(21),)),)))
    assert isinstance(found, SessionResumed)
    assert found.running == (1,)
    commands = front.wait_until(1.5 + HOST_ABSENCE_LIMIT_S)
    (failed,) = [m for m in sent(commands) if isinstance(m, LaunchFailed)]
    assert (failed.launch, failed.failure.kind) == (1, "HostLost")
    assert "host 3 has been down for" in failed.failure.message


@pytest.mark.parametrize("kind", ["HostLost", "LaunchTimeout"])
def test_launches_of_before_fail_with_a_host_that_this_controller_has_not_heard_of(kind: str) -> None:
    """
    1. Host 0 says nothing to this controller, as it is stopped; host 1 of its island does. Two launches run there.
    2. Host 0 is lost, and a new process comes for it. The client hears of both at once: the one that was over its limit
       has that failure.
    3. The loss is told once more, with the other host's: nobody hears of anything, and the new process stays.
    """
    front = Successor()
    front.tick(1.0)
    for host in (1, 2, 3):
        front.comes(host, Holds({SESSION: ()}, ()))
    island = ISLAND_OF_HOST[0]
    assert ISLAND_OF_HOST[1] == island
    front.from_island(island, IslandOutcomes((outcome(1, runs=True), outcome(2, runs=True))))
    front.wait_until(1.0 + GATHER_LIMIT_S)
    found = reply(front.ask(unanswered=tuple(Unanswered(n, (20 + n,), (kept(20 + n),)) for n in (1, 2))))
    assert isinstance(found, SessionResumed)
    assert found.running == (1, 2)
    gone = HostDown(0, 5, "it did not answer", kind, (1001,))
    commands = front.from_island(island, gone, HostUp(0, 6, "t0", "d0", 2, 200))
    failed = {m.launch: m.failure.kind for m in sent(commands) if isinstance(m, LaunchFailed)}
    assert failed == {1: kind, 2: "HostLost"}
    assert not front.core.launches.sessions[SESSION].lives(21)
    commands = front.from_island(island, HostDown(1, 5, "its island"), gone)
    assert not [m for m in sent(commands) if isinstance(m, LaunchFailed)]
    assert front.core.launches.hosts[0].down_since is None


@pytest.mark.parametrize("mine", [True, False])
def test_launches_of_before_hear_of_their_own_tenants_launch_that_ended_their_host_and_of_no_other(mine: bool) -> None:
    front = Successor()
    front.all_come()
    island = ISLAND_OF_HOST[0]
    outcomes = outcome(1, runs=True), outcome(2, runs=True)
    theirs = msgspec.structs.replace(outcomes[0], session=SESSION + 1)
    front.from_island(island, IslandOutcomes((outcomes[0] if mine else theirs, outcomes[1])))
    front.ask(unanswered=tuple(Unanswered(n, (20 + n,), (kept(20 + n),)) for n in (1, 2)))
    number = outcomes[0].sequence
    reason = f"launch {number} of program 'p' failed on host 0"
    gone = HostDown(0, 5, reason, "OrderMismatch", (), (f"dispatched launch {number}",), (), True, number)
    failed = {m.launch: m.failure for m in sent(front.from_island(island, gone)) if isinstance(m, LaunchFailed)}
    assert failed.keys() == ({1, 2} if mine else {2})
    for failure in failed.values():
        assert (reason in failure.message, gone.story[0] in failure.story) == (mine, mine)


def test_a_launch_of_before_fails_with_its_scheduler_where_its_host_has_not_come() -> None:
    """The host joins another scheduler, which knows nothing of the launch: it could tell nobody how it ended."""
    front = Successor()
    for host in (0, 1, 2):
        front.comes(host, Holds({SESSION: ()}, ()))
    island = ISLAND_OF_HOST[3]
    front.connect(island)
    front.from_island(island, IslandOutcomes((outcome(1, runs=True),)))
    front.handle(IslandDisconnected(island, island, "its scheduler"))
    front.comes(3, Holds({SESSION: ()}, ()))
    found = reply(front.ask(unanswered=(Unanswered(1, (21,), (kept(21),)),)))
    assert isinstance(found, SessionResumed)
    assert [(launch, failure.kind) for launch, failure in found.failed] == [(1, "HostLost")]


def test_what_schedulers_know_is_forgotten_once_nobody_can_come_for_it() -> None:
    front = Successor()
    front.all_come()
    front.from_island(ISLAND_OF_HOST[0], IslandOutcomes((outcome(1), outcome(2, runs=True))))
    front.tick(GATHER_LIMIT_S)
    front.tick(GATHER_LIMIT_S + limits.RESUME_LIMIT_S)
    assert not front.core.launches.outcomes.inherited.fates


def test_calls_wait_until_all_hosts_have_said_what_they_hold() -> None:
    front = Successor()
    front.comes(0, Holds({SESSION: (1,)}, ()))
    asked = front.ask(kept(1))
    assert asked == []
    for host in (1, 2):
        assert not [c for c in front.comes(host, Holds({}, ())) if c in asked]
    assert isinstance(reply(front.comes(3, Holds({}, ()))), SessionResumed)


def test_a_host_that_does_not_come_in_time_counts_as_lost() -> None:
    front = Successor()
    front.tick(1.0)
    for host in (0, 2, 3):
        front.comes(host, Holds({SESSION: (1, 2)}, ()))
    assert front.ask(kept(1), kept(2, slice=4)) == []
    front.tick(GATHER_LIMIT_S / 2)
    for island in set(ISLAND_OF_HOST.values()):  # or their hosts would count as lost too
        front.from_island(island, Load(island, {}))
    found = reply(front.tick(1.0 + GATHER_LIMIT_S))
    assert isinstance(found, SessionResumed)
    assert found.lost == (2,)


def test_a_session_comes_back_where_the_resource_manager_has_died_too() -> None:
    """
    1. Nobody else knows its slices, one of which is a part of another. Its client waits for their hosts.
    2. It has them, with what lies there. The resource manager hears of them, and gives nobody their numbers.
    """
    front = Successor((), last=0)
    part = PlacedSlice.on(SliceType(5, (1,), ("y",)), 0, [BOTH.devices[1]])
    assert front.ask(kept(1, slice=4), slices=(BOTH, known(part, 4))) == []
    commands = front.all_come(h0=(1,), h1=(1,))
    found = reply(commands)
    assert isinstance(found, SessionResumed)
    assert ([made.placed for made in found.slices], found.lost) == ([BOTH, part], ())
    slices = HeldSlice(SESSION, BOTH, "mine"), HeldSlice(SESSION, part, "mine", 4)
    assert holding(commands) == HeldSlices(slices, 5)
    assert front.core.launches.sessions[SESSION].parts == {5: 4}
    ended = reply(front.request(None, RemoveIsland(0, 1)))
    assert isinstance(ended, Refused)
    assert "may have slices on island 1; try again" in ended.failure.message
    assert front.core.launches.tables.last_slice == 5


def test_a_slice_of_an_island_that_was_removed_has_to_move_and_the_others_stay() -> None:
    """
    1. The controller died between the removal of island 7 and the move. The array there is lost, no other one is.
    2. The client hears that the slice has to move, and exchanges it for a new one. Then nobody knows the island.
    """
    front = Successor(SLICES[:1])
    front.all_come(h0=(1,))
    gone = on(8, 7, 40)
    found = reply(front.ask(kept(1), kept(2, slice=8), slices=(SLICES[0], gone)))
    assert isinstance(found, SessionResumed)
    assert ([made.placed for made in found.slices], found.lost) == ([SLICES[0], gone], (2,))
    front.handle(StreamOpened(SESSION))
    assert Vacate((8,)) in sent(front.tick(1.0))
    new = on(12, 0, 0)
    launches, moves = front.core.launches, front.core.requests.changes.moves
    launches.add_slice(SESSION, new)
    assert moves.refusal(launches.sessions[SESSION], [(8, 12)]) is None
    moves.exchange(launches.sessions[SESSION], [(8, 12)])
    assert launches.sessions[SESSION].slices[8] == new.on_devices_of(gone.mesh)
    launches.remove_slice(SESSION, 12)
    assert 40 in launches.hosts
    front.tick(9.0)
    assert 40 not in launches.hosts


@pytest.mark.parametrize(("devices", "kind"), [(3, "QuotaExceeded"), (4, "")])
def test_a_quota_holds_for_slices_that_were_given_back_and_are_named_again(devices: int, kind: str) -> None:
    """A part counts no device; what is called one, and is none, does."""
    tenant = msgspec.structs.replace(ALICE, quota=Quota(devices=devices))
    front = Successor(SLICES[:1])
    front.all_come()
    part = known(on(5, SLICES[0].island, SLICES[0].hosts[0]), 1)
    found = reply(front.ask(slices=(SLICES[0], part, known(on(6, 0, 1), 1), on(7, 0, 1)), tenant=tenant))
    assert (found.failure.kind if isinstance(found, Refused) else "") == kind


def on(number: int, island: int, *hosts: int) -> PlacedSlice:
    return PlacedSlice.on(SliceType(number, (len(hosts),), ("x",)), island, [Device(host, 0) for host in hosts])


VAST = PlacedSlice(SliceType(6, (1 << 40,), ("x",)), 0, (Block(0, 1 << 30, 0, 1 << 10),))
"""Who looks at its devices before its tag never ends."""

FORGED = KnownSlice(BOTH, slice_tag("data secret", SESSION, BOTH)), KnownSlice(VAST, "made up")
MANY = tuple(on(number, 0, 0) for number in range(1, limits.MAX_SLICES + 2))


@pytest.mark.parametrize(
    ("more", "kind", "text"),
    [
        ({"tag": "0" * 64}, "AuthenticationError", "not of tenant 'alice', or its tag is wrong"),
        ({"tenant": Tenant("bob")}, "AuthenticationError", "not of tenant 'bob'"),
        ({"tenant": None}, "AuthenticationError", "its tag is wrong"),
        ({"version": 3}, "WireError", "protocol version 3"),
        ({"slices": FORGED}, "AuthenticationError", "never had slice 6 on these devices, the tag is wrong"),
        ({"slices": FORGED, "suspended": True}, "AuthenticationError", "never had slice 6"),
        ({"slices": (known(BOTH, session=78),)}, "AuthenticationError", "never had slice 4"),
        ({"slices": MANY}, "TooLarge", f"up to {limits.MAX_SLICES} slices, and not {limits.MAX_SLICES + 1}"),
        ({"slices": (on(5, 0, 3),)}, "SessionClosed", "hosts of its slice 5 are not on island 0 any more"),
    ],
)
def test_nobody_gets_the_session_of_another_one(more: Any, kind: str, text: str) -> None:
    front = Successor()
    front.all_come(h0=(1,))
    found = reply(front.ask(kept(1), **more))
    assert isinstance(found, Refused)
    assert found.failure.kind == kind
    with pytest.raises(Exception, match=text):
        raise Exception(found.failure.message)
    assert SESSION not in front.core.launches.sessions


def test_a_controller_that_follows_no_other_one_resumes_nothing() -> None:
    front = CoreHarness(hosts=True)
    request = ResumeSession(VERSION, 1, resume_tag("data secret", 1, "alice"), "", (), (), 1)
    found = reply(front.request(ALICE, request))
    assert isinstance(found, Refused)
    assert "has followed no other one" in found.failure.message


def test_a_session_is_resumed_once_and_answered_again_where_the_answer_got_lost() -> None:
    front = Successor()
    front.all_come(h0=(1,))
    first = reply(front.ask(kept(1, 2)))
    assert reply(front.ask(kept(1, 2))) == first
    front.handle(StreamOpened(SESSION))
    found = reply(front.ask(kept(1)))
    assert isinstance(found, Refused)
    assert "it is open" in found.failure.message


def test_numbers_go_on_above_those_that_schedulers_have_seen() -> None:
    front = Successor()
    first = front.core.clients.registrar.programs_made
    front.join(0, sequence=500, program=first)
    front.join(1, sequence=900, program=7)
    assert front.core.launches.tables.sequence == 900 + NUMBERS_APART
    assert of_launches(front.core.launches, Report(), {})["launches"] == 0, "it has admitted none"
    assert front.core.clients.registrar.programs_made == first, "they are made from the time"
    assert front.core.launches.tables.last_slice == 9


def test_launches_have_numbers_above_those_that_hosts_have_seen() -> None:
    """The scheduler died with the controller, and its successor has seen none. Transfers are named by these numbers."""
    front = Successor()
    front.comes(0, Holds({}, (), sequence=5000))
    assert front.core.launches.tables.sequence == 5000 + NUMBERS_APART


def test_launches_have_numbers_above_that_from_which_on_a_host_has_data() -> None:
    """Those that waited at the controller before were numbered, and no host has seen them. Under their numbers, peers
    would say that the host came later than the launch, and it would wait for their data without end."""
    front = Successor()
    front.comes(0, Holds({}, (), sequence=50, since=5000))
    assert front.core.launches.tables.sequence == 5000 + NUMBERS_APART
    assert front.core.launches.hosts[0].since == 5000


def test_programs_have_numbers_above_those_that_hosts_hold() -> None:
    """The clock was set back. A scheduler that has just begun knows of none, and may die before its hosts have dropped
    them."""
    front = Successor()
    later = front.core.clients.registrar.programs_made + 5000
    front.join(0, sequence=0, program=0)
    front.comes(0, Holds({}, (7, -((later << SEGMENT_BITS) + 2))))
    assert front.core.clients.registrar.programs_made == later + NUMBERS_APART


def test_programs_have_other_numbers_before_a_scheduler_has_reported_any() -> None:
    """A host that is cut off may have programs of the controller before, and would take them for these."""
    front = CoreHarness()
    front.core.clients.sessions_made = 17
    front.core.take_over(HeldSlices((), 9))
    assert front.core.clients.registrar.programs_made == 17 * PROGRAMS_APART


def test_numbers_of_programs_after_a_takeover_fit_into_messages() -> None:
    """The clock gives them, and segments of programs that decide have numbers made of theirs."""
    front = CoreHarness()
    front.core.clients.sessions_made = 41 * 10**10  # hundredths of a second in the year 2099
    front.core.take_over(HeldSlices((), 9))
    made = front.core.clients.registrar.programs_made + 1000 * NUMBERS_APART
    program = planned(looping(), key=made)
    assert len(program.segments) > 1
    for segment in program.segments:
        for message in segment.messages.values():
            assert msgspec.msgpack.decode(encode(message), type=Program) == message


def test_what_nobody_comes_for_is_freed() -> None:
    """Programs at once, since they are registered again; buffers and slices after the limit. Then none comes back."""
    front = Successor()
    commands = front.all_come(h2=(5,))
    assert DropProgram(0, 3) in sent(commands)
    assert not [m for m in sent(commands) if isinstance(m, DropSession)]
    commands = [c for second in range(1, 40) for c in front.tick(float(second)) if second <= limits.RESUME_LIMIT_S]
    assert [m for m in sent(commands) if isinstance(m, DropSession)] == [DropSession(SESSION)] * 3
    assert CallManager("release_session", (SESSION,)) in commands
    found = reply(front.ask(kept(5)))
    assert isinstance(found, Refused)


def test_what_came_for_a_session_of_which_nothing_else_is_known_is_freed_too() -> None:
    front = Successor(slices=())
    for host in ISLAND_OF_HOST:
        front.comes(host, Holds({}, ()))
    front.from_island(0, Stored(0, SESSION, 1, 1, VECTOR, ()))
    commands = [c for second in range(1, 40) for c in front.tick(float(second))]
    assert [m for m in sent(commands) if isinstance(m, DropSession)] == [DropSession(SESSION)] * 3


def test_slices_without_a_handle_are_given_back() -> None:
    front = Successor()
    front.all_come()
    commands = front.ask(slices=(BOTH,))
    assert holding(commands).slices == (HeldSlice(SESSION, BOTH, "mine"),)
    assert list(front.core.launches.sessions[SESSION].slices) == [4]


def test_an_upload_that_was_under_way_goes_on() -> None:
    """Host 0 has it, host 1 gets it later. The hosts say what came to them, and that is compared."""
    front = Successor()
    where = (4, VECTOR, ())
    said = Stored(0, SESSION, 1, *where, {0: b"x"})
    front.comes(0, Holds({SESSION: (1,)}, (), (said,)))
    for host in (1, 2, 3):
        front.comes(host, Holds({}, ()))
    found = reply(front.ask(kept(1, slice=4, arriving=True)))
    assert isinstance(found, SessionResumed)
    assert not found.lost
    session = front.core.launches.sessions[SESSION]
    assert session.arriving[1].hosts == {1}
    front.from_island(0, Stored(1, SESSION, 1, *where, {0: b"other bytes"}))
    assert not session.lives(1)


def test_an_upload_that_began_behind_the_request_of_its_session_is_lost_once_its_client_names_it() -> None:
    """1. A session asks to be resumed. 2. An upload begins, arrives, and is dropped: the request says nothing of it.
    3. Its client names it, and hears that it is lost: who fetches it would wait without end."""
    front = Successor()
    front.all_come()
    front.from_island(0, Stored(0, SESSION, 7, 1, VECTOR, ()))
    assert Drop(SESSION, (7,)) in sent(front.ask())
    front.handle(StreamOpened(SESSION))
    commands = front.handle(ClientMessages(SESSION, Carrier.STREAM, 10, [Put(7, 1, VECTOR, (), {0: 5})]))
    (lost,) = [message for message in sent(commands) if isinstance(message, BuffersLost)]
    assert (lost.buffers, lost.failure.kind) == ((7,), "BufferLost")


@pytest.mark.parametrize(("went_to", "ends", "lives"), [(5, False, True), (4, False, False), (5, True, False)])
def test_an_upload_to_a_process_that_has_ended_is_lost(went_to: int, ends: bool, lives: bool) -> None:
    """
    1. While the controller was away, an upload came to hosts 0 and 1. Host 1 has not said that it has it: it will; or
       it has started again since, as process 5 in place of 4; or it ends just now.
    2. In the last two cases nobody will ever say so: who waited for it would wait without end.
    """
    front = Successor()
    front.all_come(h0=(1,))
    if ends:
        front.from_island(ISLAND_OF_HOST[1], HostDown(1, 5, "its process ended"))
    asked = msgspec.structs.replace(kept(1, slice=4, arriving=True), epochs={0: 5, 1: went_to})
    found = reply(front.ask(asked))
    assert isinstance(found, SessionResumed)
    assert found.lost == (() if lives else (1,))
    assert front.core.launches.sessions[SESSION].lives(1) == lives


@pytest.mark.parametrize("went_to", [4, 5])
def test_uploads_go_on_or_are_lost_when_a_host_comes_after_their_session(went_to: int) -> None:
    """
    1. While the controller was away, arrays came to hosts 0 and 1. Host 1 has not come when the session is back. Of the
       second one the client says then once more what it is, since that call had not left.
    2. Host 1 comes. It has them, and says so. Or they went to the process before it: nobody will report them, and who
       fetched them would wait without end.
    """
    front = Successor()
    front.tick(1.0)
    reports = {host: tuple(Stored(host, SESSION, number, 4, VECTOR, ()) for number in (1, 2)) for host in (0, 1)}
    front.comes(0, Holds({SESSION: (1, 2)}, (), reports[0]))
    for host in (2, 3):
        front.comes(host, Holds({}, ()))
    epochs = {0: 5, 1: went_to}
    front.ask(msgspec.structs.replace(kept(1, 2, slice=4, arriving=True), epochs=epochs))
    front.wait_until(1.0 + GATHER_LIMIT_S)
    front.handle(StreamOpened(SESSION))
    front.handle(ClientMessages(SESSION, Carrier.STREAM, 10, [Put(2, 4, VECTOR, (), epochs)]))
    session = front.core.launches.sessions[SESSION]
    assert {number: one.hosts for number, one in session.arriving.items()} == {1: {1}, 2: {1}}
    there = Holds({SESSION: (1, 2)}, (), reports[1]) if went_to == 5 else Holds({}, ())
    lost = [m.buffers for m in sent(front.comes(1, there)) if isinstance(m, BuffersLost)]
    assert lost == ([] if went_to == 5 else [(1,), (2,)])
    assert (set(session.buffers), session.arriving) == ({1, 2}, {})
    assert all(session.lives(number) == (went_to == 5) for number in (1, 2))


def test_an_upload_that_was_not_as_it_was_said_is_not_taken() -> None:
    front = Successor()
    front.comes(0, Holds({SESSION: (1,)}, (), (Stored(0, SESSION, 1, 4, VECTOR, ()),)))
    for host in (1, 2, 3):
        front.comes(host, Holds({}, ()))
    found = reply(front.ask(kept(1)))
    assert isinstance(found, SessionResumed)
    assert found.lost == (1,)


def test_a_host_that_is_lost_meanwhile_takes_what_it_held_with_it() -> None:
    front = Successor()
    front.all_come(h0=(1,), h1=(1,))
    front.from_island(0, HostDown(0, 5, "killed"))
    found = reply(front.ask(kept(1)))
    assert isinstance(found, SessionResumed)
    assert found.lost == (1,)


def test_islands_of_tenants_are_not_ended_before_their_sessions_can_come_back() -> None:
    front = Successor()
    front.core.requests.isolation.enabled = True
    assert not of(WantIslands, front.tick(3.0))
    info = HostInfo(0, 0, "cpu", 2, "node", 100, "", (0,), "alice")
    front.connect(0)
    front.from_island(0, HostUp(0, 5, "t", "d", 2, 1, info=info, holds=Holds({}, ())))
    commands = [c for second in range(4, 20) for c in front.tick(float(second))]
    assert {c.tenants for c in of(WantIslands, commands)} == {("alice",)}


def test_an_upload_that_came_after_its_host_had_said_what_it_holds_is_there() -> None:
    front = Successor()
    front.all_come()
    front.from_island(0, Stored(0, SESSION, 1, 1, VECTOR, ()))
    found = reply(front.ask(kept(1)))
    assert isinstance(found, SessionResumed)
    assert not found.lost
    assert not front.core.launches.sessions[SESSION].arriving


def test_a_host_that_says_twice_what_it_holds_stays() -> None:
    """Two controllers died, one soon after the other: its answer to the second one is heard by the third."""
    front = Successor()
    front.all_come(h0=(1,))
    assert front.comes(0, Holds({SESSION: (1, 2)}, ())) == []
    found = reply(front.ask(kept(1, 2)))
    assert isinstance(found, SessionResumed)
    assert not found.lost


def test_a_session_that_comes_back_hears_which_hosts_are_down() -> None:
    """One was up under the controller before, and is gone: uploads to it would wait for ever."""
    front = Successor()
    front.tick(9.0)  # schedulers that join sooner would have to be heard of again
    for host in (0, 2, 3):
        front.comes(host, Holds({}, ()))
    assert front.ask() == []
    found = reply(front.tick(1.0 + GATHER_LIMIT_S))  # since the first tick
    assert isinstance(found, SessionResumed)
    assert {one.host: one.address for one in found.hosts} == {0: "d0", 1: "", 2: "d2", 3: "d3"}


def test_what_a_host_held_goes_with_its_island() -> None:
    """Its island was ended before the session came back."""
    front = Successor()
    front.all_come(h0=(1, 2), h2=(8,))
    front.core.islands.forget(1)
    commands = front.ask(kept(1))
    assert isinstance(reply(commands), SessionResumed)
    assert [c.island for c in of(SendIsland, commands) if isinstance(c.message, Drop)] == [0]


def test_hosts_hear_of_all_that_live_at_once() -> None:
    """One that hears of some of them would drop its connections to the others."""
    front = Successor()
    commands = [c for host in (0, 1, 2) for c in front.comes(host, Holds({}, ()))]
    assert not [m for m in sent(commands) if isinstance(m, Peers)]
    lists = [m for m in sent(front.comes(3, Holds({}, ()))) if isinstance(m, Peers)]
    assert [[peer.host for peer in one.peers] for one in lists] == [[0, 1, 2, 3]] * 3


def test_hosts_that_lived_on_have_data_of_launches_that_were_under_way() -> None:
    """Others pull it from them. Of launches before its own beginning a host has none, and nor has one that began as
    launches were numbered which its scheduler has seen."""
    front = Successor()
    for island in set(ISLAND_OF_HOST.values()):
        front.join(island, 40, 0)
    for host in (0, 1, 2):
        front.comes(host, Holds({}, (), since=7 * host))
    lists = [m for m in sent(front.comes(3)) if isinstance(m, Peers)]
    found = {peer.host: peer.since for peer in lists[0].peers}
    assert [found[host] for host in (0, 1, 2)] == [0, 7, 14]
    assert found[3] > 40


def test_what_hosts_held_stays_without_their_scheduler() -> None:
    """It goes where one of them was down before: its group has ended."""
    for lost in ((), (1,)):
        front = Successor()
        front.all_come(h0=(1,), h1=(1,))
        if lost:
            front.from_island(0, HostDown(1, 5, "it is gone"))
        front.handle(IslandDisconnected(0, 0, "scheduler-0"))
        found = reply(front.ask(kept(1)))
        assert isinstance(found, SessionResumed)
        assert found.lost == lost


def test_an_island_that_is_ended_meanwhile_is_not_asked_for() -> None:
    front = Successor()
    front.all_come(h0=(1,), h3=(8,))
    front.core.islands.forget(ISLAND_OF_HOST[3])
    found = reply(front.ask(kept(1)))
    assert isinstance(found, SessionResumed)
    assert not found.lost


@pytest.mark.parametrize(
    ("numbers", "size"), [(range(1), MAX_RESUME_BYTES + 1), (range(MAX_NAMED + 1), 10)], ids=["bytes", "arrays"]
)
def test_a_request_of_more_than_a_session_may_have_is_not_kept(numbers: range, size: int) -> None:
    front = Successor()
    found = reply(front.ask(kept(*numbers), size=size))
    assert isinstance(found, Refused)
    assert found.failure.kind == "TooLarge"
    assert front.core.takeover is not None
    assert not front.core.takeover.asked


def test_of_two_calls_for_a_session_the_last_one_waits() -> None:
    """Whoever gave up waiting for an answer asks again: what waits is bounded all the same."""
    front = Successor()
    assert front.ask(kept(1)) == []
    found = reply(front.ask(kept(1)))
    assert isinstance(found, Refused)
    assert "was asked for once more" in found.failure.message
    assert isinstance(reply(front.all_come(h0=(1,))), SessionResumed)


def test_a_tenant_has_no_more_sessions_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that were closed have tags too."""
    monkeypatch.setattr("pathways_ray.controller.quotas.MAX_SESSIONS", 1)
    front = Successor()
    front.all_come()
    front.open_session(ALICE)
    found = reply(front.ask())
    assert isinstance(found, Refused)
    assert found.failure.kind == "QuotaExceeded"
    assert SESSION not in front.core.launches.sessions


def test_no_session_gets_the_number_of_one_that_may_come_back() -> None:
    front = Successor()
    front.open_session(Tenant("bob"))
    assert list(front.core.clients.known) == [SESSION + 1]


def test_slices_have_to_leave_an_island_that_was_being_drained() -> None:
    front = Successor(draining=(0,))
    front.all_come()
    front.ask()
    front.handle(StreamOpened(SESSION))
    assert Vacate((1, 4)) in sent(front.tick(1.0))


def test_what_lies_between_the_parts_of_a_launch_gets_other_numbers_than_before() -> None:
    """A part that still runs would store its value under the number of another one, and free that behind it."""
    front = Successor()
    front.all_come(h0=(1, -3, -2))
    commands = front.ask(kept(1))
    assert front.core.launches.sessions[SESSION].own_numbers == -3
    assert Drop(SESSION, (-3, -2)) in sent(commands)


def test_uploads_of_a_session_that_has_not_come_back_are_not_kept_without_bound() -> None:
    front = Successor()
    front.all_come()
    most = limits.MAX_REMEMBERED_UPLOADS
    front.from_island(0, *(Stored(0, SESSION, number, 1, VECTOR, ()) for number in range(1, most + 10)))
    assert front.core.takeover is not None
    assert sum(map(len, front.core.takeover.arrived.values())) == most


def test_a_host_that_starts_again_has_what_is_uploaded_to_it_from_then_on() -> None:
    front = Successor()
    front.all_come(h0=(1, 2))
    front.from_island(0, HostDown(0, 5, "killed"), HostUp(0, 6, "t0", "d0", 2, 200))
    front.from_island(0, Stored(0, SESSION, 2, 1, VECTOR, ()))
    found = reply(front.ask(kept(1, 2)))
    assert isinstance(found, SessionResumed)
    assert found.lost == (1,)


def test_no_launch_goes_before_the_list_of_hosts() -> None:
    """
    1. A new session calls a program on host 0, which is there; host 3 is still awaited. A scheduler whose host started
       again would drop what comes before a list that names it: the launch waits.
    2. Host 3 comes. The list goes to the island, and then the launch.
    """
    front = Successor()
    for host in (0, 1, 2):
        front.comes(host, Holds({}, ()))
    launches = front.core.launches
    launches.open_session(1)
    launches.add_slice(1, SLICES[0])
    launches.register(1, 1, program_over(1, arguments=0))
    launches.ready(Ready(0, 1, 0))
    assert launches.admission.call(launches.sessions[1], Launch(1, 1, (), 1)) == []
    kinds = [type(c.message) for c in of(SendIsland, front.comes(3, Holds({}, ()))) if c.island == 0]
    assert [kind for kind in kinds if kind in (Peers, IslandLaunch)] == [Peers, IslandLaunch]


def test_an_exchange_that_the_client_has_not_heard_of_is_taken_back() -> None:
    """
    1. The controller before had slices 1 and 9 exchanged for a move, and died before it said so. Arrays lie where they
       did, and the client knows slice 1 there.
    2. Slice 1 has its devices again, with its array; what was made for the move is given back.
    """
    front = Successor((placed(1, ["2.0", "2.1"], island=1), placed(9, ["0.0", "0.1"])))
    front.all_come(h0=(1,), h2=(8,))
    commands = front.ask(kept(1), slices=SLICES[:1])
    found = reply(commands)
    assert isinstance(found, SessionResumed)
    assert found.lost == ()
    assert [made.placed for made in found.slices] == [SLICES[0]]
    assert [one.placed for one in holding(commands).slices] == [SLICES[0]]
    assert Drop(SESSION, (8,)) in sent(commands)


@pytest.mark.parametrize("changed", [Tenant("alice", 5.0), None])
def test_the_table_of_tenants_changes_while_a_session_waits_to_come_back(changed: Tenant | None) -> None:
    """
    1. Alice's client comes back, and waits for hosts. Her weight changes meanwhile, or she is removed.
    2. Her session has the values of now; or it does not come back. It never counts as the operator's.
    """
    front = Successor()
    token = token_digest("the token of alice")
    front.handle(TenantsRead(TenantBook(((ALICE, token),)), "", ""))
    assert front.ask() == []
    front.handle(TenantsRead(TenantBook(((changed, token),) if changed is not None else ()), "", ""))
    found = reply(front.all_come())
    if changed is not None:
        assert isinstance(found, SessionResumed)
        client = front.core.clients.known[SESSION]
        assert (client.tenant, client.token) == (changed, token)
    else:
        assert isinstance(found, Refused)
        assert found.failure.kind == "AuthenticationError"
        assert front.core.clients.known == {}


def test_nothing_of_before_is_kept_once_the_takeover_is_over() -> None:
    """
    1. No session can come back any more. The link of a scheduler breaks, and it says what it knows once more: of that
       only what runs is kept, until it is over.
    2. A host joins with what it held. Nobody comes for it.
    """
    front = Successor()
    front.all_come()
    front.wait_until(60.0)
    takeover = front.core.takeover
    assert takeover is not None
    assert takeover.over
    front.handle(IslandConnected(100, IslandUp(0, "s", 0, 0)))
    ended = tuple(IslandOutcome(SESSION, n, 1000 + n, 7, 1, False, None) for n in range(1, 5))
    runs = IslandOutcome(SESSION, 5, 1005, 7, 1, True, None)
    front.from_island(0, IslandOutcomes((*ended, runs)), link=100)
    inherited = takeover.inherited
    assert (list(inherited.fates), inherited.named) == ([1005], {})
    front.from_island(0, Done((1005,)), link=100)
    assert inherited.fates == {}
    front.from_island(0, HostDown(0, 5, "gone"), link=100)
    front.from_island(0, HostUp(0, 6, "t0", "d0", 2, 100, holds=Holds({SESSION: (1,)}, ())), link=100)
    assert takeover.held == {}
