"""Islands that follow Ray's nodes: which are added, drained and removed as nodes come, are drained, and go.

Every two seconds somebody looks at all nodes and islands; what was decided before is seen there, so one look that is
missed, or a restart, does no harm. Rules:

*A node that is drained* (`ray drain-node`, a machine that is preempted): its islands are drained until shortly before
the node's deadline, so that their slices move. Unless the runtime has an island for each node, another island like each
of them is started where Ray has room, and takes their place. An island that is empty, or whose deadline is over, is
removed; the last one that takes slices stays until another one is up.

*An island for each node* (`auto`): a node that comes gets an island, one that is gone loses it.

*Spreading*: islands that share a node are replaced, one after the other, by islands on nodes that have fewer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pathways_ray.deployment.topology import Auto, Island

LOOK_S = 2.0
"""Time between two looks."""

MARGIN_S = 3.0
"""A drain ends this long before its node does: for the end of the island's processes."""

RETRY_S = 20.0
"""An island that could not be started is tried again after this time."""

GONE = "its node is gone"


class NodeSeen(NamedTuple):
    """A Ray node that lives; `leaves_in_s` where it is drained: seconds, perhaps without end."""

    node: str
    resources: Mapping[str, float]
    leaves_in_s: float | None = None


class IslandSeen(NamedTuple):
    """An island: the nodes of its hosts that are up, its state, its slices, how it was started, and the node that it
    was to be on; "" where that was left open."""

    island: int
    nodes: tuple[str, ...]
    state: str
    slices: int
    spec: Island
    node: str = ""


class Looked(NamedTuple):
    """A look at everything."""

    nodes: Sequence[NodeSeen]
    islands: Sequence[IslandSeen]


class Started(NamedTuple):
    """The end of an `Add`: the island's number, or -1 where it could not be started."""

    cause: str
    island: int


Event = Looked | Started


class Add(NamedTuple):
    """Start an island, on this node if it is not ""."""

    cause: str
    spec: Island
    node: str = ""


class Drain(NamedTuple):
    """Have an island get no slices any more."""

    island: int
    deadline_s: float
    reason: str


class Remove(NamedTuple):
    """End an island."""

    island: int


Command = Add | Drain | Remove


