"""Programs on their way to the hosts that compile them: when they go, when again, and who waits for how long."""

from __future__ import annotations

import msgspec
import pytest

from pathways_ray.controller.circuit_breaker import MAX_DEATHS
from pathways_ray.controller.preparation import QUEUE_LIMITS, RETRY_AFTER_S
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.registration import Registration, TenantFunctions
from pathways_ray.controller.state import Send
from pathways_ray.errors import Failure
from pathways_ray.limits import COMPILE_LIMIT_S
from pathways_ray.transport.messages import (
    Cancel,
    DropProgram,
    HostDown,
    HostUp,
    IslandLaunch,
    LaunchFailed,
    Program,
    Register,
)
from tests.unit.controller.harness import Harness, failure_of, program_over, to_client, to_island
from tests.unit.helpers import Sketch

TRANSIENT = Failure("CompileError", "host 0 cannot check functions: its checker does not run")


def dies(front: Harness, epoch: int, *compiling: PlannedProgram, running: int = 0, crash: str = "") -> list[Send]:
    """Host 0 dies as it compiles programs and runs a launch, and comes back."""
    keys = tuple(program.key for program in compiling)
    down = HostDown(0, epoch, "its process ended", candidates=(running,) if running else (), compiling=keys)
    commands = front.checked(front.launches.host_down(down))
    return commands + front.checked(front.launches.host_up(0, HostUp(0, epoch + 1, "t", "d", 2, 1, crash)))


def programs(commands: list[Send]) -> list[int]:
    return [message.program for message in to_island(commands, 0, Program)]


def test_a_program_that_ends_its_host_in_the_compiler_is_refused_and_the_one_that_ran_meanwhile_is_not() -> None:
    """
    1. The victim's program is proven. The poison's compilation ends the host, time and again. 2. It is sent again only
    when a launch asks for it; after three it is refused. 3. The victim goes on
    after each.
    """
    front = Harness(sessions=(1, 2))
    victim = front.register(program_over(1), 1)
    front.put(1)
    front.launch(1, (1,), 100)
    front.done(0, 1)
    poison = front.register(program_over(1, key=2, session=2, arguments=2), 1, ready=False)
    for buffer in (1, 2):
        front.put(buffer, session=2)
    asked = []
    for attempt in range(MAX_DEATHS):
        buffer = 10 + attempt
        front.put(buffer)
        commands = front.launch(2 + attempt, (buffer,), 200 + attempt)
        if attempt:
            assert programs(commands) == [victim.key]
            commands = front.ready(victim, 0)
        (running,) = [message.sequence for message in to_island(commands, 0, IslandLaunch)]
        for lost in (20 + attempt, 40 + attempt):
            front.put(lost, session=2)
        asked += programs(front.launch(attempt, (20 + attempt, 40 + attempt), 300 + attempt, session=2))
        commands = dies(front, attempt + 1, poison, running=running, crash="Segmentation fault")
        assert programs(commands) == [], "nobody waits for anything"
        assert [m.failure.kind for m in to_client(commands, 1, LaunchFailed)] == ["HostLost"]
        (failed,) = to_client(commands, 2, LaunchFailed)
        expected = "BufferLost" if attempt + 1 < MAX_DEATHS else "ProgramRefused"
        assert failed.failure.kind == expected, "its arguments were on the host"
    assert asked == [poison.key] * (MAX_DEATHS - 1), "the first time it was on its way already"
    breaker = front.launches.circuit_breaker
    assert set(breaker.refused) == {poison.culprit}
    front.put(80, session=2)
    front.put(81, session=2)
    (refused,) = to_client(front.launch(90, (80, 81), 900, session=2), 2)
    assert refused.failure.kind == "ProgramRefused"
    assert breaker.refusal(victim.culprit) is None


def test_a_host_that_dies_as_it_compiles_what_all_have_compiled_before_died_of_something_else() -> None:
    front = Harness()
    program = front.register(program_over(1), 1, ready=False)
    front.ready(program, 0)
    dies(front, 1, program)
    assert not front.launches.circuit_breaker.is_watched(program.culprit)


