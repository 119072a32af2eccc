"""No client has the controller's loop for long, or its memory: turns, back-pressure, planning elsewhere, refusals."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pathways_ray import limits
from pathways_ray.controller.channel import Carrier
from pathways_ray.controller.events import (
    ClientMessages,
    IslandDisconnected,
    IslandFull,
    IslandRoom,
    PauseReading,
    Plan,
    Planned,
    ResumeReading,
    StreamOpened,
    TakeTurn,
    Turn,
)
from pathways_ray.controller.planning import CHEAP_REFERENCES, PlanReply, answer, plan_if_cheap
from pathways_ray.controller.programs import check_size, references
from pathways_ray.controller.registrar import CHEAP_FUNCTION_BYTES
from pathways_ray.controller.state import SendClient, SendIsland
from pathways_ray.controller.tenants import Tenant
from pathways_ray.controller.turns import TURN_WORK
from pathways_ray.errors import Failure, TooLarge, WireError
from pathways_ray.ir.graph import Compute, Graph, Part, Recipe, Ref, Result
from pathways_ray.ir.types import ArrayType, Layout, SliceType
from pathways_ray.ir.verify import verify
from pathways_ray.transport.batcher import MAX_BATCH_BYTES, MAX_MESSAGES, batches, check_batch
from pathways_ray.transport.messages import (
    REQUEST,
    TO_CONTROLLER,
    VERSION,
    Cancel,
    Done,
    Drop,
    Explain,
    Free,
    FunctionsAhead,
    Holds,
    HostUp,
    InlineLaunch,
    IslandLaunch,
    KeptBuffers,
    Launch,
    LaunchFailed,
    ListHeld,
    Peers,
    Program,
    Put,
    Ready,
    Refused,
    Register,
    ResumeSession,
    Stored,
    Unanswered,
    Unregister,
    encode,
)
from tests.unit.controller.core_harness import CoreHarness, of, reply, sent
from tests.unit.controller.harness import sketch_with_slices
from tests.unit.controller.test_core import FUNCTIONS, graph_of
from tests.unit.helpers import VECTOR


def with_sessions(count: int = 2) -> CoreHarness:
    """A core with hosts, and sessions of tenants of their own with a program and buffer 1; turns do not come alone."""
    core = CoreHarness(hosts=True)
    core.core.clients.registrar.check = lambda functions: None
    for session in range(1, count + 1):
        core.open_session()
        core.hold_slices(session)
        core.handle(StreamOpened(session))
        commands = say(core, session, Register(1, graph_of(2), FUNCTIONS), Put(1, 2, VECTOR, ()))
        (program,) = [m for m in sent(commands) if isinstance(m, Program)]
        core.from_island(1, Ready(2, program.program, 0))
        core.from_island(1, Stored(2, session, 1, 2, VECTOR, ()))
    core.turning = False
    return core


def say(core: CoreHarness, session: int, *messages: Any) -> list[Any]:
    return core.handle(ClientMessages(session, Carrier.STREAM, 10, list(messages)))


def launches(commands: list[Any]) -> list[tuple[int, int]]:
    """Session and first result of the launches that go to an island."""
    return [(m.session, m.results) for m in sent(commands) if isinstance(m, IslandLaunch)]


def wide(results: int) -> bytes:
    sketch = sketch_with_slices("wide")
    value = sketch.call("f0", sketch.argument(2), slice=2)
    return encode(sketch.graph(*[value] * results))


# --- turns ------------------------------------------------------------------------------------------------------------


def test_a_flood_of_launches_is_worked_off_in_turns_and_in_order() -> None:
    """
    1. A batch of launches without arguments: one turn's work of them is refused, the client is not read, a turn is
       asked for once.
    2. Another session's launch goes at once.
    3. The rest follows in turns, in order; then the client is read again.
    """
    core = with_sessions()
    flood = [Launch(k, 1, (), 100 + k) for k in range(1, 3 * TURN_WORK)]
    commands = say(core, 1, *flood)
    refused = [m.launch for m in sent(commands) if isinstance(m, LaunchFailed)]
    assert refused == list(range(1, TURN_WORK + 1))
    assert PauseReading(1) in commands
    assert commands.count(TakeTurn()) == 1
    assert launches(say(core, 2, Launch(1, 1, (1,), 2))) == [(2, 2)]
    while TakeTurn() in commands:
        commands = core.handle(Turn())
        refused += [m.launch for m in sent(commands) if isinstance(m, LaunchFailed)]
    assert refused == [message.launch for message in flood]
    assert ResumeReading(1) in commands


def test_an_upload_whose_message_waits_for_its_turn_outlives_the_scheduler_of_its_host() -> None:
    """
    1. Behind one turn's work of launches, a session says that it uploads buffer 2. The island's scheduler ends.
    2. Its host comes back with the buffer, which it said to the old scheduler. It is not told to drop it.
    3. The message has its turn, and the upload is whole.
    """
    core = with_sessions(1)
    commands = say(core, 1, *(Launch(k, 1, (), 100 + k) for k in range(1, TURN_WORK + 1)), Put(2, 2, VECTOR, ()))
    assert TakeTurn() in commands
    core.handle(IslandDisconnected(1, 1, "scheduler-1"))
    core.connect(1, link=7)
    holds = Holds({1: (1, 2, 3)}, (), (Stored(2, 1, 2, 2, VECTOR, ()),))
    commands = core.from_island(1, HostUp(2, 1, "transfer-2", "data-2", 2, 102, holds=holds), link=7)
    assert [m for m in sent(commands) if isinstance(m, Drop)] == [Drop(1, (3,))], "nobody uploads that"
    core.handle(Turn())
    session = core.core.launches.sessions[1]
    assert session.lives(2)
    assert session.arriving == {}


def test_a_host_that_lived_on_without_its_scheduler_has_data_of_launches_that_were_under_way() -> None:
    core = with_sessions(1)
    core.core.launches.tables.sequence = 40
    core.handle(IslandDisconnected(1, 1, "scheduler-1"))
    core.connect(1, link=7)
    commands = core.from_island(1, HostUp(2, 1, "transfer-2", "data-2", 2, 102, holds=Holds({}, (), since=0)), link=7)
    found = {peer.host: peer.since for m in sent(commands) if isinstance(m, Peers) for peer in m.peers}
    assert found[2] == 0


def test_a_host_whose_scheduler_joins_twice_stays() -> None:
    """It answers each time what it holds, and both answers may come by the last stream."""
    core = with_sessions(1)
    core.handle(IslandDisconnected(1, 1, "scheduler-1"))
    core.connect(1, link=7)
    again = HostUp(2, 1, "transfer-2", "data-2", 2, 102, holds=Holds({}, ()))
    core.from_island(1, again, link=7)
    assert core.from_island(1, again, link=7) == []
    assert core.core.launches.hosts[2].down_since is None


def test_sessions_take_turns() -> None:
    core = with_sessions(3)
    for session in (1, 2, 3):
        say(core, session, *[Launch(k, 1, (), 100 + k) for k in range(3 * TURN_WORK)])
    turns = [of(SendClient, core.handle(Turn())) for _ in range(6)]
    assert [commands[0].session for commands in turns] == [1, 2, 3, 1, 2, 3]


def test_what_comes_while_messages_wait_comes_after_them() -> None:
    core = with_sessions()
    say(core, 1, *[Free((k,)) for k in range(1000, 1000 + TURN_WORK)], Launch(1, 1, (1,), 2))
    assert sent(say(core, 1, Free((1,)))) == []
    assert launches(core.handle(Turn())) == [(1, 2)]


def test_messages_that_name_much_are_more_work() -> None:
    core = with_sessions()
    commands = say(core, 1, *[Launch(k, 1, tuple(range(4096)), 5000 + k) for k in range(1, 10)])
    assert len([m for m in sent(commands) if isinstance(m, LaunchFailed)]) == 1


def test_a_session_that_ends_takes_its_messages_along() -> None:
    core = with_sessions()
    say(core, 1, *[Launch(k, 1, (), 100 + k) for k in range(1, 3 * TURN_WORK)])
    core.core.clients.close(1)
    assert core.handle(Turn()) == []
    assert not core.core.clients.turns.inboxes


def test_a_full_backlog_holds_its_session_back_and_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts and frees count too: they wait behind a launch just as well.

    1. One launch may be in flight. Behind a further one wait as many calls as may: nothing more is taken.
    2. The launch ends: the backlog empties, and the session goes on.
    """
    monkeypatch.setattr(limits, "MAX_BACKLOG_CALLS", 10)
    core = with_sessions()
    core.core.launches.admission.max_in_flight = 1
    calls = [Launch(1, 1, (1,), 2), Launch(2, 1, (1,), 3), *[Free((1000 + k,)) for k in range(30)]]
    commands = say(core, 1, *calls)
    assert PauseReading(1) in commands
    assert TakeTurn() not in commands, "there is nothing to do before the launch ends"
    assert core.core.launches.backlog(1) == 10
    commands = core.from_island(1, Done((1,)))
    assert TakeTurn() in commands
    assert ResumeReading(1) in core.handle(Turn())
    assert [m for m in sent(commands) if isinstance(m, LaunchFailed)] == []


