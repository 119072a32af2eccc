"""What status shows, to the operator and to a tenant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pathways_ray.controller.launches import Launches

SOMEBODY = "somebody"
"""What a tenant sees in place of another's slice."""


def of_launches(launches: Launches, names: Mapping[int, str]) -> dict[str, Any]:
    """Sessions, tenants and counts. `names` are what clients call their sessions."""
    sessions = launches.sessions
    return {
        "sessions": [
            {
                "session": s.id,
                "name": names.get(s.id, ""),
                "tenant": s.tenant.name,
                "buffers": len(s.buffers),
                "bytes": sum(b.held.type.nbytes for b in s.buffers.values()),
                "programs": len(s.programs),
                "in_flight": s.in_flight,
                "waiting": s.backlog,
            }
            for s in sessions.values()
        ],
        "tenants": launches.tenants(),
        "buffers": sum(len(s.buffers) for s in sessions.values()),
        "launches": launches.sequence,
        "in_flight": len(launches.in_flight),
    }


def for_tenant(status: Mapping[str, Any], tenant: str, mine: set[int]) -> dict[str, Any]:
    """The same without what is others': devices show that somebody holds them, and not who; processes are left out.

    Args:
        mine: the tenant's sessions.
    """
    sessions = [s for s in status["sessions"] if s["session"] in mine]
    labels = tuple(f"session {session}: " for session in mine)
    islands = [
        {
            **island,
            "hosts": [
                {
                    **host,
                    "node": "",
                    "pid": 0,
                    "devices": [
                        {**device, "slices": [s if s.startswith(labels) else SOMEBODY for s in device["slices"]]}
                        for device in host["devices"]
                    ],
                }
                for host in island["hosts"]
            ],
        }
        for island in status["islands"]
    ]
    return {
        "islands": islands,
        "slices": [s for s in status["slices"] if s["session"] in mine],
        "sessions": sessions,
        "tenants": [t for t in status["tenants"] if t["tenant"] == tenant],
        "buffers": sum(s["buffers"] for s in sessions),
        "in_flight": sum(s["in_flight"] for s in sessions),
    }
