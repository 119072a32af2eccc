"""What goes wrong in a run, drawn from its seed before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

KINDS = {
    "kill host": 3,
    "kill scheduler": 1,
    "kill client": 1,
    "kill controller": 0.3,
    "pause host": 2,
    "pause scheduler": 1,
    "pause client": 1,
    "pause controller": 1,
    "stop host": 0.3,
    "stop controller": 0.2,
    "part": 2,
    "drop": 2,
    "duplicate": 1,
    "reorder": 2,
    "delay": 2,
    "slow host": 1,
}
"""Faults and how often they come, against each other. A stopped process neither runs nor ends until one that watches it
has it killed."""


@dataclass(frozen=True)
class Fault:
    """At `time`, for `seconds`, to `where` (a node, or two joined by "|")."""

    time: float
    kind: str
    where: str
    seconds: float

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.3f} s" if self.seconds else ""
        return f"{self.kind} {self.where}{lasting}"


def draw(random: Random, count: int, span: float, nodes: dict[str, list[str]]) -> list[Fault]:
    """`count` faults or more within `span` seconds.

    Args:
        nodes: the names of the nodes by what they are: host, scheduler, client, controller, manager.
    """
    faults: list[Fault] = []
    kinds, weights = list(KINDS), list(KINDS.values())
    while len(faults) < count:
        time = 1.0 + random.random() * span
        kind = random.choices(kinds, weights)[0]
        what, _, who = kind.partition(" ")
        if what in ("kill", "stop"):
            faults.append(Fault(time, kind, random.choice(nodes[who]), 0.0))
        elif what == "pause":
            longest = {"host": 12.0, "scheduler": 12.0, "client": 25.0, "controller": 6.0}[who]
            faults.append(Fault(time, kind, random.choice(nodes[who]), _length(random, longest)))
        elif kind == "slow host":
            faults.append(Fault(time, kind, random.choice(nodes["host"]), 5.0))
        elif kind == "part" and random.random() < 0.2:
            # Many links at once, and they come back one by one.
            for link in dict.fromkeys(_link(random, nodes) for _ in range(6)):
                faults.append(Fault(time + random.random(), kind, link, _length(random, 6.0)))
            faults.sort(key=lambda fault: (fault.time, fault.where))
        else:
            longest = 25.0 if kind == "part" and random.random() < 0.2 else 8.0
            faults.append(Fault(time, kind, _link(random, nodes), _length(random, longest)))
    return sorted(faults, key=lambda fault: (fault.time, fault.kind, fault.where))


def _length(random: Random, longest: float) -> float:
    """Short ones more often than long ones."""
    return longest * random.random() ** 3 + 0.01


def _link(random: Random, nodes: dict[str, list[str]]) -> str:
    """Two nodes that talk to each other."""
    kind = random.choice(["client controller", "controller scheduler", "scheduler host", "host host", "client host"])
    first, second = kind.split()
    a, b = random.choice(nodes[first]), random.choice(nodes[second])
    if first == second and a == b:
        a, b = random.choice(nodes["controller"]), random.choice(nodes["scheduler"])
    if random.random() < 0.1:
        a = random.choice(nodes["manager"])
    return f"{a}|{b}"
