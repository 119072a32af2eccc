"""What a host does with the scheduler's messages, with values that are texts and devices that are never busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pathways_ray.errors import Failure
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.run.prepared import PreparedProgram
from pathways_ray.executor.run.progress import HostProgress
from pathways_ray.ir.plan import Edge, IslandPlan
from pathways_ray.transport.messages import (
    BarrierReleased,
    Drop,
    DropSession,
    Enqueued,
    IslandLaunch,
    IslandLaunchFailed,
    Message,
    Peer,
    Program,
    Ready,
)
from tests.unit.helpers import Sketch

BOOM = Failure("ExecutionError", "boom", "f", "user.py:1", 7)


class Pull:
    """A value that a peer will send."""

    def __init__(self) -> None:
        self.value: Any = None


class Edges:
    """Both sides of an edge: what is sent is noted, what is received was put into a `Pull` by the test."""

    def __init__(self, world: Host, number: int, edge: Edge) -> None:
        self.world, self.number, self.host, self.edge = world, number, world.host, edge

    def send(self, value: Any, launch: int, transfer: Any) -> Any:
        self.world.sent.append((launch, self.number, value))
        return value if isinstance(value, Failure) else []

    def post(self, launch: int, transfer: Any) -> dict[int, Any]:
        self.world.pulls[launch] = Pull()
        return {99: [self.world.pulls[launch]]}

    def assemble(self, pulled: dict[int, Any], local: Any) -> Any:
        return pulled[99][0].value


class Host:
    """A host under test: `HostProgress` with everything around it noted."""

    def __init__(self, together: bool = False, host: int = 0) -> None:
        self.host = host
        self.store = BufferStore()
        self.together = together
        self.progress = HostProgress(host, self.store, self, (0, 1) if together else (host,))
        self.enqueued: list[str] = []
        self.sent: list[tuple[int, int, Any]] = []
        self.messages: list[Message] = []
        self.watched: list[tuple[int, list[Any]]] = []
        self.pulls: dict[int, Pull] = {}
        self.awaited: dict[tuple[int, int], list[Any]] = {}
        self.lent: set[str] = set()
        self.plan: IslandPlan | None = None

    def measure(self, sequence: int, values: list[Any], program: PreparedProgram) -> None:
        pass

    def program(self, number: int, sketch: Sketch, *results: Any) -> None:
        """Plans what `sketch` says and makes this host's part of it ready."""
        self.plan = sketch.planned(*results).plans[0]
        self.ready(number)

    def ready(self, number: int) -> None:
        self.progress.handle(Program(number, b"", {}))
        assert self.plan is not None
        self.progress.prepared(number, PreparedProgram(self.plan, self.host, self, self.store, self, self.together))
        self.messages = [message for message in self.messages if not isinstance(message, Ready)]

    def buffers(self, session: int = 1) -> dict[int, Any]:
        return dict(self.store.of_session(session))

    # --- Parts --------------------------------------------------------------------------------------------------------

    temporary_bytes = 0

    def executable(self, number: int) -> Callable[..., Any] | None:
        assert self.plan is not None
        executable = self.plan.executables[number]
        if self.host not in self.plan.placed(executable.slice).hosts:
            return None
        name = ".".join(part.name for part in executable.recipe.parts)

        def run(*inputs: Any) -> list[Any]:
            if any(isinstance(value, Failure) for value in inputs):
                raise TypeError("a failure is no array")
            text = f"{name}({','.join(inputs)})"
            self.enqueued.append(text)
            return [text] * len(executable.outputs)

        return run

    def reshard(self, edge: int) -> Callable[..., Any]:
        return lambda value: f"reshard({value})"

    def outgoing(self, edge: int) -> Edges:
        assert self.plan is not None
        return Edges(self, edge, self.plan.edges[edge])

    incoming = outgoing

    def own(self, array: Any) -> Any:
        return self.copy(array) if array in self.lent else array

    def copy(self, array: Any) -> Any:
        return f"copy({array})"

    # --- Shell --------------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def watch(self, sequence: int, values: list[Any], program: PreparedProgram) -> None:
        self.watched.append((sequence, values))

    def has_arrived(self, values: list[Any]) -> bool:
        return all(value.value is not None for value in values)

    def failure_of(self, values: list[Any]) -> Failure | None:
        return next((value.value for value in values if isinstance(value.value, Failure)), None)

    def wait_for_arrival(self, sequence: int, gate: int, values: list[Any], alone: bool) -> None:
        self.awaited[sequence, gate] = values

    def prepare(self, message: Program) -> None:
        pass

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        pass