def test_a_backlog_is_full_of_what_its_launches_carry_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. One launch may be in flight. Behind it wait others that carry as much as may: nothing more is taken.
    2. It is not the sum of all that have ever waited, and half of it has to go before the session goes on."""
    monkeypatch.setattr(limits, "MAX_BACKLOG_BYTES", 1000)
    core = with_sessions()
    core.core.launches.admission.max_in_flight = 1
    carrying = [InlineLaunch(k, 1, (0,), 100 + k, ((0, bytes(VECTOR.nbytes)),)) for k in range(2, 40)]
    assert VECTOR.nbytes == 64
    assert PauseReading(1) not in say(core, 1, Launch(1, 1, (1,), 2), *carrying[:15])
    assert core.core.launches.backlog(1) == 15
    core.from_island(1, Done((1,)))
    assert PauseReading(1) not in say(core, 1, carrying[15])
    assert PauseReading(1) in say(core, 1, *carrying[16:20])
    assert core.core.launches.backlog(1) == 16
    for sequence in range(2, 10):
        assert TakeTurn() not in core.from_island(1, Done((sequence,)))
    assert core.core.launches.backlog(1) == 8
    assert TakeTurn() in core.from_island(1, Done((10,)))
    assert ResumeReading(1) in core.handle(Turn())
    backlog = core.core.launches.admission.backlogs[1]
    session = core.core.launches.sessions[1]
    assert backlog.carried == 64 * len(backlog.waiting)
    core.core.launches.cancellation.cancel(session, Cancel(19))
    assert backlog.carried == 64 * len(backlog.waiting)


# --- what may come ----------------------------------------------------------------------------------------------------


def test_batches_of_clients_are_taken_and_others_are_not_decoded() -> None:
    assert limits.MAX_CLIENT_BATCH_BYTES == MAX_BATCH_BYTES
    assert limits.MAX_CLIENT_BATCH_MESSAGES == MAX_MESSAGES
    for good in ([Free((1,))] * MAX_MESSAGES, [Register(1, bytes(9 << 20), {})], [Launch(1, 1, (1,), 1)] * 20):
        for data in batches(good):
            check_batch(data)
            TO_CONTROLLER.decode_batch(data)
    with pytest.raises(TooLarge, match="a batch of 4097 messages; the limit is 4096"):
        check_batch(encode([Free((1,))] * (MAX_MESSAGES + 1)))
    with pytest.raises(TooLarge, match="without a program of its own 8388608 are the limit"):
        check_batch(encode([Free(tuple(range(3 << 20)))]))
    with pytest.raises(TooLarge):
        check_batch(b"\xdd\xff\xff\xff\xff")
    for bad in (b"", b"\xc0", b"\xdd"):
        check_batch(bad)  # the decoder says what is wrong


@pytest.mark.parametrize(
    "bad",
    [
        Launch(1, 1, (1,) * 8193, 1),
        Free((1,) * 4097),
        Register(1, bytes(limits.MAX_GRAPH_BYTES + 1), {}),
        Put(1, 1, ArrayType((1,) * 65, "float32"), ()),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_with_too_much_in_them_are_no_messages(bad: Any) -> None:
    with pytest.raises(Exception, match="length"):
        TO_CONTROLLER.decode_batch(encode([bad]))


@pytest.mark.parametrize(
    "bad",
    [
        ListHeld(1, (1,) * (limits.MAX_PLACES + 1)),
        ResumeSession(
            VERSION, 1, "", "", (), (), 1, unanswered=(Unanswered(1, (), (KeptBuffers(1, VECTOR, (), ()),) * 65_537),)
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_calls_with_too_much_in_them_are_no_messages(bad: Any) -> None:
    with pytest.raises(WireError, match="length"):
        REQUEST.decode(encode(bad))


def test_a_refused_launch_leaves_one_entry_however_many_results_it_has() -> None:
    """
    1. Launches of a program with 8,000 results are refused: no buffer comes of it, and few entries.
    2. What would take such a result fails for the same reason.
    """
    core = with_sessions(1)
    core.turning = True
    core.core.clients.registrar.plan_if_cheap = answer
    say(core, 1, Register(2, wide(8000), FUNCTIONS))
    session = core.core.launches.sessions[1]
    before = len(session.buffers)
    for k in range(2 * limits.MAX_LAUNCHES_IN_FLIGHT):
        say(core, 1, Launch(k + 1, 2, (), 10_000 * (k + 1)))
    assert len(session.buffers) == before
    assert len(session.refused) == limits.MAX_LAUNCHES_IN_FLIGHT
    last = 10_000 * 2 * limits.MAX_LAUNCHES_IN_FLIGHT
    for number, text in ((last + 7_999, "takes 1 buffers, the launch gives 0"), (last + 8_000, "does not exist")):
        (failed,) = sent(say(core, 1, Launch(9_999, 1, (number,), 1)))
        assert isinstance(failed, LaunchFailed)
        assert text in failed.failure.message


def test_buffers_of_a_session_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways_ray.controller.quotas.MAX_SESSION_BUFFERS", 3)
    core = with_sessions()
    say(core, 1, Put(2, 2, VECTOR, ()), Put(3, 2, VECTOR, ()))
    (_, lost) = sent(say(core, 1, Put(4, 2, VECTOR, ())))
    assert "the session has 3 buffers and asks for 1 more" in lost.failure.message  # type: ignore[attr-defined]
    (failed,) = sent(say(core, 1, Launch(1, 1, (1,), 10)))
    assert isinstance(failed, LaunchFailed)
    assert failed.failure.kind == "TooLarge"


def test_programs_of_a_session_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    1. The third of two programs is too many: its launches say so, and nothing is kept of it.
    2. Those that are there may be registered again.
    3. Once one is dropped, there is room; but the functions of the refused one were not taken, which its client
       believes, and programs that name them say why.
    """
    monkeypatch.setattr(limits, "MAX_PROGRAMS", 2)
    core = with_sessions(1)
    session, registration = core.core.launches.sessions[1], core.core.clients.known[1].registration
    say(core, 1, Register(2, graph_of(2), {}), Register(3, graph_of(2), dict.fromkeys(("g", "h"), b"")))
    (failed,) = sent(say(core, 1, Launch(1, 3, (1,), 10)))
    assert isinstance(failed, LaunchFailed)
    assert "the session has 2 programs; 2 are the limit" in failed.failure.message
    assert reply(core.request(1, Explain(1, 3, graph_of(2)))) == Refused(failed.failure, 3)
    assert session.programs.keys() == {1, 2}

    before = session.programs[1].key
    say(core, 1, Register(1, graph_of(2), {}))
    assert session.programs[1].key > before

    say(core, 1, Unregister(1), Register(3, graph_of(2), {}))
    assert session.programs.keys() == {2, 3}
    assert registration.functions.keys() == FUNCTIONS.keys()
    assert registration.withheld == {"g": failed.failure, "h": failed.failure}


