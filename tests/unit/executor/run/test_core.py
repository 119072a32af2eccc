"""The decisions of a host, with values that are texts and devices that are never busy.

Most tests drive the core as a host does, and look at what its devices and its scheduler see; those at the end look at
events and instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.errors import CompileError, Failure
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.run.active_launch import (
    AT_BARRIER,
    DONE,
    ENQUEUED,
    WAITING_FOR_GANG,
    WAITING_FOR_INPUTS,
    ActiveLaunch,
)
from pathways_ray.executor.run.checks_ahead import MAX_AHEAD
from pathways_ray.executor.run.core import HostCore
from pathways_ray.executor.run.driver import HostDriver
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.executor.run.instructions import (
    AwaitInputs,
    Called,
    Complete,
    Enqueue,
    Event,
    Forward,
    Handed,
    InputsArrived,
    Joined,
    Run,
    SchedulerFound,
    Send,
    Start,
)
from pathways_ray.executor.run.parts import Keeps
from pathways_ray.executor.run.prepared import PreparedProgram
from pathways_ray.executor.run.stops import stopped
from pathways_ray.executor.run.watchers import UnderWay
from pathways_ray.ir.graph import Part
from pathways_ray.ir.plan import IslandPlan, NodeLabel, Regroup
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.observe.computations import REPORTS, Computation, Report
from pathways_ray.observe.views import MAX_STOPPED, Stopped
from pathways_ray.transport.messages import (
    Abort,
    BarrierReached,
    BarrierReleased,
    Compiling,
    Dismissed,
    Drop,
    DropProgram,
    DropSession,
    Enqueued,
    Examine,
    Examined,
    FromLeader,
    FunctionsAhead,
    Heartbeat,
    Holds,
    IslandLaunch,
    IslandLaunchFailed,
    Message,
    Peer,
    Peers,
    Program,
    Ready,
    Recount,
)
from tests.unit.helpers import Sketch

BOOM = Failure("ExecutionError", "boom", "f", "user.py:1", 7)


class Pull:
    """A value that a peer will send."""

    def __init__(self) -> None:
        self.value: Any = None


class AskedCall:
    """A call of a host function that is under way. `value` is "done" once it is over, or a failure."""

    def __init__(self, text: str, outputs: int) -> None:
        self.text, self.outputs = text, outputs
        self.value: Any = None

    @property
    def failure(self) -> Failure | None:
        return self.value if isinstance(self.value, Failure) else None

    def is_ready(self) -> bool:
        return self.value is not None

    def block_until_ready(self) -> None:
        assert self.value is not None

    def values(self) -> list[Any]:
        return [self.text] * self.outputs

    def abandon(self, failure: Failure) -> None:
        self.value = self.value or failure


class Edges:
    """Both sides of a bundle of one edge: what is sent is noted, what is received was put into a `Pull` by the test."""

    def __init__(self, world: Host, number: int) -> None:
        self.world, self.number, self.host = world, number, world.host

    def send(self, values: Any, launch: int, transfer: Any) -> Any:
        (value,) = [values] if isinstance(values, Failure) else values
        self.world.sent.append((launch, self.number, value))
        return value if isinstance(value, Failure) else []

    def take_back(self, launch: int, failure: Failure, transfer: Any) -> None:
        self.world.taken_back.append((launch, self.number))

    def post(self, launch: int, transfer: Any) -> dict[int, Any]:
        self.world.pulls[launch] = Pull()
        return {99: [self.world.pulls[launch]]}

    def assemble(self, pulled: dict[int, Any], local: Any) -> Any:
        value = pulled[99][0].value
        return value if isinstance(value, Failure) else [value]


class Host:
    """A host under test: the core and its driver with everything around them noted."""

    def __init__(self, multi_host: bool = False, host: int = 0) -> None:
        self.host = host
        self.store = BufferStore()
        self.multi_host = multi_host
        self.core = HostCore(host, (0, 1) if multi_host else (host,))
        self.driver = HostDriver(self.core, self.store, self, self, self.planned)
        self.enqueued: list[str] = []
        self.sent: list[tuple[int, int, Any]] = []
        self.taken_back: list[tuple[int, int]] = []
        self.abandoned: list[int] = []
        self.messages: list[Message] = []
        self.watched: list[tuple[int, list[Any]]] = []
        self.measured: list[tuple[int, list[Any]]] = []
        self.pulls: dict[int, Pull] = {}
        self.awaited: dict[tuple[int, int], list[Any]] = {}
        self.lent: set[str] = set()
        self.plan: IslandPlan | None = None
        self.compiling: list[Callable[[], Event]] = []
        self.functions: list[Mapping[str, bytes]] = []
        self.asked: list[AskedCall] = []
        self.ended: list[int] = []
        self.holds: Holds | None = None
        self.ends = ""
        self.confirmed: list[tuple[int, ...]] = []
        self.served: list[tuple[int, int, list[Any]]] = []
        self.left: list[int] = []
        self.refused: list[int] = []
        self.allowed: list[str] = []
        self.log: list[FromLeader] = []
        self.busy = self.computations = 0
        self.refuses = False

    def planned(self, data: bytes) -> IslandPlan:
        """The plan of the program that is sent next."""
        assert self.plan is not None
        return self.plan

    def handle(self, *events: Event) -> None:
        self.driver.handle_batch(events, now=0.0)

    def arrived(self, sequence: int, barrier: int) -> None:
        """Everything that a launch waited for at a barrier has arrived."""
        self.handle(InputsArrived(sequence, barrier, None))

    def program(self, number: int, sketch: Sketch, *results: Any, kept_bytes: int = 0) -> None:
        """Plans what `sketch` says and makes this host's part of it ready."""
        self.plan = sketch.planned(*results, kept_bytes=kept_bytes).plans[0]
        self.ready(number)

    def ready(self, number: int) -> None:
        self.handle(Program(number, b"", {}))
        self.compiled()
        self.messages = [message for message in self.messages if not isinstance(message, Ready | Compiling)]

    def compiled(self) -> None:
        """Everything that is being compiled is ready."""
        while self.compiling:
            self.handle(self.compiling.pop(0)())

    def buffers(self, session: int = 1) -> dict[int, Any]:
        return dict(self.store.of_session(session))

    # --- Parts --------------------------------------------------------------------------------------------------------

    temporary_bytes = 0
    queues = True
    keeps = Keeps.BRIEFLY

    def agreed(self, number: int) -> None:
        return None

    def executable(self, number: int) -> Callable[..., Any] | None:
        assert self.plan is not None
        executable = self.plan.executables[number]
        if self.host not in self.plan.placed(executable.slice).hosts:
            return None
        name = ".".join(part.name for part in executable.recipe.parts if isinstance(part, Part))

        def run(*inputs: Any) -> list[Any]:
            if any(isinstance(value, Failure) for value in inputs):
                raise TypeError("a failure is no array")
            text = f"{name}({','.join(inputs)})"
            self.enqueued.append(text)
            return [text] * (len(executable.outputs) + 1)  # and the end

        return run

    def analyses(self, runs: Mapping[int, int], text: bool) -> tuple[Computation, ...]:
        return tuple(Computation(k, str(k), times, text=str(text)) for k, times in sorted(runs.items()))

    def host_function(self, number: int) -> Callable[..., Any]:
        """The test says when a call is over; what it gives is a text."""
        assert self.plan is not None
        executable = self.plan.executables[number]

        def call(session: int, label: NodeLabel, inputs: list[Any]) -> AskedCall:
            made = AskedCall(f"{label.name}({','.join(inputs)})", len(executable.outputs))
            self.asked.append(made)
            return made

        return call

    def argument(self, kind: ArrayType, layout: Layout) -> Callable[[bytes], str]:
        return lambda data: data.rstrip(b".").decode()

    def reshard(self, edge: int) -> Callable[..., Any]:
        return lambda value: [f"reshard({value})"]

    def regroup(self, step: Regroup) -> Callable[..., Any]:
        return lambda *values: f"regroup({', '.join(map(str, values))})"

    def copies(self, bundles: Sequence[int]) -> None:
        """No edge is a copy on one host."""

    def outgoing(self, bundle: int) -> Edges:
        return Edges(self, bundle)

    incoming = outgoing

    def own(self, array: Any) -> Any:
        return self.copy(array) if array in self.lent else array

    def copy(self, array: Any) -> Any:
        return f"copy({array})"

    def is_consumed(self, array: Any) -> bool:
        return False

    # --- HostIO -------------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def watch(
        self,
        sequence: int,
        values: list[Any],
        program: PreparedProgram,
        consumed: tuple[int, ...],
        asked: bool,
        later: Sequence[Callable[[], None]],
    ) -> None:
        self.watched.append((sequence, values))

    def measure(self, sequence: int, values: list[Any], program: PreparedProgram) -> None:
        self.measured.append((sequence, values))

    def await_inputs(self, sequence: int, barrier: int, values: list[Any]) -> InputsArrived | None:
        found = [value if isinstance(value, Failure) else value.value for value in values]
        if values and all(value is not None for value in found):
            return InputsArrived(sequence, barrier, next((v for v in found if isinstance(v, Failure)), None))
        self.awaited[sequence, barrier] = values
        return None

    def end_calls(self, session: int) -> None:
        self.ended.append(session)

    def abandon(self, sequence: int) -> None:
        self.abandoned.append(sequence)

    def compile(self, plan: HostPlan, functions: Mapping[str, bytes], trusted: bool) -> PreparedProgram:
        self.functions.append(functions)
        if self.refuses:
            raise CompileError("it cannot be compiled")
        return PreparedProgram(plan, self, self.store, self)

    def in_background(self, tenant: str, work: Callable[[], Event]) -> None:
        """The test says when it is done."""
        self.compiling.append(work)

    def rejoin(self, holds: Holds) -> None:
        self.holds = holds

    def end_process(self, reason: str) -> None:
        self.ends = reason

    def kind_of(self, value: Any) -> Any:
        return value == "long" if isinstance(value, str) else None

    def under_way(self) -> UnderWay:
        return UnderWay(self.busy, self.computations)

    def confirm(self, number: int, sequence: int, others: Sequence[int]) -> None:
        self.confirmed.append((number, sequence, *others))

    def serve(
        self, called: Called, number: int, program: PreparedProgram, completing: list[Any], values: list[Any]
    ) -> None:
        self.served.append((called.number, number, values))

    def leave_call(self, called: Called) -> None:
        self.left.append(called.number)

    def refuse_early(self, handed: Handed) -> None:
        self.refused.append(handed.message.results)

    def say_allowed(self, tenant: str) -> None:
        self.allowed.append(tenant)

    def tell(self, entry: FromLeader) -> None:
        self.log.append(entry)

    def say_leads(self) -> None:
        self.messages.append(Heartbeat(self.host, leads=self.core.leads))

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        """Pulls of tests need no peers."""


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


