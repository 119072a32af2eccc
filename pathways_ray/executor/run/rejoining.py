"""A host whose scheduler or controller is another one: it says what it holds and has heard, and takes what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from pathways_ray.executor.run import instructions as do
from pathways_ray.executor.run.active_launch import ActiveLaunch
from pathways_ray.executor.run.early import EarlyLaunches
from pathways_ray.executor.run.journal import Journal, is_counted
from pathways_ray.executor.run.preparation import Preparation
from pathways_ray.story import Entry, Story
from pathways_ray.transport import messages as wire
from pathways_ray.transport.messages import Holds, Stored


@dataclass(frozen=True)
class Rejoining:
    """The part of a host's core that joins successors.

    Args:
        multi_host: its island has several hosts.
        active: the launches that something has stopped.
    """

    host: int
    multi_host: bool
    active: Mapping[int, ActiveLaunch]
    preparation: Preparation
    journal: Journal
    early: EarlyLaunches
    story: Story

    def scheduler_found(self, now: float) -> list[do.Instruction]:
        """The scheduler has died, and its successor answers. It hears once more where launches wait for the others."""
        heard = self.journal.heard(self.active) if self.multi_host else None
        made = self._rejoin("joins its scheduler's successor", now, heard)
        for sequence, active in self.active.items():
            barrier = active.barrier
            if barrier is not None and barrier.rendezvous and barrier.number == active.arrived:
                made.append(do.Send(wire.BarrierReached(self.host, sequence, barrier.number, active.brought)))
        return made + self.early.allow("")

    def recount(self, message: wire.Recount, now: float) -> list[do.Instruction]:
        """Another controller asks what is here."""
        return self.early.controller_lost(frozenset(message.waiting)) + self._rejoin("says what it holds", now)

    def catch_up(
        self, message: wire.CatchUp, handle: Callable[[do.Event, float], list[do.Instruction]], now: float
    ) -> list[do.Instruction]:
        """Takes what other hosts of the island have heard of, and this one has not: `handle` does."""
        first, made = message.first, list[do.Instruction]()
        for k, one in enumerate(message.messages, 1):
            first += is_counted(one)
            lacks = first - self.journal.count
            if lacks > 0 or (lacks == 0 and not is_counted(one)):
                made += handle(one, now)
                if not is_counted(one):  # its launches follow, and it is ready once that is carried out
                    return [*made, do.GoOn(do.CatchingUp(wire.CatchUp(first, message.messages[k:])))]
        return made + self._rejoin("has heard what all others have", now)

    def _rejoin(self, what: str, now: float, heard: wire.Heard | None = None) -> list[do.Instruction]:
        self.story.note(Entry(now, what, host=self.host))
        coming: dict[int, tuple[int, ...]] = {}
        for active in self.active.values():
            session = active.launch.session
            coming[session] = (*coming.get(session, ()), *active.results)
        for session, _ in self.early.taken:  # one that makes nothing here has to be forgotten too, once that is over
            coming.setdefault(session, ())
        programs = tuple(sorted(self.preparation.wanted | self.preparation.programs.keys()))
        journal = self.journal
        offered = tuple(journal.offered)
        return [do.Rejoin(coming, programs, journal.last_sequence, heard, journal.since, offered)]


def with_uploads(holds: Holds, said: Iterable[Stored]) -> Holds:
    """Adds the uploads that a host has reported to what it holds, as far as they are among its buffers."""
    there = tuple(one for one in said if one.buffer in holds.buffers.get(one.session, ()))
    return msgspec.structs.replace(holds, uploads=there)


def stored_since(known: Holds, said: Iterable[Stored], held: Mapping[int, tuple[int, ...]]) -> list[Stored]:
    """The uploads that a host has reported and still has, beyond those that it says in `known`."""
    before = {(one.session, one.buffer) for one in known.uploads}
    return [one for one in said if one.buffer in held.get(one.session, ()) and (one.session, one.buffer) not in before]
