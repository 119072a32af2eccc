"""The controller's tables: sessions, buffers, launches in flight, hosts; and the messages that it sends."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pathways_ray import limits
from pathways_ray.controller.circuit_breaker import CircuitBreaker
from pathways_ray.controller.lifecycle import LaunchState
from pathways_ray.controller.programs import BufferType, PlannedProgram
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.script import Course
from pathways_ray.ir.types import SliceType
from pathways_ray.observe.recorder import Recorder
from pathways_ray.scheduler.policies import Ledger, Usage
from pathways_ray.story import Story
from pathways_ray.transport.messages import Following, HeldSlice, HostInfo, Stored, ToClient, ToIsland

MAX_FAILED = 4096
"""Launches that failed lately, of which their programs are remembered."""


class SendIsland(msgspec.Struct, frozen=True):
    """A message for the scheduler of an island."""

    island: int
    message: ToIsland


class SendClient(msgspec.Struct, frozen=True):
    """A message for the client of a session."""

    session: int
    message: ToClient


Send = SendIsland | SendClient


class Buffer(msgspec.Struct, eq=False, gc=False):
    """One logical array: its type, the launch that makes it (0: it is there), why it failed; `freed` while donated."""

    type: BufferType
    producer: int
    failure: Failure | None = None
    freed: bool = False


class RefusedResults(NamedTuple):
    """Buffers from number `first` up to `end` that are not there."""

    first: int
    end: int
    failure: Failure


MAX_REFUSED = limits.MAX_LAUNCHES_IN_FLIGHT
"""Refused launches that a session remembers: a client has no more under way when it hears that one was refused."""

MAX_NAMED = 16384
"""Uploads of a session that are remembered as named. An older one that its client has yet to name counts as named too:
threads that began uploads behind it have named as many meanwhile."""


class Named:
    """The uploads that a client has named, by number: those up to `before`, and further ones, which its threads name in
    any order."""

    def __init__(self, before: int = 0) -> None:
        self.before = before
        self.latest: dict[int, None] = {}

    def add(self, number: int) -> None:
        self.latest[number] = None
        if len(self.latest) > MAX_NAMED:
            first = next(iter(self.latest))
            del self.latest[first]
            self.before = max(self.before, first)

    def __contains__(self, number: int) -> bool:
        return number <= self.before or number in self.latest


class Arriving(msgspec.Struct):
    """An upload on its way: the hosts that have yet to report it, and the incarnations that it went to, by host; by
    position in its mesh, a host that has reported a box that others hold as well, and the digest of its bytes there."""

    hosts: set[int]
    epochs: Mapping[int, int]
    digests: dict[int, tuple[int, bytes]] = msgspec.field(default_factory=dict)


@dataclass(slots=True)
class Session:
    """One connection of a tenant.

    `places` remembers released slices too, those released last at the end, since buffers may outlive them
    (`Moves.forget_places`); `names` has what users call slices, `parts`, for slices that are parts of others, those,
    and `replacing`, for slices that are to take the place of others, those.
    `arriving` has the buffers that its client uploads and that some hosts have yet to report; `early` what hosts
    reported of buffers that the client has not named yet; `burnt` numbers of uploads that were dropped before they had
    arrived (see `buffers`), `named` those that the client has named. `held` are the bytes of its buffers on the devices
    of each slice, `array_bytes` those of the arrays themselves, `charged_bytes` those that count against the tenant's
    quota, `in_flight` counts its launches on islands. `refused` are the last buffers that are not there because they
    were refused, in the order of their numbers, `donated` those whose memory a launch may take. Buffers between the
    parts of a launch have negative numbers, from `own_numbers` up. `plan_bytes` are those of the plans of its programs.
    `naming` counts the plans that name a function, `unnamed` are those of which the last one went since `Registration`
    looked.
    While it is `suspended` it has neither slices nor buffers; `gives_way` where that is for another session. `away` has
    the meshes of slices that it had when it was suspended, and that have not come back.
    While it `vacates`, slices of it have to leave an island.
    """

    id: int
    tenant: Tenant
    usage: Usage
    slices: dict[int, PlacedSlice] = field(default_factory=dict)
    places: dict[int, PlacedSlice] = field(default_factory=dict)
    away: dict[int, SliceType] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)
    replacing: dict[int, int] = field(default_factory=dict)
    programs: dict[int, PlannedProgram] = field(default_factory=dict)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    arriving: dict[int, Arriving] = field(default_factory=dict)
    early: dict[int, dict[int, Stored]] = field(default_factory=dict)
    burnt: dict[int, None] = field(default_factory=dict)
    named: Named = field(default_factory=Named)
    refused: list[RefusedResults] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    donated: dict[int, Buffer] = field(default_factory=dict)
    in_flight: int = 0
    array_bytes: int = 0
    charged_bytes: int = 0
    own_numbers: int = 0
    plan_bytes: int = 0
    naming: Counter[str] = field(default_factory=Counter)
    unnamed: set[str] = field(default_factory=set)
    suspended: bool = False
    gives_way: bool = False
    vacates: bool = False

    @property
    def device_bytes(self) -> int:
        """Bytes of its buffers on devices."""
        return sum(self.held.values())

    def mesh_of(self, number: int) -> SliceType | None:
        """The mesh of a slice that it has, or has had."""
        place = self.places.get(number)
        return place.mesh if place is not None else self.away.get(number)

    def lives(self, number: int) -> bool:
        """Whether a number stands for a buffer that is there or will be, or may come back from a launch."""
        buffer = self.buffers.get(number)
        return buffer.failure is None if buffer is not None else number in self.donated

    def keep(self, number: int, buffer: Buffer) -> None:
        """Enters a buffer under the client's number for it."""
        if (before := self.buffers.get(number)) is not None:
            self.array_bytes -= before.type.array_bytes
        self.buffers[number], kind = buffer, buffer.type
        self.array_bytes += kind.array_bytes
        if buffer.failure is None:
            self.held[kind.slice] = self.held.get(kind.slice, 0) + kind.device_bytes
            self.charged_bytes += kind.charged_bytes

    def find(self, number: int) -> Buffer | None:
        """A buffer that is in the table, or was donated to a launch that has not ended."""
        return self.buffers.get(number) or self.donated.get(number)

    def forget(self, number: int) -> Buffer | None:
        """Takes a buffer out of the table; None when it has no such buffer."""
        if (buffer := self.buffers.pop(number, None)) is not None:
            kind = buffer.type
            self.array_bytes -= kind.array_bytes
            if buffer.failure is None:
                self.held[kind.slice] -= kind.device_bytes
                self.charged_bytes -= kind.charged_bytes
        return buffer

    def count_plans(self, program: PlannedProgram, sign: int = 1) -> None:
        """Counts the plans of a program that is new, or, with a sign of -1, is to be forgotten, and what it names."""
        for message in (message for part in program.parts for message in part.messages.values()):
            self.plan_bytes += sign * len(message.plan)
            for digest in message.functions:
                self.naming[digest] += sign
                if not self.naming[digest]:
                    del self.naming[digest]
                    self.unnamed.add(digest)

    def refuse(self, first: int, count: int, failure: Failure) -> None:
        """Notes that buffers from number `first` on will not be: one entry however many they are, since a launch of 13
        bytes may name thousands."""
        if count:
            insort(self.refused, RefusedResults(first, first + count, failure), key=lambda entry: entry.first)
            if len(self.refused) > MAX_REFUSED:
                del self.refused[0]  # clients count up

    def why_refused(self, number: int) -> Failure | None:
        """The failure of a buffer that was refused not long ago."""
        place = bisect_right(self.refused, number, key=lambda entry: entry.first)
        return self.refused[place - 1].failure if place and number < self.refused[place - 1].end else None

    def fail(self, number: int, buffer: Buffer, failure: Failure) -> None:
        """Marks a buffer that will not be: it takes no memory."""
        buffer.producer = 0
        if buffer.failure is None and self.donated.get(number) is not buffer:
            self.held[buffer.type.slice] -= buffer.type.device_bytes
            self.charged_bytes -= buffer.type.charged_bytes
        buffer.failure = failure