def test_a_program_that_there_was_no_room_for_may_be_registered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    1. The tenant's functions are full: launches of the program say that its client may register it again, also those
       of one that names the same functions. What is wrong with the program itself stays.
    2. The other function goes, and the program comes again, with its functions.
    """
    monkeypatch.setattr(limits, "MAX_TENANT_FUNCTION_BYTES", 1000)
    core = with_sessions(1)
    core.turning = True
    say(core, 1, Unregister(1, tuple(FUNCTIONS)), Register(2, graph_of(2), {"other": b"x" * 900}))
    big = dict.fromkeys(FUNCTIONS, b"y" * 400)
    say(core, 1, Register(3, graph_of(2), big), Register(4, graph_of(2), {}), Register(5, encode(()), {}))
    for launch, program, again in ((1, 3, 3), (2, 4, 4), (3, 5, 0), (4, 77, 77)):
        (failed,) = sent(say(core, 1, Launch(launch, program, (1,), 10 * launch)))
        assert isinstance(failed, LaunchFailed)
        assert failed.again == again
        assert (failed.failure.kind == "QuotaExceeded") == (program in (3, 4))
    for program, again in ((3, 3), (4, 4), (5, 0)):
        refused = reply(core.request(1, Explain(1, program, graph_of(2))))
        assert isinstance(refused, Refused)
        assert refused.again == again, "who compiles it hears that too"
    say(core, 1, Unregister(2, ("other",)), Register(4, graph_of(2), big))
    assert core.core.launches.sessions[1].programs[4].failure is None


def test_a_program_that_is_dropped_behind_launches_that_wait_keeps_its_functions_and_no_names() -> None:
    """
    1. A launch waits for an upload, and its client drops the program: what waits is short, however many names came.
    2. Others that it drops, that are there or not, let go of nothing either: the program has its functions.
    3. The launch goes, and the next registration finds the functions gone.
    """
    core = with_sessions(1)
    registration, backlog = core.core.clients.known[1].registration, core.core.launches.admission.backlogs[1]
    (named,) = core.core.launches.sessions[1].naming
    names = (*FUNCTIONS, *("x" * 64 for _ in range(1000)))
    say(core, 1, Put(2, 2, VECTOR, ()), Launch(1, 1, (2,), 3), Unregister(1, names))
    assert backlog.deferred[-1] == Unregister(1)
    say(core, 1, Unregister(-1, names), Unregister(1 << 63, names))
    assert registration.functions.keys() == registration.tenants.held.keys() == {named}

    assert launches(core.from_island(1, Stored(2, 1, 2, 2, VECTOR, ()))) == [(1, 3)]
    say(core, 1, Register(2, b"", {}))
    assert (registration.functions, registration.function_bytes, registration.tenants.held) == ({}, 0, {})
    say(core, 1, Register(3, graph_of(2), FUNCTIONS))
    assert registration.functions == FUNCTIONS


def test_deferred_launches_that_claim_very_much_are_not_passed() -> None:
    """Each event would look at all that they claim."""
    core = with_sessions(1)
    core.turning = True
    core.core.clients.registrar.plan_if_cheap = answer
    say(core, 1, Register(2, wide(8000), {}))
    for k in range(10):
        say(core, 1, Launch(k + 1, 2, (1,), 10_000 * (k + 1)))
    backlog = core.core.launches.admission.backlogs[1]
    assert len(backlog.deferred) == 2
    assert len(backlog.waiting) == 8


# --- planning ---------------------------------------------------------------------------------------------------------

MESH, KIND = SliceType(1, (1,), ("x",)), ArrayType((1,), "float32")


def shared_recipe(parts: int, nodes: int) -> Graph:
    recipe = Recipe((Part("", "f", ()),) * parts, (Ref(parts - 1),))
    made = tuple(Compute("", 0, 1, (), (), (KIND,), (Layout(1, ()),)) for _ in range(nodes))
    return Graph("g", (MESH,), (recipe,), (*made, Result(tuple(map(Ref, range(nodes))))))


def test_a_recipe_that_many_nodes_share_is_verified_once() -> None:
    graph = shared_recipe(100_000, 8_000)
    start = time.process_time()
    verify(graph)
    assert time.process_time() - start < 10, "before, this took minutes"
    with pytest.raises(TooLarge, match="refers to 800"):
        check_size(graph)
    assert references(shared_recipe(10, 5)) > 50


def test_slices_named_twice_and_too_many_slices_are_refused() -> None:
    graph = shared_recipe(1, 1)
    doubled = Graph("g", (MESH, MESH), graph.recipes, graph.nodes)
    with pytest.raises(Exception, match="names 2 slices, of which 1 differ"):
        verify(doubled)
    core = with_sessions(1)
    say(core, 1, Register(2, encode(Graph("g", (MESH,) * 257, graph.recipes, graph.nodes)), {}))
    failure = core.core.launches.sessions[1].programs[2].failure
    assert failure is not None
    assert "length <= 256" in failure.message


def test_a_program_with_too_many_results_is_refused() -> None:
    with pytest.raises(TooLarge, match="has 8193 results; the limit is 8192"):
        check_size(shared_recipe(1, 8193))


def big(core: CoreHarness, session: int, number: int = 2, data: bytes = b"") -> list[Any]:
    """Registers a program that is not planned at once."""
    sketch = sketch_with_slices("big")
    value: Any = sketch.argument(2)
    for k in range(CHEAP_REFERENCES // 4):
        value = sketch.call(f"f{k}", value, slice=2)
    functions = {f"f{k}": data for k in range(CHEAP_REFERENCES // 4)}
    return say(core, session, Register(number, encode(sketch.graph(value)), functions), Launch(1, 1, (1,), 2))


def test_a_big_program_is_planned_elsewhere_while_others_go_on() -> None:
    """
    1. Session 1 registers one, and launches another: both wait.
    2. Session 2 launches meanwhile; its own big program waits for the planner.
    3. The planner answers: the program goes to its island, then the launch; and the next program to the planner.
    """
    core = with_sessions()
    commands = big(core, 1)
    (plan,) = of(Plan, commands)
    assert plan_if_cheap(plan.request) is None
    assert launches(commands) == []
    commands = big(core, 2)
    assert of(Plan, commands) == []
    assert launches(say(core, 2, Launch(9, 1, (1,), 2))) == [], "behind its own program"
    commands = core.handle(Planned(plan.call, answer(plan.request)))
    assert [m.name for m in sent(commands) if isinstance(m, Program)] == ["big"]
    (second,) = of(Plan, commands)
    assert launches(core.handle(Turn())) == [(1, 2)]
    commands = core.handle(Planned(second.call, PlanReply(failure=Failure("ProgramRefused", "too much"))))
    assert launches(core.handle(Turn())) == [(2, 2)]
    failure = core.core.launches.sessions[2].programs[2].failure
    assert failure is not None
    assert failure.message == "too much"


def test_the_functions_of_a_big_program_go_ahead_to_its_islands() -> None:
    """Islands of its own slices have the small ones checked while it is planned; big ones wait for the program."""
    core = with_sessions()
    commands = big(core, 1)
    (plan,) = of(Plan, commands)
    ahead = next(message for message in sent(commands) if isinstance(message, FunctionsAhead))
    islands = [c.island for c in of(SendIsland, commands) if isinstance(c.message, FunctionsAhead)]
    assert islands == sorted({placed.island for placed in plan.request.slices})
    assert (ahead.tenant, ahead.trusted) == (plan.request.tenant.name, plan.request.tenant.trusted)
    assert ahead.functions == plan.functions
    commands = big(core, 2, data=b"x" * (CHEAP_FUNCTION_BYTES // 10))
    assert not any(isinstance(message, FunctionsAhead) for message in sent(commands))


def test_a_session_that_ends_while_its_program_is_planned() -> None:
    """One is under way, one waits; the next one's turn comes."""
    core = with_sessions(3)
    (plan,) = of(Plan, big(core, 1))
    big(core, 2)
    big(core, 3)
    core.core.clients.close(1)
    core.core.clients.close(2)
    commands = core.handle(Planned(plan.call, answer(plan.request)))
    assert [m for m in sent(commands) if isinstance(m, Program)] == []
    (third,) = of(Plan, commands)
    core.handle(Planned(third.call, answer(third.request)))
    assert launches(core.handle(Turn())) == [(3, 2)]