def run(
    sequence: int, *arguments: int, results: int = 0, program: int = 1, first: int = 0, gangs: int = 0
) -> IslandLaunch:
    return IslandLaunch(sequence, 1, program, arguments, results or 100 * sequence, first, gangs)


def host_with_call(**options: Any) -> Host:
    """Program 1 is one call `f` on this host; buffer 1 is there."""
    host, sketch = Host(**options), Sketch()
    here = sketch.slice("0.0", "0.1")
    x = sketch.argument(here)
    host.program(1, sketch, sketch.call("f", x, slice=here))
    host.store.put(1, 1, "x")
    return host


def host_with_gate(together: bool = False) -> Host:
    """Program 1 is a call `f` as in `host_with_call`, program 2 a call `g` of a value from another island."""
    host = host_with_call(together=together)
    sketch = Sketch()
    there, here = sketch.slice("5.0", island=-1), sketch.slice("0.0", "0.1")
    far = sketch.call("far", sketch.argument(there), slice=there)
    result = sketch.call("g", far, slice=here)
    plans = sketch.planned(result).plans
    host.plan = plans[0]
    host.ready(2)
    return host


# --- launches ---------------------------------------------------------------------------------------------------------


def test_a_launch_takes_its_arguments_and_stores_its_results_at_once() -> None:
    host = host_with_call()
    host.progress.handle(run(5, 1))
    assert host.enqueued == ["f(x)"]
    assert host.buffers() == {1: "x", 500: "f(x)"}
    assert host.watched == [(5, ["f(x)"])]
    assert host.progress.active == {}
    assert host.progress.promised == {}


def test_a_buffer_that_is_gone_makes_a_failure_and_not_a_hang() -> None:
    host = host_with_call()
    host.progress.handle(run(5, 7))
    assert host.enqueued == []
    (value,) = host.watched[0][1]
    assert isinstance(value, Failure)
    assert value.kind == "BufferLost"
    assert host.buffers()[500] == value


def test_a_launch_of_a_program_that_a_restarted_host_does_not_have_fails() -> None:
    host = host_with_call()
    host.progress.handle(run(5, 1, program=9))
    (message,) = host.messages
    assert isinstance(message, IslandLaunchFailed)
    assert (message.sequence, message.failure.kind) == (5, "HostLost")


def test_what_a_peer_may_still_read_is_copied_before_it_is_donated() -> None:
    host, sketch = Host(), Sketch()
    here = sketch.slice("0.0")
    first = sketch.call("f", sketch.argument(here), slice=here)
    host.program(1, sketch, sketch.call("g", first, slice=here, donated=(0,)))
    host.store.put(1, 1, "x")
    host.lent.add("f(x)")
    host.progress.handle(run(1, 1))
    assert host.enqueued == ["f(x)", "g(copy(f(x)))"]


def test_a_host_without_a_part_in_a_slice_does_nothing_for_it_but_reports() -> None:
    """Two hosts, one slice on each: host 1 runs `g` only, and still completes launches of `f`."""
    host, sketch = Host(together=True, host=1), Sketch()
    here = sketch.slice("0.0")
    host.program(1, sketch, sketch.call("f", sketch.argument(here), slice=here))
    host.progress.handle(run(1, 1))
    assert host.enqueued == []
    assert host.watched == [(1, [])]
    assert host.buffers() == {}


def test_a_program_that_was_dropped_while_it_was_compiled_does_not_stay() -> None:
    host = host_with_call()
    program = host.progress.programs[1]
    host.progress.handle(Program(2, b"", {}))
    host.progress.wanted.discard(2)  # as DropProgram does
    host.progress.prepared(2, program)
    assert set(host.progress.programs) == {1}


def test_a_program_that_is_there_already_is_reported_ready() -> None:
    host = host_with_call()
    host.progress.handle(Program(1, b"", {}))
    assert host.messages == [Ready(0, 1, 0)]


def test_a_host_without_a_part_in_a_program_does_not_count_as_one_that_is_ready() -> None:
    """The controller counts hosts that are ready; one more would let a launch out before the others are."""
    host, sketch = Host(together=True, host=1), Sketch()
    here = sketch.slice("0.0")
    host.plan = sketch.planned(sketch.call("f", sketch.argument(here), slice=here)).plans[0]
    host.progress.handle(Program(1, b"", {}))
    host.progress.prepared(1, PreparedProgram(host.plan, 1, host, host.store, host))
    assert host.messages == []
    host.progress.handle(run(1, 1))
    assert host.watched == [(1, [])]


