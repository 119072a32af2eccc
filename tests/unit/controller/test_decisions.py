"""Launches that go to their islands in parts: events in, commands out."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pathways_ray import limits
from pathways_ray.controller import decisions
from pathways_ray.controller.cancellation import CANCELLED_LATE
from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.inspection import launch_view
from pathways_ray.controller.planning import PlanRequest, answer
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import Send, SendClient, SendIsland
from pathways_ray.controller.tenants import Quota, Tenant
from pathways_ray.controller.turns import Turns
from pathways_ray.ir.graph import Body, Branch, Graph, Repeat
from pathways_ray.transport.messages import (
    Cancel,
    CancelRefused,
    Decided,
    Done,
    Drop,
    Following,
    HostUp,
    IslandLaunch,
    LaunchFailed,
    encode,
)
from tests.unit.controller.harness import (
    BOOM,
    ISLAND_OF_HOST,
    SLICES,
    Harness,
    completed,
    program_over,
    sketch_with_slices,
    to_client,
)
from tests.unit.helpers import SCALAR, VECTOR, Sketch
from tests.unit.ir.test_script import one_call

BEGUN = [CancelRefused(1, CANCELLED_LATE)]


def planned(graph: Graph, key: int = 1, donated: bool = False) -> PlannedProgram:
    reply = answer(PlanRequest(encode(graph), tuple(SLICES), False, Tenant("t")))
    assert reply.failure is None, reply.failure
    assert reply.lowered is not None
    functions = {
        digest: b"" for one in reply.lowered.segments for part in one.islands.values() for digest in part.functions
    }
    return PlannedProgram.of(key, 1, reply.lowered, functions)


def branching(donate: bool = False) -> Graph:
    """A value on slice 1 decides between two functions on slice 2."""
    sketch = sketch_with_slices("branching")
    x, y = sketch.argument(1), sketch.argument(2)
    index = sketch.call("index", x, slice=1, outputs=(SCALAR,), donated=(0,) if donate else ())
    bodies = tuple(sketch.body([y], one_call(name, 2)) for name in "fg")
    return sketch.graph(sketch.control(Branch("pick", index, (y,), bodies, (VECTOR,), (sketch.layout(y),))))


def looping(times: int = 0, tested: int = 1) -> Graph:
    """Rounds on slice 2, tested on slice 1 or another one."""
    sketch = sketch_with_slices("looping")
    x = sketch.argument(2)
    body = sketch.body([x], one_call("step", 2))
    test = sketch.body([x], lambda s, v: [s.call("test", v[0], slice=tested, outputs=(SCALAR,))])
    layouts = (sketch.layout(x),)
    loop = Repeat("loop", (x,), times, None if times else test, body, (VECTOR,), layouts, "rl.py:7")
    return sketch.graph(sketch.control(loop))


class Deciding(Harness):
    """A front with one program that decides."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.program = planned(graph)
        self.checked(self.launches.register(1, 1, self.program))
        for segment in self.program.segments:
            for host in segment.hosts:
                self.ready(segment, host)
        self.put(11, slice=1)
        self.put(12, slice=2)

    def decided(self, sequence: int, *values: int) -> list[Send]:
        return self.checked(self.launches.decided(Decided(sequence, values)))

    def end(self, commands: list[Send]) -> list[Send]:
        """All islands report what was launched."""
        return [c for send in sent(commands) for c in self.done(send.island, send.message.sequence)]


class Sent(NamedTuple):
    island: int
    message: IslandLaunch


def sent(commands: list[Send]) -> list[Sent]:
    """The launches that go to islands."""
    to_islands = [c for c in commands if isinstance(c, SendIsland)]
    return [Sent(c.island, c.message) for c in to_islands if isinstance(c.message, IslandLaunch)]


def functions(front: Deciding, commands: list[Send]) -> list[str]:
    """The functions that launches run."""
    keys = {segment.key: segment for segment in front.program.segments}
    found = []
    for command in sent(commands):
        message = command.message
        found += sorted(keys[message.program].messages[command.island].functions)
    return found