def test_tenants_take_turns_at_the_planner() -> None:
    core = CoreHarness(hosts=True)
    core.core.clients.registrar.check = lambda functions: None
    for session, name in enumerate(["alice", "alice", "alice", "bob"], 1):
        core.open_session(Tenant(name))
        core.hold_slices(session)
        core.handle(StreamOpened(session))
    asked = of(Plan, [command for session in (1, 2, 3, 4) for command in big(core, session)])
    order = []
    while asked:
        order.append(asked[0].request.tenant.name)
        asked = of(Plan, core.handle(Planned(asked[0].call, PlanReply(failure=Failure("TooLarge", "no")))))
    assert order == ["alice", "alice", "bob", "alice"]


def test_programs_wait_while_an_island_takes_nothing_and_launches_do_not() -> None:
    core = with_sessions()
    core.handle(IslandFull(0))
    commands = say(core, 1, Launch(1, 1, (1,), 2), Register(2, graph_of(2), {}), Launch(2, 1, (1,), 3))
    assert launches(commands) == [(1, 2)]
    assert launches(say(core, 2, Launch(1, 1, (1,), 2))) == [(2, 2)]
    assert TakeTurn() in core.handle(IslandRoom(0))
    assert launches(core.handle(Turn())) == [(1, 3)]