# --- gates ------------------------------------------------------------------------------------------------------------


def test_a_launch_waits_at_its_gate_and_others_pass_it() -> None:
    """1. Launch 1 needs a value of another island that is not there. 2. Launch 2 goes on. 3. The value comes."""
    host = host_with_gate()
    host.progress.handle(run(1, program=2))
    assert list(host.awaited) == [(1, 2)]
    host.progress.handle(run(2, 1))
    assert host.enqueued == ["f(x)"]
    host.pulls[1].value = "y"
    host.progress.opened(1, 2, None)
    assert host.enqueued == ["f(x)", "g(y)"]
    assert host.watched[-1] == (1, ["g(y)"])


def test_a_value_that_is_there_already_does_not_stop_the_only_host_of_an_island() -> None:
    host = host_with_gate()
    program = host.progress.programs[2]
    post = program.incoming[0].post

    def arrived(launch: int, transfer: Any) -> dict[int, Any]:
        pulled = post(launch, transfer)
        host.pulls[launch].value = "y"
        return pulled

    program.incoming[0].post = arrived  # type: ignore[method-assign]
    host.progress.handle(run(1, program=2))
    assert host.enqueued == ["g(y)"]
    assert host.awaited == {}


def host_of_a_pair(host: int = 0) -> Host:
    """Island 0 has hosts 0 and 1. Program 1 is a call `g` on both of a value from another island, program 2 a call `f`
    on both of what `h` on host 0 makes of such a value, program 3 is `h` by itself."""
    made = Host(together=True, host=host)
    for number in (1, 2, 3):
        sketch = Sketch()
        there, one, both = sketch.slice("5.0", island=-1), sketch.slice("0.0"), sketch.slice("0.0", "1.0")
        far = sketch.call("far", sketch.argument(there), slice=there)
        if number == 1:
            result = sketch.call("g", far, slice=both)
        else:
            result = sketch.call("h", far, slice=one)
            if number == 2:
                result = sketch.call("f", sketch.argument(both), slice=both), result
        made.plan = sketch.planned(*result if isinstance(result, tuple) else (result,)).plans[0]
        made.ready(number)
    made.store.put(1, 1, "x")
    return made


def test_before_a_gang_of_several_hosts_they_meet() -> None:
    """All enter a collective or none: one host's inputs say nothing of the others'."""
    for number in (0, 1):
        host = host_of_a_pair(number)
        host.progress.handle(run(1, 7))
        host.pulls[1].value = "y"
        host.progress.handle(run(2, 7))
        assert host.enqueued == []
        assert sorted(host.awaited) == [(1, 2), (2, 2)]
        host.progress.handle(BarrierReleased(1, 2))
        assert host.enqueued == ["g(y)"]


def test_a_host_takes_the_failure_of_another_one_although_its_own_inputs_are_there() -> None:
    host = host_of_a_pair()
    host.progress.handle(run(1, 7))
    host.pulls[1].value = "y"
    host.progress.handle(BarrierReleased(1, 2, BOOM))
    assert host.enqueued == []
    assert host.watched == [(1, [BOOM])]


def test_a_host_opens_the_gate_of_what_is_its_own_and_meets_the_others_before_what_is_not() -> None:
    here, other = host_of_a_pair(0), host_of_a_pair(1)
    for host in (here, other):
        host.progress.handle(run(1, 7, 1, program=2))
    assert sorted(here.awaited) == [(1, 2)]  # the gate; nobody but host 0 stands there
    assert sorted(other.awaited) == [(1, 5)]  # the meeting
    here.pulls[1].value = "y"
    here.progress.opened(1, 2, None)
    assert here.enqueued == ["h(y)"]
    assert sorted(here.awaited) == [(1, 2), (1, 5)]
    for host in (here, other):
        host.progress.handle(BarrierReleased(1, 5))
        assert host.enqueued[-1] == "f(x)"
        assert host.progress.active == {}


def test_a_launch_ends_on_all_hosts_at_once_although_only_one_of_them_had_a_gate() -> None:
    """What takes its results goes on at the end, and must do so between the same two launches everywhere."""
    for number in (0, 1):
        host = host_of_a_pair(number)
        host.progress.handle(run(1, 7, program=3))
        if number == 0:
            host.pulls[1].value = "y"
            host.progress.opened(1, 2, None)
            assert host.enqueued == ["h(y)"]
        assert (1, 4) in host.awaited
        assert host.watched == []
        host.progress.handle(BarrierReleased(1, 4))
        assert len(host.watched) == 1
        assert host.buffers() == ({1: "x", 100: "h(y)"} if number == 0 else {1: "x"})


