"""The time without a controller: a scheduler goes on with what its hosts hold, and looks for the successor."""

from __future__ import annotations

from dataclasses import dataclass

from pathways_ray.errors import Failure
from pathways_ray.scheduler import events
from pathways_ray.scheduler.handover import let_go, outcomes
from pathways_ray.scheduler.membership import Membership
from pathways_ray.scheduler.order import IslandOrder
from pathways_ray.story import Entry, Story
from pathways_ray.transport import messages as wire

REJOIN_PAUSE_S = 1.0
"""A scheduler that something is wrong with ends after this pause, so that Ray does not start it in a tight loop."""

CONTROLLER_ABSENCE_LIMIT_S = 60.0
"""A scheduler that has lost its controller goes on with what its hosts hold, and looks for the successor, for this
long: Ray may take its time to start one on a busy machine."""


@dataclass(slots=True)
class ControllerAbsence:
    """A scheduler's loss of its controller. `since` is when it began; None while there is a controller."""

    order: IslandOrder
    members: Membership
    story: Story
    since: float | None = None

    def over(self, island: int, address: str, now: float) -> list[events.Command]:
        """A controller answers: it hears of this scheduler, which serves hosts at `address`, and then of each host that
        is up what it holds."""
        self.story.note(Entry(now, "controller connected"))
        self.since = None
        hello = wire.IslandUp(island, address, self.order.last_sequence, self.order.last_program)
        known = outcomes(self.order)
        told = [events.ToController(wire.IslandOutcomes(known))] if known else []
        # Hosts that are apart say it anyway, once they are not.
        launches = self.order.queues.launches()
        waiting = tuple((one.session, number) for one in launches for number in one.covers or (one.results,))
        recount = [events.ToHosts(wire.Recount(waiting))] if self.members.present and not self.members.apart else []
        return [events.ToController(hello), *told, *recount]

    def begin(self, address: str, now: float) -> list[events.Command]:
        """The controller is gone. Launches go on: the successor asks what they came to."""
        self.story.note(Entry(now, "controller disconnected", address))
        if self.since is None:
            self.since = now
        # Otherwise this process might find the old controller; one that lives says every second where it is.
        withdraw = events.Withdraw("controller", address)
        return [withdraw, *let_go(self.order, Failure("ControllerLost", "the controller ended"))]

    def limit(self, now: float) -> list[events.Command]:
        """The end of the island, once there has been no controller for `CONTROLLER_ABSENCE_LIMIT_S`."""
        if self.since is None or now - self.since < CONTROLLER_ABSENCE_LIMIT_S:
            return []
        self.since = now
        reason = f"there was no controller for {CONTROLLER_ABSENCE_LIMIT_S:.0f} s"
        return [events.ToHosts(wire.Dismissed()), events.Exit(reason)]