def test_a_quota_of_launches_counts_a_loop_as_one() -> None:
    """With two allowed, a loop with several rounds under way leaves room for another, and not for a third."""
    front = Deciding(looping(times=5))
    front.launches.sessions[1].tenant = Tenant("alice", quota=Quota(launches=2))
    begun = front.launch(1, (12,), 20)
    assert len(sent(begun)) > 1
    assert not to_client(front.launch(2, (12,), 30), kind=LaunchFailed)
    (refused,) = to_client(front.launch(3, (12,), 40), kind=LaunchFailed)
    assert "it has 2 and asks for 1 more" in refused.failure.message
    front.end(begun)


def test_the_chosen_branch_follows_and_then_what_is_left() -> None:
    front = Deciding(branching())
    first = front.launch(1, (11, 12), 20)
    assert functions(front, first) == ["index"]
    second = front.decided(1, 1)
    assert functions(front, second) == ["g"]
    assert [c.message.results for c in sent(second)] == [-3, 20]
    assert front.done(SLICES[0].island, 1) == []
    outcomes = front.end(second)
    assert to_client(outcomes) == [m.message for m in completed(1)]
    assert front.buffers() == {11, 12, 20}


def told(commands: list[Send]) -> tuple[Following | None, ...]:
    """What the host of the value is told of its branches."""
    (launch,) = sent(commands)
    return launch.message.follows


def test_no_host_is_told_of_a_branch_with_many_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MAX_FORESEEN_ARGUMENTS", 0)
    front = Deciding(branching())
    assert told(front.launch(1, (11, 12), 20)) == (None, None)


def test_the_host_of_a_value_is_told_what_follows() -> None:
    front = Deciding(branching())
    follows = told(front.launch(1, (11, 12), 20))
    (host,) = SLICES[1].hosts
    keys = {name: s.key for s in front.program.segments for part in s.messages.values() for name in part.functions}
    assert follows == (Following(host, 1, keys["f"], (12,), -2), Following(host, 1, keys["g"], (12,), -3))
    (first, _) = sent(front.decided(1, 0))
    chosen = follows[0]
    assert chosen is not None
    message = first.message
    assert (message.program, message.arguments, message.results) == (chosen.program, chosen.arguments, chosen.results)


def drops(commands: list[Send]) -> set[tuple[int, tuple[int, ...]]]:
    to_islands = [c for c in commands if isinstance(c, SendIsland)]
    return {(c.island, c.message.buffers) for c in to_islands if isinstance(c.message, Drop)}


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
def test_what_hosts_were_told_and_is_never_launched_is_taken_back(ends: str) -> None:
    """Before the value is there, or after: then a host may have begun it."""
    front = Deciding(branching())
    (launch,) = sent(front.launch(1, (11, 12), 20))
    if ends == "cancelled":
        cancelling = front.launches.cancellation.cancel(front.launches.sessions[1], Cancel(1))
        found = drops(front.checked(cancelling))
    else:
        found = drops(front.failed(launch.island, 1))
    assert found >= {(SLICES[1].island, (-2,)), (SLICES[1].island, (-3,))}


def test_a_launch_whose_last_part_is_over_may_be_cancelled_and_has_one_outcome() -> None:
    """Another part is under way: what it had no part in is there, and nobody has heard of it."""
    front = Deciding(branching())
    first = front.launch(1, (11, 12), 20)
    second = front.decided(1, 1)
    assert to_client(front.end(second)) == []
    session = front.launches.sessions[1]
    assert to_client(front.checked(front.launches.cancellation.cancel(session, Cancel(1)))) == BEGUN
    outcome = front.end(first)
    (report,) = to_client(outcome)
    assert isinstance(report, LaunchFailed)
    assert (report.launch, report.failure) == (1, CANCELLED_LATE)
    assert (SLICES[1].island, (20,)) in drops(outcome)


