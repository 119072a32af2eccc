"""The policy "preempt": sessions give way to others that find no memory, and come back when it is their turn.

A launch that waits for memory has another session *give way*: its client suspends it, its calls wait meanwhile, and its
devices are free. One of a lower priority gives way soon; any other one after a turn, so that those whose arrays do not
fit beside each other take turns, whatever their priorities. What a session that gives way has under way already is let
through one by one where it finds no room either, or two that wait for each other would wait for ever.

One that does not give way in its time stays, and others are asked before it. To a session of a higher priority it ends,
or a client that does nothing would keep that one out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pathways_ray.controller.memory import Memory
from pathways_ray.controller.state import Send, SendClient, Session, Tables
from pathways_ray.story import Entry
from pathways_ray.transport import messages as wire

PATIENCE_S = 1.0
"""A launch waits this long for memory before a session of a lower priority gives way to it."""

STAY_S = 5.0
"""A session that has come back stays for so long, whatever the priority of who waits."""

TURN_S = 30.0
"""After this time in which it had to wait, a session may have one of its own or of a higher priority give way, if that
one has been there for as long."""

AGAIN_S = 5.0
"""Time between two messages to a client that has not done what it was asked for."""

ASKED = 6
"""Messages that a client gets at least before it is late: time may pass while this process stands still."""

GIVE_WAY_LIMIT_S = 60.0
"""A session has this time to give way once no call of it is under way, and `SAVED_BYTES_S` for what it holds."""

SAVED_BYTES_S = 64 << 20
"""Bytes that a client is to save in a second."""

WORK_LIMIT_S = 180.0
"""A session with calls under way has this time in all, and as much for what it holds."""

MEMORY_LIMIT_S = 300.0
"""A launch waits this long for memory where sessions give way."""

PRESSED_S = 240.0
"""Once a launch has waited for so long, a session that gives way to it has no more time than `GIVE_WAY_LIMIT_S` in all:
what it holds after that would be of no use to the launch, which fails."""


@dataclass
class Way:
    """A session that gives way.

    Attributes:
        to: the session that it gives way to
        since: when it was asked
        room: the bytes in each pool that it takes to go on
        asked: when its client was told last
        times: how often
        worked: when calls of it were last seen under way
        away: whether it is suspended
        back: whether it is on its way back
        called: since when
        resumed: since when it is not suspended any more
    """

    to: int
    since: float
    room: Mapping[str, int]
    asked: float
    times: int = 1
    worked: float = -math.inf
    away: bool = False
    back: bool = False
    called: float = math.inf
    resumed: float = math.inf


class Wanting(NamedTuple):
    """A session that wants memory in some pools, and since when; `is_away` when it gave way and wants to come back."""

    session: Session
    since: float
    pools: Mapping[str, int]
    is_away: bool


class Preemption:
    """Decides who gives way, and who comes back. `giving` are the sessions that give way, or are away for it.

    `late` are those that are to end, with the reason, until somebody ends them: they have not given way to one of a
    higher priority.

    Args:
        calls: how many of a session wait at the controller.
    """

    def __init__(self, tables: Tables, memory: Memory, calls: Callable[[int], int]) -> None:
        self.tables, self.memory, self.calls = tables, memory, calls
        self.enabled = False
        self.giving: dict[int, Way] = {}
        self.late: dict[int, str] = {}
        self.came: dict[int, float] = {}

    def enable(self) -> None:
        """Has sessions give way from now on; launches wait for memory for as long as that may take."""
        self.enabled = True
        self.memory.limit_s = MEMORY_LIMIT_S

    def tick(self, now: float) -> list[Send]:
        """Time passes: returns what clients are told."""
        if not self.enabled:
            return []
        commands = self._looked_after(now)
        if not self.giving and not self.memory.waiting:
            self.memory.peaks.clear()
            return commands
        capacity = self.memory.capacity()
        held = self._held(now, capacity)
        kept = set[str]()
        for one in sorted(self._wanting(), key=lambda w: (-w.session.tenant.priority, w.since)):
            if not one.is_away and one.session.id in self.giving:
                continue  # one before it has it give way
            if one.is_away and self._goes_first(self.giving[one.session.id]):
                continue
            pools = {pool for pool, size in one.pools.items() if size}
            if pools & kept:
                continue  # it would take the room of one before it
            found = self._served(one, now, held, capacity)
            commands += found
            if not found and one.is_away:
                kept |= pools
        return commands

    def ask(self, session: Session, to: Session, now: float) -> list[Send]:
        """Has a session give way to another one."""
        self.giving[session.id] = Way(to.id, now, self._room(session, self.memory.capacity()), now)
        self.memory.let_through.add(session.id)
        whose = f"to session {to.id} of tenant {to.tenant.name}, which waits for memory"
        self._note("session gives way", session, whose, private=to.tenant.name != session.tenant.name)
        return [SendClient(session.id, wire.GiveWay(False))]

    def to(self, session: int) -> int:
        """The session that a session gives way to; 0 if it does not."""
        way = self.giving.get(session)
        return way.to if way is not None else 0

    def for_session(self, session: int) -> int:
        """The session that is being suspended for this one; 0 without one."""
        return next((number for number, way in self.giving.items() if way.to == session and not way.away), 0)

    def _looked_after(self, now: float) -> list[Send]:
        """Notes who has gone and who has come, and tells again who has not done so yet."""
        commands: list[Send] = []
        sessions = self.tables.sessions
        for late in [one.id for one in sessions.values() if one.gives_way and one.id not in self.giving]:
            self.giving[late] = Way(0, now, {}, now)  # its client took longer than it may
        for number, way in list(self.giving.items()):
            session = sessions.get(number)
            # A session that has to leave an island does that first: what it waits for there may never come.
            leaves = session is not None and session.vacates and not way.away
            if session is not None and (session.in_flight or self.calls(number)):
                way.worked = now
            if session is None or leaves or self._is_over(way, session, now):
                del self.giving[number]
                self.memory.let_through.discard(number)
                self.came[number] = now
            elif now - way.asked > AGAIN_S and way.away == way.back:
                way.asked, way.times = now, way.times + 1
                commands.append(SendClient(number, wire.GiveWay(way.back)))
            if way.away:
                self.memory.let_through.discard(number)
        self.came = {number: at for number, at in self.came.items() if number in sessions}
        return commands

    def _held(self, now: float, capacity: Mapping[str, int]) -> dict[str, int]:
        """The bytes in each pool that sessions take to go on, those on their way back as well: for as long as that may
        take, or a client that does not resume its session would keep others out."""
        found: dict[str, int] = {}
        for session in self.tables.sessions.values():
            way = self.giving.get(session.id)
            room = self._room(session, capacity) if not session.suspended else {}
            comes = way is not None and way.back and now - way.called <= _time_for(sum(way.room.values()))
            coming = way.room if way is not None and comes else {}
            for pool in {**room, **coming}:
                found[pool] = found.get(pool, 0) + max(room.get(pool, 0), coming.get(pool, 0))
        return found

    def _room(self, session: Session, capacity: Mapping[str, int]) -> dict[str, int]:
        """The bytes in each pool that a session takes to go on: what it holds, or did lately at the most. No more than
        there are: uploads and launches that never fit would have it keep others out for as long as they would take."""
        held, peak = self.memory.held([session]), self.memory.peaks.get(session.id, {})
        most = {pool: max(held.get(pool, 0), peak.get(pool, 0)) for pool in held | peak}
        return {pool: min(size, capacity.get(pool, size)) for pool, size in most.items()}

    def _is_over(self, way: Way, session: Session, now: float) -> bool:
        """Whether a session is back, cannot give way, or was suspended by its user meanwhile. It is suspended again
        where its client could not resume it."""
        if session.suspended:
            way.back = way.back and way.resumed == math.inf
            way.away, way.resumed = True, math.inf
            return not session.gives_way
        if not way.away:
            if late := self._is_late(way, session, now):
                self._stays(way, session, now)
            return late
        way.resumed = min(way.resumed, now)
        if now - way.resumed <= AGAIN_S or session.arriving:
            return False
        self._note("session came back", session, f"after {now - way.since:.0f} s")
        return True

    def _is_late(self, way: Way, session: Session, now: float) -> bool:
        """Whether a session had its time to give way."""
        asked_s, quiet_s = now - way.since, now - max(way.since, way.worked)
        limit = _time_for(sum(self.memory.held([session]).values()))
        waiting = self.memory.longest(way.to)
        pressed = waiting is not None and now - waiting.since > PRESSED_S and asked_s > GIVE_WAY_LIMIT_S
        over = pressed or quiet_s > limit or asked_s > limit + WORK_LIMIT_S - GIVE_WAY_LIMIT_S
        return over and way.times >= ASKED

    def _stays(self, way: Way, session: Session, now: float) -> None:
        """A session has not given way: it ends, if one of a higher priority still waits."""
        self._note("session did not give way", session, f"within {now - way.since:.0f} s")
        other = self.tables.sessions.get(way.to)
        if other is None or other.id not in self.memory.waiting:
            return
        if other.tenant.priority > session.tenant.priority:
            self.late[session.id] = (
                f"it has not given way within {now - way.since:.0f} s to another session, which has a higher priority "
                "and waits for memory; a client has to save what its session holds when it is asked to"
            )

    def _wanting(self) -> Iterator[Wanting]:
        sessions = self.tables.sessions
        for number, waiting in self.memory.waiting.items():
            if number in sessions and number not in self.giving and self.enabled:
                since = next(iter(waiting.values())).since
                yield Wanting(sessions[number], since, {one.pool: 1 for one in waiting.values()}, False)
        for number, way in self.giving.items():
            if way.away and not way.back:
                yield Wanting(sessions[number], way.since, way.room, True)

    def _goes_first(self, way: Way) -> bool:
        """Whether the session that another one gave way to has not had its turn yet."""
        other = self.giving.get(way.to)
        waits = other is not None and other.away and not other.back and other.since < way.since
        return waits or way.to in self.memory.waiting

    def _served(self, one: Wanting, now: float, held: dict[str, int], capacity: Mapping[str, int]) -> list[Send]:
        """Has who wants memory come back, where there is room, or others give way to it, where they may."""
        # Alone it may come, whatever it holds: uploads are not held against the room that there is.
        full = {pool for pool, size in one.pools.items() if 0 < held.get(pool, 0) > capacity.get(pool, math.inf) - size}
        if one.is_away and not full:
            way = self.giving[one.session.id]
            way.back, way.asked, way.called = True, now, now
            for pool, size in way.room.items():
                held[pool] = held.get(pool, 0) + size
            return [SendClient(one.session.id, wire.GiveWay(True))]
        if any(way.to == one.session.id and not way.away for way in self.giving.values()):
            return []
        pools = full if one.is_away else set(one.pools)
        able = [other for other in self.tables.sessions.values() if self._may_displace(one, other, pools, now)]
        if not able:
            return []
        return self.ask(min(able, key=lambda s: (s.tenant.priority, self.came.get(s.id, 0.0))), one.session, now)

    def _may_displace(self, one: Wanting, other: Session, pools: set[str], now: float) -> bool:
        if other.id == one.session.id or other.id in self.giving or other.suspended or other.vacates:
            return False
        held = self.memory.held([other])
        if not any(held.get(pool, 0) for pool in pools):
            return False
        mine, theirs = one.session.tenant.priority, other.tenant.priority
        # One that waits for memory itself makes nothing of its turn.
        higher = mine > theirs or (mine == theirs and other.id in self.memory.waiting)
        waited, stayed = now - one.since, now - self.came.get(other.id, -math.inf)
        return waited >= (PATIENCE_S if higher else TURN_S) and stayed >= (STAY_S if higher else TURN_S)

    def _note(self, what: str, session: Session, detail: str, private: bool = False) -> None:
        self.tables.story.note(Entry(self.tables.now, what, detail, session=session.id, private=private))


def _time_for(size: int) -> float:
    """Seconds that a client has to save so many bytes, or to bring them back."""
    return GIVE_WAY_LIMIT_S + size / SAVED_BYTES_S
