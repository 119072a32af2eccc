"""Devices, islands, and the mapping of virtual slices to them.

The rule is the paper's first one: spread computations over all devices. A slice goes to the island whose devices carry
the least, and there to the least loaded devices; among such, to whole hosts and to neighbours (`choosing`). Islands
that are up come first, then those that are away; one that is lost, or is being drained, gets none. Several slices may
share a device. Ties go to lower numbers.

A device carries its slices, and the time that it was busy for: one that never rests carries as much as with
`BUSY_SLICES` more. So slices that only hold devices count for less than those that use them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pathways_ray.errors import Unschedulable
from pathways_ray.ir.links import Hardware
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import SliceType, check_axis_names
from pathways_ray.resource_manager.choosing import Choice, HostRecord, choose, hardware_text
from pathways_ray.resource_manager.slice_requests import SliceRequest, check_shape, request_text
from pathways_ray.transport.messages import HeldSlice, HeldSlices

BUSY_SLICES = 4
"""A device that computes all the time carries as much as with so many slices more."""

Rank = tuple[bool, int, float, int, float, int]
"""How good an island is for a slice: whether it is away, then its `choosing.Choice`, and its number."""


class IslandState(StrEnum):
    """Whether an island serves.

    UP: all of its hosts do.
    AWAY: one is missing, and expected back.
    DRAINING: it is to be removed, and gets no slices any more; those that it has go on.
    LOST: one has been missing for so long that nobody waits for it. If it comes all the same, the island is up again.
    """

    UP = "up"
    AWAY = "away"
    DRAINING = "draining"
    LOST = "lost"


@dataclass
class SliceRecord:
    """A slice and its owner. A part of another slice does not count as load: its devices are counted for that one.
    `call` is the one that asked for it, of a controller that may not know of it."""

    session: int
    name: str
    placed: PlacedSlice
    within: int = 0
    call: int = 0


@dataclass
class Inventory:
    """All hosts, and all slices of all sessions.

    Args:
        members: the hosts of each island; of one that is not named, those that have joined.
        last_epoch: hosts join under higher ones.
        lost_after_s: seconds without one of its hosts after which an island is lost.

    `now` is the time of the event that is handled, `missed` since when islands have been without a host, `draining`
    until when those that get no slices any more may keep what they have, `drained_for` why. `busy` is the part of its
    time, 0 to 1, for which each device computed lately. Slices up to `past_slice` are of controllers before.
    `exchanged` has for each session the last call that exchanged slices of it.
    """

    members: Mapping[int, Sequence[int]] = field(default_factory=dict)
    hosts: dict[int, HostRecord] = field(default_factory=dict)
    slices: dict[tuple[int, int], SliceRecord] = field(default_factory=dict)
    next_slice: int = 0
    past_slice: int = 0
    last_epoch: int = 0
    held: Counter[Device] = field(default_factory=Counter)
    """Slices on each device that has some, also on one that a host has come back without."""
    of_session: dict[int, set[int]] = field(default_factory=dict)
    """The slices of each session."""
    lost_after_s: float = math.inf
    now: float = 0.0
    missed: dict[int, float] = field(default_factory=dict)
    draining: dict[int, float] = field(default_factory=dict)
    drained_for: dict[int, str] = field(default_factory=dict)
    busy: dict[Device, float] = field(default_factory=dict)
    exchanged: dict[int, int] = field(default_factory=dict)

    def state_of(self, island: int) -> IslandState:
        """Whether an island serves now."""
        state = IslandState.AWAY if self.missing(island) else IslandState.UP
        if state is IslandState.UP:
            self.missed.pop(island, None)
        elif self.now - self.missed.setdefault(island, self.now) > self.lost_after_s:
            return IslandState.LOST
        return IslandState.DRAINING if island in self.draining else state

    def missing(self, island: int) -> set[int]:
        """The hosts of an island that are not up."""
        members = self.members.get(island) or [h.host for h in self.hosts.values() if h.island == island]
        return {host for host in members if host not in self.hosts or not self.hosts[host].up}

    def join(self, hosts: Sequence[HostRecord]) -> int:
        """All hosts of an island come up together; returns their epoch, newer than any these hosts had."""
        epoch = 1 + max([self.last_epoch, *(self.hosts[h.host].epoch for h in hosts if h.host in self.hosts)])
        for host in hosts:
            host.epoch = epoch
            if (before := self.hosts.get(host.host)) is not None and host.hardware == Hardware():
                host.hardware = before.hardware
            self.hosts[host.host] = host
        return epoch

    def describe_host(self, host: int, epoch: int, hardware: Hardware) -> None:
        """A host says what its devices are."""
        known = self.hosts.get(host)
        if known is not None and known.epoch == epoch:
            known.hardware = hardware

    def left_behind(self, host: int) -> list[HostRecord]:
        """The others of the group that a host belonged to before it restarted: they wait for a process that is gone."""
        if (known := self.hosts.get(host)) is None:
            return []
        group = known.island, known.epoch
        return [one for one in self.hosts.values() if one.host != host and (one.island, one.epoch) == group]

    def leave(self, host: int, epoch: int) -> bool:
        """A host is gone; whether it was the present one: news of an older epoch is ignored."""
        known = self.hosts.get(host)
        if known is None or known.epoch != epoch:
            return False
        known.up = False
        self.state_of(known.island)  # it is missed from now on
        return True

    def new_controller(self) -> None:
        """Another controller has come: a host is down until that one has heard of it. Slices stay: it says which
        sessions do not come back."""
        self.busy, self.past_slice = {}, self.next_slice
        for record in self.slices.values():
            record.call = 0  # its calls may have the same numbers
        for host in self.hosts.values():
            host.up = False

    def held_slices(self) -> HeldSlices:
        """All slices, with their owners, and the islands that they are to leave."""
        known = (HeldSlice(s.session, s.placed, s.name, s.within) for s in self.slices.values())
        return HeldSlices(tuple(known), self.next_slice, tuple(sorted(self.draining)))

    def islands(self, tenant: str | None = None) -> dict[int, list[HostRecord]]:
        """The hosts of each island that have joined, in the order of their ids: of those of a tenant, or of all."""
        found: dict[int, list[HostRecord]] = {}
        for host in sorted(self.hosts.values(), key=lambda h: h.host):
            if tenant is None or host.tenant == tenant:
                found.setdefault(host.island, []).append(host)
        return found

    def remove(self, island: int) -> list[HostRecord]:
        """Forgets an island for good, with the slices there; returns its hosts."""
        gone = [host for host in self.hosts.values() if host.island == island]
        for host in gone:
            del self.hosts[host.host]
            self.last_epoch = max(self.last_epoch, host.epoch)  # its number may be another island's some day
        for key in [key for key, record in self.slices.items() if record.placed.island == island]:
            self.release(*key)
        return gone

    def load(self) -> dict[Device, int]:
        """Number of slices on each device, and for how many more its work counts."""
        devices = (Device(h.host, k) for h in self.hosts.values() for k in range(h.devices))
        found = {device: self.held.get(device, 0) for device in devices}
        for device, share in self.busy.items():
            if device in found:
                found[device] += round(BUSY_SLICES * share)
        return found

    def create(self, session: int, request: SliceRequest) -> PlacedSlice:
        """Maps a slice, unless a call whose answer was lost has done so.

        Raises:
            Unschedulable: no island can hold it; the message lists what exists.
        """
        if number := self._made_for(session, request.call):
            return self.slices[session, number].placed
        if request.within:
            return self._create_part(session, request)
        check_shape(request)
        own = self._island_of(session, request.instead)
        best = self._best(request, own)
        if best is None:
            where = f" beside island {own}, where it is," if own >= 0 > request.island else ""
            raise Unschedulable(
                f"no island{where} can hold {request_text(request)}; "
                f"there is {self.describe(request.tenant, request.is_particular)}"
            )
        chosen = best[1].devices
        shape = request.shape or (len(chosen),)
        placed = self._keep(session, request, shape, self.hosts[chosen[0].host].island, chosen)
        self.held.update(placed.devices)
        return placed

    def _made_for(self, session: int, call: int) -> int:
        """The slice that was made for a call of the controller; 0 without one."""
        own = self.of_session.get(session, ()) if call else ()
        return next((number for number in own if self.slices[session, number].call == call), 0)

    def _create_part(self, session: int, request: SliceRequest) -> PlacedSlice:
        whole = self.slices.get((session, request.within))
        if whole is None:
            raise Unschedulable(f"session {session} has no slice {request.within} to take a part of")
        devices, shape, places = whole.placed.devices, request.shape, request.places
        if not shape or any(size < 1 for size in shape) or math.prod(shape) != len(places):
            raise Unschedulable(f"a part of a slice names as many devices as its shape has; {shape} got {len(places)}")
        if len(set(places)) != len(places) or not all(0 <= place < len(devices) for place in places):
            raise Unschedulable(f"places {places} are not different devices of a slice of {len(devices)}")
        check_axis_names(request.axes)
        if len(request.axes) != len(shape):
            raise Unschedulable(f"slice shape {shape} and axis names {request.axes} differ in number")
        chosen = [devices[place] for place in places]
        return self._keep(session, request, shape, whole.placed.island, chosen)

    def _keep(
        self,
        session: int,
        request: SliceRequest,
        shape: tuple[int, ...],
        island: int,
        devices: Sequence[Device],
    ) -> PlacedSlice:
        self.next_slice += 1
        placed = PlacedSlice.on(SliceType(self.next_slice, shape, request.axes), island, devices)
        self.slices[session, placed.mesh.id] = SliceRecord(session, request.name, placed, request.within, request.call)
        self.of_session.setdefault(session, set()).add(placed.mesh.id)
        return placed

    def restore(self, slices: Iterable[HeldSlice]) -> None:
        """Takes over slices that were mapped before a restart. Their islands may have yet to come."""
        for one in slices:
            number = one.placed.mesh.id
            before = self.slices.get((one.session, number))
            if before is not None and not before.within:
                self.held.subtract(before.placed.devices)
            self.slices[one.session, number] = SliceRecord(one.session, one.name, one.placed, one.within)
            self.of_session.setdefault(one.session, set()).add(number)
            if not one.within:
                self.held.update(one.placed.devices)

    def hold(self, session: int, slices: Sequence[HeldSlice], last_slice: int) -> bool:
        """A session has these slices, and no others up to `last_slice` or `past_slice`: this may come late."""
        self.next_slice = max(self.next_slice, last_slice)
        self.exchanged.pop(session, None)  # calls of another controller may have its number
        last = max(last_slice, self.past_slice)
        for number in {n for n in self.of_session.get(session, ()) if n <= last} - {s.placed.mesh.id for s in slices}:
            self.release(session, number)
        self.restore(slices)
        return True

    def fits_now(self, request: SliceRequest) -> bool:
        """Whether an island that is up can hold a slice; a part waits for none. Raises `Unschedulable` as `create`."""
        if request.within:
            return True
        check_shape(request)
        best = self._best(request)
        return best is not None and not best[0][0]

    def _island_of(self, session: int, slice_id: int) -> int:
        """The island of a session's slice; -1 where there is no such slice."""
        found = self.slices.get((session, slice_id))
        return found.placed.island if found is not None else -1

    def exchange(self, session: int, pairs: Sequence[tuple[int, int]], call: int) -> bool:
        """Gives each slice of a pair the devices of the other; False where a second one is not there. A first one that
        went with its island comes back on the devices of the second. Other parts stay, as parts of what has theirs."""
        if self.exchanged.get(session) == call:  # the answer was lost, and it is asked again
            return True
        if any((session, other) not in self.slices for _, other in pairs):
            return False
        self.exchanged[session] = call
        mine = {number: self.slices[session, number] for number in self.of_session.get(session, ())}
        first_of = {other: one for one, other in pairs}
        swapped = {n: m for pair in pairs if pair[0] in mine for n, m in (pair, pair[::-1])}
        before = {number: (record.placed, record.within) for number, record in mine.items()}
        for number, record in mine.items():
            placed, whole = before[swapped.get(number, number)]
            record.placed, record.within = placed.on_devices_of(record.placed.mesh), swapped.get(whole, whole)
        for one, other in pairs:
            if one not in mine:
                placed, whole = before[other]
                again = placed.on_devices_of(SliceType(one, placed.mesh.shape, placed.mesh.axes))
                self.restore([HeldSlice(session, again, mine[other].name, first_of.get(whole, 0))])
        return True

    def _best(self, request: SliceRequest, avoided: int = -1) -> tuple[Rank, Choice] | None:
        """The devices for a slice, and the rank of their island: whether it is away, and how good they are. Not on an
        island to be `avoided`, unless the request names it."""
        load = self.load()
        best: tuple[Rank, Choice] | None = None
        for island, members in self.islands(request.tenant).items():
            if request.island not in (-1, island, members[0].base) or (request.island == -1 and island == avoided):
                continue
            if request.platform and members[0].platform != request.platform:
                continue
            if (state := self.state_of(island)) in (IslandState.LOST, IslandState.DRAINING):
                continue
            hosts = [host for host in members if host.has(request.memory, request.generation)]
            whole = math.prod(request.topology) if request.topology else sum(host.devices for host in hosts)
            shape = request.shape or (whole,)
            size = math.prod(shape)
            choice = choose(hosts, load, shape, request.topology) if size else None
            if choice is None:
                continue
            quality = (choice.busiest, choice.load / size, choice.parts, choice.cost / size, island)
            rank = (state is not IslandState.UP, *quality)
            if best is None or rank < best[0]:
                best = (rank, choice)
        return best

    def release(self, session: int, slice_id: int) -> bool:
        """Whether the session had the slice, which is free now. A negative number is that of the call that it was made
        for."""
        slice_id = slice_id if slice_id >= 0 else self._made_for(session, -slice_id)
        record = self.slices.pop((session, slice_id), None)
        if record is None:
            return False
        if not record.within:
            self.held.subtract(record.placed.devices)
        own = self.of_session[session]
        own.discard(slice_id)
        for number in [number for number in own if self.slices[session, number].within == slice_id]:
            self.release(session, number)
        return True

    def release_session(self, session: int) -> int:
        """Releases all slices of a session; returns their number."""
        slices = list(self.of_session.get(session, ()))
        for number in slices:
            self.release(session, number)
        self.of_session.pop(session, None)
        self.exchanged.pop(session, None)
        return len(slices)

    def describe(self, tenant: str = "", hardware: bool = False) -> str:
        """The islands of a tenant, or of all, and their devices in words; with what is known of their hardware."""
        parts = []
        for island, hosts in self.islands(tenant).items():
            devices = sum(h.devices for h in hosts)
            state = self.state_of(island)
            parts.append(
                f"island {island} with {devices} {hosts[0].platform} devices on {len(hosts)} host(s)"
                + (hardware_text(hosts) if hardware else "")
                + (f", which is {state}" if state is not IslandState.UP else "")
            )
        for island in sorted(self.members.keys() - self.islands().keys()) if not tenant else ():
            parts.append(f"island {island}, whose hosts have not joined")
        return ", ".join(parts) or "nothing"