def host_with_barrier(multi_host: bool = False) -> Host:
    """Program 1 is a call `f` as in `host_with_call`, program 2 a call `g` of a value from another island."""
    host = host_with_call(multi_host=multi_host)
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
    host.handle(run(5, 1))
    assert host.enqueued == ["f(x)"]
    assert host.buffers() == {1: "x", 500: "f(x)"}
    assert host.watched == [(5, ["f(x)"])]
    assert host.core.active == {}
    assert host.core.producers.sessions == {}


def test_a_buffer_that_is_gone_makes_a_failure_and_not_a_hang() -> None:
    host = host_with_call()
    host.handle(run(5, 7))
    assert host.enqueued == []
    (value,) = host.watched[0][1]
    assert isinstance(value, Failure)
    assert value.kind == "BufferLost"
    assert host.buffers()[500] == value


def test_a_launch_of_a_program_that_a_restarted_host_does_not_have_fails() -> None:
    host = host_with_call()
    host.handle(run(5, 1, program=9))
    (message,) = host.messages
    assert isinstance(message, IslandLaunchFailed)
    assert (message.sequence, message.failure.kind) == (5, "HostLost")


def test_what_a_program_was_compiled_to_is_told_who_asks() -> None:
    """1. Asked for, a program's computations are told in the background. 2. One that is not there is told as such. 3.
    One that is dropped meanwhile is told still."""
    host = host_with_call()
    host.handle(Examine(5, 1, "alice", True))
    assert host.messages == []
    host.compiled()
    (said,) = host.messages
    assert isinstance(said, Examined)
    expected = Report(1, 0, (Computation(0, "0", 1, text="True"),))
    assert (said.look, said.host, REPORTS.decode(b"[" + said.report + b"]")) == (5, 0, (expected,))
    host.handle(Examine(6, 2))
    assert host.messages[1] == Examined(6, 0, 2, b"")
    host.handle(Examine(7, 1), DropProgram(1, 1))
    host.compiled()
    assert host.messages[2] == Examined(7, 0, 1, said.report.replace(b"True", b"False"))