PART_COST_S = 0.25
"""Beside its time on the devices, a part counts for the launch limit with the time until its outcome, up to this: an
endless loop of nothing has to end as well, and a launch that waits behind others has not used that time."""


class Whole(msgspec.Struct, eq=False):
    """A launch of `program` that goes to its islands in parts, as values decide (`decisions.Decisions`).

    `segment` is the one that goes next; `flying` has the parts without an outcome, by sequence, with their segments;
    `spent_s` is what the others took, `at` when the last of them ended, or the launch began. It is `closed` when there
    will be no further one. `foreseen` has what hosts may begin by the next value, by segment. `results` and `islands`
    are those of the last part, `consumed` and `undecided` what parts did with donated arguments.
    """

    launch: int
    program: PlannedProgram
    course: Course
    at: float
    segment: int = 0
    flying: dict[int, int] = msgspec.field(default_factory=dict)
    closed: bool = False
    foreseen: dict[int, Following] = msgspec.field(default_factory=dict)
    failure: Failure | None = None
    results: range = range(0)
    islands: tuple[int, ...] = ()
    consumed: set[int] = msgspec.field(default_factory=set)
    undecided: set[int] = msgspec.field(default_factory=set)
    device_us: int = 0
    spent_s: float = 0.0

    def begun(self, record: InFlight) -> None:
        """Notes that a part is on its islands."""
        record.whole = self
        self.flying[record.sequence] = self.segment

    def ended(self, record: InFlight, now: float) -> bool:
        """Notes that a part has ended; returns whether that was all. What it waited for others is not its own time, and
        what several parts took at once counts once."""
        self.flying.pop(record.sequence, None)
        busy_s = record.device_seconds / record.program.devices
        self.spent_s += min(now - max(record.at, self.at), busy_s + PART_COST_S)
        self.at = now
        self.device_us += round(1e6 * busy_s)
        if record.failure is None:
            self.consumed.update(record.donated)
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether no part is under way, and none will be."""
        return self.closed and not self.flying

    def failed(self, failure: Failure, consumed: Iterable[int], undecided: Iterable[int]) -> None:
        """Notes that a part has failed, and what of its donated arguments it took. The first failure that names a node
        is the launch's."""
        if self.failure is None or (failure.node and not self.failure.node):
            self.failure = failure
        self.consumed.update(consumed)
        self.undecided.update(undecided)


