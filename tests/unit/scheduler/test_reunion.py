"""Hosts that come to the successor of their scheduler: what each of them lacks, and what waits until none does."""

from __future__ import annotations

from typing import Any

from pathways_ray.errors import Failure
from pathways_ray.scheduler.core import SchedulerCore
from pathways_ray.scheduler.events import (
    Command,
    ControllerConnected,
    ControllerMessage,
    HostConnected,
    HostMessage,
    Kill,
    ToController,
    ToHosts,
)
from pathways_ray.transport.messages import (
    Abort,
    BarrierReached,
    BarrierReleased,
    CatchUp,
    Done,
    Drop,
    FromHost,
    Gang,
    Heard,
    Holds,
    HostDown,
    HostUp,
    IslandLaunch,
    IslandLaunchFailed,
    IslandOutcomes,
    IslandUp,
    Ordered,
    Program,
    Recount,
)

FIRST, SECOND, THIRD = (IslandLaunch(n, 1, n, (), 0) for n in (1, 2, 3))
RELEASED = BarrierReleased(1, 0)
GONE = Failure("HostLost", "its island's scheduler ended")


def program(number: int) -> Program:
    return Program(number, b"plan", {})


class Successor:
    """A scheduler of hosts 0 and 1 that follows another one, and its controller."""

    def __init__(self) -> None:
        self.core = SchedulerCore(0, (0, 1), 8)
        self.core.handle(ControllerConnected("here"), 0.0)

    def comes(self, host: int, heard: Heard | None = None, epoch: int = 4) -> list[Any]:
        """What hosts and controller get when a host joins: one that holds something, or a new one."""
        holds = Holds({}, (), heard=heard) if heard is not None else None
        return said(self.core.handle(HostConnected(HostUp(host, epoch, "t", "d", 2, 1, holds=holds)), 0.0))

    def says(self, host: int, message: FromHost) -> list[Any]:
        return said(self.core.handle(HostMessage(host, 4, message), 0.0))


def said(commands: list[Command]) -> list[Any]:
    return [c.message if isinstance(c, ToHosts | ToController) else c for c in commands if not _is_joining(c)]


def _is_joining(command: Command) -> bool:
    return type(command).__name__ in ("Accept", "ForgetHosts")


def test_hosts_get_what_others_have_heard_before_the_controller_hears_of_them() -> None:
    """
    1. One has heard of two launches and a release, the other one of the first launch. It gets the rest, both are told
       that nobody waits for these launches, and then each says what it holds.
    2. Launches come again only then: with the release, the first one that waits at a barrier goes on.
    """
    s = Successor()
    assert s.comes(0, Heard(3, (FIRST, RELEASED, SECOND), (SECOND,))) == []
    assert s.comes(1, Heard(1, (FIRST,), (FIRST,))) == [
        CatchUp(1, (RELEASED, SECOND)),
        Abort(((1, 1), (2, 2)), GONE),
    ]
    answer = HostUp(0, 4, "t", "d", 2, 1, holds=Holds({1: (2,)}, ()))
    assert s.says(0, answer) == [answer]
    assert s.says(0, BarrierReached(0, 2, 0)) == []
    assert s.says(1, BarrierReached(1, 2, 0, GONE)) == [BarrierReleased(2, 0, GONE)]
    assert s.says(0, Done((1, 2))) == []
    assert s.says(1, Done((1, 2))) == [Done((1, 2), (0, 0))]
    assert not s.core.order.outstanding


def test_a_host_that_lacks_an_abort_gets_it_before_the_releases_behind_it() -> None:
    s = Successor()
    aborted = Abort(((1, 1),), GONE)
    s.comes(0, Heard(3, (FIRST, aborted, RELEASED)))
    caught_up, *_ = s.comes(1, Heard(1, (FIRST,)))
    assert caught_up == CatchUp(1, (aborted, RELEASED))


