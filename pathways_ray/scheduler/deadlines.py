"""Deadlines of launches that are first in line on their devices.

A launch cannot be taken off a device. So the island restarts when one keeps devices for longer than the operator's
limit (a loop without end), or when hosts still sit in a gang that another one has failed to enter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pathways_ray.scheduler.state import Outstanding, RestartIsland

MAX_STRANDED_S = 5.0
"""When a launch has failed on one host, the hosts that share the failed value must end it within this time as well."""


@dataclass
class Deadlines:
    """Times at which launches were first seen at the head of their devices' queues.

    Args:
        limit_s: seconds that a launch may stay there, unless its tenant has a limit of its own.
    """

    limit_s: float = math.inf
    first_since: dict[int, float] = field(default_factory=dict)

    def overdue(self, first: Mapping[int, Outstanding], hosts: frozenset[int], now: float) -> RestartIsland | None:
        """The reason to restart the island, if a launch gives one.

        Args:
            first: the launches first in line on their devices, by number.
            hosts: those of the island.
        """
        self.first_since = {sequence: self.first_since.get(sequence, now) for sequence in first}
        for sequence, record in first.items():
            since = self.first_since[sequence]
            launch = f"launch {sequence} of program {record.program.name!r}"
            limit_s = record.usage.launch_limit_s or self.limit_s
            if now - since > limit_s:
                reason = f"{launch} was first on its devices for {now - since:.0f} s; the limit is {limit_s:.0f} s"
                return RestartIsland(min(hosts), reason, "LaunchTimeout", sequence)
            failed = record.failed
            if failed is None or now - max(since, failed.at) <= MAX_STRANDED_S:
                continue
            if stranded := failed.affected & record.hosts:
                on, left = (", ".join(map(str, sorted(members))) for members in (failed.hosts, stranded))
                reason = f"{launch} failed on host {on}, and host {left} waits in it: {failed.report.failure.message}"
                return RestartIsland(min(hosts), reason, launch=sequence)
        return None
