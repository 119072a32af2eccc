"""Whether those that the controller depends on are alive: the islands' schedulers, and the resource manager.

A scheduler that is silent is treated as lost and killed, as is one that does not join, and a resource manager that
twice does not answer. Ray starts them again.
"""

from __future__ import annotations

from collections.abc import Iterable

from pathways_ray.controller import events
from pathways_ray.liveness import Liveness
from pathways_ray.story import Entry, Story

TICK_S = 1.0
"""A `Tick` comes once in this time."""

SCHEDULER_ABSENCE_LIMIT_S = 60.0
"""A scheduler that does not join for this long is killed: one that was stopped when the controller before this one died
is on no stream that could break. That is long, since Ray may take its time to start one on a busy machine."""

_MANAGER = "resource manager"


class Watch:
    """Looks after schedulers and the resource manager.

    Args:
        expected: islands whose schedulers run when the controller starts, and have to join.
        silence_limit_s: a scheduler that is silent for this long is lost; the resource manager's limit for one answer
            is half of it.
    """

    def __init__(self, story: Story, expected: Iterable[int], silence_limit_s: float) -> None:
        self.story = story
        self.expected = tuple(expected)
        self.schedulers: Liveness[int] = Liveness(silence_limit_s, TICK_S)
        self.absent: Liveness[int] = Liveness(max(silence_limit_s, SCHEDULER_ABSENCE_LIMIT_S), TICK_S)
        self.manager: Liveness[str] = Liveness(silence_limit_s / 2, TICK_S)
        self.is_manager_gone = False
        self.missed = 0
        self.looked: float | None = None

    def uncounted_s(self, now: float, slowness: float) -> float:
        """The part of the time since the last look that does not count for those that are to answer: as `Liveness`
        counts the silence of peers."""
        gap = now - self.looked if self.looked is not None else 0.0
        self.looked = now
        return gap - min(gap, 2 * TICK_S) / max(slowness, 1.0)

    # --- schedulers ---------------------------------------------------------------------------------------------------

    def joined(self, island: int, now: float) -> None:
        """A scheduler has opened its stream."""
        self.schedulers.hear(island, now)
        self.absent.forget(island)

    def left(self, island: int, now: float) -> None:
        """A scheduler is gone, and a successor has to join."""
        self.schedulers.forget(island)
        self.absent.hear(island, now)

    def silent_schedulers(self, now: float, slowness: float) -> list[tuple[int, str]]:
        """The islands whose schedulers say nothing, with the reason for which these are lost. Their hosts end with
        their streams, and follow."""
        reason = f"its island's scheduler did not answer for {self.schedulers.limit_s:.0f} s"
        return [(island, reason) for island in self.schedulers.silent(now, slowness)]

    def absent_schedulers(self, now: float, slowness: float) -> list[events.Command]:
        """Has schedulers killed that do not join."""
        for island in self.expected:
            self.absent.hear(island, now)
        self.expected = ()
        commands: list[events.Command] = []
        for island in self.absent.silent(now, slowness):
            self.absent.hear(island, now)
            reason = f"it did not join for {self.absent.limit_s:.0f} s"
            self.story.note(Entry(now, "scheduler absent", f"island {island}", reason))
            commands.append(events.KillScheduler(island))
        return commands

    # --- the resource manager -----------------------------------------------------------------------------------------

    def manager_knows(self, now: float) -> None:
        """Notes that the resource manager has answered a report."""
        self.manager.forget(_MANAGER)
        self.missed = 0
        if self.is_manager_gone:
            self.is_manager_gone = False
            self.story.note(Entry(now, "resource manager answers again"))

    def manager_lost(self, event: events.ManagerLost, now: float) -> list[events.Command]:
        """Its successor, or an answer to the next report, may be there within seconds. All goes on meanwhile."""
        self.manager.forget(_MANAGER)
        self.missed = 0
        if not self.is_manager_gone:
            self.is_manager_gone = True
            self.story.note(Entry(now, "resource manager lost", cause=event.reason[:200]))
        return []

    def tick(self, now: float, slowness: float) -> list[events.Command]:
        """Reports once a second; asks again where no answer came in time, and has the resource manager killed where
        none came to that either. Twice: after a pause of this process the time may be over before an answer that is
        there is seen."""
        if _MANAGER not in self.manager:
            self.manager.silent(now, slowness)
            self.manager.hear(_MANAGER, now)
            return [events.ReportToManager()]
        if not self.manager.silent(now, slowness):
            return []
        self.missed += 1
        if self.missed < 2:
            self.manager.hear(_MANAGER, now)
            return [events.ReportToManager()]
        self.missed = 0
        self.manager.forget(_MANAGER)
        reason = f"it did not answer for {2 * self.manager.limit_s:.0f} s"
        self.story.note(Entry(now, "resource manager killed", cause=reason))
        return [events.KillManager()]
