"""Bugs planted into early launches; they join the table of `planted`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from pathways_ray.client.early import EarlyCalls
from pathways_ray.controller import outcomes
from pathways_ray.controller.dispatch import Dispatch
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.executor.run.core import HostCore
from pathways_ray.executor.run.early import EarlyLaunches, EarlyReports
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.executor.run.instructions import Free
from pathways_ray.transport.messages import EarlyLaunch, IslandLaunch, Message
from tests.simulation.planted import Original, Patch, bug, wrapped

ALONE: dict[str, Any] = {
    "islands": {0: [0], 1: [1]},
    "clients": 1,
    "slices": 1,
    "flaws": 0.0,
    "decisions": 0.0,
    "changes": 0,
    "moves": 0.0,
    "suspends": 0.0,
    "parallel": True,
    "eager": True,
    "launches": (40, 40),
}
"""One user on islands of one host, whose launches may begin early."""


@bug(faults=0, **ALONE)
def a_launch_that_began_early_begins_again_when_it_is_sent(patch: Patch) -> None:
    def sent(original: Original, self: EarlyLaunches, launch: IslandLaunch, programs: Any) -> Any:
        original(self, launch, programs)
        return [], False

    wrapped(patch, EarlyLaunches, "sent", sent)


@bug(faults=0, seeds=150, shown=86, **ALONE)
def a_launch_is_begun_early_that_has_been_sent(patch: Patch) -> None:
    """Its copy came late: it has run, and what it made may have been dropped."""
    patch.setattr(EarlyLaunches, "_note", lambda self, session, results: None)


@bug(faults=0, seeds=150, shown=13, **ALONE | {"poison": 0.2, "cancels": 0.2})
def a_launch_that_takes_memory_is_begun_early(patch: Patch) -> None:
    """Where it is refused or cancelled, its client believes that what it donated lives."""
    may_be_early = cached_property(lambda self: self.is_unobstructed and self.computes and bool(self.plan.results))
    may_be_early.__set_name__(HostPlan, "may_be_early")
    patch.setattr(HostPlan, "may_be_early", may_be_early)
    patch.setattr(PlannedProgram, "takes_memory", property(lambda self: False, lambda self, taken: None))


@bug(faults=0, **ALONE)
def what_became_of_an_early_launch_is_not_kept_until_it_is_sent(patch: Patch) -> None:
    def ended(original: Original, self: EarlyReports[Any], number: int, report: Any) -> int:
        sequence: int = original(self, number, report)
        self._first.clear()
        return sequence

    wrapped(patch, EarlyReports, "ended", ended)


@bug(faults=0, shown=30, **ALONE | {"poison": 0.2, "cancels": 0.2})
def what_began_early_and_is_refused_stays_on_its_host(patch: Patch) -> None:
    patch.setattr(outcomes, "withdrawn", lambda session, program, launch: [])


@bug(faults=0, **ALONE | {"impatient": 1.0})
def an_ended_session_keeps_its_early_launches(patch: Patch) -> None:
    patch.setattr(EarlyLaunches, "session_ended", lambda self, session: [])


@bug(faults=0, shown=2, **ALONE)
def early_launches_take_what_is_not_there(patch: Patch) -> None:
    def looked_at(original: Original, self: HostCore, looked: Any) -> Any:
        return original(self, type(looked)(looked.handed, True, looked.under_way))

    wrapped(patch, HostCore, "_looked_at", looked_at)


@bug(faults=0, **ALONE | {"inline": 1.0})
def what_a_call_carries_is_left_out_before_its_host_has_it(patch: Patch) -> None:
    def lightened(self: EarlyCalls, messages: list[Message]) -> list[Message]:
        return [
            EarlyLaunch(message.launch, message.program, message.arguments, message.results)
            if type(message) is EarlyLaunch
            else message
            for message in messages
        ]

    patch.setattr(EarlyCalls, "lightened", lightened)


@bug(faults=0, **ALONE | {"inline": 1.0})
def a_call_whose_bytes_were_left_out_counts_as_another_one(patch: Patch) -> None:
    def sent(original: Original, self: EarlyLaunches, launch: IslandLaunch, programs: Any) -> Any:
        early = self.taken.get((launch.session, launch.results))
        found = original(self, launch, programs)
        return found if early is None or early.launch.inline == launch.inline else (early.forget(), False)

    wrapped(patch, EarlyLaunches, "sent", sent)


AS_ONE: dict[str, Any] = ALONE | {"waits": 1.0, "loops": 1.0}
"""Its loops look at each value."""


@bug(faults=0, **AS_ONE)
def calls_that_left_as_one_begin_again(patch: Patch) -> None:
    def sent(original: Original, self: EarlyLaunches, launch: IslandLaunch, programs: Any) -> Any:
        found = original(self, launch, programs)
        return ([], False) if launch.covers else found

    wrapped(patch, EarlyLaunches, "sent", sent)


@bug(faults=0, **AS_ONE)
def what_calls_made_that_left_as_one_stays(patch: Patch) -> None:
    def sent(original: Original, self: EarlyLaunches, launch: IslandLaunch, programs: Any) -> Any:
        made, begun = original(self, launch, programs)
        return [one for one in made if not launch.covers or not isinstance(one, Free)], begun

    wrapped(patch, EarlyLaunches, "sent", sent)


@bug(faults=0, **AS_ONE)
def what_became_of_calls_that_left_as_one_is_kept(patch: Patch) -> None:
    patch.setattr(EarlyReports, "sent_with", lambda self, numbers: [])


@bug(faults=0, **AS_ONE)
def the_host_does_not_hear_which_calls_left_as_one(patch: Patch) -> None:
    def start(original: Original, self: Dispatch, session: Any, program: Any, launch: Any, state: Any) -> Any:
        alone = msgspec.structs.replace(launch, covers=()) if launch.covers else launch
        return original(self, session, program, alone, state)

    wrapped(patch, Dispatch, "start", start)