def test_what_a_host_could_not_compile_is_tried_again_by_a_later_launch() -> None:
    """The launches that wait fail; one that comes at once too, so that a client that tries without pause does no
    harm."""
    front = Harness()
    program = front.register(program_over(1), 1, ready=False)
    front.put(1)
    assert front.launch(1, (1,), 2) == []
    assert [message.failure for message in to_client(front.ready(program, 0, TRANSIENT))] == [TRANSIENT]
    assert failure_of(front.launch(2, (1,), 3)) == TRANSIENT
    front.tick(RETRY_AFTER_S)
    assert programs(front.launch(3, (1,), 4)) == [program.key]
    assert to_island(front.ready(program, 0), 0, IslandLaunch)[0].results == 4


def test_a_call_without_end_that_only_its_host_knew_is_the_timeout_of_the_launch_that_follows() -> None:
    """As one that its host serves: the scheduler, which ends the host, can name the program alone. It was compiled."""
    front = Harness()
    program = front.register(program_over(1), 1)
    reason = "a launch of program 'p' that was only handed over was first on its devices for 4 s"
    down = HostDown(0, 1, reason, "LaunchTimeout", (-3,), (), (program.key,), decided=True, launch=-3)
    front.checked(front.launches.host_down(down))
    front.put(1)
    failure = failure_of(front.launch(1, (1,), 2))
    assert (failure.kind, failure.host) == ("LaunchTimeout", 0)
    assert failure.message.startswith(reason)
    assert len(front.launches.circuit_breaker.records[program.culprit].strikes) == 1
    front.up(0, epoch=2)
    front.put(2)
    assert programs(front.launch(2, (2,), 3)) == [program.key]


def test_a_host_that_comes_anew_has_compiled_nothing_and_failed_at_nothing() -> None:
    front = Harness()
    program = front.register(program_over(1), 1, ready=False)
    front.ready(program, 0, TRANSIENT)
    front.down(0)
    front.up(0, epoch=2)
    front.put(1)
    assert programs(front.launch(1, (1,), 2)) == [program.key]
    assert len(to_island(front.ready(program, 0), 0, IslandLaunch)) == 1


def test_what_the_allowlist_refuses_stays_refused() -> None:
    front = Harness()
    program = front.register(program_over(1), 1, ready=False)
    refused = Failure("ProgramRefused", "operation x is not among those that programs may use")
    front.ready(program, 0, refused)
    front.put(1)
    for launch, now in ((1, 1000.0), (2, 1010.0), (3, 1700.0), (4, 1702.0)):
        front.tick(now)
        assert failure_of(front.launch(launch, (1,), 2)) == refused


def test_the_circuit_breakers_refusal_is_what_every_launch_says() -> None:
    """It has the id by which the operator lifts it, and nobody compiles the program: no launch waits for that."""
    front = Harness()
    program = front.register(program_over(1), 1, ready=False)
    for epoch in range(1, MAX_DEATHS + 1):
        dies(front, epoch, program)
        front.tick(100.0 * epoch)
    front.put(1)
    for launch, now in ((1, 1000.0), (2, 1010.0), (3, 1700.0), (4, 1702.0)):
        front.tick(now)
        assert program.culprit.id in failure_of(front.launch(launch, (1,), 2)).message


def test_a_host_that_comes_back_compiles_what_somebody_waits_for() -> None:
    front = Harness(sessions=(1, 2))
    wanted = front.register(program_over(1), 1)
    front.register(program_over(1, key=2, arguments=2), 2)
    idle = front.register(program_over(1, key=3, session=2), 1)
    front.down(0)
    front.put(1)
    front.launch(1, (1,), 2)
    assert programs(front.up(0, epoch=2)) == [wanted.key]
    front.put(1, session=2)
    assert programs(front.launch(1, (1,), 2, session=2)) == [idle.key], "the others when they are launched"