def test_functions_that_come_ahead_of_their_program_are_checked_in_the_background() -> None:
    host = host_with_call()
    checked: list[tuple[Mapping[str, bytes], bool]] = []
    host.driver.check_ahead = lambda functions, trusted: checked.append((functions, trusted))
    host.handle(FunctionsAhead("alice", True, {"f": b"code"}))
    assert checked == []
    host.compiled()
    assert checked == [({"f": b"code"}, True)]
    assert host.messages == [], "nobody waits for it: the program is refused where a function is"


def test_the_last_functions_of_each_tenant_that_came_ahead_wait_to_be_checked() -> None:
    """Thousands of one tenant are no more than a few of them, whatever another one sends; later there is room again."""
    host = host_with_call()
    checked: list[str] = []
    host.driver.check_ahead = lambda functions, trusted: checked.extend(functions)
    for _ in range(2):
        host.handle(FunctionsAhead("bob", False, {"bob's": b"code"}))
        host.handle(*(FunctionsAhead("alice", False, {str(k): b"code"}) for k in range(1000)))
        assert len(host.compiling) == 1 + MAX_AHEAD
        host.compiled()
        assert sorted(checked) == sorted(["bob's", *map(str, range(1000 - MAX_AHEAD, 1000))])
        checked.clear()


def test_what_a_peer_may_still_read_is_copied_before_it_is_donated() -> None:
    host, sketch = Host(), Sketch()
    here = sketch.slice("0.0")
    first = sketch.call("f", sketch.argument(here), slice=here)
    host.program(1, sketch, sketch.call("g", first, slice=here, donated=(0,)))
    host.store.put(1, 1, "x")
    host.lent.add("f(x)")
    host.handle(run(1, 1))
    assert host.enqueued == ["f(x)", "g(copy(f(x)))"]


def test_a_host_without_a_part_in_a_slice_does_nothing_for_it_but_reports() -> None:
    """Two hosts, one slice on each: host 1 runs `g` only, and still completes launches of `f`."""
    host, sketch = Host(multi_host=True, host=1), Sketch()
    here = sketch.slice("0.0")
    host.program(1, sketch, sketch.call("f", sketch.argument(here), slice=here))
    host.handle(run(1, 1))
    assert host.enqueued == []
    assert host.watched == [(1, [])]
    assert host.buffers() == {}


def test_a_function_is_kept_while_a_program_names_it() -> None:
    """
    1. It comes with the first program that names it; the second one has it too. One that is dropped before it is
       compiled needs it no more.
    2. When the last one is dropped, it is gone.
    """
    host = Host()
    sketch = Sketch()
    here = sketch.slice("0.0")
    host.plan = sketch.planned(sketch.call("f", sketch.argument(here), slice=here)).plans[0]
    host.handle(Program(1, b"", {"f": b"code"}), Program(2, b"", {}), Program(3, b"", {}), DropProgram(1, 3))
    host.compiled()
    assert host.functions == [{"f": b"code"}] * 2
    host.handle(DropProgram(1, 1))
    assert host.driver.functions == {"f": b"code"}
    host.handle(DropProgram(1, 2))
    assert host.driver.functions == {}
    assert host.driver.named == {}


def test_the_functions_of_a_program_that_could_not_be_compiled_go_with_it() -> None:
    """
    1. It may be sent again, without its functions, and so the host keeps them.
    2. When it is dropped, they are gone.
    """
    host, sketch = Host(), Sketch()
    here = sketch.slice("0.0")
    host.plan = sketch.planned(sketch.call("f", sketch.argument(here), slice=here)).plans[0]
    host.refuses = True
    host.handle(Program(1, b"", {"f": b"code"}))
    host.compiled()
    host.handle(Program(1, b"", {}))
    host.compiled()
    assert host.functions == [{"f": b"code"}] * 2
    host.handle(DropProgram(1, 1))
    assert host.driver.functions == {}
    assert host.driver.named == {}


def test_a_program_that_was_dropped_while_it_was_compiled_does_not_stay() -> None:
    host = host_with_call()
    host.handle(Program(2, b"", {}), DropProgram(1, 2))
    host.compiled()
    assert set(host.core.programs) == {1}
    assert set(host.driver.programs) == {1}


def test_a_program_that_is_there_already_is_reported_ready() -> None:
    host = host_with_call()
    host.handle(Program(1, b"", {}))
    assert host.messages == [Ready(0, 1, 0)]


