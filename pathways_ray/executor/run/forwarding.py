"""Results that are named before they exist: what one launch has yet to store, and those that wait for it.

A launch that is not through is a *producer*: later launches of its session take its results from it, rather than from
the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pathways_ray.executor.run import instructions as do
from pathways_ray.executor.run.active_launch import ENQUEUED, ActiveLaunch, PendingResults


class Producers:
    """Active launches by the session and the buffer that they will store: `sessions`."""

    def __init__(self) -> None:
        self.sessions: dict[int, dict[int, ActiveLaunch]] = {}

    def announce(self, active: ActiveLaunch) -> None:
        """Lets later launches name the results of one that is not through before they are in the store."""
        results = active.results
        if active.pending is None and results:
            active.pending = PendingResults()
            self.sessions.setdefault(active.launch.session, {}).update(dict.fromkeys(results, active))

    def forget(self, active: ActiveLaunch) -> None:
        """A launch that was announced is through: its results are in the store. A client may have freed one of them,
        and have another launch make it again: that one is the producer since."""
        producers = self.sessions.get(active.launch.session, {})
        for buffer in active.results:
            if producers.get(buffer) is active:
                del producers[buffer]
        if not producers:
            self.sessions.pop(active.launch.session, None)

    def free(self, session: int, buffers: Iterable[int]) -> None:
        """Notes that buffers which launches have yet to store are freed as soon as they are there."""
        producers = self.sessions.get(session, {})
        for buffer in buffers:
            producer = producers.get(buffer)
            if producer is not None and producer.pending is not None:
                producer.pending.freed.append(buffer)


def resolve(active: ActiveLaunch, producers: Mapping[int, ActiveLaunch]) -> list[do.Instruction]:
    """Starts a launch of a session whose earlier launches have yet to store some of their results."""
    launch, unresolved = active.launch, active.unresolved
    slots: list[int] = []
    forwards: list[do.Instruction] = []
    for slot, number, here in active.plan.arguments:
        buffer = launch.arguments[number]
        producer = producers.get(buffer)
        if producer is None or (active.goes_early and not here):
            continue
        slots.append(slot)
        if active.goes_early and producer.phase is ENQUEUED:
            forwards.append(do.Forward(producer.launch.sequence, launch.sequence, buffer, (slot,)))
            continue
        if buffer not in unresolved:
            assert producer.pending is not None
            producer.pending.consumers.setdefault(buffer, []).append(active)
        unresolved.setdefault(buffer, []).append(slot)
    return [do.Start(launch, tuple(slots)), *forwards]


def hand_over(active: ActiveLaunch, only_early: bool) -> tuple[list[do.Instruction], list[ActiveLaunch]]:
    """Forwards results to launches that wait for them, with `only_early` to those that go early. Returns the
    instructions, and the launches that now have all inputs."""
    made: list[do.Instruction] = []
    ready: list[ActiveLaunch] = []
    assert active.pending is not None or not active.results
    consumers = active.pending.consumers if active.pending is not None else {}
    for buffer, waiting in list(consumers.items()):
        served = [one for one in waiting if one.goes_early or not only_early]
        consumers[buffer] = [one for one in waiting if one not in served]
        for one in served:
            slots = tuple(one.unresolved.pop(buffer))
            made.append(do.Forward(active.launch.sequence, one.launch.sequence, buffer, slots))
            if not one.unresolved:
                ready.append(one)
    return made, ready
