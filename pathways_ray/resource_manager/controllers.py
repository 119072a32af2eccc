"""The controllers of a cluster, one after the other: which one serves, which are over, and which has to be killed.

They all run on the machine of the resource manager, so that the later one is the one whose process began later. What
one says may come after it has died, when others have begun, and died as well: this process may have been stopped.
"""

from __future__ import annotations

from pathways_ray.liveness import Liveness
from pathways_ray.resource_manager import events
from pathways_ray.story import Entry, Story

TICK_S = 1.0
"""Time between two looks at the controller and at hosts."""

MAX_CONTROLLER_SILENCE_S = 30.0
"""A controller that says nothing for this long is stopped or hangs, and is killed. That is long, since it may be busy
with a big program; clients of one that is stopped have seen it before, by its missing answers to their pings."""

MAX_CONTROLLER_START_S = 120.0
"""A controller that does not serve for this long after it began is stuck, and is killed: on a busy machine a start
takes a minute."""


class Controllers:
    """Knows the controller by what it says once a second.

    Args:
        actor: the name of its actor, if it runs already: after a restart of the resource manager.
        silence_limit_s: the operator's, where it is longer than that of this file.
    """

    def __init__(self, actor: str, silence_limit_s: float, story: Story) -> None:
        self.story = story
        self.known = events.ControllerServes("", "", actor)
        self.past: set[str] = set()
        self.newest = 0
        self.lists_heard = 0
        self.serving: Liveness[str] = Liveness(max(silence_limit_s, MAX_CONTROLLER_SILENCE_S), TICK_S)
        self.starting: Liveness[tuple[int, int]] = Liveness(MAX_CONTROLLER_START_S, TICK_S)

    def expect(self, now: float) -> None:
        """Notes that a controller runs that has not been heard of: it may be stopped."""
        self.serving.hear("", now)

    def began(self, started: int) -> None:
        """Notes that a controller's process began at this time: those that began before it are over."""
        self.newest = max(self.newest, started)

    def is_over(self, started: int) -> bool:
        """Whether a later process has begun since to be the controller; never where the system does not say when."""
        return 0 < started < self.newest

    def is_past(self, event: events.ControllerServes) -> bool:
        """Whether one that has a successor says that it serves: that was sent before it died."""
        return event.incarnation in self.past or self.is_over(event.started)

    def serves(self, event: events.ControllerServes, now: float) -> bool:
        """Notes that a controller serves; returns whether it is another one than before."""
        known, self.known = self.known, event
        self.began(event.started)
        if other := event.incarnation != known.incarnation:
            self.past.add(known.incarnation)
            self.lists_heard = 0
            self.serving.forget(known.incarnation)
            self.story.note(Entry(now, "new controller", event.address))
        self.serving.hear(event.incarnation, now)
        self.starting.forget((event.pid, event.started))
        return other

    def hears(self, event: events.ControllerHolds) -> bool:
        """Whether a list of what a controller holds is of the one that serves, and newer than those before."""
        number = event.holdings.number
        if event.incarnation != self.known.incarnation or number <= self.lists_heard:
            return False
        self.lists_heard = number
        return True

    def starts(self, event: events.ControllerStarts, now: float) -> None:
        """Notes that a process has begun to be the controller; it is the one that was awaited."""
        self.began(event.started)
        self.serving.forget("")
        self.starting.hear((event.pid, event.started), now)

    def silent(self, now: float, slowness: float) -> list[events.Command]:
        """Kills a controller that has been silent for too long, or does not come to serve, once: that process, and not
        one that is about to take its place."""
        silent: list[tuple[str, int, int]] = []
        known = self.known
        for incarnation in self.serving.silent(now, slowness):
            self.serving.forget(incarnation)
            silent.append((f"it did not answer for {self.serving.limit_s:.0f} s", known.pid, known.started))
        for process in self.starting.silent(now, slowness):
            self.starting.forget(process)
            silent.append((f"it did not serve {self.starting.limit_s:.0f} s after its start", *process))
        for reason, _, _ in silent:
            self.story.note(Entry(now, "controller killed", reason))
        return [events.KillController(known.actor, *one) for one in silent]