def test_a_host_without_a_part_in_a_program_does_not_count_as_one_that_is_ready() -> None:
    """The controller counts hosts that are ready; one more would let a launch out before the others are."""
    host, sketch = Host(multi_host=True, host=1), Sketch()
    here = sketch.slice("0.0")
    host.plan = sketch.planned(sketch.call("f", sketch.argument(here), slice=here)).plans[0]
    host.handle(Program(1, b"", {}))
    assert set(host.core.programs) == {1}
    assert host.messages == []
    host.handle(run(1, 1))
    assert host.watched == [(1, [])]


# --- barriers ---------------------------------------------------------------------------------------------------------


def test_a_launch_waits_at_its_barrier_and_others_pass_it() -> None:
    """1. Launch 1 needs a value of another island that is not there. 2. Launch 2 goes on. 3. The value comes."""
    host = host_with_barrier()
    host.handle(run(1, program=2))
    assert list(host.awaited) == [(1, 2)]
    host.handle(run(2, 1))
    assert host.enqueued == ["f(x)"]
    host.pulls[1].value = "y"
    host.arrived(1, 2)
    assert host.enqueued == ["f(x)", "g(y)"]
    assert host.watched[-1] == (1, ["g(y)"])


def test_a_value_that_is_there_already_does_not_stop_the_only_host_of_an_island() -> None:
    host = host_with_barrier()
    program = host.driver.programs[2]
    post = program.incoming[0].post

    def arrived(launch: int, transfer: Any) -> dict[int, Any]:
        pulled = post(launch, transfer)
        host.pulls[launch].value = "y"
        return pulled

    program.incoming[0].post = arrived  # type: ignore[method-assign]
    host.handle(run(1, program=2))
    assert host.enqueued == ["g(y)"]
    assert host.awaited == {}


LOST = Failure("HostLost", "host 5 was lost", host=5)


def test_a_host_lists_what_it_holds_when_it_finds_another_scheduler() -> None:
    """What is in its store, what a launch has yet to store, and programs; a scheduler that dismisses it ends it."""
    host = Host()
    host.store.put(1, 4, "kept")
    host.driver.handle(SchedulerFound(), 0.0)
    assert host.holds == Holds({1: (4,)}, ())
    host.driver.handle(Dismissed(), 0.0)
    assert host.ends == "there is no controller that knows what it holds"


def test_a_host_lists_what_it_holds_for_another_controller() -> None:
    host = Host()
    host.store.put(1, 4, "kept")
    host.driver.handle(Recount(), 0.0)
    assert host.holds == Holds({1: (4,)}, ())
    assert not host.ends


def test_a_host_says_the_highest_number_of_a_launch_that_it_has_seen() -> None:
    host = host_with_call()
    host.handle(run(9, 1), run(7, 1))
    host.driver.handle(Recount(), 0.0)
    assert host.holds is not None
    assert host.holds.sequence == 9


def test_a_host_says_which_launches_have_something_for_others() -> None:
    """Program 1 has a value for host 5, program 2 has not. Nobody says when it is taken, so it is named."""
    sketch = Sketch()
    here, there = sketch.slice("0.0"), sketch.slice("5.0", island=-1)
    made = sketch.call("here", sketch.argument(here), slice=here)
    host = Host()
    host.program(1, sketch, sketch.call("far", made, slice=there))
    host.program(2, sketch, made)
    host.handle(run(3, 1), run(4, 1, program=2))
    host.driver.handle(Recount(), 0.0)
    assert host.holds is not None
    assert host.holds.offered == ((3, 1),)


def test_a_host_says_up_to_which_launch_it_was_not_there() -> None:
    host = host_with_call()
    host.driver.handle(Recount(), 0.0)
    assert host.holds is not None
    assert host.holds.since is None
    host.handle(Peers((Peer(0, 1, "t", since=4), Peer(5, 1, "u", since=9))))
    host.driver.handle(Recount(), 0.0)
    assert host.holds.since == 4


def test_a_launch_that_has_ended_elsewhere_waits_for_nothing() -> None:
    """
    1. Launch 1 waits for a value of host 5.
    2. It is aborted, and ends on the failure. What arrives later is ignored.
    """
    host = host_with_barrier()
    host.handle(run(1, program=2))
    host.handle(Abort(((1, 2),), LOST))
    assert host.abandoned == [1]
    assert host.watched[-1] == (1, [LOST])
    assert host.core.active == {}
    host.pulls[1].value = "y"
    host.arrived(1, 2)
    assert host.watched[-1] == (1, [LOST])


def test_what_waits_as_the_scheduler_dies_ends_once_there_is_another_one() -> None:
    """It may never have come to the other island: nobody else knows of it once the controller has died too."""
    host = host_with_barrier()
    host.handle(run(1, program=2))
    host.driver.handle(SchedulerFound(), 0.0)
    assert host.abandoned == [1]
    assert host.core.active == {}
    ((number, (failure,)),) = host.watched
    assert (number, failure.kind) == (1, "HostLost")


def test_what_an_aborted_launch_offers_is_taken_back() -> None:
    """One that is over here has offered its value already; nobody pulls it any more."""
    sketch = Sketch()
    here, there = sketch.slice("0.0"), sketch.slice("5.0", island=-1)
    host = Host()
    host.program(1, sketch, sketch.call("far", sketch.call("f", sketch.argument(here), slice=here), slice=there))
    host.store.put(1, 1, "x")
    host.handle(run(3, 1))
    assert [(launch, value) for launch, _, value in host.sent] == [(3, "f(x)")]
    host.handle(Abort(((3, 1), (9, 77)), LOST))
    assert host.taken_back == [(3, 0)], "a program that is gone offers nothing that is known"


