"""Sequential dispatch: a gang leaves when the one before it is on its device queues."""

from __future__ import annotations

from pathways_ray.transport.messages import Abort, Completed, Drop, Enqueued, IslandLaunch, LaunchFailed
from tests.unit.controller.harness import Harness, program_over, sketch_with_slices, to_client, to_island


def enqueued(front: Harness, island: int, sequence: int, gang: int) -> list:
    return front.checked(front.launches.enqueued(island, Enqueued(sequence, gang)))


def gangs(commands: list, island: int) -> list[tuple[int, int, int]]:
    return [(run.sequence, run.first, run.gangs) for run in to_island(commands, island, IslandLaunch)]


def test_gangs_leave_one_after_another() -> None:
    """
    1. The program has gang 0 on island 0, gang 1 on island 1, gang 2 on island 0 again.
    2. Each leaves when the one before is enqueued; news that came twice or too early counts for nothing.
    3. What was enqueued last sends nothing more; the launch ends when both islands are done.
    """
    front = Harness(parallel=False)
    front.register(program_over(1, 2, 1), 1)
    front.put(1)
    commands = front.launch(1, (1,), 2)
    assert gangs(commands, 0) == [(1, 0, 1)]
    assert (1, 1, 1) not in gangs(commands, 1)
    assert enqueued(front, 1, 1, 1) == []
    commands = enqueued(front, 0, 1, 0)
    assert (gangs(commands, 0), gangs(commands, 1)) == ([], [(1, 1, 1)])
    assert enqueued(front, 0, 1, 0) == []
    commands = enqueued(front, 1, 1, 1)
    assert (gangs(commands, 0), gangs(commands, 1)) == ([(1, 2, 1)], [])
    assert enqueued(front, 0, 1, 2) == []
    assert front.done(1, 1) == []
    assert to_client(front.done(0, 1)) == [Completed((1,), (0,))]


def test_a_gang_is_enqueued_once() -> None:
    """Two gangs of one island: what is said twice of the first one says nothing of the second."""
    front = Harness(parallel=False)
    front.register(program_over(1, 1, 1), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    assert gangs(enqueued(front, 0, 1, 0), 0) == [(1, 1, 1)]
    assert enqueued(front, 0, 1, 0) == []
    assert gangs(enqueued(front, 0, 1, 1), 0) == [(1, 2, 1)]


def test_a_gang_that_touches_two_islands_is_enqueued_when_both_say_so() -> None:
    """An argument of island 0 is consumed on island 1: the transfer takes a step on each."""
    front = Harness(parallel=False)
    sketch = sketch_with_slices("far argument")
    x = sketch.argument(1)
    g = sketch.call("g", x, slice=2)
    h = sketch.call("h", g, slice=2)
    front.register(sketch.planned(h), 1)
    front.put(1)
    commands = front.launch(1, (1,), 2)
    assert (gangs(commands, 0), gangs(commands, 1)) == ([(1, 0, 1)], [(1, 0, 1)])
    assert enqueued(front, 1, 1, 0) == []
    commands = enqueued(front, 0, 1, 0)
    assert (gangs(commands, 0), gangs(commands, 1)) == ([], [(1, 1, 1)])


def test_news_of_a_launch_that_is_over_is_ignored() -> None:
    front = Harness(parallel=False)
    front.register(program_over(1, 2), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    assert [m.launch for m in to_client(front.down(2), kind=LaunchFailed)] == [1]
    assert enqueued(front, 0, 1, 0) == []


def test_an_island_that_only_holds_an_argument_takes_part() -> None:
    """
    1. The program has an argument on island 1 that nothing uses, and a call on island 0.
    2. Both islands are told of the launch, so that both can end it.
    """
    front = Harness(parallel=False)
    sketch = sketch_with_slices("unused argument")
    sketch.argument(2)
    front.register(sketch.planned(sketch.call("f", slice=1)), 1)
    front.put(1, slice=2)
    commands = front.launch(1, (1,), 2)
    asked = [island for island in (0, 1, 2) if to_island(commands, island, IslandLaunch)]
    for island in asked:
        commands = front.done(island, 1)
    assert to_client(commands) == [Completed((1,), (0,))]


def test_every_island_hears_of_a_launch_before_its_arguments_may_be_dropped() -> None:
    """
    1. A launch on islands 0 and 1 is called with buffer 1 on island 0 and buffer 2 on island 1; both are freed at once.
    2. Island 1 has its first gang later. Yet the drop does not come first: the island has taken its argument by then.
    """
    front = Harness(parallel=False)
    sketch = sketch_with_slices("two arguments")
    x, y = sketch.argument(1), sketch.argument(2)
    f = sketch.call("f", x, slice=1)
    front.register(sketch.planned(sketch.call("g", f, y, slice=2)), 1)
    front.put(1)
    front.put(2, slice=2)
    sent = to_island(front.launch(1, (1, 2), 3), 1) + to_island(front.free(1, 2), 1)
    sent += to_island(enqueued(front, 0, 1, 0), 1)
    assert isinstance(sent[0], IslandLaunch)
    assert Drop(1, (2,)) in sent
    assert front.buffers() == {3}


def test_a_launch_that_lost_a_host_ends_on_the_other_islands_too() -> None:
    """
    1. Gang 0 runs on island 0; island 1, which has gang 1, loses its host.
    2. The launch fails. Island 0 has gang 2 left: it is told to go on, so that nothing of the launch stays there.
    """
    front = Harness(parallel=False)
    front.register(program_over(1, 2, 1), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    commands = front.down(2)
    assert [message.launch for message in to_client(commands, kind=LaunchFailed)] == [1]
    *runs, last, abort = to_island(commands, 0)[1:]
    assert [(run.first, run.first + run.gangs) for run in runs] == [(1, 3)]
    assert last == Drop(1, (2,))
    assert isinstance(abort, Abort)


def test_an_island_that_is_done_is_not_told_to_go_on() -> None:
    """
    1. Gangs 0, 1 and 2 run on islands 0, 1 and 2. Island 0 has done its part and said so.
    2. Island 2 loses its host: island 1 has to end, island 0 has nothing left to do and would begin again.
    """
    front = Harness(parallel=False)
    front.register(program_over(1, 2, 3), 1)
    front.put(1)
    front.launch(1, (1,), 2)
    enqueued(front, 0, 1, 0)
    front.done(0, 1)
    commands = front.down(3)
    assert gangs(commands, 1) == [(1, 2, 1)]
    assert gangs(commands, 0) == []
    assert to_island(commands, 0, Drop) == [Drop(1, (2,))]
