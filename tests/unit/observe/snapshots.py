"""A look at everything, for tests: two islands, two tenants, one launch each."""

from __future__ import annotations

import json
from typing import Any

from pathways_ray.observe import views
from pathways_ray.observe.views import Dispatched, IslandView, Queue


def view(**fields: Any) -> dict[str, Any]:
    """An island as it is in a snapshot."""
    found: dict[str, Any] = json.loads(views.encode(IslandView(**fields)))
    return found


def host(number: int, devices: int = 2, up: bool = True) -> dict[str, Any]:
    names = [{"device": f"{number}.{k}", "slices": ["session 1: left"] if not k else []} for k in range(devices)]
    return {"host": number, "node": "n1", "pid": 100 + number, "epoch": 1, "up": up, "devices": names}


def island(number: int, *hosts: dict[str, Any], state: str = "up") -> dict[str, Any]:
    return {"island": number, "platform": "cpu", "tenant": "", "state": state, "hosts": list(hosts)}


def snapshot(**status: Any) -> dict[str, Any]:
    """Bob's launch 640 is on the devices of island 0, alice's 641 waits behind it."""
    sent = Dispatched(640, 2, "bob", "step", 1.5, (0,), ("0.0", "0.1"))
    return {
        "status": {
            "islands": [island(0, host(0)), island(1, host(1))],
            "slices": [],
            "sessions": [],
            "tenants": [
                {
                    "tenant": name,
                    "weight": 1.0,
                    "priority": 0,
                    "launch_limit_s": None,
                    "device_seconds": 1.25,
                    "share": 0.5,
                    "queued": 1,
                    "waiting": 0,
                    "in_flight": 1,
                    "sessions": 1,
                    "device_bytes": 2048,
                }
                for name in ("alice", "bob")
            ],
            "memory": [{"pool": "0.0", "bytes": 100, "held": 40, "tenants": {"bob": 40}}],
            "refusals": [],
            "launches": 641,
            "in_flight": 2,
            "buffers": 3,
            "launch_limit_s": 60.0,
            "trusted_tenants": [],
            **status,
        },
        "islands": {
            "0": view(
                island=0, hosts=(0,), dispatched=(sent,), queues=(Queue(1, "alice", 2, 641, "double", 0.5, ("0.0",)),)
            ),
            "1": view(island=1, hosts=(1,)),
        },
        "overview": {
            "now": 9.0,
            "programs": [
                {
                    "key": 5,
                    "name": "step",
                    "session": 2,
                    "islands": [0],
                    "devices": 2,
                    "hosts": 1,
                    "ready": 1,
                    "launches": 12,
                    "in_flight": 1,
                    "failure": "",
                    "nodes": [
                        {"id": 0, "name": "f", "island": 0, "gang": 0},
                        {"id": 1, "name": "g", "island": 1, "gang": 1},
                    ],
                    "edges": [{"from": 0, "to": 1}],
                }
            ],
            "launches": [
                {
                    "sequence": 640,
                    "session": 2,
                    "launch": 3,
                    "tenant": "bob",
                    "program": "step",
                    "state": "in flight",
                    "islands": [0],
                }
            ],
            "transfers": [(0, 1, 4096), (1, 0, 2 << 20)],
            "events": [
                {"age_s": 2.0, "event": "session opened", "detail": "tenant bob", "cause": "", "session": 2, "host": -1}
            ],
        },
    }