def test_a_launch_does_not_wait_for_a_compiler_without_a_limit() -> None:
    limit = QUEUE_LIMITS * COMPILE_LIMIT_S
    front = Harness()
    program = front.register(program_over(1), 1, ready=False)
    front.put(1)
    front.tick(10.0)
    for k in (1, 2):
        assert front.launch(k, (1,), 10 * k) == [], "it is on its way since it was registered"
    assert front.tick(10.0 + limit) == []
    failed = to_client(front.tick(10.1 + limit))
    assert [(message.launch, message.failure.kind) for message in failed] == [(1, "CompileError"), (2, "CompileError")]
    assert "was not compiled on host 0 within 600 s" in failed[0].failure.message
    front.tick(20.0 + limit)
    front.launch(3, (1,), 30)
    assert len(to_island(front.ready(program, 0), 0, IslandLaunch)) == 1


def test_a_launch_waits_for_a_compiler_from_its_own_call_on() -> None:
    """The one that asked for the program before it was cancelled, and its host is another one since."""
    front = Harness()
    program = front.register(program_over(1), 1, ready=False)
    front.put(1)
    front.tick(10.0)
    front.launch(1, (1,), 100)
    front.checked(front.launches.cancellation.cancel(front.launches.sessions[1], Cancel(1)))
    front.down(0)
    front.up(0, epoch=2)
    front.tick(5000.0)
    front.put(2)
    assert programs(front.launch(2, (2,), 200)) == [program.key]
    assert len(to_island(front.ready(program, 0), 0, IslandLaunch)) == 1


def test_two_suspects_are_compiled_one_after_the_other() -> None:
    """
    1. A host dies as it compiles two programs: it may have been either of them.
    2. When launches ask for both, the second one has to wait for the first, which succeeds.
    3. The host dies again: now it is clear whose fault it is.
    """
    front = Harness(sessions=(1, 2))
    good = front.register(program_over(1), 1, ready=False)
    bad = front.register(program_over(1, key=2, session=2, arguments=2), 1, ready=False)
    dies(front, 1, good, bad)
    for session in (1, 2):
        for buffer in (1, 2):
            front.put(buffer, session=session)
    assert programs(front.launch(1, (1,), 10)) == [good.key]
    assert programs(front.launch(1, (1, 2), 10, session=2)) == []
    front.ready(good, 0)
    assert programs(front.tick(1.0)) == [], "its launch could be what ends hosts"
    front.done(0, front.launches.tables.sequence)
    assert programs(front.tick(2.0)) == [bad.key]
    dies(front, 2, bad)
    assert [len(front.launches.circuit_breaker.records[p.culprit].strikes) for p in (good, bad)] == [0, 1]


def test_a_suspect_does_not_wait_for_one_that_only_a_host_which_is_away_has_yet_to_compile() -> None:
    """That host may be away for long. One that is up compiles suspects one after the other, as ever."""
    front = Harness(sessions=(1, 2))
    both = front.register(program_over(1, 2), 1, ready=False)
    other = front.register(program_over(1, key=2, session=2, arguments=2), 1, ready=False)
    dies(front, 1, both, other)
    front.put(1)
    for buffer in (1, 2):
        front.put(buffer, session=2)
    assert programs(front.launch(1, (1,), 10)) == [both.key]
    assert programs(front.launch(1, (1, 2), 10, session=2)) == []
    front.down(2)
    assert programs(front.tick(1.0)) == [], "host 0 compiles the first one"
    front.ready(both, 0)
    assert programs(front.tick(2.0)) == [other.key]


@pytest.mark.parametrize("first", [0, 1])
def test_suspects_wait_until_all_hosts_of_their_island_are_back(first: int) -> None:
    """
    1. Launches wait for two suspects on host 0. It is back before the other host of its island, or behind it.
    2. One suspect goes once both are there: one that had gone before would be compiled beside it.
    """
    front = Harness(sessions=(1, 2))
    found = [front.register(program_over(1, key=k, session=k, arguments=k), 1, ready=False) for k in (1, 2)]
    dies(front, 1, *found)
    front.down(0, epoch=2)
    front.down(1)
    front.up(first, epoch=3)
    for session, arguments in ((1, (1,)), (2, (1, 2))):
        for buffer in arguments:
            front.put(buffer, session=session)
        assert programs(front.launch(1, arguments, 10, session=session)) == []
    assert programs(front.up(1 - first, epoch=3)) == [1]
    front.ready(found[0], 0)
    front.done(0, front.launches.tables.sequence)
    assert programs(front.tick(1.0)) == [2]


