"""The way of a simulated client to the successor of its controller: a driver of `client/ending.py`."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from pathways_ray import limits
from pathways_ray.client import events
from pathways_ray.client.ending import ANSWER_LIMIT_S
from pathways_ray.errors import Failure
from pathways_ray.ir.types import ArrayType, SliceType, Spec
from pathways_ray.simulation.client_view import Client
from pathways_ray.simulation.controller import SimulatedController
from pathways_ray.simulation.environment import Environment
from pathways_ray.simulation.programs import ARRAY
from pathways_ray.transport import messages as wire
from pathways_ray.transport.capabilities import slice_tag

LOOK_S = 0.5
"""Time between two looks for the successor."""

HELD_S = 0.01
"""Time between two looks at whether the session's calls are held."""

UNKNOWN = Failure("ControllerLost", "the controller is gone")


class Kind(NamedTuple):
    """The type of an array, with the names that `ArgumentType` has."""

    slice: SliceType
    spec: Spec
    array: ArrayType = ARRAY


class WayBack:
    """Looks for the successor, and opens the session there. `back` counts the sessions that were opened again,
    `answered` the launches by what became of them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.calls = self.calls_before = self.back = 0
        self.since = 0.0
        self.answered: Counter[str] = Counter()

    @property
    def world(self) -> Environment:
        world: Environment = self.client.world
        return world

    def begin(self) -> None:
        """The controller is lost. A session that has just begun ends."""
        client = self.client
        self.since, self.calls_before = self.world.clock.now, self.calls
        if not client.programs:
            return self._fail("it was not at work when its controller was lost")
        self.world.network.after(client.process, 0.0, client.mover.controller_lost)
        self._look(self.calls)

    def _look(self, calls: int) -> None:
        client, world = self.client, self.world
        if client.over or not client.core.away or calls != self.calls:
            return
        if world.clock.now - self.since > 2 * limits.RESUME_LIMIT_S:
            if client.world.is_whole() and self.calls == self.calls_before:
                world.checker.report(f"session {client.core.session} never asked the successor of its controller")
            return self._fail("there was no successor")
        if client.mover.holding:  # who holds the session's calls goes on without an answer, and lets go of them
            return world.network.after(client.process, HELD_S, self._look, calls)
        controller: SimulatedController = client.world.controller
        if not controller.process.alive:
            return world.network.after(client.process, LOOK_S, self._look, calls)
        session = client.core.session
        away = client.mover.suspension
        slices = [wire.KnownSlice(placed, slice_tag("", session, placed)) for placed in client.slices]
        request = client.core.resume_request("", slices, world.clock.now, away)
        client.left_behind([], UNKNOWN)  # donations of which nobody will tell are decided now
        self.calls += 1
        answered = partial(self._answered, self.calls)
        post = world.network.post
        post(client.process, controller.process, controller.resume, client.process, client.tenant, request, answered)
        world.network.after(client.process, ANSWER_LIMIT_S, self._look, self.calls)

    def _answered(self, call: int, reply: wire.Reply, controller: SimulatedController) -> None:
        client = self.client
        if client.over or call != self.calls or not client.core.away:
            return
        away = client.mover.suspension
        if not isinstance(reply, wire.SessionResumed):
            said = str(reply)
            known = "was given up" in said
            if not (known or controller is client.controller):  # that one had ended the session, as it was silent
                self.world.checker.report(f"session {client.core.session} did not come back: {reply}")
            return self._fail(str(reply))
        if not client.connect(controller):
            return self._look(self.calls)
        placed = {made.placed.mesh.id: made.placed for made in reply.slices}
        client.slices[:] = [placed.get(one.mesh.id, one) for one in client.slices]
        self.back, client.last_drop = self.back + 1, self.world.clock.now  # what was freed meanwhile goes from now on
        numbers = () if away is None else away.arrays
        saved = [one for number in numbers if (one := client.core.buffers.get(number)) is not None and not one.failure]
        # Not those that were cancelled, of which only the donations are open: they have their outcome.
        asked = [launch for launch in sorted(client.core.unanswered) if launch in client.core.pending]
        leaders = {launch: client.core.coalescer.leader_of(launch) for launch in asked}
        client.handle(events.Resumed(reply))
        if lost := [record.id for record in saved if record.failure is not None]:
            self.world.checker.report(f"session {client.core.session} lost buffers {lost}, which its client had saved")
        failures = dict(reply.failed)
        self.answered += Counter(value=len(reply.done), failure=len(reply.failed), later=len(reply.running))
        for launch, leader in leaders.items():
            if leader in failures:
                client.left_behind([launch], failures[leader], by_client=False)
            elif leader in reply.done:
                client.left_behind([launch], None, by_client=False)
            elif launch not in client.core.pending:
                if has_run(client.world, client.session, leader):
                    client.world.checker.report(f"launch {launch} of session {client.session} ran, and nobody tells it")
                client.left_behind([launch], UNKNOWN)
        client.mover.controller_back()

    def _fail(self, reason: str) -> None:
        self.client.handle(events.ResumeFailed(reason))


def has_run(world: Any, session: int, launch: int) -> bool:
    """Whether all schedulers of a launch know that it ended in a value. Under other faults they may come too late."""
    if world.settings.faults or world.settings.scheduler_deaths or world.settings.deaths:
        return False
    known = [
        (islands, failure)
        for scheduler in world.schedulers.values()
        for of, number, *_, islands, failure in scheduler.core.order.ended
        if (of, number) == (session, launch)
    ]
    return bool(known) and len(known) == known[0][0] and all(failure is None for _, failure in known)
