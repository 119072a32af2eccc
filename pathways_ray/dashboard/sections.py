"""Sections of the page: a look at everything, cut into parts that change apart from each other.

A browser gets a section again only when it has changed, so a page that stands open over a runtime where little happens
costs next to nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pathways_ray.observe.diagnosis import findings
from pathways_ray.observe.tables import on_devices, tables

TABLES = ("tenants", "sessions", "launches", "queue", "memory", "events")
MAX_SLICES_OF_DEVICE = 8


def sections(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a snapshot, as JSON has them."""
    made = tables(snapshot)
    status = snapshot.get("status") or {}
    overview = snapshot.get("overview", {})
    return {
        "health": [msgspec.to_builtins(finding) for finding in findings(snapshot)],
        "totals": {
            "islands": len(status.get("islands", [])),
            "hosts": sum(len(island["hosts"]) for island in status.get("islands", [])),
            "sessions": len(status.get("sessions", [])),
            "launches": status.get("launches"),
            "in_flight": status.get("in_flight", 0),
            "buffers": status.get("buffers", 0),
            "policy": status.get("policy", ""),
        },
        "devices": _devices(snapshot),
        "programs": overview.get("programs", []),
        "transfers": overview.get("transfers", []),
        "logs": [log["process"] for log in status.get("logs", [])],
        **{name: {"columns": made[name].columns, "rows": made[name].rows} for name in TABLES},
    }


def _devices(snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Islands with their hosts; of each device who holds it, and what is first on it."""
    runs = on_devices(snapshot)
    return [
        {
            "island": island["island"],
            "state": island.get("state", ""),
            "reason": island.get("reason", ""),
            "platform": island["platform"],
            "hosts": [
                {
                    "host": host["host"],
                    "up": host["up"],
                    "devices": [
                        [one["device"], one["slices"][:MAX_SLICES_OF_DEVICE], runs.get(one["device"], "")]
                        for one in (host["devices"] if host["up"] else ())
                    ],
                }
                for host in island["hosts"]
            ],
        }
        for island in (snapshot.get("status") or {}).get("islands", [])
    ]


@dataclass
class Page:
    """The sections as they were last, each with the number of the change that it came with."""

    changes: int = 0
    texts: dict[str, tuple[int, str]] = field(default_factory=dict)

    def update(self, found: Mapping[str, Any]) -> bool:
        """Takes the sections of a further look; whether any has changed."""
        changed = {}
        for name, value in found.items():
            text = json.dumps(value, separators=(",", ":"))
            if self.texts.get(name, (0, ""))[1] != text:
                changed[name] = text
        if changed:
            self.changes += 1
            self.texts.update({name: (self.changes, text) for name, text in changed.items()})
        return bool(changed)

    def since(self, seen: int) -> str:
        """The sections that have changed after change `seen`, as server-sent events."""
        parts = [f"event: {name}\ndata: {text}\n\n" for name, (at, text) in self.texts.items() if at > seen]
        return "".join(parts)
