"""Seconds of communication: collectives over a tree of networks, messages between stages; and bytes per link.

A group of a plan is `size` devices, `stride` apart. At each level of the network it has some members below one switch
(`_members`), so a collective is done level by level: inside first, each member then carries its piece across.

    all-reduce of S bytes = reduce-scatter inward-out + all-gather outward-in:
        level i, k_i members, piece S_i = S / (k_0 … k_(i-1)):    2 (k_i - 1)/k_i · S_i bytes per device

which is the least a device can send (2 (n-1)/n S in all). The levels follow one another; their times add. A ring has
k - 1 steps each way; between servers libraries use a tree at full rate, so ⌈log2 k⌉ steps.

Contention: all groups of a plan communicate at the same time, and a `Level.rate` is what a device has when all use it.
Since each member carries a piece of its own, all cards of a server work, whatever the stride.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from megatron_ptdp.config.cluster import Cluster, Level


@dataclass(frozen=True, slots=True)
class Group:
    """Devices `stride` apart that communicate with one another; all such groups do so at once."""

    size: int
    stride: int = 1


@lru_cache(maxsize=65536)
def _members(levels: tuple[Level, ...], group: Group) -> tuple[int, ...]:
    """Members that meet at each level: their product is the group's size (rounded up where it does not divide)."""
    counts, done = [], 1
    for level in levels:
        below = max(1, level.size // group.stride) if level.size else group.size
        inside = min(group.size, max(below, done))
        counts.append(ceil(inside / done))
        done *= counts[-1]
    if done < group.size and counts:
        counts[-1] *= ceil(group.size / done)
    return tuple(counts)


def shares(cluster: Cluster, group: Group, size: float) -> Iterator[tuple[Level, int, float]]:
    """For each level the group uses: the level, its members there, the bytes of the piece."""
    for level, members in zip(cluster.levels, _members(cluster.levels, group), strict=True):
        if members > 1:
            yield level, members, size
            size /= members


def all_reduce(cluster: Cluster, group: Group, size: float, cut: bool = False) -> float:
    """Seconds to sum `size` bytes over the group, the sum on all members. `cut`: as `gather`."""
    return 2 * gather(cluster, group, size, cut)


def gather(cluster: Cluster, group: Group, size: float, cut: bool = False) -> float:
    """Seconds of an all-gather to, or a reduce-scatter of, `size` bytes; `cut` into `Level.collectives` of them."""
    seconds = 0.0
    for position, (level, members, piece) in enumerate(shares(cluster, group, size)):
        steps = members - 1 if position == 0 and level is cluster.levels[0] else ceil(log2(members))
        seconds += (members - 1) / members * piece / level.rate + steps * level.latency * (
            level.collectives if cut else 1
        )
    return seconds


def flat_gather(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds of an all-gather by one ring through all members: each forwards all bytes, at the slowest level's
    rate."""
    used = [level for level, _, _ in shares(cluster, group, size)]
    if not used:
        return 0.0
    return (group.size - 1) / group.size * size / min(level.rate for level in used) + sum(u.latency for u in used)


@lru_cache(maxsize=8192)
def crossed(cluster: Cluster, distance: int, blocks: int) -> tuple[Level, ...]:
    """The level that messages cross between neighbours of `blocks` blocks of `distance` devices, for each boundary.

    Boundary k, between block k - 1 and block k, is inside a group of a level when the group is whole blocks and none
    of them ends there.
    """
    found = []
    for boundary in range(1, blocks):
        inside = (
            level
            for level in cluster.levels
            if not level.size or (level.size % distance == 0 and (boundary * distance) % level.size)
        )
        found.append(next(inside, cluster.levels[-1]))
    return tuple(found)


def message(cluster: Cluster, level: Level, size: float, senders: int = 1) -> float:
    """Seconds to send `size` bytes across a level, all devices at once.

    With `senders` t > 1 each of t neighbours that hold the same bytes sends 1/t, and the receivers gather them
    (PTD-P section 4.1).
    """
    if level.message_bandwidth:
        seconds = size / senders / level.message_bandwidth + level.message_latency
    else:
        seconds = size / senders / level.rate + level.latency
    if senders > 1:
        seconds += gather(cluster, Group(senders), size)
    return seconds


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per device and iteration on one level, by axis, and the share of the iteration its links are busy."""

    level: str
    tensor: float
    pipeline: float
    data: float
    busy: float

    @property
    def total(self) -> float:
        return self.tensor + self.pipeline + self.data


def spread(cluster: Cluster, group: Group, size: float, passes: float) -> dict[str, float]:
    """Bytes a device sends on each level in `passes` gathers or scatters of `size` bytes (an all-reduce is two)."""
    return {
        level.name: passes * (members - 1) / members * piece for level, members, piece in shares(cluster, group, size)
    }