def test_a_host_that_lost_its_sender_waits_no_longer() -> None:
    """
    1. Launch 4 waits for a value of host 5, which goes on: a list that still has it changes nothing.
    2. It restarts: the new process has nothing for launch 4.
    """
    host = host_with_barrier()
    host.handle(Peers((Peer(5, 1, "t"),)), run(4, program=2))
    host.handle(Peers((Peer(5, 1, "t"), Peer(6, 1, "u", since=9))))
    assert len(host.core.active) == 1
    host.handle(Peers((Peer(5, 2, "t2", since=4),)))
    assert host.core.active == {}
    assert host.watched[-1][1] == [Failure("HostLost", "host 5, which holds the data, was lost", host=5)]


def test_an_aborted_launch_passes_its_rendezvous_with_the_other_hosts() -> None:
    """It says so once, and enqueues nothing before all hosts have come: they enter the gang, or none does."""
    host = host_of_a_pair()
    host.handle(run(1, 7))
    host.handle(Abort(((1, 1),), LOST), Abort(((1, 1),), LOST))
    assert host.messages == [BarrierReached(0, 1, 2, LOST)]
    host.handle(Peers(()))
    host.pulls[1].value = "y"
    host.arrived(1, 2)
    assert len(host.messages) == 1
    assert len(host.core.active) == 1
    host.handle(BarrierReleased(1, 2, LOST))
    assert host.enqueued == []
    assert host.core.active == {}


def test_later_barriers_of_an_aborted_launch_open_at_once() -> None:
    """It stood at a barrier before its second gang when it was aborted: of the third it knows already."""
    sketch = Sketch()
    here, there = sketch.slice("0.0"), sketch.slice("5.0", island=-1)
    value = sketch.argument(there)
    for name in ("a", "b"):
        value = sketch.call(f"{name}-here", sketch.call(f"{name}-far", value, slice=there), slice=here)
    host = Host()
    host.program(1, sketch, value)
    host.handle(run(1))
    host.handle(Abort(((1, 1),), LOST))
    assert host.core.active == {}
    assert host.sent == [], "nobody takes what it would send"
    assert host.watched[-1] == (1, [LOST])


def host_of_a_pair(host: int = 0) -> Host:
    """Island 0 has hosts 0 and 1. Program 1 is a call `g` on both of a value from another island, program 2 a call `f`
    on both of what `h` on host 0 makes of such a value, program 3 is `h` by itself."""
    made = Host(multi_host=True, host=host)
    for number in (1, 2, 3):
        sketch = Sketch()
        there, one, both = sketch.slice("5.0", island=-1), sketch.slice("0.0"), sketch.slice("0.0", "1.0")
        far = sketch.call("far", sketch.argument(there), slice=there)
        if number == 1:
            results = [sketch.call("g", far, slice=both)]
        else:
            results = [sketch.call("h", far, slice=one)]
            if number == 2:
                results.insert(0, sketch.call("f", sketch.argument(both), slice=both))
        made.plan = sketch.planned(*results).plans[0]
        made.ready(number)
    made.store.put(1, 1, "x")
    return made


def test_before_a_gang_of_several_hosts_there_is_a_rendezvous() -> None:
    """All enter a collective or none: one host's inputs say nothing of the others'."""
    for number in (0, 1):
        host = host_of_a_pair(number)
        host.handle(run(1, 7))
        host.pulls[1].value = "y"
        host.handle(run(2, 7))
        assert host.enqueued == []
        assert sorted(host.awaited) == [(1, 2), (2, 2)]
        host.handle(BarrierReleased(1, 2))
        assert host.enqueued == ["g(y)"]


def test_a_host_takes_the_failure_of_another_one_although_its_own_inputs_are_there() -> None:
    host = host_of_a_pair()
    host.handle(run(1, 7))
    host.pulls[1].value = "y"
    host.handle(BarrierReleased(1, 2, BOOM))
    assert host.enqueued == []
    assert host.watched == [(1, [BOOM])]


def test_a_host_passes_its_own_barrier_by_itself_and_has_a_rendezvous_before_a_shared_gang() -> None:
    here, other = host_of_a_pair(0), host_of_a_pair(1)
    for host in (here, other):
        host.handle(run(1, 7, 1, program=2))
    assert sorted(here.awaited) == [(1, 2)]  # the barrier that only host 0 observes
    assert sorted(other.awaited) == [(1, 1)]  # the rendezvous
    here.pulls[1].value = "y"
    here.arrived(1, 2)
    assert here.enqueued == ["h(y)"]
    assert sorted(here.awaited) == [(1, 1), (1, 2)]
    for host in (here, other):
        host.handle(BarrierReleased(1, 1))
        assert host.enqueued[-1] == "f(x)"
        assert host.core.active == {}


def test_a_launch_ends_on_all_hosts_at_once_although_only_one_of_them_had_a_barrier() -> None:
    """Its consumers go on at the end, and must do so between the same two launches everywhere."""
    for number in (0, 1):
        host = host_of_a_pair(number)
        host.handle(run(1, 7, program=3))
        if number == 0:
            host.pulls[1].value = "y"
            host.arrived(1, 2)
            assert host.enqueued == ["h(y)"]
        assert (1, 4) in host.awaited
        assert host.watched == []
        host.handle(BarrierReleased(1, 4))
        assert len(host.watched) == 1
        assert host.buffers() == ({1: "x", 100: "h(y)"} if number == 0 else {1: "x"})


def test_an_independent_launch_goes_on_before_the_launch_before_it_has_ended_on_all_hosts() -> None:
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
    host.handle(run(1, 7, program=3), run(2, 7, 100, program=4), run(3, 100, 1, program=5))
    host.pulls[1].value, host.pulls[2].value = "y", "z"
    host.arrived(1, 2)
    assert host.enqueued == ["h(y)", "k(z,h(y))"]
    host.handle(run(4, 7, 100, program=4))
    host.pulls[4].value = "w"
    host.arrived(4, 2)
    assert host.enqueued == ["h(y)", "k(z,h(y))", "k(w,h(y))"]
    assert host.watched == []
    host.handle(BarrierReleased(2, 4))
    assert [sequence for sequence, _ in host.watched] == [2]
    host.handle(BarrierReleased(1, 4))
    assert host.enqueued[3:] == ["f(x)", "l(h(y))"]


