"""Device memory: whether the results and temporaries of a launch fit beside the buffers that are there.

A *pool* is memory that devices share: an accelerator has its own, the virtual devices of one machine share the
machine's. A launch that does not fit waits while buffers of others, or launches under way, may give room; where they
cannot, it fails at once, and so does an upload that empty devices could not hold. Buffers count from the admission of
the launch that makes them until their handles are gone, and beside them the largest temporaries of the launches under
way. Memory that a host's process takes for itself does not count.

Most launches fit by far. They are taken off `slack`, a bound from below of the room in every pool, and nothing is added
up; when it is used up, the pools are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pathways_ray.controller.programs import BufferType, PlannedProgram
from pathways_ray.controller.state import Session, Tables
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.observe.why import bytes_text

WAIT_LIMIT_S = 60.0
"""A launch waits this long for memory; then it fails."""


MAX_PROGRAMS_AHEAD = 64
"""Those that wait in the memory of a launch are not passed where they are of more programs: adding up takes time."""


class Need(NamedTuple):
    """Bytes that a launch takes in a pool: its results without the arguments that it gives up, and its temporaries."""

    results: int
    temporaries: int


class Waiting(NamedTuple):
    """Since when a launch waits for room, and the pool that lacks it."""

    since: float
    pool: str


class Memory:
    """The pools of a cluster. `waiting` has the launches that wait for room, by session: its next one, and those that
    decide, which others may pass, each by its number. Sessions in `let_through` wait for their own launches only, one
    of which is then under way. `peaks` are the most bytes that sessions have held lately, or would have with their next
    launch, where memory is short. While `working`, a session is in the middle of its calls, and what these free
    is `owed` to others."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.waiting: dict[int, dict[int, Waiting]] = {}
        self.let_through: set[int] = set()
        self.peaks: dict[int, dict[str, int]] = {}
        self.limit_s = WAIT_LIMIT_S
        self.slack = 0
        self.working = self.owed = self._going_on = False

    def pools(self, placed: PlacedSlice) -> dict[str, int]:
        """The pools of known size that a slice lies in, each with the number of its devices there."""
        found: dict[str, int] = {}
        for device in placed.devices:
            host = self.tables.hosts.get(device.host)
            if host is not None and host.memory:
                pool = host.pool or str(device)
                found[pool] = found.get(pool, 0) + 1
        return found

    def capacity(self) -> dict[str, int]:
        """The bytes of each pool."""
        hosts = [host for host in self.tables.hosts.values() if host.memory]
        shared = {host.pool: host.memory for host in hosts if host.pool}
        return shared | {
            f"{host.host}.{k}": host.memory for host in hosts if not host.pool for k in range(host.devices)
        }

    def held(self, sessions: Iterable[Session]) -> dict[str, int]:
        """The bytes of sessions' buffers in each pool."""
        found: dict[str, int] = {}
        for session in sessions:
            for slice_id, held in session.held.items():
                place = session.places[slice_id]
                for pool, devices in self.pools(place).items():
                    found[pool] = found.get(pool, 0) + held * devices // place.mesh.size
        return found

    def temporaries(self) -> dict[str, int]:
        """The largest temporaries of launches under way in each pool: devices work on one launch at a time."""
        found: dict[str, int] = {}
        for program in {record.program.key: record.program for record in self.tables.in_flight.values()}.values():
            for pool, need in self.needs(program).items():
                found[pool] = max(found.get(pool, 0), need.temporaries)
        return found

    def needs(self, program: PlannedProgram) -> dict[str, Need]:
        """Bytes that a launch of a program takes."""
        places = {placed.mesh.id: placed for plan in program.plans.values() for placed in plan.slices}
        found: dict[str, Need] = {}
        for kind, sign in [(k, 1) for k in program.results] + [(program.arguments[k], -1) for k in program.donated]:
            place = places.get(kind.slice)
            for pool, devices in self.pools(place).items() if place is not None else ():
                results, temporaries = found.get(pool, Need(0, 0))
                found[pool] = Need(results + sign * kind.device_bytes * devices // place.mesh.size, temporaries)  # type: ignore[union-attr]
        for device in {device for placed in places.values() for device in placed.devices}:
            host = self.tables.hosts.get(device.host)
            if host is not None and host.memory and (each := program.temporary_bytes.get(device.host, 0)):
                pool = host.pool or str(device)
                results, temporaries = found.get(pool, Need(0, 0))
                found[pool] = Need(results, temporaries + each)
        return found

    # --- admission ----------------------------------------------------------------------------------------------------

    def take(self, session: Session, program: PlannedProgram, launch: int) -> Failure | bool:
        """Whether there is room for a launch, or for a part of it, which are of this program; a `Failure` where there
        never will be, or has not been for too long."""
        if program.most_bytes <= self.slack:
            self.slack -= program.most_bytes
            if self.waiting:
                self.waits_no_more(session.id, launch)
            return True
        capacity = self.capacity()
        needs = self.needs(program)
        held, temporaries = self.held(self.tables.sessions.values()), self.temporaries()
        mine, lacking = self.held([session]), ""
        self._note_peak(session, mine, needs)
        for pool, need in needs.items():
            room = capacity[pool] - held.get(pool, 0) - max(temporaries.get(pool, 0), need.temporaries)
            if not lacking and (need.results > max(room, 0) or (need.results + need.temporaries > 0 > room)):
                lacking = pool
        if not lacking:
            self.waits_no_more(session.id, launch)
            self._measure(capacity, held, temporaries, needs)
            return True
        need, own = needs[lacking], mine.get(lacking, 0)
        never = own + need.results + need.temporaries > capacity[lacking]
        if session.id in self.let_through and not session.in_flight and not never:
            self.waits_no_more(session.id, launch)
            return True
        waiting = self.waiting.setdefault(session.id, {})
        since = waiting[launch].since if launch in waiting else self.tables.now
        waiting[launch] = Waiting(since, lacking)
        if never or self.tables.now - since > self.limit_s:
            self.waits_no_more(session.id, launch)
            return self._failure(program, lacking, need, own, held.get(lacking, 0), never)
        return False

    def leaves_room(self, session: Session, program: PlannedProgram, ahead: Sequence[PlannedProgram]) -> bool:
        """Whether a launch leaves room for those of its session that it passes, beside what the session has: where it
        does not, they would fail for good, though there is room for all of them in their order."""
        # Each of them once: they may be many, and of few programs.
        times, distinct = Counter(one.key for one in ahead), list({one.key: one for one in ahead}.values())
        temporaries = _largest(
            part.devices * _largest(part.temporary_bytes.values())
            for each in (program, *distinct)
            for part in _parts(each)
        )
        results = _result_bytes(program) + sum(times[one.key] * _result_bytes(one) for one in distinct)
        if results + temporaries <= self.slack:
            return True
        where = self._where(program)
        near = [one for one in distinct if not where.isdisjoint(self._where(one))]
        if not near:
            return True
        if len(near) > MAX_PROGRAMS_AHEAD:
            return False
        others = [(times[one.key], self._largest_needs(one)) for one in near]
        own, capacity, needs = self.held([session]), self.capacity(), self._largest_needs(program)
        for pool, need in needs.items():
            sharing = [(count, each[pool]) for count, each in others if pool in each]
            results = need.results + sum(count * one.results for count, one in sharing)
            temporaries = max(need.temporaries, *(one.temporaries for _, one in sharing), 0)
            if sharing and own.get(pool, 0) + results + temporaries > capacity[pool]:
                return False
        return True

    def _largest_needs(self, program: PlannedProgram) -> dict[str, Need]:
        """Bytes that a launch of a program takes, or one of its parts at the most where it decides."""
        found: dict[str, Need] = {}
        for part in _parts(program):
            for pool, (results, temporaries) in self.needs(part).items():
                before = found.get(pool, Need(results, temporaries))
                found[pool] = Need(max(before.results, results), max(before.temporaries, temporaries))
        return found

    def _where(self, program: PlannedProgram) -> set[str | int]:
        """The pools of a program, and those of its hosts whose devices share none."""
        hosts = [self.tables.hosts.get(host) for part in _parts(program) for host in part.hosts]
        return {host.pool or host.host for host in hosts if host is not None}

    def _note_peak(self, session: Session, held: Mapping[str, int], needs: Mapping[str, Need]) -> None:
        peak = self.peaks.setdefault(session.id, {})
        for pool, need in needs.items():
            peak[pool] = max(peak.get(pool, 0), held.get(pool, 0) + need.results + need.temporaries)

    def closed(self, session: int) -> None:
        """Forgets a session that has ended."""
        self.waiting.pop(session, None)
        self.let_through.discard(session)
        self.peaks.pop(session, None)

    def freed(self) -> Iterator[list[Session]]:
        """Yields the sessions that may go on since something was freed. What one of them frees in turn is for the next
        round, since all of them are in the middle of it."""
        self.owed = True
        if self.working or self._going_on:
            return
        self._going_on = True
        try:
            while self.owed:
                self.owed = False
                if waiting := [self.tables.sessions[session] for session in self.waiting]:
                    yield waiting
        finally:
            self._going_on = False

    def longest(self, session: int) -> Waiting | None:
        """Returns the wait of the launch of a session that has waited longest."""
        return next(iter(self.waiting.get(session, {}).values()), None)

    def waits_no_more(self, session: int, launch: int) -> None:
        """A launch that may have waited for room has it, or has ended."""
        waiting = self.waiting.get(session)
        if waiting is not None and waiting.pop(launch, None) is not None and not waiting:
            del self.waiting[session]

    def _measure(
        self,
        capacity: Mapping[str, int],
        held: Mapping[str, int],
        temporaries: Mapping[str, int],
        taken: Mapping[str, Need],
    ) -> None:
        """Sets the slack to the least room of a pool once a launch has what it takes."""
        nothing = Need(0, 0)
        self.slack = min(
            (
                size
                - held.get(pool, 0)
                - taken.get(pool, nothing).results
                - max(temporaries.get(pool, 0), taken.get(pool, nothing).temporaries)
                for pool, size in capacity.items()
            ),
            default=1 << 62,
        )

    def changed(self) -> None:
        """Pools came or went, or something was put: the slack is worth nothing."""
        self.slack = 0

    def _failure(self, program: PlannedProgram, pool: str, need: Need, own: int, held: int, never: bool) -> Failure:
        capacity = self.capacity()[pool]
        why = "can never fit" if never else f"found no room for {self.limit_s:.0f} s"
        return Failure(
            "OutOfMemory",
            f"a launch of program {program.name!r} {why}: it takes {bytes_text(need.results)} for results and "
            f"{bytes_text(need.temporaries)} for temporaries on {_named(pool)}, which has {bytes_text(capacity)}; "
            f"{bytes_text(own)} of that hold this session's buffers, {bytes_text(max(held - own, 0))} those of others. "
            "Delete arrays, donate arguments, or use more devices",
        )

    def status(self) -> list[dict[str, object]]:
        """One entry for each pool: its bytes, those that buffers hold, and these by tenant."""
        capacity = self.capacity()
        tenants: dict[str, list[Session]] = {}
        for session in self.tables.sessions.values():
            tenants.setdefault(session.tenant.name, []).append(session)
        by_tenant = {name: self.held(mine) for name, mine in tenants.items()}
        return [
            {
                "pool": pool,
                "bytes": size,
                "held": sum(found.get(pool, 0) for found in by_tenant.values()),
                "tenants": {name: found[pool] for name, found in sorted(by_tenant.items()) if found.get(pool)},
            }
            for pool, size in sorted(capacity.items())
        ]


def never_holds(tables: Tables, placed: PlacedSlice, kind: BufferType) -> Failure | None:
    """The failure of an upload that the devices of its slice could not hold even if nothing else were there."""
    each = kind.device_bytes // placed.mesh.size
    asked: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for block in placed.blocks:
        for number in range(block.host, block.host + block.hosts):
            host = tables.hosts.get(number)
            if host is None or not host.memory:
                continue
            pool = host.pool or f"{number}.{block.index}"  # one device for all of the block: they are alike
            sizes[pool] = host.memory
            asked[pool] = asked.get(pool, 0) + each * (block.count if host.pool else 1)
    for pool, size in asked.items():
        if size > sizes[pool]:
            return Failure(
                "OutOfMemory",
                f"an upload of {kind.type} can never fit: it takes {bytes_text(size)} on {_named(pool)}, which has "
                f"{bytes_text(sizes[pool])}. Partition it over more devices, or put it in several parts",
            )
    return None


def _named(pool: str) -> str:
    return f"device {pool}" if "." in pool else "its devices' memory"


def _parts(program: PlannedProgram) -> tuple[PlannedProgram, ...]:
    """The parts of a program that go to islands one by one: all of it, or a segment of one that decides."""
    return program.segments or (program,)


def _result_bytes(program: PlannedProgram) -> int:
    return _largest(part.result_bytes for part in _parts(program))


def _largest(sizes: Iterable[int]) -> int:
    return max(sizes, default=0)