def test_reports_wait_until_it_is_known_what_they_are_about() -> None:
    s = Successor()
    s.comes(0, Heard(1, (FIRST,), (FIRST,)))
    assert s.says(0, BarrierReached(0, 1, 0)) == []
    assert s.says(0, Ordered(0, (Gang(1, 0, 3),))) == []
    s.comes(1, Heard(1, (FIRST,), (FIRST,)))
    assert s.says(1, BarrierReached(1, 1, 0)) == [BarrierReleased(1, 0)]


def test_a_launch_that_failed_on_one_host_and_ran_on_another_restarts_the_island() -> None:
    """One host had said so to the scheduler that died, and says so again: gangs would not meet any more."""
    s = Successor()
    s.comes(0, Heard(1, (FIRST,)))
    s.says(0, Done((1,)))
    s.comes(1, Heard(1, (FIRST,)))
    commands = s.says(1, IslandLaunchFailed(1, Failure("ExecutionError", "out of memory"), (0, 1)))
    assert [c for c in commands if isinstance(c, Kill)] == [Kill(1, 4), Kill(0, 4)]


def test_hosts_start_again_where_what_is_missing_was_not_kept() -> None:
    s = Successor()
    s.comes(0, Heard(900, (SECOND, THIRD)))
    commands = s.comes(1, Heard(10, (FIRST,)))
    assert {c for c in commands if isinstance(c, Kill)} == {Kill(0, 4), Kill(1, 4)}
    assert not s.core.members.apart


def test_a_program_comes_with_its_launch_where_not_all_had_to_compile_it() -> None:
    """Another one, which no launch needs, a host may have a part in: the controller sends it with its functions."""
    s = Successor()
    s.comes(0, Heard(2, (FIRST, program(2), program(9), SECOND)))
    caught_up, *_ = s.comes(1, Heard(1, (FIRST,)))
    assert caught_up == CatchUp(1, (program(2), SECOND))


def test_nothing_is_dropped_and_nothing_is_launched_while_hosts_are_apart() -> None:
    """
    1. A drop that comes meanwhile is not passed on: a launch that the other host lacks may take the array.
    2. A launch waits. It goes once the hosts are at one point, behind what they lacked.
    """
    s = Successor()
    s.comes(0, Heard(1, (FIRST,)))
    assert said(s.core.handle(ControllerMessage(Drop(1, (7,))), 0.0)) == []
    assert said(s.core.handle(ControllerMessage(THIRD), 0.0)) == []
    assert s.comes(1, Heard())[::2] == [CatchUp(0, (FIRST,)), THIRD]
    assert said(s.core.handle(ControllerMessage(Drop(1, (7,))), 0.0)) == [Drop(1, (7,))]


def test_a_new_host_ends_the_group_of_one_that_waits_for_the_others() -> None:
    """The resource manager gave it a new epoch, so the other one comes under that as well."""
    s = Successor()
    s.comes(0, Heard(1, (FIRST,)))
    commands = s.comes(1, epoch=5)
    assert [c.host for c in commands if isinstance(c, HostDown)] == [0]
    assert [c for c in commands if isinstance(c, HostUp)] == [HostUp(1, 5, "t", "d", 2, 1)]
    assert not s.core.members.apart
    assert s.comes(0, epoch=5) == [HostUp(0, 5, "t", "d", 2, 1)]
    assert s.core.members.complete


def test_a_host_that_never_heard_of_a_scheduler_before_has_heard_nothing() -> None:
    """It joins the group for the first time, as the scheduler dies. The other one holds what clients have uploaded."""
    s = Successor()
    new = HostUp(1, 4, "t", "d", 2, 1)
    assert s.comes(1) == [new]
    assert s.comes(0, Heard()) == [CatchUp(0, ())]


def test_hosts_that_are_apart_say_what_they_hold_to_another_controller_later() -> None:
    s = Successor()
    s.comes(0, Heard(1, (FIRST,)))
    again = s.core.handle(ControllerConnected("here"), 1.0)
    assert said(again) == [IslandUp(0, "here")]
    s.comes(1, Heard(1, (FIRST,)))
    again = s.core.handle(ControllerConnected("here"), 2.0)
    assert said(again) == [IslandUp(0, "here", 1), Recount()]
    assert not [m for m in said(again) if isinstance(m, IslandOutcomes)]