@pytest.mark.parametrize(("value", "name"), [(-7, "f"), (0, "f"), (1, "g"), (9, "g")])
def test_an_index_out_of_range_is_the_first_or_the_last(value: int, name: str) -> None:
    front = Deciding(branching())
    front.launch(1, (11, 12), 20)
    assert functions(front, front.decided(1, value)) == [name]


def test_what_has_to_do_with_it_waits_and_the_rest_does_not() -> None:
    front = Deciding(branching())
    double = front.register(sketch_program(2), 2)
    front.launch(1, (11, 12), 20)
    front.put(13, slice=2)
    assert [c.message.results for c in sent(front.launch(2, (13,), 30, program=2))] == [30]
    assert sent(front.launch(3, (20,), 31, program=2)) == []
    follows = sent(front.decided(1, 0))
    assert [c.message.results for c in follows] == [-2, 20, 31]
    assert double.key == follows[-1].message.program


def sketch_program(slice: int) -> PlannedProgram:
    sketch: Sketch = sketch_with_slices("double")
    x = sketch.argument(slice)
    return sketch.planned(sketch.call("double", x, slice=slice), key=7)


def test_an_argument_that_is_freed_meanwhile_is_there_until_the_end() -> None:
    front = Deciding(branching())
    front.launch(1, (11, 12), 20)
    front.free(12)
    assert 12 in front.buffers()
    second = front.decided(1, 1)
    assert functions(front, second) == ["g"]
    assert 12 not in front.buffers()


def test_a_loop_goes_on_while_its_value_says_so() -> None:
    front = Deciding(looping())
    commands = front.launch(1, (12,), 20)
    assert functions(front, commands) == ["test"]
    sequence = 1
    for _ in range(3):
        commands = front.decided(sequence, 1)
        sequence += 1
        assert set(functions(front, commands)) == {"step", "test"}
    last = front.decided(sequence, 0)
    assert [c.message.results for c in sent(last)] == [20]
    assert front.end(last) == []
    ended = [
        c for k in range(1, sequence + 1) for island in {s.island for s in SLICES[:2]} for c in front.done(island, k)
    ]
    assert to_client(ended) == [m.message for m in completed(1)]
    assert front.buffers() == {11, 12, 20}


def test_rounds_that_find_room_do_not_begin_the_wait_of_a_later_launch_for_memory_again() -> None:
    front = Deciding(looping(tested=2))
    memory = front.launches.admission.memory
    front.register(program_over(1, key=9), 2)
    for host in front.launches.hosts.values():
        host.memory = 8 * VECTOR.nbytes
    for number in range(21, 27):
        front.put(number)
    front.launch(1, (12,), 40)
    front.launches.open_session(2)
    front.launches.add_slice(2, SLICES[0])
    front.put(1, session=2)
    front.launch(2, (11,), 30, program=2)
    for second in range(1, int(memory.limit_s) + 1):
        front.tick(float(second))
        assert len(sent(front.decided(second, 1))) == 1
        front.done(1, second)
    (failed,) = to_client(front.tick(memory.limit_s + 1), kind=LaunchFailed)
    assert (failed.launch, failed.failure.kind) == (2, "OutOfMemory")


def test_a_loop_of_known_length_waits_for_no_value_but_is_not_all_under_way() -> None:
    front = Deciding(looping(times=100))
    commands = front.launch(1, (12,), 20)
    first = sent(commands)
    assert 16 < len(first) < 100
    more = [c for send in first for c in front.done(send.island, send.message.sequence)]
    assert sent(more)


def test_a_part_that_fails_is_the_outcome_once_all_have_ended() -> None:
    front = Deciding(branching())
    front.launch(1, (11, 12), 20)
    (report,) = to_client(front.failed(SLICES[0].island, 1))
    assert isinstance(report, LaunchFailed)
    assert (report.launch, report.failure) == (1, BOOM)
    assert front.buffers() == {11, 12}
    assert front.launches.tables.recorder.failures == {BOOM.kind: 1}
    (next_one,) = to_client(front.launch(2, (20,), 30, program=1))
    assert isinstance(next_one, LaunchFailed)