def test_what_is_apart_goes_on_before_the_launch_before_it_has_ended_on_all_hosts() -> None:
    """Program 4 is program 3 with an argument of host 0; host 1 has no part in either. What is of both hosts waits."""
    host = host_of_a_pair()
    sketch = Sketch()
    there, one = sketch.slice("5.0", island=-1), sketch.slice("0.0")
    far = sketch.call("far", sketch.argument(there), slice=there)
    host.plan = sketch.planned(sketch.call("k", far, sketch.argument(one), slice=one)).plans[0]
    host.ready(4)
    sketch = Sketch()
    one, both = sketch.slice("0.0"), sketch.slice("0.0", "1.0")
    argument = sketch.argument(one)
    host.program(5, sketch, sketch.call("f", sketch.argument(both), slice=both), sketch.call("l", argument, slice=one))
    host.progress.handle_batch([run(1, 7, program=3), run(2, 7, 100, program=4), run(3, 100, 1, program=5)])
    host.pulls[1].value, host.pulls[2].value = "y", "z"
    host.progress.opened(1, 2, None)
    assert host.enqueued == ["h(y)", "k(z,h(y))"]
    host.progress.handle_batch([run(4, 7, 100, program=4)])
    host.pulls[4].value = "w"
    host.progress.opened(4, 2, None)
    assert host.enqueued == ["h(y)", "k(z,h(y))", "k(w,h(y))"]
    assert host.watched == []
    host.progress.handle_batch([BarrierReleased(2, 4)])
    assert [sequence for sequence, _ in host.watched] == [2]
    host.progress.handle_batch([BarrierReleased(1, 4)])
    assert host.enqueued[3:] == ["f(x)", "l(h(y))"]


def test_a_gate_of_a_launch_that_is_over_opens_nothing() -> None:
    host = host_with_gate()
    host.progress.handle(BarrierReleased(77, 0))
    assert host.enqueued == []
    assert host.messages == []


# --- results that are still to come -----------------------------------------------------------------------------------


def test_a_launch_can_name_a_result_that_is_still_to_come() -> None:
    """1. Launch 1 waits at its gate. 2. Launch 2 takes its result, launch 3 that of launch 2. 3. The gate opens."""
    host = host_with_gate()
    host.progress.handle_batch([run(1, program=2), run(2, 100), run(3, 200)])
    assert host.enqueued == []
    host.pulls[1].value = "y"
    host.progress.opened(1, 2, None)
    assert host.enqueued == ["g(y)", "f(g(y))", "f(f(g(y)))"]
    assert host.progress.promised == {}
    assert host.progress.active == {}


def test_a_result_that_is_dropped_before_it_is_there_reaches_its_consumer_and_goes() -> None:
    host = host_with_gate()
    host.progress.handle_batch([run(1, program=2), run(2, 100), Drop(1, (100,))])
    host.pulls[1].value = "y"
    host.progress.opened(1, 2, None)
    assert host.enqueued == ["g(y)", "f(g(y))"]
    assert host.buffers() == {1: "x", 200: "f(g(y))"}


def test_what_a_session_leaves_behind_at_a_gate_is_not_stored() -> None:
    host = host_with_gate()
    host.progress.handle_batch([run(1, program=2), DropSession(1)])
    host.pulls[1].value = "y"
    host.progress.opened(1, 2, None)
    assert host.watched == [(1, ["g(y)"])]
    assert host.store.count() == 0


# --- several hosts stop and go on at the same messages ----------------------------------------------------------------


def host_of_two(host: int) -> Host:
    """Island 0 has hosts 0 and 1. Program 1 takes a value of another island to host 0; program 2 takes that result
    and runs on both; program 3 runs on both and takes buffer 1."""
    made = Host(together=True, host=host)
    sketch = Sketch()
    there, one = sketch.slice("5.0", island=-1), sketch.slice("0.0")
    result = sketch.call("g", sketch.call("far", sketch.argument(there), slice=there), slice=one)
    made.plan = sketch.planned(result).plans[0]
    made.ready(1)
    second = Sketch()
    one, both = second.slice("0.0"), second.slice("0.0", "1.0")
    argument = second.argument(one)
    other = second.argument(both)
    made.program(2, second, second.call("h", other, slice=both), second.call("k", argument, slice=one))
    third = Sketch()
    both = third.slice("0.0", "1.0")
    made.program(3, third, third.call("f", third.argument(both), slice=both))
    made.store.put(1, 1, "x")
    return made


