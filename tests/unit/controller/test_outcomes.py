"""Outcomes of launches that depend on each other: the root cause, and many at once."""

from __future__ import annotations

from pathways_ray.errors import Failure
from pathways_ray.transport.messages import Completed, Done, IslandLaunchFailed, Launch, LaunchFailed
from tests.unit.controller.harness import BOOM, Harness, failure_of, program_over, sketch_with_slices, to_client


def test_a_failed_launch_waits_for_the_launches_it_consumes_from() -> None:
    """
    1. Launch 1 runs on islands 0 and 1; launch 2 consumes its result on island 1.
    2. Island 1 reports that launch 2 failed, without saying why. Nothing is told yet.
    3. Island 0 reports why launch 1 failed, island 1 that its part is over. Both have the same cause.
    """
    front = Harness()
    front.register(program_over(1, 2), 1)
    front.register(program_over(2, key=2), 2)
    front.put(1)
    front.launch(1, (1,), 2)
    front.launch(2, (2,), 3, program=2)
    assert front.failed(1, 2, Failure("BufferLost", "no input", "f0")) == []
    assert front.failed(0, 1) == []
    assert to_client(front.done(1, 1)) == [LaunchFailed(1, BOOM), LaunchFailed(2, BOOM)]


def test_the_cause_is_known_where_the_result_that_was_consumed_is_gone() -> None:
    front = Harness()
    front.register(program_over(1), 1)
    front.put(1)
    front.launch(1, (1,), 10)
    front.launch(2, (10,), 20)
    front.free(10)
    assert failure_of(front.failed(0, 1)) == BOOM
    assert to_client(front.failed(0, 2, Failure("ExecutionError", "an input is gone"))) == [LaunchFailed(2, BOOM)]


def test_a_failure_of_its_own_is_kept_when_the_producers_did_well() -> None:
    front = Harness()
    front.register(program_over(1), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    front.launch(2, (2,), 3)
    assert front.failed(0, 2) == []
    commands = front.done(0, 1)
    assert to_client(commands) == [Completed((1,), (0,)), LaunchFailed(2, BOOM)]


def test_a_launch_that_fails_is_charged_for_what_it_took() -> None:
    """One island computed for 2 s before another one failed."""
    front = Harness()
    front.register(program_over(1, 2), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    front.checked(front.launches.done(0, Done((1,), (2_000_000,))))
    assert failure_of(front.failed(1, 1)) == BOOM
    (usage,) = front.launches.ledger.usages.values()
    assert usage.device_seconds >= 2.0


def test_the_failure_that_names_a_node_is_the_cause() -> None:
    front = Harness()
    front.register(program_over(1, 2), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    front.failed(1, 1, Failure("ExecutionError", "the peer sent nothing"))
    assert failure_of(front.failed(0, 1)) == BOOM


def test_a_long_chain_of_failed_launches_ends_whole() -> None:
    """
    1. 1,000 launches, each consuming the one before, run on islands 0 and 1 at once.
    2. Island 1 reports all of them failed; none can be told before the first one's cause is known.
    3. Island 0 reports the first one, then the rest.
    """
    count = 1000
    front = Harness(max_in_flight=count)
    sketch = sketch_with_slices("both")
    x = sketch.argument(1)
    y = sketch.call("f", x, slice=1)
    sketch.call("g", x, slice=2)
    front.register(sketch.planned(y, sketch.call("g", x, slice=2)), 1)
    front.put(0)
    for k in range(1, count + 1):
        front.launches.admission.call(front.launches.sessions[1], Launch(k, 1, (2 * k - 2,), 2 * k))
    for k in range(1, count + 1):
        assert front.launches.run_failed(1, IslandLaunchFailed(k, BOOM)) == []
    for k in range(count, 1, -1):
        assert front.launches.run_failed(0, IslandLaunchFailed(k, BOOM)) == []
    failed = to_client(front.failed(0, 1))
    assert [message.launch for message in failed] == list(range(1, count + 1))


def test_many_launches_released_at_once_leave_whole() -> None:
    """
    1. One launch may be in flight; 2,000 launches of a program without any work wait behind it.
    2. It ends: all leave, and those without work are complete at once.
    """
    front = Harness(max_in_flight=1)
    front.register(program_over(1), 1)
    front.register(sketch_with_slices("nothing").planned(key=2), 2)
    front.put(1)
    front.launch(1, (1,), 2)
    for k in range(2, 2002):
        front.launches.admission.call(front.launches.sessions[1], Launch(k, 2, (), 10 * k))
    commands = front.done(0, 1)
    completed = [number for m in to_client(commands, kind=Completed) for number in m.launches]
    assert completed == list(range(1, 2002))