def test_a_lost_host_ends_it_between_its_parts() -> None:
    front = Deciding(branching())
    commands = front.launch(1, (11, 12), 20)
    (launch,) = sent(commands)
    host = next(h for s in SLICES if s.island == launch.island for h in s.hosts)
    failures = [m for m in to_client(front.down(host)) if isinstance(m, LaunchFailed)]
    assert [(m.launch, m.failure.kind) for m in failures] == [(1, "HostLost")]


def across() -> Graph:
    """A value on slice 1 decides between two functions, on slice 2 and then on slice 3."""
    sketch = sketch_with_slices("across")
    x, y, z = (sketch.argument(slice) for slice in (1, 2, 3))
    index = sketch.call("index", x, slice=1, outputs=(SCALAR,))

    def body(name: str) -> Body:
        return sketch.body([y], lambda s, v: [s.call(f"{name}3", s.call(f"{name}2", v[0], slice=2), slice=3)])

    return sketch.graph(
        sketch.control(Branch("pick", index, (y,), (body("f"), body("g")), (VECTOR,), (sketch.layout(z),)))
    )


def test_one_that_ends_while_it_waits_for_room_on_islands_holds_back_nobody() -> None:
    front = Deciding(across())
    front.put(13, slice=3)
    front.launches.cross_island.window = 0
    front.launch(1, (11, 12, 13), 20)
    assert not sent(front.decided(1, 0))
    front.done(SLICES[0].island, 1)
    assert (1, 1) in front.launches.cross_island.queued
    commands = front.down(SLICES[2].hosts[0]) + front.tick(1000.0)
    assert [m.launch for m in to_client(commands, kind=LaunchFailed)] == [1]
    assert not front.launches.cross_island.queued


def test_it_may_be_cancelled_between_its_parts() -> None:
    """A part is under way, which may take long: the client hears at once that it has begun, and of its end later."""
    front = Deciding(looping())
    front.launch(1, (12,), 20)
    session = front.launches.sessions[1]
    assert to_client(front.checked(front.launches.cancellation.cancel(session, Cancel(1)))) == BEGUN
    islands = {s.island for s in SLICES[:2]}
    (report,) = to_client([c for island in islands for c in front.done(island, 1)])
    assert isinstance(report, LaunchFailed)
    assert report.failure == CANCELLED_LATE, "some of it has run"
    assert front.buffers() == {11, 12}


def test_the_launch_limit_ends_a_loop_without_end() -> None:
    front = Deciding(looping())
    front.launch(1, (12,), 20)
    front.decided(1, 1)
    islands = {s.island for s in SLICES[:2]}
    assert not to_client([c for k in (1, 2) for island in islands for c in front.done(island, k)])
    (report,) = to_client(front.tick(limits.LAUNCH_LIMIT_S + 1))
    assert isinstance(report, LaunchFailed)
    assert report.failure.kind == "LaunchTimeout"
    assert "after 1 rounds of its loops" in report.failure.message
    assert (report.failure.node, report.failure.where) == ("loop", "rl.py:7")
    assert front.launches.tables.recorder.failures == {"LaunchTimeout": 1}


def test_what_several_parts_took_at_once_counts_once_for_the_launch_limit() -> None:
    front = Deciding(looping(times=100))
    front.tick(0.0)
    first = sent(front.launch(1, (12,), 20))
    front.tick(0.7 * limits.LAUNCH_LIMIT_S)
    took = round(0.7e6 * limits.LAUNCH_LIMIT_S)
    for send in first:
        more = front.checked(front.launches.done(send.island, Done((send.message.sequence,), (took,))))
        assert sent(more), "it goes on"