def test_hosts_wait_for_the_same_launches_also_for_results_that_are_not_theirs() -> None:
    """1. Launch 1 stands at its gate. 2. Launch 2 takes its result, which only host 0 will hold. 3. Launch 3 goes on.
    Both hosts must enqueue launch 3 before launch 2, or their collectives would meet the wrong ones."""
    for number in (0, 1):
        host = host_of_two(number)
        host.progress.handle_batch([run(1), run(2, 100, 1, program=2), run(3, 1, program=3)])
        assert host.enqueued == ["f(x)"]
        for pull in host.pulls.values():
            pull.value = "y"
        if number == 0:
            host.progress.opened(1, 2, None)
        assert [text for text in host.enqueued if text[0] in "fh"] == ["f(x)"]
        host.progress.handle(BarrierReleased(1, 4))
        assert [text for text in host.enqueued if text[0] in "fh"] == ["f(x)", "h(x)"]
        assert host.progress.promised == {}


# --- sequential dispatch ----------------------------------------------------------------------------------------------


def host_with_two_gangs() -> Host:
    host, sketch = Host(), Sketch()
    here = sketch.slice("0.0")
    first = sketch.call("f", sketch.argument(here), slice=here)
    host.program(1, sketch, sketch.call("g", first, slice=here))
    host.store.put(1, 1, "x")
    return host


def test_gangs_that_are_sent_one_by_one_run_one_by_one() -> None:
    host = host_with_two_gangs()
    host.progress.handle(run(1, 1, gangs=1))
    assert host.enqueued == ["f(x)"]
    assert host.messages == [Enqueued(1, 0)]
    host.progress.handle(run(1, 1, first=1, gangs=1))
    assert host.enqueued == ["f(x)", "g(f(x))"]
    assert host.messages == [Enqueued(1, 0), Enqueued(1, 1)]
    assert host.watched == [(1, ["g(f(x))"])]


def test_a_later_gang_of_a_launch_that_is_over_does_nothing() -> None:
    host = host_with_two_gangs()
    host.progress.handle(run(1, 1, first=1, gangs=1))
    assert host.enqueued == []
    assert host.messages == []


# --- memory that is overwritten ---------------------------------------------------------------------------------------


def test_an_argument_that_an_earlier_launch_still_needs_is_copied_before_it_is_overwritten() -> None:
    """1. Launch 1 takes buffer 1 and stands at its gate. 2. Launch 2, to which buffer 1 is donated, passes it."""
    host, sketch = Host(), Sketch()
    there, here = sketch.slice("5.0", island=-1), sketch.slice("0.0", "0.1")
    far = sketch.call("far", sketch.argument(there), slice=there)
    host.plan = sketch.planned(sketch.call("g", sketch.argument(here), far, slice=here)).plans[0]
    host.ready(1)
    second = Sketch()
    here = second.slice("0.0", "0.1")
    host.program(2, second, second.call("f", second.argument(here), slice=here, donated=(0,)))
    host.store.put(1, 1, "x")
    host.progress.handle_batch([run(1, 7, 1), run(2, 1, program=2), run(3, 200, program=2)])
    assert host.enqueued == ["f(copy(x))", "f(f(copy(x)))"]
    host.pulls[1].value = "y"
    host.progress.opened(1, 2, None)
    assert host.enqueued[-1] == "g(x,y)"


def test_hosts_agree_when_a_launch_that_is_sent_by_gangs_is_over() -> None:
    """Host 1 has nothing to do in the last gang of launch 1. It promises the results until that was sent, as host 0
    does, so that both stop at launch 2, which takes one."""
    for number in (0, 1):
        host, sketch = Host(together=True, host=number), Sketch()
        one, both = sketch.slice("0.0"), sketch.slice("0.0", "1.0")
        first = sketch.call("f", sketch.argument(both), slice=both)
        host.program(1, sketch, first, sketch.call("g", sketch.argument(one), slice=one))
        second = Sketch()
        both = second.slice("0.0", "1.0")
        host.program(2, second, second.call("h", second.argument(both), slice=both))
        host.store.put(1, 1, "x")
        host.store.put(1, 2, "z")
        host.progress.handle_batch([run(1, 1, 2, gangs=1), run(2, 100, program=2)])
        assert host.enqueued == ["f(x)"]
        host.progress.handle(run(1, 1, 2, first=1, gangs=1))
        assert host.enqueued[-1] == "h(f(x))"
