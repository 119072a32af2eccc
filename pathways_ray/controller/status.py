"""Status: sessions, tenants and their use of devices, to the operator and to a tenant; for people and for metrics."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pathways_ray.controller.launches import Launches
from pathways_ray.controller.state import Session
from pathways_ray.observe import usage
from pathways_ray.scheduler.policies import Usage, account_name
from pathways_ray.story import Entry, Story, log_name
from pathways_ray.transport.messages import Load

SPAN_S = 10.0
"""The achieved share is that of the device time of this last span."""

ANONYMOUS = "somebody"
"""The label of another tenant's slice, as a tenant sees it."""


FRESH_STATUS = 8
"""Answers about the status in a second, to one tenant, that are made for it; further ones are at most a second old.
The operator's are always made for it."""

STATUS_AGE_S = 1.0


@dataclass
class KnownStatus:
    """The last status that a tenant was told, when that was, and how often it was asked for in that second."""

    text: str = ""
    since: float = -math.inf
    made: int = 0

    def is_fresh_enough(self, now: float) -> bool:
        """Whether it can be told again; it is counted."""
        if now - self.since >= STATUS_AGE_S:
            self.since, self.made, self.text = now, 0, ""
        self.made += 1
        return bool(self.text) and self.made > FRESH_STATUS


@dataclass
class Report:
    """Device seconds of all tenants at moments of the last span, and launches that wait on the islands."""

    moments: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)
    queued: dict[int, dict[str, int]] = field(default_factory=dict)
    usage_at: float = -math.inf
    used: dict[str, float] = field(default_factory=dict)

    def note(self, now: float, usages: Iterable[Usage]) -> None:
        """Takes down the accounts; `now` in seconds."""
        self.moments.append((now, {one.tenant: one.device_seconds for one in usages}))
        while len(self.moments) > 2 and self.moments[1][0] <= now - SPAN_S:
            self.moments.popleft()

    def note_usage(self, now: float, accounts: Mapping[str, float], story: Story) -> None:
        """Notes the accounts that have changed, once in a while, for `pathways usage`."""
        if now - self.usage_at < usage.PERIOD_S:
            return
        self.usage_at = now
        for tenant, seconds in accounts.items():
            if seconds != self.used.get(tenant, 0.0):
                self.used[tenant] = seconds
                story.note(Entry(now, usage.EVENT, tenant, f"{seconds:.3f}"))

    def load(self, message: Load) -> None:
        """Notes how many launches of each tenant wait on an island."""
        self.queued[message.island] = message.queued

    def tenants(self, launches: Launches) -> list[dict[str, Any]]:
        """One entry for each tenant, by name.

        `device_seconds` is the total, `share` the tenant's part of all device time of the last 10 s (0 to 1), `queued`
        its launches that no device queue has yet, here (`waiting`) and on the islands. `launch_limit_s` is null where
        that of the runtime holds.
        """
        before = self.moments[0][1] if self.moments else {}
        accounts = sorted(launches.ledger.usages.values(), key=lambda one: one.tenant)
        recent = {u.tenant: u.device_seconds - before.get(u.tenant, 0.0) for u in accounts}
        total = sum(recent.values())
        sessions: dict[str, list[Session]] = {}
        for session in launches.sessions.values():
            sessions.setdefault(session.tenant.name, []).append(session)
        found = []
        for account in accounts:
            mine = sessions.get(account.tenant, [])
            waiting = sum(launches.backlog(s.id) for s in mine)
            found.append(
                {
                    "tenant": account.tenant,
                    "weight": account.weight,
                    "priority": account.priority,
                    "launch_limit_s": account.launch_limit_s or None,
                    "device_seconds": account.device_seconds,
                    "share": recent[account.tenant] / total if total > 0 else 0.0,
                    "queued": waiting + sum(queued.get(account.tenant, 0) for queued in self.queued.values()),
                    "waiting": waiting,
                    "in_flight": sum(s.in_flight for s in mine),
                    "sessions": len(mine),
                    "device_bytes": sum(s.device_bytes for s in mine),
                }
            )
        return found