def test_a_program_that_its_session_dropped_while_it_was_compiled_is_blamed_all_the_same() -> None:
    front = Harness(sessions=(1, 2))
    poison = front.register(program_over(1, key=2, session=2), 1, ready=False)
    front.checked(front.launches.close_session(2))
    dies(front, 1, poison)
    assert len(front.launches.circuit_breaker.records[poison.culprit].strikes) == 1


def test_another_name_is_the_same_program_and_other_work_another_one() -> None:
    def culprit(name: str, calls: int, tenant: str = "t") -> object:
        sketch = Sketch(name)
        here = sketch.slice("0.0")
        value = sketch.argument(here)
        for _ in range(calls):
            value = sketch.call("f", value, slice=here)
        return sketch.planned(value, tenant=tenant).culprit

    assert culprit("step", 1) == culprit("renamed", 1)
    assert culprit("step", 1) != culprit("step", 2)
    assert culprit("step", 1) != culprit("step", 1, "other")


def test_the_program_message_says_whose_it_is() -> None:
    program = program_over(1)
    assert {msgspec.structs.asdict(message)["tenant"] for message in program.messages.values()} == {""}


def test_a_program_that_is_replaced_while_it_runs_is_dropped_once_it_is_over() -> None:
    """Hosts would keep what they compiled for ever: nobody else drops it, not even the end of the session."""
    front = Harness()
    front.register(program_over(1, key=5), 1)
    front.put(1)
    front.launch(1, (1,), 10)
    assert to_island(front.launches.register(1, 1, program_over(1, key=6)), 0, DropProgram) == []
    assert to_island(front.done(0, 1), 0, DropProgram) == [DropProgram(1, 5)]
    assert to_island(front.launches.close_session(1), 0, DropProgram) == [DropProgram(1, 6)]


def test_a_program_that_its_client_drops_leaves_its_hosts_behind_launches_of_it() -> None:
    """1. Behind one that is under way. 2. Behind one that waits for an argument, which others pass. 3. What is unknown,
    and what is dropped twice, is nothing."""
    front = Harness()
    front.register(program_over(1, key=5), 1)
    front.register(program_over(1, key=6), 2)
    front.put(1)
    front.launch(1, (1,), 10)
    assert to_island(front.unregister(1), 0, DropProgram) == []
    assert front.launches.sessions[1].programs.keys() == {2}
    assert to_island(front.done(0, 1), 0, DropProgram) == [DropProgram(1, 5)]

    front.put(2, arrives=False)
    front.launch(2, (2,), 20, program=2)
    assert front.unregister(2) == []
    assert front.unregister(2) == []
    assert front.launches.sessions[1].programs.keys() == {2}
    front.stored(0, 2)
    assert to_island(front.done(0, 2), 0, DropProgram) == [DropProgram(1, 6)]
    assert front.launches.sessions[1].programs == {}
    assert front.launches.sessions[1].plan_bytes == 0
    assert front.launches.tables.programs == {}

    assert front.unregister(2) == []
    assert front.unregister(77) == []
    assert to_client(front.launch(3, (1,), 30, program=2), 1, LaunchFailed)[0].failure.kind == "WireError"


def test_functions_that_are_let_go_count_no_more() -> None:
    tenant, session = TenantFunctions(), Harness().launches.sessions[1]
    one, other = Registration(tenant), Registration(tenant)
    one.take({"f": b"12", "g": b"345"})
    other.take({"f": b"12"})
    one.let_go(session, ["f", "g", "g", "h"])
    assert (one.function_bytes, other.function_bytes, tenant.bytes) == (0, 2, 2)
    one.take({"g": b"345"})
    assert (one.function_bytes, tenant.bytes) == (3, 5)
    one.close()
    other.let_go(session, ["f"])
    assert (tenant.bytes, tenant.held) == (0, {})