# --- functions --------------------------------------------------------------------------------------------------------


def functions_sent(commands: list[Any]) -> list[set[str]]:
    return [set(m.functions) for m in sent(commands) if isinstance(m, Program)]


def test_a_function_goes_to_an_island_once() -> None:
    """
    1. Session 2 names what session 1 has sent the island: it has it.
    2. A host of the island starts: what launches ask for goes again, each function once.
    3. When the last program that names it is gone, hosts have it no more.
    """
    core = CoreHarness(hosts=True)
    core.core.clients.registrar.check = lambda functions: None
    for session in (1, 2, 3):
        core.open_session()
        core.hold_slices(session)
        core.handle(StreamOpened(session))
    assert functions_sent(say(core, 1, Register(1, graph_of(2), FUNCTIONS))) == [{"f0"}]
    assert functions_sent(say(core, 1, Register(2, graph_of(2), {}))) == [set()]
    assert functions_sent(say(core, 2, Register(1, graph_of(2), FUNCTIONS))) == [set()]
    up = core.core.launches.hosts[2]
    assert functions_sent(core.from_island(1, HostUp(2, up.epoch + 1, "t", "d", 2, 300))) == []
    asking = Put(1, 2, VECTOR, ()), Launch(1, 1, (1,), 2)
    assert functions_sent(say(core, 1, *asking)) == [{"f0"}]
    assert functions_sent(say(core, 2, *asking)) == [set()]
    core.core.clients.close(1)
    assert functions_sent(say(core, 3, Register(1, graph_of(2), FUNCTIONS))) == [set()]
    core.core.clients.close(2)
    core.core.clients.close(3)
    core.open_session()
    core.hold_slices(4)
    core.handle(StreamOpened(4))
    assert functions_sent(say(core, 4, Register(1, graph_of(2), FUNCTIONS))) == [{"f0"}]


