"""What tenants used: for `pathways status` and for metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pathways_ray.controller.state import Session
from pathways_ray.scheduler.policies import Usage

SPAN_S = 10.0
"""The achieved share is that of the device time of this last span."""


@dataclass
class Report:
    """Device seconds of all tenants at moments of the last span, and what waits on the islands."""

    moments: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)
    queued: dict[int, dict[str, int]] = field(default_factory=dict)

    def note(self, now: float, usages: Iterable[Usage]) -> None:
        """Takes down the accounts; `now` in seconds."""
        self.moments.append((now, {usage.tenant: usage.device_seconds for usage in usages}))
        while len(self.moments) > 2 and self.moments[1][0] <= now - SPAN_S:
            self.moments.popleft()

    def tenants(self, usages: Iterable[Usage], sessions: Iterable[Session]) -> list[dict[str, Any]]:
        """One entry for each tenant, by name.

        `device_seconds` is the total, `share` the tenant's part of all device time of the last 10 s (0 to 1), `queued`
        its launches that no device queue has yet, here (`waiting`) and on the islands.
        """
        before = self.moments[0][1] if self.moments else {}
        held = list(sessions)
        accounts = sorted(usages, key=lambda usage: usage.tenant)
        recent = {u.tenant: u.device_seconds - before.get(u.tenant, 0.0) for u in accounts}
        total = sum(recent.values())
        found = []
        for usage in accounts:
            mine = [s for s in held if s.tenant.name == usage.tenant]
            waiting = sum(s.backlog for s in mine)
            found.append(
                {
                    "tenant": usage.tenant,
                    "weight": usage.weight,
                    "priority": usage.priority,
                    "device_seconds": usage.device_seconds,
                    "share": recent[usage.tenant] / total if total > 0 else 0.0,
                    "queued": waiting + sum(queued.get(usage.tenant, 0) for queued in self.queued.values()),
                    "waiting": waiting,
                    "in_flight": sum(s.in_flight for s in mine),
                    "sessions": len(mine),
                    "device_bytes": sum(s.device_bytes for s in mine),
                }
            )
        return found
