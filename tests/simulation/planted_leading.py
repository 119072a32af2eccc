"""Bugs planted into islands of several hosts, one of which takes early launches for all; they join the table of
`planted`."""

from __future__ import annotations

from typing import Any

from pathways_ray.executor.run.instructions import Tell
from pathways_ray.executor.run.leading import Follower, Leader
from pathways_ray.scheduler.reunion import Met, Reunion
from pathways_ray.transport.messages import CatchUp, IslandLaunch, Passed
from tests.simulation.planted import Original, Patch, bug, wrapped
from tests.simulation.planted_early import ALONE

LED: dict[str, Any] = ALONE | {"islands": {0: [0, 1], 1: [2, 3, 4]}}
"""One user on islands of several hosts, whose launches may begin early."""

DYING = LED | {"torn": 0.05}
"""Their schedulers die before what they say has come to all hosts."""


@bug(faults=0, **LED)
def hosts_handle_what_the_leader_has_not(patch: Patch) -> None:
    patch.setattr(Follower, "lets_pass", lambda self, event: True)


@bug(faults=0, **LED)
def the_leader_begins_a_launch_and_tells_nobody(patch: Patch) -> None:
    def led(self: Leader, launch: IslandLaunch) -> Tell:
        return Tell(Passed(self._term, self._place))

    patch.setattr(Leader, "led", led)


@bug(faults=0, **LED)
def the_leader_lets_others_go_on_before_it_has_heard_itself(patch: Patch) -> None:
    def led(original: Original, self: Leader, launch: IslandLaunch) -> Any:
        self._place += 1
        made = original(self, launch)
        self._place -= 1
        return made

    wrapped(patch, Leader, "led", led)


@bug(faults=0, seeds=200, shown=161, **DYING)
def launches_behind_messages_that_a_host_lacks_are_lost(patch: Patch) -> None:
    def close(original: Original, self: Follower) -> Any:
        closed = original(self)
        self.late.clear()
        return closed

    wrapped(patch, Follower, "_close", close)


@bug(faults=0, seeds=200, shown=161, **DYING)
def launches_behind_messages_that_a_host_lacks_come_before_these(patch: Patch) -> None:
    patch.setattr(Follower, "next_late", lambda self: self.late.popleft() if self.late else None)


@bug(faults=0, **DYING)
def hosts_catch_up_before_they_have_the_log(patch: Patch) -> None:
    def meet(original: Original, self: Reunion) -> Any:
        met = original(self)
        return Met(CatchUp(met.catch_up.first, met.catch_up.messages), met.launches) if isinstance(met, Met) else met

    wrapped(patch, Reunion, "meet", meet)
