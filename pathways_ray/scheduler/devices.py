"""The device queues of an island, as the scheduler counts them.

What is with the hosts is bounded for each *device*, whichever set of devices a program uses: with a bound for each set,
a tenant with many overlapping sets would have many times the bound on the devices that they share. A set may have
thousands of devices, and most programs use one of a few sets. So devices that are in the same sets are counted as one
*group*: a set is a list of groups, and a new set splits those that it cuts in two.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pathways_ray.ir.plan import Device
from pathways_ray.limits import MAX_DEVICE_COMPUTATIONS
from pathways_ray.scheduler.estimates import MovingAverage

SINGLE_TENANT_WINDOW_S = 0.2
"""Estimated work on a device that may be with the hosts while one tenant has the island to itself."""

CONTENDED_WINDOW_S = 0.02
"""The same while several tenants have launches: a newcomer finds this much in the device queues before its launch."""

MIN_DEVICE_LAUNCHES = 2
"""Launches on a device that may be with the hosts however long they take, so that devices do not run dry."""

REFILLED_AT = MAX_DEVICE_COMPUTATIONS // 2
"""Where a tenant is alone, a queue that is full takes no more until so few are left: launches that left one by one, as
others end, would each wake controller, scheduler and host. Not where it has one launch, nor where what it has takes
longer than `CONTENDED_WINDOW_S`: other devices would wait too, since launches of a tenant go in order."""


@dataclass(slots=True, eq=False)
class DeviceGroup:
    """Devices that are in the same sets. `launches` of this island only are in the queue of each of them, of
    `computations` in all, which are expected to take `seconds`. It is `full` from `MAX_DEVICE_COMPUTATIONS` down to
    `REFILLED_AT`."""

    devices: frozenset[Device]
    launches: int = 0
    computations: int = 0
    seconds: float = 0.0
    full: bool = False

    @property
    def gathers(self) -> bool:
        """Whether it takes no launch of a tenant that is alone until more of it is over."""
        return self.full and self.launches >= MIN_DEVICE_LAUNCHES and self.seconds <= CONTENDED_WINDOW_S

    @property
    def hosts(self) -> set[int]:
        return {device.host for device in self.devices}

    def split(self, inside: frozenset[Device]) -> DeviceGroup:
        """Leaves the devices `inside` to a new group with the same queue."""
        self.devices -= inside
        return DeviceGroup(inside, self.launches, self.computations, self.seconds, self.full)


@dataclass(slots=True, eq=False, weakref_slot=True)
class DeviceSet:
    """The devices of an island that a program uses."""

    devices: frozenset[Device] = frozenset()
    groups: list[DeviceGroup] = field(default_factory=list)
    hosts: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.hosts = frozenset(device.host for device in self.devices)

    def add(self, estimate: float, computations: int) -> None:
        """A launch goes to the hosts."""
        for group in self.groups:
            group.launches += 1
            group.seconds += estimate
            if computations:
                group.computations += computations
                group.full |= group.computations >= MAX_DEVICE_COMPUTATIONS

    def has_room(self, length: MovingAverage, computations: int, contended: bool) -> bool:
        """Whether one more launch may go to the hosts, on each of its devices.

        One whose length nobody knows has to wait until they have no other: its tenant would get more than its share, by
        all that went before the first one was measured.
        """
        if contended and not length.seconds:
            return not any(group.launches for group in self.groups)
        window = CONTENDED_WINDOW_S if contended else SINGLE_TENANT_WINDOW_S
        for group in self.groups:
            if group.launches and (
                group.computations + computations > MAX_DEVICE_COMPUTATIONS
                or (group.launches >= MIN_DEVICE_LAUNCHES and group.seconds + length.estimate > window)
                or (group.gathers and not contended)
            ):
                return False
        return True

    def remove(self, estimate: float, computations: int) -> None:
        """A launch is over."""
        for group in self.groups:
            group.launches -= 1
            group.seconds = group.seconds - estimate if group.launches else 0.0
            if computations:
                group.computations -= computations
                group.full &= group.computations > REFILLED_AT


class DeviceTable:
    """All sets of devices that programs use, and their groups."""

    def __init__(self) -> None:
        self._sets: weakref.WeakValueDictionary[frozenset[Device], DeviceSet] = weakref.WeakValueDictionary()
        self.groups: list[DeviceGroup] = []

    def set_of(self, devices: Iterable[Device]) -> DeviceSet:
        """The set of these devices; a later call with the same ones gives the same set, while somebody has it."""
        wanted = frozenset(devices)
        known = self._sets.get(wanted)
        if known is not None:
            return known
        made = DeviceSet(wanted)
        left = wanted
        for group in list(self.groups):
            inside = group.devices & wanted
            if not inside:
                continue
            left -= inside
            if inside != group.devices:
                self._split(group, inside)
                made.groups.append(self.groups[-1])
            else:
                made.groups.append(group)
        if left:
            made.groups.append(DeviceGroup(left))
            self.groups.append(made.groups[-1])
        self._sets[wanted] = made
        return made

    def _split(self, group: DeviceGroup, inside: frozenset[Device]) -> None:
        self.groups.append(group.split(inside))
        for other in self._sets.values():
            if group in other.groups:
                other.groups.append(self.groups[-1])

    def clear(self) -> None:
        """Nothing is with the hosts any more."""
        for group in self.groups:
            group.launches, group.computations, group.seconds, group.full = 0, 0, 0.0, False

    def __iter__(self) -> Iterator[DeviceSet]:
        return iter(self._sets.values())
