"""The controller's core, as events and the commands that follow from them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pathways_ray.controller.channel import Carrier
from pathways_ray.controller.circuit_breaker import MAX_DEATHS, Candidate, Culprit
from pathways_ray.controller.events import (
    AnswerCall,
    CallManager,
    ClientMessages,
    CloseChannel,
    CloseIsland,
    IslandDisconnected,
    KillManager,
    KillScheduler,
    ManagerKnows,
    ManagerLost,
    ManagerMissed,
    Plan,
    Planned,
    ReportFault,
    ReportToManager,
    StreamOpened,
    TellManager,
    TenantsRead,
    Tick,
)
from pathways_ray.controller.planning import answer
from pathways_ray.controller.programs import check_functions
from pathways_ray.controller.state import SendClient, SendIsland
from pathways_ray.controller.tenants import Quota, Tenant, TenantBook, token_digest
from pathways_ray.controller.watch import SCHEDULER_ABSENCE_LIMIT_S
from pathways_ray.errors import AuthenticationError, Failure, SessionClosed
from pathways_ray.liveness import SILENCE_LIMIT_S
from pathways_ray.transport.batcher import MAX_BATCH_BYTES
from pathways_ray.transport.messages import (
    VERSION,
    Abort,
    Accepted,
    Account,
    CloseSession,
    Completed,
    CreateSlice,
    Done,
    DropProgram,
    DropSession,
    Explain,
    Explained,
    Holds,
    HostAddress,
    HostDown,
    HostInfo,
    HostUp,
    InlineLaunch,
    IslandLaunch,
    KnownHost,
    Launch,
    LaunchFailed,
    LiftRefusal,
    Load,
    OpenSession,
    Prepared,
    PrioritizedLaunch,
    Program,
    Put,
    ReadLog,
    Ready,
    Refused,
    Register,
    ReleaseSlice,
    SessionEnded,
    SessionOpened,
    SliceCreated,
    Status,
    StatusReply,
    Stored,
    encode,
)
from tests.unit.controller.core_harness import TOKEN, CoreHarness, created, of, reply, sent
from tests.unit.controller.harness import ISLAND_OF_HOST, SLICES, sketch_with_slices
from tests.unit.helpers import VECTOR

ALICE = Tenant("alice", weight=2.0, quota=Quota(devices=3, message_bytes=100_000))


def alice(**quota: int) -> Tenant:
    return Tenant("alice", quota=Quota(**quota))


BOOK = TenantBook(((ALICE, token_digest("alice's token of the test")),))


def graph_of(*slices: int) -> bytes:
    """One call on each slice after the other, of functions that have no content."""
    sketch = sketch_with_slices("program")
    value: Any = sketch.argument(slices[0])
    for number, slice in enumerate(slices):
        value = sketch.call(f"f{number}", value, slice=slice)
    return encode(sketch.graph(value))


def streaming(**options: Any) -> CoreHarness:
    """A core with hosts and session 1, which has its stream and holds slices; functions are not checked."""
    core = CoreHarness(hosts=True, **options)
    core.core.clients.registrar.check = lambda functions: None
    core.open_session()
    core.hold_slices(1)
    core.handle(StreamOpened(1))
    return core


def say(core: CoreHarness, *messages: Any, size: int = 10) -> list[Any]:
    return core.handle(ClientMessages(1, Carrier.STREAM, size, list(messages)))


FUNCTIONS = {"f0": b"", "f1": b""}

# --- a launch ---------------------------------------------------------------------------------------------------------


def arrive(core: CoreHarness, buffer: int) -> None:
    """The hosts of slice 1 have what the first session uploaded."""
    for host in (0, 1):
        core.from_island(0, Stored(host, 1, buffer, 1, VECTOR, ()))


def test_a_launch_from_its_registration_to_its_outcome() -> None:
    """
    1. The client registers a program: both islands get their part. It puts an array and launches in one batch, before
       anything is compiled: the launch is deferred.
    2. The hosts have compiled it: the client hears so, and the launch goes to both islands.
    3. The islands report: the client hears of the outcome once.
    """
    core = streaming()
    commands = say(core, Register(1, graph_of(1, 2), FUNCTIONS), Put(1, 1, VECTOR, ()), Launch(1, 1, (1,), 2))
    assert [(c.island, type(c.message)) for c in commands] == [(0, Program), (1, Program)]
    key = commands[0].message.program
    assert core.from_island(0, Ready(0, key, 0)) == []
    arrive(core, 1)
    commands = core.from_island(1, Ready(2, key, 0))
    launch = IslandLaunch(1, 1, key, (1,), 2, launch=1)
    assert commands == [SendClient(1, Prepared(1)), SendIsland(0, launch), SendIsland(1, launch)]
    assert core.from_island(0, Done((1,), (100,))) == []
    assert core.from_island(1, Done((1,), (100,))) == [SendClient(1, Completed((1,), (100,)))]


def test_an_upload_has_its_time_where_all_processes_are_slow() -> None:
    """
    1. A launch waits for an upload, for 100 s on a machine where all take ten times as long, and for a minute in which
       the controller stands still.
    2. It fails once 20 s have passed that count.
    """
    core = streaming()
    (ready,) = say(core, Register(1, graph_of(1), FUNCTIONS))
    core.from_island(0, Ready(0, ready.message.program, 0))
    assert say(core, Put(1, 1, VECTOR, ()), Launch(1, 1, (1,), 2)) == []

    def passes(seconds: float, slowness: float, looks: int) -> list[object]:
        commands = []
        for _ in range(looks):
            core.now += seconds
            for island in (0, 1):
                core.from_island(island)
            commands += core.handle(Tick(slowness))
        return [message for message in sent(commands) if isinstance(message, LaunchFailed)]

    assert passes(1.0, 10.0, 100) == []
    assert passes(60.0, 1.0, 1) == []
    assert passes(1.0, 1.0, 7) == []
    (failed,) = passes(1.0, 1.0, 3)
    assert isinstance(failed, LaunchFailed)
    assert failed.failure.kind == "BufferLost"


def test_a_lost_host_has_a_story() -> None:
    """The failure of a launch names what the controller saw: the host came, and went for a reason."""
    core = streaming()
    commands = say(core, Register(1, graph_of(1), FUNCTIONS), Put(1, 1, VECTOR, ()))
    core.from_island(0, Ready(0, commands[0].message.program, 0))
    arrive(core, 1)
    say(core, Launch(1, 1, (1,), 2))
    core.now = 5.0
    commands = core.from_island(0, HostDown(0, 1, "its process ended", "LaunchTimeout", (1,)))
    (failed,) = [m for m in sent(commands) if isinstance(m, LaunchFailed)]
    assert failed.failure.kind == "LaunchTimeout"
    assert failed.failure.story == (
        "controller: 5.000 s before: host up host 0: epoch 1 on island 0",
        "controller: 5.000 s before: host up host 1: epoch 1 on island 0",
        "controller: 5.000 s before: admitted session 1 launch 1: program",
        "controller: 0.000 s before: host lost host 0: epoch 1 on island 0: LaunchTimeout (because its process ended)",
    )
    assert CallManager("leave", (0, 1)) in commands
    assert "host lost host 0" in core.core.story.lifecycle[-1].text(5.0)


def test_a_launch_that_never_ended_names_the_lines_of_its_loops() -> None:
    """Another launch on the island, which has not begun, fails as well, and is not at fault."""
    core = streaming()
    sketch = sketch_with_slices("endless")
    value: Any = sketch.argument(1)
    value = sketch.call("before", value, slice=1, where="user.py:7")
    value = sketch.call("loop", value, slice=2, where="user.py:8", has_loop=True)
    value = sketch.call("loop", value, slice=1, where="user.py:9", has_loop=True)
    functions = {"before": b"", "loop": b""}
    commands = say(core, Register(1, encode(sketch.graph(value)), functions), Put(1, 1, VECTOR, ()))
    for command in commands:
        if isinstance(command, SendIsland) and isinstance(command.message, Program):
            for host in (0, 1) if command.island == 0 else (2,):
                core.from_island(command.island, Ready(host, command.message.program, 0))
    arrive(core, 1)
    say(core, Launch(1, 1, (1,), 2), Launch(2, 1, (1,), 3))
    commands = core.from_island(0, HostDown(0, 1, "the limit is 60 s", "LaunchTimeout", (1,)))
    first, second = (m.failure for m in sent(commands) if isinstance(m, LaunchFailed))
    assert (first.kind, first.node, first.where) == ("LaunchTimeout", "loop", "user.py:9")
    assert first.message == "the limit is 60 s. The hosts of island 0 start again"
    assert (second.kind, second.node, second.where) == ("HostLost", "", "")
    assert second.message == "host 0 was lost: the limit is 60 s"
    assert [c.island for c in commands if isinstance(c, SendIsland) and isinstance(c.message, Abort)] == [0, 1] * 2


def test_an_error_of_the_controller_ends_the_session_that_met_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = streaming()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(core.core.launches.admission, "call", broken)
    commands = say(core, Launch(1, 1, (), 2))
    assert "ZeroDivisionError: of the test" in of(ReportFault, commands)[0].text
    assert SendClient(1, SessionEnded("internal error of the controller: ZeroDivisionError: of the test")) in commands
    assert CloseChannel(1, True) in commands


# --- the life of schedulers -------------------------------------------------------------------------------------------


def test_a_scheduler_that_says_nothing_is_declared_dead_and_killed() -> None:
    """
    1. It last said something at 0 s; the others go on.
    2. Just within the limit nothing happens. Beyond it, its host is away, with what it holds, and its process is
       killed, once.
    3. What it says afterwards is not believed: its stream is closed.
    """
    core = streaming()
    while core.now < SILENCE_LIMIT_S:
        assert of(KillScheduler, core.tick(core.now + 1.0)) == []
        for island in (0, 1):
            core.from_island(island, Load(island, {}))
    commands = core.tick(SILENCE_LIMIT_S + 1.0)
    assert of(KillScheduler, commands) == [KillScheduler(2)]
    assert HostAddress(3, 1, "") not in sent(commands)
    assert core.core.launches.hosts[3].orphaned
    assert core.core.launches.away == {3}
    assert of(KillScheduler, core.tick(core.now + 1.0)) == []
    assert core.from_island(2, Load(2, {})) == [CloseIsland(2)]


def test_a_controller_that_did_not_run_itself_judges_no_scheduler() -> None:
    core = streaming()
    core.tick(1.0)
    core.now += 100.0
    assert of(KillScheduler, core.handle(Tick())) == []
    assert of(KillScheduler, core.tick(core.now + SILENCE_LIMIT_S)) == []
    assert len(of(KillScheduler, core.tick(core.now + 1.0))) == 3


def test_a_scheduler_that_does_not_join_is_killed() -> None:
    """A controller after a restart expects islands 0 and 1; island 1 was stopped when its predecessor died."""
    core = CoreHarness(expected=(0, 1))
    core.tick(1.0)
    core.connect(0)
    killed = []
    while core.now < SCHEDULER_ABSENCE_LIMIT_S + 5.0:
        killed += of(KillScheduler, core.tick(core.now + 1.0))
        core.from_island(0, Load(0, {}))
    assert killed == [KillScheduler(1)]


def test_a_new_scheduler_takes_the_place_of_the_old_one() -> None:
    """
    1. It connects before the end of the old one's stream: the hosts of that one are lost, and it learns of sessions.
    2. The end of the old stream changes nothing more.
    """
    core = streaming()
    commands = core.connect(0, link=77)
    assert core.core.launches.away == {0, 1}
    assert not [message for message in sent(commands) if isinstance(message, HostAddress)], "clients may still fetch"
    assert [c.message for c in of(SendIsland, commands) if c.island == 0] == [Account(1, "session 1", 1.0, 0)]
    withdraw = CallManager("withdraw", ("scheduler-0", "old"))
    assert core.handle(IslandDisconnected(0, 0, "old")) == [withdraw]
    assert core.from_island(0, Load(0, {}), link=77) == []
    commands = core.handle(IslandDisconnected(77, 0, "new"))
    assert commands[-1] == CallManager("withdraw", ("scheduler-0", "new"))
    assert not of(KillScheduler, commands)


def test_hosts_outlive_a_second_scheduler_that_dies_before_all_of_them_have_come() -> None:
    """
    1. Host 0 is back with the successor, host 1 on its way, when that dies too. Both come to the third: none is killed.
    2. Host 1 is lost just before that one dies as well: what host 0 holds is of a group that is no more.
    """
    core = streaming()

    def killed(link: int, *hosts: int) -> list[Any]:
        """Another scheduler joins, and hosts with what they hold. Returns those that have to start again."""
        core.connect(0, link=link)
        back = [HostUp(host, 1, "t", "d", 2, 1, holds=Holds({}, ())) for host in hosts]
        found = of(CallManager, core.from_island(0, *back, link=link))
        return [call.arguments for call in found if call.method == "kill_host"]

    assert killed(77, 0) == []
    assert killed(78, 0, 1) == []
    assert core.core.launches.away == set()
    core.from_island(0, HostDown(1, 1, "its process ended"), link=78)
    assert killed(79, 0, 1) == [(0, 1), (1, 1)]


def test_a_host_that_started_again_unheard_is_taken_with_what_it_holds() -> None:
    """
    1. Host 1 starts again, and the only one to hear of it, its scheduler, dies with its word. So does the resource
       manager: nobody could end a process of this epoch.
    2. It comes to the next scheduler with a program that nobody has: it is up, and drops that.
    """
    core = streaming()
    core.connect(0, link=77)
    back = HostUp(0, 1, "t", "d", 2, 1, holds=Holds({}, ())), HostUp(1, 2, "t", "d", 2, 2, holds=Holds({}, (55,)))
    commands = core.from_island(0, *back, link=77)
    assert not [call for call in of(CallManager, commands) if call.method == "kill_host"]
    assert DropProgram(0, 55) in sent(commands)
    assert core.core.launches.away == set()
    assert core.core.launches.hosts[1].epoch == 2


def test_how_the_process_before_a_host_died_is_noted_once_with_whichever_scheduler_it_comes() -> None:
    """It says so to each: the first one, which was to pass it on, may have died."""
    core = streaming()
    crash = "Segmentation fault"
    for link in (77, 78):
        core.connect(0, link=link)
        core.from_island(0, HostUp(0, 1, "t", "d", 2, 1, holds=Holds({}, ())), link=link)
        core.from_island(0, HostUp(1, 2, "t", "d", 2, 2, crash, holds=Holds({}, ())), link=link)
    noted = [entry.cause for entry in core.core.story.lifecycle if entry.event == "host up" and entry.host == 1]
    assert noted == ["", f"its process before died of {crash}", ""]


def test_a_scheduler_without_hosts_hears_of_sessions() -> None:
    """It has joined, its hosts have not yet: a session that ends meanwhile must not stay there for ever."""
    core = streaming()
    core.connect(7)
    assert SendIsland(7, Account(2, "session 2", 1.0, 0)) in core.open_session()
    assert SendIsland(7, DropSession(2)) in core.request(2, CloseSession(2))
    core.handle(IslandDisconnected(7, 7, "scheduler-7"))
    assert not [c for c in of(SendIsland, core.open_session()) if c.island == 7]


def test_a_scheduler_whose_stream_was_given_up_is_killed() -> None:
    """It may be stopped, on a machine so slow that its own silence does not count yet; nobody else would end it."""
    core = streaming()
    assert KillScheduler(0) in core.handle(IslandDisconnected(0, 0, "old", silent=True))
    assert core.core.launches.away == {0, 1}


# --- the life of the resource manager ---------------------------------------------------------------------------------


def test_a_resource_manager_that_twice_does_not_answer_is_killed() -> None:
    core = CoreHarness()
    core.answering = False
    assert core.handle(Tick()) == [ReportToManager()]
    assert core.tick(SILENCE_LIMIT_S / 2) == [], "it has time to answer"
    assert core.tick(SILENCE_LIMIT_S / 2 + 1.0) == [ReportToManager()], "asked again"
    assert core.tick(SILENCE_LIMIT_S + 1.0) == []
    commands = core.tick(SILENCE_LIMIT_S + 2.0)
    assert commands == [KillManager()]
    assert core.tick(SILENCE_LIMIT_S + 3.0) == [ReportToManager()], "its successor has as long"


def test_a_resource_manager_that_answers_the_second_report_lives() -> None:
    core = CoreHarness()
    core.answering = False
    core.handle(Tick())
    core.tick(SILENCE_LIMIT_S / 2 + 1.0)
    assert of(TellManager, core.handle(ManagerKnows("manager 1"))), "it is the first one"
    assert core.tick(SILENCE_LIMIT_S / 2 + 2.0) == [ReportToManager()]
    assert core.tick(SILENCE_LIMIT_S + 2.0) == []
    assert core.tick(SILENCE_LIMIT_S + 3.0) == [ReportToManager()], "the count begins again"


def test_the_death_of_the_resource_manager_ends_nothing() -> None:
    """
    1. It is away for a minute: the controller reports in vain once a second, and goes on.
    2. Its successor answers: it is told what there is, once. Another one is told again.
    """
    core = streaming()
    core.hold_slices(1)
    core.answering = False
    for _ in range(60):
        for island in core.core.islands.links:
            core.from_island(island, Load(island, {}))
        assert ReportToManager() in core.tick(core.now + 1.0)
        assert core.handle(ManagerLost("it died")) == []
    for manager in ("manager 2", "manager 3"):
        (told,) = of(TellManager, core.handle(ManagerKnows(manager)))
        assert core.handle(ManagerKnows(manager)) == []
    found = told.holdings
    assert [held.placed for held in found.slices] == list(SLICES)
    assert dict(found.schedulers) == {island: f"scheduler-{island}" for island in set(ISLAND_OF_HOST.values())}
    assert found.last_slice == max(placed.mesh.id for placed in SLICES)
    assert 1 in core.core.clients.known


def test_a_host_is_made_known_with_what_it_says_of_itself() -> None:
    """When it comes, and to the successor of a resource manager that knew it, also when it has gone since."""
    core = CoreHarness(hosts=True)
    info = HostInfo(0, ISLAND_OF_HOST[0], "cpu", 2, "node", 7, "")
    commands = core.from_island(ISLAND_OF_HOST[0], HostUp(0, 2, "t", "d", 2, 7, info=info))
    assert CallManager("serves", (encode(KnownHost(info, 2)),)) in commands
    core.from_island(ISLAND_OF_HOST[0], HostDown(0, 2, "it ended"))
    (told,) = core.handle(ManagerKnows("manager 2"))
    assert isinstance(told, TellManager)
    assert told.holdings.hosts == (KnownHost(info, 2, up=False),)


def test_slices_are_held_again_before_they_are_given_back() -> None:
    """Calls that did not get through may be missed in any order. A session that is suspended has none in the end."""
    core = CoreHarness(hosts=True)
    given_back, held = CallManager("release_session", (1,)), CallManager("hold_slices", (1, b""))
    for call in (given_back, held):
        core.handle(ManagerMissed(call))
    again = of(CallManager, core.handle(ManagerKnows("manager 1")))
    assert [call.method for call in again] == ["hold_slices", "release_session"]


def test_what_gives_slices_back_is_never_given_up() -> None:
    """
    1. A resource manager is out of reach for longer than a question lasts, and lives on. Sessions end meanwhile, one
       comes back, and another gives a slice back: its client hears that this failed.
    2. Once it can be reached again, it hears all of that, each once.
    """
    core = CoreHarness(hosts=True)
    core.open_session()
    core.hold_slices(1)
    core.answering = False
    (asked,) = of(CallManager, core.request(1, ReleaseSlice(1, 2)))
    unanswered = [CallManager("release_session", (7,)), CallManager("hold_slices", (8, b""))]
    for call in (asked, *unanswered, *unanswered):
        assert core.handle(ManagerMissed(call)) == []
    over: list[Any] = []
    while core.now < 70.0:
        for island in list(core.core.islands.links):
            core.from_island(island)
        over += core.tick(core.now + 1.0)
    refused = reply(over)
    assert isinstance(refused, Refused)
    assert "could not be reached for 60 s" in refused.failure.message
    again = of(CallManager, core.handle(ManagerKnows("manager 1")))
    assert [(call.method, call.arguments[0]) for call in again] == [
        ("hold_slices", 8),
        ("release_session", 7),
        ("release_slice", 1),
    ]
    assert of(CallManager, core.handle(ManagerKnows("manager 1"))) == []


def test_a_slice_that_has_come_back_is_not_released() -> None:
    """The resource manager missed that it was given back; an exchange brought it back since. It hears where that is."""
    core = CoreHarness(hosts=True)
    core.open_session()
    core.hold_slices(1)
    number = max(core.core.launches.sessions[1].slices)
    gone = CallManager("release_slice", (1, number + 1))
    core.handle(ManagerMissed(gone))
    core.handle(ManagerMissed(CallManager("release_slice", (1, number))))
    held, *released = of(CallManager, core.handle(ManagerKnows("manager 1")))
    assert held.method == "hold_slices"
    assert released == [gone]
    assert of(CallManager, core.handle(ManagerKnows("manager 1"))) == []


def test_an_exchange_is_not_taken_back_at_a_resource_manager_that_never_made_it() -> None:
    """Nor twice at one that did: it hears which slices the session has."""
    core = CoreHarness(hosts=True)
    call = CallManager("exchange_slices", (1, ((1, 2),), -5))
    core.handle(ManagerKnows("manager 1"))
    for manager in ("manager 1", "manager 2"):
        core.handle(ManagerMissed(call))
        (held,) = of(CallManager, core.handle(ManagerKnows(manager)))
        assert held.method == "hold_slices"
        assert of(CallManager, core.handle(ManagerKnows(manager))) == []


def test_what_did_not_get_through_to_the_resource_manager_is_said_again() -> None:
    """
    1. News did not get through: with the next answer it is told everything. That got lost too: once more.
    2. A question did not: it is asked again, each time that the resource manager answers, for a minute. Then it has
       failed.
    """
    core = CoreHarness(hosts=True)
    news = CallManager("leave", (0, 1))
    assert core.handle(ManagerMissed(news)) == []
    (told,) = core.handle(ManagerKnows("manager 1"))
    assert isinstance(told, TellManager)
    assert core.handle(ManagerMissed(told)) == []
    assert core.handle(ManagerKnows("manager 1")) == [TellManager(msgspec.structs.replace(told.holdings, number=2))]
    assert core.handle(ManagerKnows("manager 1")) == []

    core.answering = False
    (question,) = of(CallManager, core.request(None, OpenSession(VERSION, "me")))
    for second in range(59):
        assert core.handle(ManagerMissed(question)) == []
        core.tick(float(second))
        (question,) = of(CallManager, core.handle(ManagerKnows("manager 1")))
    assert core.handle(ManagerMissed(question)) == []
    refused = reply(core.tick(60.0))
    assert isinstance(refused, Refused)
    assert "could not be reached for 60 s" in refused.failure.message


# --- requests ---------------------------------------------------------------------------------------------------------


def test_the_origin_of_a_request() -> None:
    core = CoreHarness()
    core.handle(TenantsRead(BOOK, "tenants.json", ""))
    caller = core.core.requests.caller
    assert caller({"authorization": TOKEN}) is None
    assert caller({"authorization": "alice's token of the test"}) == BOOK.entries[0]
    with pytest.raises(AuthenticationError, match="the token is missing or wrong"):
        caller({"authorization": "another"})
    opened = reply(core.open_session(ALICE))
    assert isinstance(opened, SessionOpened)
    assert caller({"session": "1", "authorization": opened.secret}) == 1
    for metadata in ({"session": "1", "authorization": "x"}, {"session": "2", "authorization": opened.secret}):
        with pytest.raises(SessionClosed, match="is not open, or the secret is not its own"):
            caller(metadata)


def test_a_session_opens_with_the_hosts_that_are_up_and_closes_with_all_it_held() -> None:
    core = CoreHarness(hosts=True)
    core.from_island(0, HostDown(1, 1, "gone"))
    opened = reply(core.open_session(name="mine"))
    assert isinstance(opened, SessionOpened)
    assert (opened.session, opened.platforms) == (1, ("cpu",))
    assert [host.host for host in opened.hosts] == [0, 2, 3]
    commands = core.request(1, CloseSession(1))
    assert reply(commands) == Accepted()
    assert CloseChannel(1, False) in commands
    assert CallManager("release_session", (1,)) in commands
    refused = reply(core.request(1, Status(1)))
    assert isinstance(refused, Refused)
    assert refused.failure.kind == "SessionClosed"


@pytest.mark.parametrize(
    ("caller", "request_", "kind", "message"),
    [
        (None, OpenSession(VERSION + 1, ""), "WireError", f"version {VERSION + 1}, this cluster {VERSION}"),
        (None, Status(1), "AuthenticationError", "another session's"),
        (None, CloseSession(1), "AuthenticationError", "another session's"),
        (1, Status(2), "AuthenticationError", "another session's"),
        (1, OpenSession(VERSION, ""), "AuthenticationError", "takes a session's own secret"),
        (1, LiftRefusal(1, "a1"), "AuthenticationError", "the operator's"),
        (1, ReadLog(1, "host 3"), "AuthenticationError", "the operator's"),
        (ALICE, ReadLog(0, "host 3"), "AuthenticationError", "another session's"),
        (1, LiftRefusal(0, "a1"), "AuthenticationError", "another session's"),
        (ALICE, LiftRefusal(0, "a1"), "AuthenticationError", "another session's"),
        (None, LiftRefusal(0, "a1"), "UsageError", "no program is refused under 'a1'"),
        (1, Explain(1, -1, b"nonsense"), "WireError", "program of 8 bytes refused"),
    ],
)
def test_requests_that_are_refused(caller: Any, request_: Any, kind: str, message: str) -> None:
    core = CoreHarness()
    core.open_session()
    refused = reply(core.request(caller, request_))
    assert isinstance(refused, Refused)
    assert refused.failure.kind == kind
    assert message in refused.failure.message


def test_slices_are_checked_before_and_after_the_resource_manager_is_asked() -> None:
    """Alice may have three devices. The manager gives her a slice of two, then another one, which is given back."""
    core = CoreHarness(hosts=True)
    core.open_session(ALICE)

    def ask(*shape: int) -> list[Any]:
        return core.request(1, CreateSlice(1, shape, ("x",), -1, "", ""))

    refused = reply(ask(4))
    assert isinstance(refused, Refused)
    assert "asks for a slice of 4 devices and holds 0 in other slices; 3 are allowed" in refused.failure.message
    made = reply(core.answered(ask(2), created(0)))
    assert isinstance(made, SliceCreated)
    assert made.placed == SLICES[0]
    assert made.slice_tag
    commands = core.answered(ask(), created(1))
    assert isinstance(reply(commands), Refused)
    assert CallManager("release_slice", (1, 2)) in commands
    commands = core.request(1, ReleaseSlice(1, 1))
    assert reply(core.answered(commands, True)) == Accepted()
    assert core.core.launches.sessions[1].slices == {}


def test_a_slice_for_a_session_that_ended_meanwhile_is_given_back() -> None:
    core = CoreHarness(hosts=True)
    core.open_session()
    asked = core.request(1, CreateSlice(1, (2,), ("x",), -1, "", ""))
    core.request(1, CloseSession(1))
    commands = core.answered(asked, created(0))
    refused = reply(commands)
    assert isinstance(refused, Refused)
    assert "ended while it asked for a slice" in refused.failure.message
    assert CallManager("release_slice", (1, 1)) in commands


def test_a_resource_manager_that_fails_refuses_the_request() -> None:
    core = CoreHarness()
    core.open_session()
    refused = reply(core.answered(core.request(1, Status(1)), RuntimeError("of the test")))
    assert isinstance(refused, Refused)
    assert refused.failure.message == "the resource manager failed: of the test"


@pytest.mark.parametrize("failure", [None, Failure("CompileError", "no", host=0)])
def test_explain_waits_until_the_program_is_compiled(failure: Failure | None) -> None:
    """The question overtakes the program; it is answered with the last host, or with the failure."""
    core = streaming()
    graph = graph_of(1)
    assert core.request(1, Explain(1, 1, graph)) == []
    commands = say(core, Register(1, graph, FUNCTIONS))
    assert of(AnswerCall, commands) == []
    answer = reply(core.from_island(0, Ready(0, commands[0].message.program, 7, failure)))
    if failure is None:
        assert isinstance(answer, Explained)
        assert answer.temporary_bytes == {0: 7}
    else:
        assert answer == Refused(failure)


def test_explain_waits_no_longer_than_its_limit() -> None:
    core = streaming()
    assert core.request(1, Explain(1, 1, graph_of(1))) == []
    for island in (0, 1, 2):
        core.from_island(island, Load(island, {}))
    core.now = 121.0
    assert isinstance(reply(core.handle(Tick())), Explained)


def test_status_is_the_managers_with_the_controllers_own() -> None:
    core = streaming()
    core.handle(TenantsRead(BOOK, "tenants.json", "cannot be read"))
    found = reply(core.answered(core.request(None, Status(0)), json.dumps({"islands": [], "slices": []})))
    assert isinstance(found, StatusReply)
    status = json.loads(found.text)
    assert [s["session"] for s in status["sessions"]] == [1]
    assert status["tenants_file"] == {"path": "tenants.json", "problem": "cannot be read"}


def test_an_operator_sees_what_is_refused_and_lifts_it() -> None:
    core = streaming()
    breaker = core.core.launches.circuit_breaker
    culprit = Culprit("bob", "d1")
    for _ in range(MAX_DEATHS):
        breaker.died(0, [Candidate(culprit, "deadly", True)], "it ended", True, core.now)
    core.tick(core.now + 7.0)
    found = reply(core.answered(core.request(None, Status(0)), json.dumps({"islands": [], "slices": []})))
    assert isinstance(found, StatusReply)
    (refusal,) = json.loads(found.text)["refusals"]
    assert (refusal["id"], refusal["tenant"], refusal["program"]) == (culprit.id, "bob", "deadly")
    assert refusal["age_s"] == 7.0
    assert "(it ended; it ended; it ended)" in refusal["reason"]
    assert reply(core.request(None, LiftRefusal(0, culprit.id))) == Accepted()
    assert breaker.refusal(culprit) is None


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_a_table_of_tenants_that_changes() -> None:
    """
    1. Alice's weight changes: her island learns of it.
    2. She is not there any more: her session ends, with a reason; the operator's stays.
    """
    core = CoreHarness(hosts=True)
    core.handle(TenantsRead(BOOK, "tenants.json", ""))
    core.open_session(ALICE)
    core.open_session()
    ((_, digest),) = BOOK.entries
    heavy = TenantBook(((Tenant("alice", 5.0), digest),))
    commands = core.handle(TenantsRead(heavy, "tenants.json", ""))
    assert commands == [SendIsland(island, Account(1, "alice", 5.0, 0)) for island in (0, 1, 2)]
    commands = core.handle(TenantsRead(TenantBook(), "tenants.json", ""))
    (ended,) = [m for m in sent(commands) if isinstance(m, SessionEnded)]
    assert "tenant 'alice' is not in the table of tenants any more" in ended.reason
    assert core.core.launches.sessions.keys() == {2}
    core.handle(TenantsRead(TenantBook(), "tenants.json", "cannot be read"))
    core.handle(TenantsRead(TenantBook(), "tenants.json", ""))
    noted = [entry.detail for entry in core.core.story.lifecycle if entry.event == "tenants read"]
    assert noted == ["added alice", "changed alice", "removed alice", "cannot be read"]


def test_islands_hear_once_of_each_session_of_a_tenant_that_changed() -> None:
    """With as many messages for each session as there are sessions, a thousand kept the controller for seconds."""
    core = CoreHarness(hosts=True)
    core.handle(TenantsRead(BOOK, "", ""))
    for _ in range(3):
        core.open_session(ALICE)
    ((_, digest),) = BOOK.entries
    heavy = Tenant("alice", 5.0)
    commands = core.handle(TenantsRead(TenantBook(((heavy, digest),)), "", ""))
    assert commands == [SendIsland(i, Account(n, "alice", 5.0, 0)) for i in (0, 1, 2) for n in (1, 2, 3)]
    assert {client.tenant for client in core.core.clients.known.values()} == {heavy}


@pytest.mark.parametrize("trusted", [True, False, None])
def test_trust_travels_from_the_table_to_hosts_and_ends_with_it(trusted: bool | None) -> None:
    """The operator (None) is trusted. The client hears of it, and each program carries it."""
    core = CoreHarness(hosts=True)
    core.core.clients.registrar.check = lambda functions: None
    tom = None if trusted is None else Tenant("tom", trusted=trusted)
    core.handle(TenantsRead(TenantBook(((tom, "ab" * 32),) if tom else ()), "tenants.json", ""))
    (opened,) = [c.reply for c in core.open_session(tom) if isinstance(c, AnswerCall)]
    assert isinstance(opened, SessionOpened)
    assert opened.trusted == (trusted is not False)
    core.hold_slices(1)
    core.handle(StreamOpened(1))
    commands = say(core, Register(1, graph_of(1, 2), FUNCTIONS))
    programs = [c.message for c in commands if isinstance(c, SendIsland) and isinstance(c.message, Program)]
    assert [program.trusted for program in programs] == [opened.trusted] * 2
    if tom is not None:
        commands = core.handle(TenantsRead(TenantBook(((Tenant("tom"), "ab" * 32),)), "tenants.json", ""))
        reasons = [m.reason for m in sent(commands) if isinstance(m, SessionEnded)]
        assert reasons == (["tenant 'tom' is not trusted any more"] if trusted else [])


def test_messages_over_a_tenants_quota() -> None:
    """A big message ends the session; many small ones in a batch do not; a big program fails by itself."""
    core = CoreHarness(hosts=True)
    core.open_session(alice(message_bytes=50))
    core.handle(StreamOpened(1))
    assert say(core, Put(1, 1, VECTOR, ()), Put(2, 1, VECTOR, ()), size=200) == []
    assert say(core, Register(1, bytes(60), {}), size=70) == []
    program = core.core.launches.sessions[1].programs[1]
    assert program.failure is not None
    assert "a program of 60 bytes from tenant 'alice' is too big: 50 are allowed" in program.failure.message
    commands = say(core, Put(3, 1, VECTOR, ()), size=51)
    (ended,) = [m for m in sent(commands) if isinstance(m, SessionEnded)]
    assert "a message of 51 bytes from tenant 'alice' is too big" in ended.reason


@pytest.mark.parametrize(
    ("messages", "size", "fits"),
    [
        pytest.param([InlineLaunch(1, 1, (0,), 1, ((0, bytes(100)),))], 150, True, id="a launch"),
        pytest.param([PrioritizedLaunch(1, 1, (0,), 1, 5, ((0, bytes(100)),))], 150, True, id="one with a priority"),
        pytest.param([InlineLaunch(1, 1, (0,), 1, ((0, bytes(100)),))], 151, False, id="a launch with more beside it"),
        pytest.param(
            [InlineLaunch(1, 1, (0,), 1, ((0, bytes(100)),)), Put(2, 1, VECTOR, ())],
            MAX_BATCH_BYTES + 3,
            False,
            id="a big message behind a launch",
        ),
    ],
)
def test_a_quota_of_messages_does_not_count_what_launches_carry(messages: list[Any], size: int, fits: bool) -> None:
    core = CoreHarness(hosts=True)
    core.open_session(alice(message_bytes=50))
    core.handle(StreamOpened(1))
    say(core, Register(1, bytes(60), {}), size=70)
    ended = [m for m in sent(say(core, *messages, size=size)) if isinstance(m, SessionEnded)]
    assert not ended if fits else "is too big: 50 are allowed in a message" in ended[0].reason


# --- registration -----------------------------------------------------------------------------------------------------


def test_functions_of_a_program_that_was_refused_are_missed_by_later_ones() -> None:
    core = CoreHarness(hosts=True)
    core.core.clients.registrar.check = lambda functions: None
    core.open_session(alice(message_bytes=2000))
    core.hold_slices(1)
    core.handle(StreamOpened(1))
    say(core, Register(1, graph_of(1), {"f0": bytes(3000)}), Register(2, graph_of(1), {}))
    programs = core.core.launches.sessions[1].programs
    assert programs[1].failure == programs[2].failure
    assert programs[1].failure is not None
    assert programs[1].failure.kind == "QuotaExceeded"


def test_functions_are_checked_against_their_digests() -> None:
    core = streaming()
    core.core.clients.registrar.check = check_functions
    say(core, Register(1, graph_of(1), {"f0": b"code"}))
    failure = core.core.launches.sessions[1].programs[1].failure
    assert failure is not None
    assert failure.message == "function f0 does not match its digest"


def test_explanations_that_wait_are_looked_at_when_something_of_their_session_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenant may have thousands wait, and every event would look at all of them."""
    core = streaming()
    explanations = core.core.requests.explanations
    assert core.request(1, Explain(1, 1, graph_of(1))) == []
    looked: list[int] = []
    monkeypatch.setattr(explanations, "_explained", lambda waiting, now: looked.append(1))
    for island in (0, 1, 2):
        core.from_island(island, Load(island, {}))
    core.open_session()
    assert looked == []
    core.handle(Tick())
    commands = say(core, Register(1, graph_of(1), FUNCTIONS))
    assert looked == [1, 1]
    monkeypatch.undo()
    assert isinstance(reply(core.from_island(0, Ready(0, commands[0].message.program, 7))), Explained)
    assert explanations.waiting == {}


def test_programs_that_wait_to_be_explained_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session may have sixteen such calls, of 32 MiB each, and a tenant many sessions."""
    core = streaming()
    monkeypatch.setattr("pathways_ray.controller.explaining.plan_if_cheap", lambda request: None)
    graph = graph_of(1)
    monkeypatch.setattr("pathways_ray.limits.MAX_GRAPH_BYTES", 2 * len(graph))
    (first,) = of(Plan, core.request(1, Explain(1, -1, graph)))
    assert core.request(1, Explain(1, -1, graph)) == []
    refused = reply(core.request(1, Explain(1, -1, graph)))
    assert isinstance(refused, Refused)
    assert f"programs of {2 * len(graph)} bytes of the session wait to be planned" in refused.failure.message
    assert isinstance(reply(core.handle(Planned(first.call, answer(first.request)))), Explained)
    assert core.request(1, Explain(1, -1, graph)) == []