def test_what_a_part_took_of_donated_arguments_is_said_with_the_failure() -> None:
    front = Deciding(branching(donate=True))
    commands = front.launch(1, (11, 12), 20)
    (launch,) = sent(commands)
    assert 11 not in front.buffers()
    front.decided(1, 0)
    front.done(launch.island, 1)
    found = [c for sequence in (2, 3) for c in front.failed(SLICES[1].island, sequence)]
    (report,) = [c.message for c in found if isinstance(c, SendClient)]
    assert isinstance(report, LaunchFailed)
    assert report.consumed == (11,)


def test_a_session_that_closes_forgets_it() -> None:
    front = Deciding(looping())
    front.launch(1, (12,), 20)
    front.checked(front.launches.close_session(1))
    assert not front.decided(1, 1)
    assert not [c for c in front.done(SLICES[0].island, 1) if isinstance(c, SendClient)]


def test_a_launch_that_decides_says_which_part_it_waits_for() -> None:
    front = Deciding(looping())
    front.launch(1, (12,), 20)
    view = launch_view(front.launches, Turns(), 1, 1)
    assert view is not None
    assert (view.sequence, view.parts, view.rounds) == (0, (1,), 0)
    front.decided(1, 1)
    view = launch_view(front.launches, Turns(), 1, 1)
    assert view is not None
    assert view.rounds == 1
    assert view.parts == (1, 2)


def test_a_launch_whose_program_is_registered_again_before_it_decides_fails() -> None:
    """Its next part would be one of another program, or of none: the controller ended."""
    front = Deciding(branching())
    front.launch(1, (11, 12), 20)
    front.register(program_over(1, key=9), 1, ready=False)
    commands = front.decided(1, 1)
    assert sent(commands) == []
    outcome = front.done(SLICES[0].island, 1)
    (failed,) = [m for m in to_client(commands) + to_client(outcome) if isinstance(m, LaunchFailed)]
    assert failed.failure.message == "program 1 was registered again while launch 1 of it was under way"
    assert front.buffers() == {11, 12}


def test_what_a_backlog_frees_has_others_go_once_it_is_worked_off() -> None:
    """A launch that waited for that memory let others go, among them the session that was in the middle of its own
    calls: it worked these off twice, and the controller ended.

    1. Two sessions fill the islands 0 and 1, and one waits for memory on island 2. 2. Session 1 has a loop over the
    first two, a launch over them, and behind it what frees that memory. 3. Islands 0 and 1 have room again.
    """
    front = Harness(sessions=(1, 2, 3), cross_island=CrossIslandWindow(window=4))
    for host, island in ISLAND_OF_HOST.items():
        room = (3 if host == 3 else 1000) * VECTOR.nbytes
        front.checked(front.launches.host_up(island, HostUp(host, 2, f"t{host}", f"d{host}", 2, 100 + host, "", room)))
    sketch = sketch_with_slices("looping")
    x = sketch.argument(2)
    body = sketch.body([x], lambda s, v: [s.call("g", s.call("f", v[0], slice=1), slice=2)])
    loop = sketch.control(Repeat("loop", (x,), 6, None, body, (VECTOR,), (sketch.layout(x),), "rl.py:7"))
    program = planned(sketch.graph(loop))
    front.checked(front.launches.register(1, 1, program))
    for segment in program.segments:
        for host in segment.hosts:
            front.ready(segment, host)
    front.register(program_over(1, 2, key=101, session=1), 2)
    front.register(program_over(1, 2, key=201, session=2), 1)
    front.register(program_over(3, key=301, session=3), 1)
    for buffer, slice, session in ((11, 1, 1), (12, 2, 1), (13, 3, 1), (1, 1, 2), (1, 3, 3), (2, 3, 3)):
        front.put(buffer, slice=slice, session=session)
    for launch in range(1, 5):
        front.launch(launch, (1,), 10 + launch, program=1, session=2)
    front.launch(1, (1,), 10, program=1, session=3)
    assert list(front.launches.admission.memory.waiting) == [3]
    front.launch(1, (12,), 20, program=1)
    front.launch(2, (11,), 21, program=2)
    front.launch(5, (1,), 50, program=1, session=2)
    front.free(13)
    front.done(0, 1, 2, 3, 4)
    sent = [c.message for c in front.done(1, 1, 2, 3, 4) if isinstance(c, SendIsland) and c.island in (1, 2)]
    found = [(m.session, m.results) for m in sent if isinstance(m, IslandLaunch)]
    assert found == [(1, -1), (1, 21), (2, 50), (1, -2), (3, 10)]