@dataclass
class Following:
    """Decides, see the head of this file.

    Args:
        auto: the island of each node; None where the operator says which islands there are.

    `homes` are the nodes of each island when it was last seen up, or where it was to be, `adding` the causes of islands
    that are being started, `made` those of islands that were, `again` when one that failed is tried again, `leaving`
    until when islands are drained by this.
    """

    auto: Auto | None = None
    homes: dict[int, frozenset[str]] = field(default_factory=dict)
    adding: set[str] = field(default_factory=set)
    made: dict[str, int] = field(default_factory=dict)
    again: dict[str, float] = field(default_factory=dict)
    leaving: dict[int, float] = field(default_factory=dict)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes one event at time `now`, in seconds; returns commands to carry out in their order."""
        match event:
            case Started(cause, island):
                self.adding.discard(cause)
                if island < 0:
                    self.again[cause] = now + RETRY_S
                else:
                    self.made[cause] = island
                return []
            case Looked(nodes, islands):
                return self._looked(nodes, islands, now)

    def _looked(self, nodes: Sequence[NodeSeen], islands: Sequence[IslandSeen], now: float) -> list[Command]:
        there = {node.node for node in nodes}
        leaving = {n.node: n.leaves_in_s for n in nodes if n.leaves_in_s is not None}
        self._remember(islands, there)
        commands: list[Command] = []
        for one in islands:
            ends = [leaving[node] for node in self.homes.get(one.island, one.nodes) if node in leaving]
            if ends:
                commands += self._vacate(one, min(ends), now)
            elif self.auto is not None and one.island in self.homes and not self.homes[one.island] & there:
                commands += self._drain(one, 0.0, GONE, now)
            elif one.state != "draining":
                self.leaving.pop(one.island, None)
        commands += [Remove(one.island) for one in islands if self._is_over(one, now)]
        return commands + self._for_nodes(nodes, islands, now)

    def _remember(self, islands: Sequence[IslandSeen], there: set[str]) -> None:
        numbers = {one.island for one in islands}
        for one in islands:
            home = self.homes.get(one.island)
            if home is None and self.auto is not None and one.node:  # a keeper before this one may have seen it there
                home = self.homes[one.island] = frozenset({one.node})
            if home and self.auto is not None and not home & there:
                continue  # Ray has restarted its host on the node of another island, or is about to
            if one.nodes and (one.state == "up" or home is None):
                self.homes[one.island] = frozenset(one.nodes)
        for table in (self.homes, self.leaving):
            for gone in [island for island in table if island not in numbers]:
                table.pop(gone)
        for cause in [cause for cause, island in self.made.items() if island not in numbers]:
            del self.made[cause]

    def _vacate(self, one: IslandSeen, leaves_in_s: float, now: float) -> list[Command]:
        """An island whose node is drained: another one is started, and it is drained."""
        reason = "its node is drained by Ray"
        if leaves_in_s < math.inf:
            reason += f", and ends in {leaves_in_s:.0f} s"
        added = self._add(f"in place of island {one.island}", one.spec, "", now) if self.auto is None else []
        return added + self._drain(one, max(0.0, leaves_in_s - MARGIN_S), reason, now)

    def _drain(self, one: IslandSeen, deadline_s: float, reason: str, now: float) -> list[Command]:
        self.leaving[one.island] = min(self.leaving.get(one.island, math.inf), now + deadline_s)
        if one.state == "draining":  # since the look before this, by a keeper before this one, or by the operator
            return []
        return [Drain(one.island, deadline_s, reason)]

    def _is_over(self, one: IslandSeen, now: float) -> bool:
        until = self.leaving.get(one.island)
        return until is not None and one.state in ("draining", "lost") and (one.slices == 0 or now > until)

    def _for_nodes(self, nodes: Iterable[NodeSeen], islands: Iterable[IslandSeen], now: float) -> list[Command]:
        """Islands for nodes that have none."""
        unknown = [one for one in islands if one.island not in self.homes and one.state != "lost"]
        if self.auto is None or unknown:  # which may be that of a node
            return []
        served = {node for home in self.homes.values() for node in home}
        commands: list[Command] = []
        for one in nodes:
            spec = self.auto.island_of(one.resources)
            if spec is not None and one.node not in served and one.leaves_in_s is None:
                commands += self._add(f"for node {one.node}", spec, one.node, now)
        return commands

    def _add(self, cause: str, spec: Island, node: str, now: float) -> list[Command]:
        if cause in self.adding or cause in self.made or now < self.again.get(cause, -math.inf):
            return []
        self.adding.add(cause)
        return [Add(cause, spec, node)]


def crowded(nodes: Sequence[NodeSeen], islands: Sequence[IslandSeen]) -> list[tuple[IslandSeen, str]]:
    """Islands to be replaced, each with the node for its successor, so that no node has two islands more than another
    one. Islands over several nodes stay; so does what no other node has the resources for."""
    homes = {one.island: one.nodes[0] for one in islands if len(set(one.nodes)) == 1 and one.state == "up"}
    counts = Counter({node.node: 0 for node in nodes if node.leaves_in_s is None})
    for one in islands:
        for node in set(one.nodes) & counts.keys():
            counts[node] += 1
    resources = {node.node: node.resources for node in nodes}
    moves: list[tuple[IslandSeen, str]] = []
    for one in sorted(islands, key=lambda one: -one.island):
        home = homes.get(one.island, "")
        fitting = [n for n in counts if n != home and fits(resources[n], one.spec)]
        if home not in counts or not fitting:
            continue
        target = min(fitting, key=lambda node: (counts[node], node))
        if counts[home] - counts[target] >= 2:
            counts[home], counts[target] = counts[home] - 1, counts[target] + 1
            moves.append((one, target))
    return moves


def fits(resources: Mapping[str, float], spec: Island) -> bool:
    """Whether an idle node has all that the hosts of an island take."""
    return all(resources.get(name, 0.0) >= spec.hosts * amount for name, amount in spec.bundle().items())
