"""What a tenant sees of a cluster that others use too."""

from __future__ import annotations

import json
from typing import Any

from pathways_ray.controller import status

STATUS: dict[str, Any] = {
    "islands": [
        {
            "island": 0,
            "tenant": "",
            "hosts": [
                {
                    "host": 0,
                    "node": "machine",
                    "pid": 77,
                    "up": True,
                    "devices": [
                        {"device": "0.0", "slices": ["session 1: mine", "session 11: secret project"]},
                        {"device": "0.1", "slices": ["session 2: session 1: mine"]},
                    ],
                }
            ],
        }
    ],
    "slices": [{"session": 1, "name": "mine"}, {"session": 11, "name": "secret project"}],
    "sessions": [
        {"session": 1, "name": "a", "buffers": 3, "in_flight": 1, "gives_way_to": 11},
        {"session": 11, "name": "eve", "buffers": 9, "in_flight": 2, "gives_way_to": 0},
    ],
    "tenants": [{"tenant": "alice"}, {"tenant": "mallory"}],
    "refusals": [{"tenant": "alice", "id": "a1"}, {"tenant": "mallory", "id": "b2"}],
    "tenants_file": {"path": "/etc/secret"},
    "controller": {"pid": 78},
    "launches": 99,
    "launch_limit_s": 600.0,
}


def test_others_are_somebody() -> None:
    """A session whose number only begins alike, or whose slice is named to look alike, is another's."""
    found = status.for_tenant(STATUS, "alice", {1})
    devices = found["islands"][0]["hosts"][0]["devices"]
    assert [device["slices"] for device in devices] == [["session 1: mine", "somebody"], ["somebody"]]
    assert (found["buffers"], found["in_flight"], found["launch_limit_s"]) == (3, 1, 600.0)
    text = json.dumps(found)
    for word in ("secret", "eve", "mallory", "machine", "77", "78", "99", "11"):
        assert word not in text


def test_who_has_nothing_sees_that_devices_are_held() -> None:
    devices = status.for_tenant(STATUS, "bob", set())["islands"][0]["hosts"][0]["devices"]
    assert [device["slices"] for device in devices] == [["somebody", "somebody"], ["somebody"]]


def test_a_tenant_with_islands_of_its_own_sees_no_others() -> None:
    own = {"island": 1, "tenant": "alice", "hosts": []}
    found = status.for_tenant({**STATUS, "islands": [*STATUS["islands"], own]}, "alice", {1}, "alice")
    assert found["islands"] == [own]


def test_every_process_has_a_log_on_its_node() -> None:
    islands = [
        {"island": 0, "hosts": [{"host": 0, "node": "a"}, {"host": 1, "node": "b"}]},
        {"island": 3, "hosts": []},
    ]
    assert status.logs(islands, "/logs/one", "c") == [
        {"process": "controller", "node": "c", "path": "/logs/one/controller.jsonl"},
        {"process": "host 0", "node": "a", "path": "/logs/one/host-0.jsonl"},
        {"process": "host 1", "node": "b", "path": "/logs/one/host-1.jsonl"},
        {"process": "resource manager", "node": "c", "path": "/logs/one/resource-manager.jsonl"},
        {"process": "scheduler 0", "node": "c", "path": "/logs/one/scheduler-0.jsonl"},
        {"process": "scheduler 3", "node": "c", "path": "/logs/one/scheduler-3.jsonl"},
    ]