def test_a_barrier_of_a_launch_that_is_over_releases_nothing() -> None:
    host = host_with_barrier()
    host.handle(BarrierReleased(77, 0))
    assert host.enqueued == []
    assert host.messages == []


# --- results that are still to come -----------------------------------------------------------------------------------


def test_a_launch_can_name_a_result_that_is_still_to_come() -> None:
    """1. Launch 1 waits at its barrier. 2. Launch 2 takes its result, launch 3 that of launch 2. 3. It goes on."""
    host = host_with_barrier()
    host.handle(run(1, program=2), run(2, 100), run(3, 200))
    assert host.enqueued == []
    host.pulls[1].value = "y"
    host.arrived(1, 2)
    assert host.enqueued == ["g(y)", "f(g(y))", "f(f(g(y)))"]
    assert host.core.producers.sessions == {}
    assert host.core.active == {}


def test_a_result_that_is_freed_before_it_is_there_reaches_its_consumer_and_goes() -> None:
    host = host_with_barrier()
    host.handle(run(1, program=2), run(2, 100), Drop(1, (100,)))
    host.pulls[1].value = "y"
    host.arrived(1, 2)
    assert host.enqueued == ["g(y)", "f(g(y))"]
    assert host.buffers() == {1: "x", 200: "f(g(y))"}


def test_results_of_a_launch_that_waits_when_its_session_ends_are_not_stored() -> None:
    host = host_with_barrier()
    host.handle(run(1, program=2), DropSession(1))
    host.pulls[1].value = "y"
    host.arrived(1, 2)
    assert host.watched == [(1, ["g(y)"])]
    assert host.store.count() == 0


# --- several hosts stop and go on at the same messages ----------------------------------------------------------------


def host_of_two(host: int) -> Host:
    """Island 0 has hosts 0 and 1. Program 1 takes a value of another island to host 0; program 2 takes that result
    and runs on both; program 3 runs on both and takes buffer 1."""
    made = Host(multi_host=True, host=host)
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
    """1. Launch 1 waits at its barrier. 2. Launch 2 takes its result, which only host 0 will hold. 3. Launch 3 goes on.
    Both hosts must enqueue launch 3 before launch 2, or their collectives would meet the wrong ones."""
    for number in (0, 1):
        host = host_of_two(number)
        host.handle(run(1), run(2, 100, 1, program=2), run(3, 1, program=3))
        assert host.enqueued == ["f(x)"]
        for pull in host.pulls.values():
            pull.value = "y"
        if number == 0:
            host.arrived(1, 2)
        assert [text for text in host.enqueued if text[0] in "fh"] == ["f(x)"]
        host.handle(BarrierReleased(1, 4))
        assert [text for text in host.enqueued if text[0] in "fh"] == ["f(x)", "h(x)"]
        assert host.core.producers.sessions == {}


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
    host.handle(run(1, 1, gangs=1))
    assert host.enqueued == ["f(x)"]
    assert host.messages == [Enqueued(1, 0)]
    host.handle(run(1, 1, first=1, gangs=1))
    assert host.enqueued == ["f(x)", "g(f(x))"]
    assert host.messages == [Enqueued(1, 0), Enqueued(1, 1)]
    assert host.watched == [(1, ["g(f(x))"])]


def test_an_aborted_launch_waits_for_no_further_gangs() -> None:
    """Who would send the second one may be gone."""
    host = host_with_two_gangs()
    host.handle(run(1, 1, gangs=1))
    assert list(host.core.active) == [1]
    host.handle(Abort(((1, 1),), LOST))
    assert host.core.active == {}


def test_a_later_gang_of_a_launch_that_is_over_does_nothing() -> None:
    host = host_with_two_gangs()
    host.handle(run(1, 1, first=1, gangs=1))
    assert host.enqueued == []
    assert host.messages == []


# --- memory that is overwritten ---------------------------------------------------------------------------------------


def test_an_argument_that_an_earlier_launch_still_needs_is_copied_before_it_is_overwritten() -> None:
    """1. Launch 1 takes buffer 1 and waits at its barrier. 2. Launch 2, to which buffer 1 is donated, passes it."""
    host, sketch = Host(), Sketch()
    there, here = sketch.slice("5.0", island=-1), sketch.slice("0.0", "0.1")
    far = sketch.call("far", sketch.argument(there), slice=there)
    host.plan = sketch.planned(sketch.call("g", sketch.argument(here), far, slice=here)).plans[0]
    host.ready(1)
    second = Sketch()
    here = second.slice("0.0", "0.1")
    host.program(2, second, second.call("f", second.argument(here), slice=here, donated=(0,)))
    host.store.put(1, 1, "x")
    host.handle(run(1, 7, 1), run(2, 1, program=2), run(3, 200, program=2))
    assert host.enqueued == ["f(copy(x))", "f(f(copy(x)))"]
    host.pulls[1].value = "y"
    host.arrived(1, 2)
    assert host.enqueued[-1] == "g(x,y)"


def test_an_argument_is_copied_also_for_an_earlier_launch_that_makes_nothing_here() -> None:
    """Launch 1 waits at its barrier; its result goes back to another island. So launch 2 waits for nothing."""
    host, sketch = Host(), Sketch()
    there, here = sketch.slice("5.0", island=-1), sketch.slice("0.0", "0.1")
    far = sketch.call("far", sketch.argument(there), slice=there)
    made = sketch.call("g", sketch.argument(here), far, slice=here)
    host.plan = sketch.planned(sketch.call("back", made, slice=there)).plans[0]
    host.ready(1)
    second = Sketch()
    here = second.slice("0.0", "0.1")
    host.program(2, second, second.call("f", second.argument(here), slice=here, donated=(0,)))
    host.store.put(1, 1, "x")
    host.handle(run(1, 7, 1), run(2, 1, program=2))
    assert host.enqueued == ["f(copy(x))"]


