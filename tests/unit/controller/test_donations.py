"""Donated arguments: gone with a launch that succeeds, back from one that fails before it takes them."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from pathways_ray.controller.state import Buffer, Send, SendClient
from pathways_ray.limits import MAX_KEPT_BYTES
from pathways_ray.transport.messages import (
    BuffersLost,
    DonationsDecided,
    Done,
    Drop,
    Free,
    IslandLaunchFailed,
    LaunchFailed,
)
from tests.unit.controller.harness import (
    BOOM,
    Harness,
    failure_of,
    program_over,
    sketch_with_slices,
    to_client,
    to_island,
)


def donating(islands: int = 1, kept_bytes: int = 0) -> Harness:
    """Buffers 1 and 2 lie on islands 0 and 1; program 1 is given the first, or with two islands both."""
    front = Harness()
    sketch = sketch_with_slices("taking")
    ends = []
    for slice in (1, 2)[:islands]:
        ends.append(sketch.call("f", sketch.argument(slice), slice=slice, donated=(0,)))
    front.register(sketch.planned(*ends, kept_bytes=kept_bytes), 1)
    front.put(1, slice=1)
    front.put(2, slice=2)
    return front


def outcome(commands: list[Send]) -> LaunchFailed:
    (message,) = [c.message for c in commands if isinstance(c, SendClient) and isinstance(c.message, LaunchFailed)]
    return message


def known(front: Harness) -> set[int]:
    return set(front.launches.sessions[1].buffers)


def failed(front: Harness, island: int, consumed: tuple[int, ...]) -> list[Any]:
    return front.checked(front.launches.run_failed(island, IslandLaunchFailed(1, BOOM, (), consumed)))


def test_what_a_launch_took_is_freed_when_it_is_done() -> None:
    front = donating()
    bytes_before = front.launches.sessions[1].device_bytes
    front.launch(1, (1,), 5)
    assert known(front) == {2, 5}
    assert front.launches.sessions[1].device_bytes == bytes_before, "the result in place of the argument"
    assert to_island(front.done(0, 1), 0, Drop) == [Drop(1, (1,), given=True)]
    assert not front.launches.sessions[1].donated


def test_what_keeps_its_memory_is_freed_with_the_launch_as_well() -> None:
    front = donating(kept_bytes=MAX_KEPT_BYTES)
    front.launch(1, (1,), 5)
    assert known(front) == {2, 5}
    assert to_island(front.done(0, 1), 0, Drop) == [Drop(1, (1,), given=True)]


@pytest.mark.parametrize("freed", [False, True])
def test_what_keeps_its_memory_is_back_wherever_the_launch_fails(freed: bool) -> None:
    """One island has computed its part, the other fails. The last handle may be gone meanwhile."""
    front = donating(islands=2, kept_bytes=MAX_KEPT_BYTES)
    front.launch(1, (1, 2), 5)
    front.done(0, 1)
    if freed:
        front.free(1)
    commands = failed(front, 1, ())
    report = outcome(commands)
    assert (report.consumed, report.undecided) == ((), ())
    assert known(front) >= ({2} if freed else {1, 2})
    assert to_island(commands, 0, Drop) == ([Drop(1, (1,))] if freed else []), "behind what was called before"


@pytest.mark.parametrize(("kept_bytes", "lost"), [(0, [1]), (MAX_KEPT_BYTES, [])])
def test_what_keeps_its_memory_is_not_lost_with_a_scheduler(kept_bytes: int, lost: list[int]) -> None:
    """Its hosts stay. A launch may have taken what others are given."""
    front = donating(kept_bytes=kept_bytes)
    front.launch(1, (1,), 5)
    hosts = [host for host in front.launches.tables.hosts.values() if host.island == 0]
    front.launches.scheduler_lost(hosts, "its process ended")
    assert sorted(k for k, one in front.launches.sessions[1].buffers.items() if one.failure) == [*lost, 5]


def test_what_a_failed_launch_did_not_take_is_back() -> None:
    """1. It fails before any host took the argument. 2. The next launch has it."""
    front = donating()
    front.launch(1, (1,), 5)
    report = outcome(failed(front, 0, ()))
    assert (report.consumed, report.undecided) == ((), ())
    assert 1 in known(front)
    front.launch(2, (1,), 6)
    assert to_client(front.done(0, 2))[0].launches == (2,)


def test_what_was_freed_while_a_launch_had_it_is_dropped_when_that_fails() -> None:
    """The call was interrupted: nobody has a handle to what was donated to it, and frees it later."""
    front = donating()
    front.launch(1, (1,), 5)
    assert to_island(front.free(1), 0, Drop) == []
    commands = failed(front, 0, ())
    assert outcome(commands).consumed == ()
    assert Drop(1, (1,)) in to_island(commands, 0, Drop)
    assert 1 not in known(front)
    assert not front.launches.sessions[1].donated


def test_what_was_freed_while_it_was_undecided_is_dropped_when_that_is_known() -> None:
    front = donating(2)
    front.launch(1, (1, 2), 5)
    assert outcome(front.down(0)).undecided == (2,)
    front.free(2)
    commands = failed(front, 1, ())
    assert to_client(commands) == [DonationsDecided((2,), ())]
    assert Drop(1, (2,)) in to_island(commands, 1, Drop)
    assert 2 not in known(front)
    assert not front.launches.sessions[1].donated


def test_what_a_failed_launch_took_is_gone() -> None:
    front = donating()
    front.launch(1, (1,), 5)
    commands = failed(front, 0, (1,))
    assert outcome(commands).consumed == (1,)
    assert to_island(commands, 0, Drop) == [Drop(1, (1,))]
    assert 1 not in known(front)
    assert failure_of(front.launch(2, (1,), 6)).kind == "BufferDeleted"


def test_an_island_that_succeeded_took_what_lies_there() -> None:
    front = donating(2)
    front.launch(1, (1, 2), 5)
    assert front.done(1, 1) == []
    report = outcome(failed(front, 0, ()))
    assert report.consumed == (2,)
    assert 1 in known(front)


def test_a_lost_host_takes_nothing_on_other_islands() -> None:
    """
    1. The host of island 0 dies. The launch ends at once; island 1 has not said yet how far it was.
    2. It reports that its part failed, and took nothing: the argument is back.
    3. What was donated on island 0 is lost with the host, as it would be otherwise.
    """
    front = donating(2)
    front.launch(1, (1, 2), 5)
    commands = front.down(0)
    report = outcome(commands)
    assert report.failure.kind == "HostLost"
    assert (report.consumed, report.undecided) == ((), (2,))
    assert [message.buffers for message in to_client(commands, kind=BuffersLost)] == [(1,)]
    assert to_client(failed(front, 1, ())) == [DonationsDecided((2,), ())]
    assert 2 in known(front)
    assert not front.launches.outcomes.donations.undecided


def test_an_undecided_argument_may_turn_out_to_be_taken() -> None:
    for report in (Done((1,)), IslandLaunchFailed(1, BOOM, (), (2,))):
        front = donating(2)
        front.launch(1, (1, 2), 5)
        front.down(0)
        launches = front.launches
        done = launches.done(1, report) if isinstance(report, Done) else launches.run_failed(1, report)
        commands = front.checked(done)
        assert to_client(commands) == [DonationsDecided((2,), (2,))]
        assert to_island(commands, 1, Drop) == [Drop(1, (2,))]
        assert 2 not in known(front)


def test_an_island_that_is_lost_too_decides_by_its_loss() -> None:
    front = donating(2)
    front.launch(1, (1, 2), 5)
    front.down(0)
    commands = front.down(2)
    assert DonationsDecided((2,), ()) in to_client(commands)
    assert to_client(commands, kind=BuffersLost)[-1].buffers == (2,)


def test_a_session_that_ends_leaves_nothing_undecided() -> None:
    front = donating(2)
    front.launch(1, (1, 2), 5)
    front.down(0)
    front.launches.close_session(1)
    assert not front.launches.outcomes.donations.undecided
    assert failed(front, 1, ()) == []


def test_a_donated_buffer_cannot_be_freed_or_named_by_others() -> None:
    front = donating()
    front.launch(1, (1,), 5)
    assert front.checked(front.launches.admission.call(front.launches.sessions[1], Free((1,)))) == []
    assert failure_of(front.launch(2, (1,), 6)).kind == "BufferDeleted"


def test_a_number_that_may_come_back_stands_for_nothing_else() -> None:
    """Of launches that make and take a second one under it, the first launch would find none to give back: the
    controller ended."""
    front = donating(2)
    front.register(program_over(2, key=2), 2)
    sketch = sketch_with_slices("third")
    front.register(sketch.planned(sketch.call("g", sketch.argument(2), slice=2, donated=(0,)), key=3), 3)
    front.put(3, slice=2)
    front.launch(1, (1, 2), 5)
    refused = front.launch(2, (3,), 2, program=2)
    front.put(2, slice=2)
    front.launch(3, (2,), 9, program=3)
    front.down(0)
    front.done(1, 2, 3)
    failed(front, 1, ())
    assert failure_of(refused).message == "launch 2 gives its result number 2, which is taken"
    assert 2 in known(front)


def test_memory_is_not_taken_of_a_buffer_that_is_given_twice() -> None:
    """Hosts would find that its array is gone."""
    front = Harness()
    sketch = sketch_with_slices("twice")
    x, y = sketch.argument(1), sketch.argument(1)
    front.register(sketch.planned(sketch.call("f", x, slice=1, donated=(0,)), y), 1)
    front.put(1)
    front.put(2)
    text = "program 'twice' takes the memory of buffer 1, which launch 1 gives it a second time"
    assert failure_of(front.launch(1, (1, 1), 5)).message == text
    assert to_client(front.launch(2, (1, 2), 7)) == []


def test_results_fail_without_a_look_at_all_that_is_donated() -> None:
    """A thousand steps that donate their state have a million arrays under way, and each result of each that fails
    would be compared with them."""

    class Unlisted(dict[int, Buffer]):
        def values(self) -> NoReturn:
            raise AssertionError("all donated buffers are listed")

    front = donating()
    session = front.launches.sessions[1]
    session.donated = Unlisted()
    front.launch(1, (1,), 5)
    held = session.charged_bytes
    front.launch(2, (5,), 6)
    commands = front.launches.run_failed(0, IslandLaunchFailed(1, BOOM, (), (1,)))
    assert outcome(commands).consumed == (1,)
    front.launches.run_failed(0, IslandLaunchFailed(2, BOOM))
    assert known(front) == {2, 5, 6}
    assert session.charged_bytes == held - front.launches.sessions[1].find(2).type.charged_bytes  # type: ignore[union-attr]