def test_functions_of_a_tenant_are_limited_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TENANT_FUNCTION_BYTES", 100)
    core = CoreHarness(hosts=True)
    core.core.clients.registrar.check = lambda functions: None
    for session in (1, 2):
        core.open_session(Tenant("alice"))
        core.hold_slices(session)
        core.handle(StreamOpened(session))
        say(core, session, Register(1, graph_of(2), {"f0": bytes(70), "f1": b""}))
        assert core.core.launches.sessions[session].programs[1].failure is None
    say(core, 2, Register(2, graph_of(2, 1), {"f1": bytes(70), "f9": bytes(70)}))
    failure = core.core.launches.sessions[2].programs[2].failure
    assert failure is not None
    assert "70 bytes that are new to tenant 'alice', whose sessions hold 70; 100 are allowed" in failure.message
    core.core.clients.close(1)
    core.core.clients.close(2)
    assert core.core.clients.functions == {}


def test_a_session_that_ends_leaves_the_functions_of_its_tenant_to_the_others() -> None:
    """It has sent none, and nobody else has yet: they are counted together all the same."""
    core = CoreHarness(hosts=True)
    for _ in range(2):
        core.open_session(Tenant("alice"))
    core.core.clients.close(2)
    core.open_session(Tenant("alice"))
    first, third = (core.core.clients.known[session].registration for session in (1, 3))
    assert first.tenants is third.tenants
