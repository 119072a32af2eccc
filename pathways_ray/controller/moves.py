"""Slices that clients move, and those that have to: their island is drained, lost or gone.

A client moves a slice with launches of its own. Here it asks what lies on a slice, and, once all of that is on another
slice of the same mesh too, has the two *exchanged*: each gets the devices and the arrays of the other. So a move takes
effect at one point, and everything before that can fail without harm. Nothing of the session may be under way then.

Clients are told again and again which slices have to move: one that could not be, finds room later.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from pathways_ray import limits
from pathways_ray.controller import buffers
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import Buffer, Send, SendClient, Session
from pathways_ray.errors import Failure
from pathways_ray.story import Entry
from pathways_ray.transport import messages as wire

AGAIN_S = 5.0
"""Time between two messages to a client whose slices have to move."""

MAX_AWAY = limits.MAX_PLACES // 2
"""Slices of a suspended session that are remembered. What was left when it could not be resumed may be among them."""

HELD_AT_ONCE = 2048
"""Arrays that are looked at for one answer to `ListHeld`, in some 5 ms. All that a session may have take half a second
on a busy machine."""


class Moves:
    """Moves of slices.

    An island is lost once one of its hosts is away for `lost_after_s` seconds. `draining` are islands that are to be
    emptied, `gone` those that were ended with slices on them. `unheard` are those that sessions came back to and of
    which nobody has been heard since: they count as ended until then.
    """

    def __init__(self, launches: Launches) -> None:
        self.launches = launches
        self.lost_after_s = limits.LOST_AFTER_S
        self.draining: set[int] = set()
        self.gone: set[int] = set()
        self.unheard: set[int] = set()
        self.said = -math.inf

    # --- moves --------------------------------------------------------------------------------------------------------

    def held(self, session: Session, asked: wire.ListHeld) -> wire.Held:
        """The arrays on some slices of a session, or on any, as many as are told at once."""
        wanted = set(asked.slices) or session.places.keys()
        numbers = sorted(session.buffers)
        first = bisect_right(numbers, asked.after)
        looked = [(number, session.buffers[number]) for number in numbers[first : first + HELD_AT_ONCE]]
        found = tuple(
            wire.HeldBuffer(number, buffer.type.slice, buffer.type.type, buffer.type.spec)
            for number, buffer in looked
            if buffer.type.slice in wanted and buffer.failure is None
        )
        return wire.Held(found, looked[-1][0] if first + len(looked) < len(numbers) else 0)

    def busy(self, session: Session) -> Failure | None:
        """The reason for which a session's slices stay as they are for now: something is under way."""
        backlog = self.launches.backlog(session.id)
        if session.in_flight or backlog or session.donated:
            text = f"{session.in_flight} launches of the session are under way and {backlog} wait"
            return Failure("UsageError", f"slices are exchanged and given back when nothing is under way; {text}")
        return None

    def refusal(self, session: Session, pairs: Sequence[tuple[int, int]]) -> Failure | None:
        """The reason for which slices cannot be exchanged now."""
        named = [number for pair in pairs for number in pair]
        if len(set(named)) < len(named) or not pairs:
            return Failure("UsageError", f"slices {named} are not different ones")
        for one, other in pairs:  # the first one may have been given back, as those of a suspended session are
            a, b = session.mesh_of(one), session.mesh_of(other)
            if a is None or b is None or other not in session.slices:
                return Failure("UsageError", f"session {session.id} has no slice {one if a is None else other}")
            if (a.shape, a.axes) != (b.shape, b.axes):
                return Failure("UsageError", f"slice {one} has mesh {a}, and slice {other} has {b}")
            if not _lie_alike(session, one, other, pairs):
                text = f"slice {one} or slice {other} is a part of another one"
                return Failure("UsageError", f"{text}: it is exchanged for a part, with what both are parts of")
            if one not in session.slices and _has_a_pair(session, other):
                text = f"slice {other} is to take the place of another one, or another one its place"
                return Failure("UsageError", f"{text}: slice {one}, which was given back, cannot have its devices")
        gone = {one for one, _ in pairs if one not in session.slices}
        if gone and (left := gone & {buffer.type.slice for buffer in session.buffers.values()}):
            text = f"slices {sorted(left)} were released, and arrays on them stay where they are"
            return Failure("UsageError", f"{text}: drop them first")
        return self.busy(session)

    def exchange(self, session: Session, pairs: Sequence[tuple[int, int]]) -> list[Send]:
        """Gives each slice of a pair the devices and the arrays of the other; a first one that was given back is there
        again. A part that is not among them stays where it is, as a part of the slice that has its devices by then.
        Programs that name one of them are forgotten: the client registers them again, and they are planned for the new
        devices."""
        renamed = dict(pairs) | {other: one for one, other in pairs}
        commands: list[Send] = []
        for key, program in list(session.programs.items()):
            parts = program.parts
            meshes = {placed.mesh.id for part in parts for plan in part.plans.values() for placed in plan.slices}
            if not renamed.keys().isdisjoint(meshes):
                commands += self.launches.preparation.unregistered(session, key)
        for one, other in pairs:
            if one not in session.slices and other in session.names:
                session.names[one] = session.names[other]
        # The devices of one that was given back are others' by now: the second one of its pair stays where it is.
        stays = {other: one for one, other in pairs if one not in session.slices}
        session.replacing |= stays
        found = {n: (session.mesh_of(n), session.places.get(n)) for n in renamed}
        for one, other in renamed.items():
            mesh, there = found[one][0], found[other][1]
            if one not in stays and mesh is not None and there is not None:
                session.places[one] = session.slices[one] = there.on_devices_of(mesh)
        for one in stays.values():
            session.away.pop(one, None)
        first_of = {other: one for one, other in pairs}
        back = {one: first_of[session.parts[other]] for other, one in stays.items() if other in session.parts}
        swapped = {n: m for n, m in renamed.items() if n not in stays and m not in stays}
        wholes = {part: session.parts[swapped.get(part, part)] for part in session.parts}
        session.parts = {part: swapped.get(whole, whole) for part, whole in wholes.items()} | back
        session.held |= {one: session.held.get(other, 0) for one, other in renamed.items()}
        for buffer in session.buffers.values():
            rename(buffer, renamed)
        for one, _ in pairs:
            where = f"slice {one} to island {session.places[one].island}"
            self.launches.story.note(Entry(self.launches.tables.now, "slice moved", where, session=session.id))
        return commands

    def suspend(self, session: Session, gives_way: bool = False) -> list[Send]:
        """Frees all arrays of a session, and forgets its slices. Their meshes, and its programs, stay. `gives_way`
        where it is suspended for another session, and not by its user."""
        commands = buffers.free(self.launches.tables, session, list(session.buffers))
        # Not those that were made to take the place of others, when it was about to be resumed: nobody wants them back.
        wanted = {n: placed.mesh for n, placed in session.slices.items() if n not in session.replacing}
        session.away = dict(list((session.away | wanted).items())[-MAX_AWAY:])
        for number in [number for number in session.slices if number not in session.parts]:
            self.launches.remove_slice(session.id, number)
        self.launches.admission.memory.changed()
        session.gives_way = gives_way  # not any more, where no island can hold its slices
        if not session.suspended:  # else its client begins to resume it
            session.suspended = True
            self.launches.story.note(Entry(self.launches.tables.now, "session suspended", session=session.id))
        return commands

    def forget_places(self, session: Session) -> None:
        """Forgets the older half of the released slices that nothing of a session names any more, once it has
        `MAX_PLACES`: each move and each resumption makes slices, and gives them back. Messages that are on their way
        may name the newer ones."""
        if len(session.places) < limits.MAX_PLACES:
            return
        flying = [record for record in self.launches.in_flight.values() if record.session == session.id]
        programs = [*session.programs.values(), *(record.program for record in flying)]
        programs += [record.whole.program for record in flying if record.whole is not None]
        named = _slices_in(programs) | session.slices.keys() | session.away.keys()
        named |= {buffer.type.slice for held in (session.buffers, session.donated) for buffer in held.values()}
        named |= {number for number, size in session.held.items() if size}
        free = [number for number in session.places if number not in named]
        for number in free[: (len(free) + 1) // 2]:
            del session.places[number]
            session.held.pop(number, None)

    # --- slices that have to move -------------------------------------------------------------------------------------

    def ended(self, island: int) -> bool:
        """An island was ended; returns whether no session has a slice there."""
        self.draining.discard(island)
        if any(placed.island == island for s in self.launches.sessions.values() for placed in s.slices.values()):
            self.gone.add(island)
        self.said = -math.inf
        return island not in self.gone

    def leaving(self, island: int) -> str:
        """The reason for which slices have to leave an island, in words; "" where they may stay."""
        if island in self.draining:
            return "is drained"
        if island in self.gone or island in self.unheard:
            return "was removed"
        return "is lost" if island in self._lost(self.launches.tables.now) else ""

    def heard_of(self, island: int) -> None:
        """The scheduler of an island has come. Its hosts are waited for from now on."""
        if island not in self.unheard:
            return
        self.unheard.discard(island)
        self.said = -math.inf
        for host in self.launches.hosts.values():
            if host.island == island and host.down_since is not None:
                host.down_since = self.launches.tables.now

    def drained(self, island: int) -> None:
        """An island is to be emptied."""
        self.draining.add(island)
        self.said = -math.inf

    def tick(self, now: float) -> tuple[list[Send], list[int]]:
        """Time passes: tells clients which slices have to move. Returns islands too that are gone and have none."""
        if now - self.said < AGAIN_S:
            return [], []
        self.said = now
        empty = sorted(self.draining | self.gone | self.unheard | self._lost(now))
        commands: list[Send] = []
        left: set[int] = set()
        for session in self.launches.sessions.values():
            found = [n for n, placed in session.slices.items() if placed.island in empty]
            session.vacates = bool(found)
            left |= {session.slices[n].island for n in found}
            if whole := tuple(n for n in found if n not in session.parts):
                commands.append(SendClient(session.id, wire.Vacate(whole)))
        over = sorted((self.gone | self.unheard) - left)
        self.gone &= left
        self.unheard &= left
        return commands, over

    def _lost(self, now: float) -> set[int]:
        hosts = self.launches.hosts
        away = [hosts[host] for host in self.launches.away]
        return {h.island for h in away if h.down_since is not None and now - h.down_since > self.lost_after_s}


def _lie_alike(session: Session, one: int, other: int, pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether both slices of a pair are parts, of slices that are exchanged too, or neither is. A slice would become a
    part of itself otherwise, or lie on devices that nobody counts. A first one that was given back is what the second
    one is, so only that one's slice has to be exchanged too."""
    if one not in session.slices:
        return other not in session.parts or session.parts[other] in [second for _, second in pairs]
    wholes = _whole_of(session, one), _whole_of(session, other)
    if one not in session.parts or other not in session.parts:
        return wholes == (one, other)
    return wholes[0] == wholes[1] or wholes in pairs


def _has_a_pair(session: Session, number: int) -> bool:
    """Whether a slice is to take the place of another one that is there, or has a successor. If a slice that was given
    back got its devices, that one could be replaced too, and so on beyond every quota."""
    return session.replacing.get(number) in session.slices or number in session.replacing.values()


def _whole_of(session: Session, number: int) -> int:
    """The slice that a part lies in, through all parts between them; of any other slice, itself."""
    while number in session.parts:
        number = session.parts[number]
    return number


def _slices_in(programs: Iterable[PlannedProgram]) -> set[int]:
    """The slices that programs name."""
    found: set[int] = set()
    for part in (part for program in programs for part in (program, *program.parts)):
        found.update(kind.slice for kind in (*part.arguments, *part.results))
        found.update(placed.mesh.id for plan in part.plans.values() for placed in plan.slices)
    return found


def rename(buffer: Buffer, slices: dict[int, int]) -> None:
    """Has an array lie on the slice that got its devices."""
    if (target := slices.get(buffer.type.slice)) is not None:
        buffer.type = msgspec.structs.replace(buffer.type, slice=target)