def test_hosts_agree_when_a_launch_that_is_sent_by_gangs_is_over() -> None:
    """Host 1 has nothing to do in the last gang of launch 1. Its results are pending until that was sent, as host 0
    does, so that both stop at launch 2, which takes one."""
    for number in (0, 1):
        host, sketch = Host(multi_host=True, host=number), Sketch()
        one, both = sketch.slice("0.0"), sketch.slice("0.0", "1.0")
        first = sketch.call("f", sketch.argument(both), slice=both)
        host.program(1, sketch, first, sketch.call("g", sketch.argument(one), slice=one))
        second = Sketch()
        both = second.slice("0.0", "1.0")
        host.program(2, second, second.call("h", second.argument(both), slice=both))
        host.store.put(1, 1, "x")
        host.store.put(1, 2, "z")
        host.handle(run(1, 1, 2, gangs=1), run(2, 100, program=2))
        assert host.enqueued == ["f(x)"]
        host.handle(run(1, 1, 2, first=1, gangs=1))
        assert host.enqueued[-1] == "h(f(x))"


# --- events and instructions ------------------------------------------------------------------------------------------


def instructions(host: Host, *events: Event) -> list[list[Any]]:
    """The core's answers to each event, without a driver."""
    return [host.core.handle(event, 0.0) for event in events]


def test_a_launch_that_nothing_stops_is_one_instruction() -> None:
    host = host_with_call()
    launch = run(5, 1)
    assert instructions(host, launch) == [[Run(launch)]]


def test_a_launch_that_waits_for_an_input_is_started_and_goes_on_behind_its_producer() -> None:
    host = host_with_barrier()
    first, second = run(1, program=2), run(2, 100)
    assert instructions(host, first, second) == [[Start(first, ()), AwaitInputs(1, 0, 2)], [Start(second, (0,))]]
    assert host.core.active[1].phase is AT_BARRIER
    assert host.core.active[2].phase is WAITING_FOR_INPUTS
    assert instructions(host, InputsArrived(1, 2, BOOM)) == [
        [
            Enqueue(1, 1, 3, BOOM),
            Forward(1, 2, 100, (0,)),
            Complete(1),
            Enqueue(2, 0, 1, None),
            Complete(2),
        ]
    ]


def test_a_host_reports_a_rendezvous_when_its_inputs_have_arrived_and_waits_for_its_release() -> None:
    host = host_of_a_pair()
    instructions(host, run(1, 7, program=3), InputsArrived(1, 2, None))
    assert host.core.active[1].phase is ENQUEUED
    assert instructions(host, InputsArrived(1, 4, BOOM)) == [[Send(BarrierReached(0, 1, 4, BOOM))]]
    assert host.core.active[1].phase is ENQUEUED
    assert instructions(host, BarrierReleased(1, 4, BOOM)) == [[Complete(1)]]


def test_a_barrier_is_passed_once() -> None:
    host = host_of_a_pair()
    instructions(host, run(1, 7, 1, program=2), InputsArrived(1, 2, None))
    assert instructions(host, InputsArrived(1, 2, None), BarrierReleased(1, 2)) == [[], []]


def test_a_launch_cannot_go_back() -> None:
    host = host_with_call()
    launch = ActiveLaunch(run(1, 1), host.core.programs[1].plan)
    launch.enter(DONE)
    with pytest.raises(AssertionError, match="launch 1 cannot go from DONE to AT_BARRIER"):
        launch.enter(AT_BARRIER)


def test_a_launch_of_a_lost_program_tells_what_happened_to_it_on_the_host() -> None:
    host = host_of_a_pair()
    host.core.handle(Joined(4), 1.0)
    instructions(host, DropProgram(1, 3), DropSession(2))
    (sent,) = host.core.handle(run(2, 7, program=3), 3.5)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, IslandLaunchFailed)
    assert sent.message.failure.kind == "HostLost"
    assert sent.message.failure.story == ("host 0: 2.500 s before: joined host 0: epoch 4",)


class Recorded:
    """A random run of one host of a pair, with a scheduler that releases what both hosts would have reached."""

    def __init__(self) -> None:
        self.host = host_of_a_pair()
        self.events: list[tuple[Event, float]] = []
        self.answers: list[list[Any]] = []
        self.handle = self.host.core.handle
        self.host.core.handle = self.record  # type: ignore[method-assign]
        self.now = 0.0
        self.launches = 0

    def record(self, event: Event, now: float) -> list[Any]:
        answer = self.handle(event, now)
        self.events.append((event, now))
        self.answers.append(answer)
        return answer

    def happens(self, *events: Event) -> None:
        self.now += 0.125
        self.host.driver.handle_batch(events, self.now)

    def launch(self, program: int, argument: int, by_gang: bool) -> None:
        self.launches += 1
        sequence = self.launches
        gangs = len(self.host.core.programs[program].plan.plan.labels) if by_gang else 0
        pending = 100 * (sequence - argument) if argument else 1
        self.happens(run(sequence, 7, pending, program=program, gangs=min(gangs, 1)))

    def arrive(self, choice: int) -> None:
        waiting = [k for k, values in self.host.awaited.items() if values]
        if waiting:
            sequence, barrier = waiting[choice % len(waiting)]
            del self.host.awaited[sequence, barrier]
            self.host.pulls[sequence].value = f"y{sequence}"
            self.happens(InputsArrived(sequence, barrier, BOOM if choice % 7 == 6 else None))

    def release(self, choice: int) -> None:
        """A rendezvous at which this host waits for nothing of its own, or which it has reported."""
        ready = [k for k, values in self.host.awaited.items() if not values]
        ready += [(m.sequence, m.barrier) for m in self.host.messages if isinstance(m, BarrierReached)]
        if ready:
            self.happens(BarrierReleased(*ready[choice % len(ready)]))

    def next_gang(self, choice: int) -> None:
        stopped = [a for a in self.host.core.active.values() if a.phase is WAITING_FOR_GANG]
        if stopped:
            one = stopped[choice % len(stopped)]
            self.happens(msgspec.structs.replace(one.launch, first=one.limit))

    def free(self, choice: int) -> None:
        self.happens(Drop(1, (100 * (1 + choice % max(1, self.launches)),)))