def test_functions_count_as_long_as_programs_have_them() -> None:
    """Whatever the client says: else it could have the controller keep more than it may. 1. A program is there. 2. It
    is gone once launches that wait have left. 3. Those that were sent again meanwhile stay. 4. So do those that are
    sent again for a program that is refused."""
    front = Harness()
    session, registration = front.launches.sessions[1], Registration(TenantFunctions())
    blobs = dict.fromkeys(front.register(program_over(1, key=5), 1).messages[0].functions, b"123")
    registration.take(blobs)
    registration.let_go(session, blobs)
    assert registration.function_bytes == 3 * len(blobs) > 0

    front.unregister(1)
    registration.let_go(session)
    assert (registration.function_bytes, registration.leaving, session.naming) == (0, set(), {})

    for program in (PlannedProgram(7, 1, "", failure=TRANSIENT), program_over(1, key=8)):
        front.register(program_over(1, key=program.key + 10), 2)
        registration.take(blobs)
        registration.let_go(session, blobs)
        registration.take(blobs)
        front.register(program, 3)
        front.unregister(2)
        registration.let_go(session)
        assert registration.functions == blobs


def test_a_program_that_is_dropped_in_flight_keeps_the_names_of_its_functions() -> None:
    """They are not counted any more, and its islands are told when it is over."""
    front = Harness()
    program = program_over(1, key=5)
    named = dict.fromkeys(program.messages[0].functions, b"123")
    program.messages = {0: msgspec.structs.replace(program.messages[0], functions=named)}
    front.register(program, 1)
    front.put(1)
    front.launch(1, (1,), 10)
    assert front.unregister(1) == []
    assert program.messages[0].functions == dict.fromkeys(named, b"")
    assert to_island(front.done(0, 1), 0, DropProgram) == [DropProgram(1, 5)]
    assert not front.launches.preparation.distribution.held[0]


def test_a_program_that_is_remembered_keeps_no_functions() -> None:
    """They count for no tenant any more, and thousands of programs are remembered."""
    front = Harness()
    running = front.register(program_over(1, key=5), 1)
    over = front.register(program_over(1, key=6), 2)
    assert over.plans
    front.put(1)
    front.launch(1, (1,), 10)
    front.launches.close_session(1)
    assert set(front.launches.preparation.dropped) == {5, 6}
    assert running.messages
    front.done(0, 1)
    for program in (running, over):
        assert program.messages == {}
        assert "plans" not in vars(program)
        assert program.islands == (0,)


def test_plans_count_with_the_functions_that_their_session_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. There is room for one plan, and for no further program. 2. One that replaces it takes its room."""
    front = Harness()
    session, registration = front.launches.sessions[1], Registration(TenantFunctions())
    program = front.register(program_over(1, key=5), 1)
    size = sum(len(message.plan) for message in program.messages.values())
    assert session.plan_bytes == size > 0
    monkeypatch.setattr("pathways_ray.limits.MAX_SESSION_FUNCTION_BYTES", size + 10)
    assert registration.refusal(session, Register(2, b"x" * 10, {})) is None
    refused = registration.refusal(session, Register(2, b"x" * 11, {}))
    assert refused is not None
    assert f"with the plans of its programs, {size}; {size + 10} are the limit" in refused.message
    front.register(program_over(1, key=6), 1)
    assert session.plan_bytes == size
    front.launches.register(1, 1, PlannedProgram(7, 1, "", failure=TRANSIENT))
    assert session.plan_bytes == 0


def test_each_program_that_a_scheduler_blames_is_named_alone() -> None:
    front = Harness(sessions=(1, 2))
    found = [front.register(program_over(1, key=key, session=key), 1, ready=False) for key in (1, 2)]
    for program, name in zip(found, ("one", "two"), strict=True):
        program.name = name
    down = HostDown(0, 1, "it took too long", "CompileError", compiling=(1, 2), decided=True)
    front.checked(front.launches.host_down(down))
    texts = [program.failure.message for program in found if program.failure is not None]
    assert [text.split(": ") for text in texts] == [
        [f"program '{name}' was not compiled", "it took too long. The hosts of island 0 start again"]
        for name in ("one", "two")
    ]