def test_a_launch_for_which_its_session_has_no_room_waits_for_no_memory() -> None:
    """1. A loop waits for memory that another session has. 2. A launch elsewhere passes it, as many as may be under way
    at a time. 3. The loop is looked at again; and goes on once it has both."""
    front = Harness(sessions=(1, 2), max_in_flight=1)
    for host, island in ISLAND_OF_HOST.items():
        up = HostUp(host, 2, f"t{host}", f"d{host}", 2, 100 + host, "", 3 * VECTOR.nbytes)
        front.checked(front.launches.host_up(island, up))
    program = planned(looping(times=2))
    front.checked(front.launches.register(1, 1, program))
    for segment in program.segments:
        for host in segment.hosts:
            front.ready(segment, host)
    front.register(program_over(1, key=101), 2)
    front.put(1, slice=1)
    front.put(2, slice=2)
    for buffer in (1, 2):
        front.put(buffer, slice=2, session=2)
    assert front.launch(1, (2,), 20, program=1) == []
    memory = front.launches.admission.memory
    assert list(memory.waiting) == [1]
    front.launch(2, (1,), 30, program=2)
    front.tick(1.0)
    assert list(memory.waiting) == []
    front.free(1, 2, session=2)
    sent = [c.message for c in front.done(0, 1) if isinstance(c, SendIsland)]
    assert [m.results for m in sent if isinstance(m, IslandLaunch)] == [-1]


def rounds_in(vectors: int) -> Harness:
    """A front with a loop, whose devices have room for so many vectors."""
    front = Harness(sessions=(1, 2))
    for host, island in ISLAND_OF_HOST.items():
        up = HostUp(host, 2, f"t{host}", f"d{host}", 2, 100 + host, "", vectors * VECTOR.nbytes)
        front.checked(front.launches.host_up(island, up))
    program = planned(looping(times=40))
    front.checked(front.launches.register(1, 1, program))
    for segment in program.segments:
        for host in segment.hosts:
            front.ready(segment, host)
    front.put(12, slice=2)
    return front


def test_a_loop_goes_on_once_its_own_session_drops_arrays() -> None:
    """1. A loop waits for memory of its own session and another one. 2. Some of its own is dropped."""
    front = rounds_in(6)
    for buffer, session in ((13, 1), (14, 1), (1, 2), (2, 2), (3, 2)):
        front.put(buffer, slice=2, session=session)
    assert front.launch(1, (12,), 20) == []
    assert sent(front.free(13, 14))


def test_a_launch_passes_no_loop_that_it_would_leave_no_room() -> None:
    """1. A loop is between its parts. 2. A launch whose results fit now, and no more beside a part of the loop, waits
    until it is over."""
    front = rounds_in(6)
    sketch = sketch_with_slices("several")
    front.register(sketch.planned(*(sketch.call(f"f{k}", slice=2) for k in range(4)), key=50), 2)
    commands, begun = front.launch(1, (12,), 20), []
    assert sent(front.launch(2, (), 30, program=2)) == []
    while sends := sent(commands):
        begun += [send.message.results for send in sends]
        commands = [c for send in sends for c in front.done(send.island, send.message.sequence)]
        assert not to_client(commands, kind=LaunchFailed)
    assert begun.pop() == 30