CHOICES = st.integers(0, 20)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just(Recorded.launch), st.sampled_from([1, 2, 3]), st.integers(0, 3), st.booleans()),
        st.tuples(st.sampled_from([Recorded.arrive, Recorded.release, Recorded.next_gang, Recorded.free]), CHOICES),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_a_recorded_run_replays_into_a_fresh_core_with_equal_instructions(actions: list[Any]) -> None:
    recorded = Recorded()
    before = dict(recorded.host.core.programs)
    for action, *arguments in actions:
        action(recorded, *arguments)
    for _ in range(200):  # whatever still waits comes in the end
        for finish in (Recorded.arrive, Recorded.release, Recorded.next_gang):
            finish(recorded, 0)
        for barrier in [key for key, values in recorded.host.awaited.items() if not values]:
            del recorded.host.awaited[barrier]
            recorded.happens(BarrierReleased(*barrier))
        for message in [m for m in recorded.host.messages if isinstance(m, BarrierReached)]:
            recorded.happens(BarrierReleased(message.sequence, message.barrier))
        if not recorded.host.core.active:
            break
    assert not recorded.host.core.active
    assert not recorded.host.core.producers.sessions
    assert sorted(sequence for sequence, _ in recorded.host.watched) == list(range(1, recorded.launches + 1))
    fresh = HostCore(0, (0, 1))
    fresh.wanted, fresh.programs = set(before), before
    assert [fresh.handle(event, now) for event, now in recorded.events] == recorded.answers


# --- where launches stand ---------------------------------------------------------------------------------------------


def test_a_heartbeat_says_what_a_launch_waits_for() -> None:
    """Launch 5 waits for data of host 5, launch 6 for a result of launch 5; launch 7 is through."""
    host = host_with_barrier()
    assert stopped(host.core) == ()
    host.handle(run(5, 1, program=2))
    host.handle(run(6, 500))
    host.handle(run(7, 1))
    assert stopped(host.core) == (
        Stopped(5, "AT_BARRIER", (), (5,)),
        Stopped(6, "WAITING_FOR_INPUTS", (5,)),
    )
    host.pulls[5].value = "v"
    host.arrived(5, 2)
    assert stopped(host.core) == ()


def test_a_launch_whose_data_is_there_waits_for_the_other_hosts() -> None:
    host = host_with_barrier(multi_host=True)
    host.handle(run(5, 1, program=2))
    (one,) = stopped(host.core)
    assert not one.arrived
    host.pulls[5].value = "v"
    host.arrived(5, 2)
    assert stopped(host.core) == (Stopped(5, "ENQUEUED"),)
    host.arrived(5, 4)
    assert stopped(host.core) == (Stopped(5, "ENQUEUED", arrived=True),)


def test_many_launches_that_stand_are_named_in_part() -> None:
    host = host_with_barrier()
    host.handle(*(run(sequence, 1, program=2) for sequence in range(5, 5 + MAX_STOPPED + 3)))
    assert [one.sequence for one in stopped(host.core)] == list(range(5, 5 + MAX_STOPPED))


def test_what_stands_is_read_while_it_goes_on() -> None:
    """Another thread reads it, for the heartbeat: a result may be there between its look and the next one."""

    class Passing(dict[int, Any]):
        def __contains__(self, key: object) -> bool:
            return self.pop(key, None) is not None  # type: ignore[call-overload]

    host = host_with_barrier()
    host.handle(run(5, 1, program=2), run(6, 500))
    producers = host.core.producers.sessions
    producers[1] = Passing(producers[1])
    assert [one.sequence for one in stopped(host.core)] == [5, 6]


def test_a_number_that_is_freed_may_be_made_again_before_the_first_launch_is_through() -> None:
    """1. Launch 1 waits with its result, which is freed. 2. So does launch 2, under the same number. 3. Both go on."""
    host = host_with_barrier()
    host.handle(run(1, results=500, program=2), Drop(1, (500,)), run(2, results=500, program=2), run(3, 500))
    host.pulls[1].value, host.pulls[2].value = "y", "z"
    host.arrived(1, 2)
    assert host.buffers() == {1: "x"}
    host.arrived(2, 2)
    assert host.buffers() == {1: "x", 500: "g(z)", 300: "f(g(z))"}
    assert host.core.producers.sessions == {}
    assert host.core.active == {}


def test_a_result_whose_memory_the_launch_has_taken_is_a_failure() -> None:
    """A launch may give one array as two arguments, of which one is taken and the other handed on."""
    host, sketch = Host(), Sketch()
    here = sketch.slice("0.0", "0.1")
    x, y = sketch.argument(here), sketch.argument(here)
    host.program(1, sketch, sketch.call("f", x, slice=here, donated=(0,)), y)
    host.store.put(1, 1, "x")
    host.is_consumed = lambda array: array == "x"  # type: ignore[method-assign]
    host.handle(run(5, 1, 1))
    assert host.buffers()[500] == "f(x)"
    assert host.buffers()[501].message == "buffer 1 was to be a result, and the launch has taken its memory"
