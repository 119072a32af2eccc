"""A host among several: what it keeps of the talk with its scheduler, and what it gets of it from others."""

from __future__ import annotations

from typing import Any

from pathways_ray.executor.run import journal
from pathways_ray.executor.run.core import HostCore
from pathways_ray.executor.run.instructions import Abandon, Rejoin, SchedulerFound, Send
from pathways_ray.executor.run.journal import Journal, Said
from pathways_ray.transport.messages import (
    Abort,
    BarrierReleased,
    CatchUp,
    Compiling,
    Done,
    Heard,
    Heartbeat,
    Holds,
    IslandLaunch,
    IslandLaunchFailed,
    Program,
    Ready,
)
from tests.unit.executor.run.test_core import BOOM, Host
from tests.unit.helpers import Sketch

FIRST, SECOND, THIRD = (IslandLaunch(n, 1, n, (), 0) for n in (1, 2, 3))
RELEASED = BarrierReleased(1, 0)
ABORTED = Abort(((1, 1),), BOOM)


def failed(made: list[Any]) -> list[int]:
    """The launches that fail, since their program is not there."""
    return [one.message.sequence for one in made if isinstance(one, Send) and type(one.message) is IslandLaunchFailed]


def test_a_host_says_what_it_has_heard_and_takes_only_what_it_lacks() -> None:
    """
    1. It has heard of a launch and a release when its scheduler dies. The successor hears of both.
    2. Others have heard of two launches more. It takes these, and says what it holds.
    3. Those count: when the successor dies too, it lacks only what is behind them.
    """
    core = HostCore(0, (0, 1))
    core.handle(FIRST, 0.0)
    core.handle(RELEASED, 0.0)
    joined = core.handle(SchedulerFound(), 1.0)[0]
    assert isinstance(joined, Rejoin)
    assert joined.heard == Heard(2, (FIRST, RELEASED))
    made = core.handle(CatchUp(0, (FIRST, RELEASED, SECOND, THIRD)), 2.0)
    assert failed(made) == [2, 3]
    assert isinstance(made[-1], Rejoin)
    assert made[-1].heard is None
    assert failed(core.handle(CatchUp(1, (RELEASED, SECOND, THIRD, FIRST)), 3.0)) == [1]


def test_aborts_keep_their_places_among_launches_and_releases() -> None:
    """A launch that waits goes on by either: hosts that hear them in two orders enqueue different gangs."""
    core = HostCore(0, (0, 1))
    for message in (FIRST, ABORTED, RELEASED):
        core.handle(message, 0.0)
    joined = core.handle(SchedulerFound(), 1.0)[0]
    assert isinstance(joined, Rejoin)
    assert joined.heard == Heard(3, (FIRST, ABORTED, RELEASED))
    other = HostCore(1, (0, 1))
    other.handle(FIRST, 0.0)
    made = other.handle(CatchUp(1, (ABORTED, RELEASED)), 1.0)
    assert [one.sequence for one in made if isinstance(one, Abandon)] == [1]
    assert list(other.journal.last) == [FIRST, ABORTED, RELEASED]


def test_a_program_without_a_part_here_is_ready_before_its_launches() -> None:
    """Otherwise they would fail here, and on no other host, which ends the island."""
    host, sketch = Host(multi_host=True), Sketch()
    there = sketch.slice("1.0")
    host.plan = sketch.planned(sketch.call("f", sketch.argument(there), slice=there)).plans[0]
    programs = [Program(number, b"", {}) for number in (1, 2)]
    launches = [IslandLaunch(number, 1, number, (1,), 0) for number in (1, 2)]
    host.handle(CatchUp(0, (programs[0], launches[0], programs[1], launches[1])))
    assert [message for message in host.messages if isinstance(message, IslandLaunchFailed)] == []
    assert [sequence for sequence, _ in host.watched] == [1, 2]
    assert host.core.journal.count == 2
    assert host.holds is not None
    assert host.holds.programs == (1, 2)


def test_a_host_by_itself_keeps_nothing() -> None:
    core = HostCore(0, (0,))
    core.handle(FIRST, 0.0)
    core.handle(ABORTED, 0.0)
    joined = core.handle(SchedulerFound(), 1.0)[0]
    assert isinstance(joined, Rejoin)
    assert joined.heard is None
    assert not core.journal.last


def test_programs_are_kept_without_their_functions_and_do_not_count() -> None:
    kept = Journal()
    kept.add(FIRST)
    kept.add_program(Program(7, b"plan", {"f": b"code"}))
    assert kept.heard({}) == Heard(1, (FIRST, Program(7, b"plan", {})))


def test_the_journal_is_bounded(monkeypatch: Any) -> None:
    """In messages, and in the bytes of plans."""
    monkeypatch.setattr(journal, "MAX_HEARD", 2)
    monkeypatch.setattr(journal, "MAX_HEARD_BYTES", 10)
    kept = Journal()
    for launch in (FIRST, SECOND, THIRD):
        kept.add(launch)
    assert (kept.count, list(kept.last)) == (3, [SECOND, THIRD])
    for number in (7, 8):
        kept.add_program(Program(number, b"123456", {}))
    assert list(kept.last) == [Program(8, b"123456", {})]
    kept.add(FIRST)
    assert kept.count == 4


def test_reports_of_launches_are_kept_and_nothing_else() -> None:
    said = Said()
    for message in (Done((1,)), Heartbeat(0), Done((2,))):
        said.note(message)
    assert list(said.messages) == [Done((1,)), Done((2,))]


def test_what_a_host_compiles_is_said_again_until_it_is_ready_and_reports_where_hosts_are_apart() -> None:
    said = Said()
    for message in (Compiling(0, 7), Done((1,)), Compiling(0, 8), Ready(0, 9, 0, BOOM), Ready(0, 7, 0)):
        said.note(message)
    assert said.again(Holds({}, ())) == [Compiling(0, 8)]
    assert said.again(Holds({}, (), heard=Heard())) == [Compiling(0, 8), Done((1,))]
    said.note(Ready(0, 8, 0, BOOM))
    assert said.again(Holds({}, ())) == []