class InFlight(msgspec.Struct, eq=False):
    """A launch on its islands.

    `made` are its results, under the numbers from `results` on. `pending` are the islands that have not reported,
    `failed_on` those that reported a failure. `donated` are the buffers whose memory it may take, `consumed` those of
    which an island said that it has. It is `cancelled` once its islands have been told so. `carried` are the bytes on
    devices of arguments that came with it, which count until it is over. `producers` are launches it consumes from that
    had no outcome at admission, `consumers` those that consume from it in turn, `dependents` those of them that failed
    and wait for its outcome; `root` is the failure of the first producer that failed. `at` is when it was admitted.
    `device_seconds` is its device time so far, `estimate` what its tenant was charged in advance. `next_gang` and
    `awaiting` serve sequential dispatch. It may be a part of `whole`.
    """

    sequence: int
    session: int
    usage: Usage
    launch: int
    program: PlannedProgram
    results: int
    arguments: tuple[int, ...]
    made: list[Buffer]
    pending: set[int]
    producers: tuple[int, ...]
    state: LaunchState
    at: float = 0.0
    estimate: float = 0.0
    device_seconds: float = 0.0
    donated: tuple[int, ...] = ()
    carried: int = 0
    consumed: set[int] = msgspec.field(default_factory=set)
    cancelled: bool = False
    failed_on: set[int] = msgspec.field(default_factory=set)
    next_gang: int = 0
    awaiting: set[int] = msgspec.field(default_factory=set)
    failure: Failure | None = None
    root: Failure | None = None
    whole: Whole | None = None
    dependents: list[int] = msgspec.field(default_factory=list)
    consumers: list[int] = msgspec.field(default_factory=list)

    @property
    def is_part(self) -> bool:
        """Whether it is one of several parts of a launch, and not the last of them, which has its number."""
        return self.whole is not None and self.launch != self.whole.launch


@dataclass(slots=True)
class HostState:
    """A host as last heard of; `down_since` is None while it is up. It has seen no launch up to number `since`.

    `memory` are the bytes of each of its devices, or those that all devices of `pool` share; 0 is unknown. `info` is
    what it told the resource manager when it joined, None of one that was only expected. One that is `orphaned` has
    lost its scheduler alone: it is down until it joins the successor, and keeps what it holds.
    """

    host: int
    island: int
    epoch: int
    transfer_address: str
    data_address: str
    devices: int
    pid: int
    down_since: float | None = None
    since: int = 0
    memory: int = 0
    pool: str = ""
    info: HostInfo | None = None
    orphaned: bool = False
    machine: str = ""


@dataclass
class Tables:
    """The state that admission, dispatch, outcomes and hosts share.

    `failed` has the programs of launches that failed lately, `programs` are all by their key, `away` the hosts that are
    down, `schedulers` the islands whose scheduler has joined, `sequence` is the number of the last launch of the
    cluster, `last_slice` the highest one of a slice, `admitted` how many launches this controller has admitted,
    `unclaimed` the slices of sessions that may come back, `now` the time of the event that is handled, in seconds,
    `uncounted_s` how much of it does not count for peers that are to answer (`liveness`), `buffers` how many there were
    at the last tick, `changed` the sessions whose programs this event has changed.
    """

    ledger: Ledger = field(default_factory=Ledger)
    circuit_breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    story: Story = field(default_factory=lambda: Story("controller"))
    recorder: Recorder = field(default_factory=Recorder)
    hosts: dict[int, HostState] = field(default_factory=dict)
    away: set[int] = field(default_factory=set)
    sessions: dict[int, Session] = field(default_factory=dict)
    programs: dict[int, PlannedProgram] = field(default_factory=dict)
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    failed: OrderedDict[int, PlannedProgram] = field(default_factory=OrderedDict)
    schedulers: set[int] = field(default_factory=set)
    sequence: int = 0
    last_slice: int = 0
    admitted: int = 0
    unclaimed: dict[int, dict[int, HeldSlice]] = field(default_factory=dict)
    now: float = 0.0
    uncounted_s: float = 0.0
    buffers: int = 0
    changed: set[int] = field(default_factory=set)

    @property
    def counted(self) -> float:
        """The time of the event that is handled, by a clock that counts only the time in which peers could answer."""
        return self.now - self.uncounted_s

    def note_failed(self, sequence: int, program: PlannedProgram) -> None:
        """Remembers what a launch that has failed was of: some of it may still be on a device."""
        self.failed[sequence] = program
        while len(self.failed) > MAX_FAILED:
            self.failed.popitem(last=False)

    def islands(self) -> list[int]:
        """The islands that have a scheduler, or have, or had, a host."""
        return sorted(self.schedulers | {host.island for host in self.hosts.values()})