def of_launches(launches: Launches, report: Report, names: Mapping[int, str]) -> dict[str, Any]:
    """Sessions, tenants and counts. `names` are the clients' names for their sessions."""
    sessions = launches.sessions
    return {
        "sessions": [
            {
                "session": s.id,
                "name": names.get(s.id, ""),
                "tenant": s.tenant.name,
                "buffers": len(s.buffers),
                "bytes": s.array_bytes,
                "programs": len(s.programs),
                "in_flight": s.in_flight,
                "waiting": launches.backlog(s.id),
                "suspended": s.suspended,
                "gives_way_to": launches.preemption.to(s.id),
            }
            for s in sessions.values()
        ],
        "tenants": report.tenants(launches),
        "device_seconds": launches.ledger.device_seconds(),
        "refusals": refusals(launches),
        "memory": launches.admission.memory.status(),
        "buffers": sum(len(s.buffers) for s in sessions.values()),
        "launches": launches.tables.admitted,
        "served": launches.tables.recorder.served,
        "in_flight": len(launches.in_flight),
        "latencies": {
            tenant: {"buckets": found.cumulated(), "sum": found.total}
            for tenant, found in launches.tables.recorder.latencies(account_name).items()
        },
        "busy": dict(launches.tables.recorder.busy),
        "failures": dict(launches.tables.recorder.failures),
        "events": dict(launches.story.counts),
        "queued": {island: sum(queued.values()) for island, queued in report.queued.items()},
    }


def refusals(launches: Launches) -> list[dict[str, Any]]:
    """The programs that the circuit breaker refuses, oldest first; `age_s` is for how long, in seconds."""
    return [
        {
            "id": culprit.id,
            "tenant": culprit.tenant,
            "program": refusal.name,
            "reason": refusal.failure.message,
            "age_s": launches.tables.now - refusal.at,
        }
        for culprit, refusal in launches.circuit_breaker.refused.items()
    ]


def logs(islands: Iterable[Mapping[str, Any]], folder: str, node: str) -> list[dict[str, str]]:
    """The log files of all processes, each with the Ray node that it lies on.

    Args:
        islands: as the resource manager's status has them.
        folder: of the runtime's logs, on every node.
        node: the one of the controller, the resource manager and the schedulers.
    """
    places = {"controller": node, "resource manager": node}
    for island in islands:
        places[f"scheduler {island['island']}"] = node
        places |= {f"host {host['host']}": host["node"] for host in island["hosts"] if host["node"]}
    return [
        {"process": process, "node": where, "path": f"{folder}/{log_name(process)}"}
        for process, where in sorted(places.items())
    ]


def for_tenant(status: Mapping[str, Any], tenant: str, mine: set[int], islands_of: str = "") -> dict[str, Any]:
    """The part of a status that a tenant sees: devices of others show as taken, without a name; processes are left out.

    Args:
        mine: the tenant's sessions.
        islands_of: the tenant whose islands it uses; "" for those that all share.
    """
    sessions = [
        {**s, "gives_way_to": to if (to := s["gives_way_to"]) in mine else 0}
        for s in status["sessions"]
        if s["session"] in mine
    ]
    labels = tuple(f"session {session}: " for session in mine)
    islands = [
        {
            **island,
            "hosts": [
                {
                    **host,
                    "node": "",
                    "pid": 0,
                    "started": 0,
                    "devices": [
                        {**device, "slices": [s if s.startswith(labels) else ANONYMOUS for s in device["slices"]]}
                        for device in host["devices"]
                    ],
                }
                for host in island["hosts"]
            ],
        }
        for island in status["islands"]
        if island["tenant"] == islands_of
    ]
    return {
        "islands": islands,
        "slices": [s for s in status["slices"] if s["session"] in mine],
        "sessions": sessions,
        "tenants": [t for t in status["tenants"] if t["tenant"] == tenant],
        "refusals": [r for r in status["refusals"] if r["tenant"] == tenant],
        "buffers": sum(s["buffers"] for s in sessions),
        "in_flight": sum(s["in_flight"] for s in sessions),
        **({"launch_limit_s": status["launch_limit_s"]} if "launch_limit_s" in status else {}),
    }
