"""Metrics: the page has the figures of the status."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pathways_ray import errors
from pathways_ray.controller import metrics
from pathways_ray.scheduler.policies import OPERATOR, anonymous

HOST = {"host": 0, "up": True, "devices": [{"device": "0.0", "slices": []}, {"device": "0.1", "slices": []}]}
STATUS: dict[str, Any] = {
    "islands": [
        {"island": 0, "platform": "cpu", "hosts": [HOST, {**HOST, "host": 1, "up": False}]},
        {"island": 1, "platform": "gpu", "hosts": [{**HOST, "host": 2}], "state": "draining"},
    ],
    "slices": [{}, {}],
    "sessions": [{"suspended": True}],
    "launches": 1234,
    "served": 77,
    "in_flight": 5,
    "buffers": 42,
    "latencies": {'al"ice\n': {"buckets": [("0.001", 3.0), ("+Inf", 5.0)], "sum": 1.5}},
    "failures": {"HostLost": 2},
    "busy": {0: 3.5, 1: 0.0},
    "moved_bytes": 4096,
    "events": {"host lost": 1},
    "queued": {0: 7, 1: 0},
    "memory": [{"pool": "0.0", "bytes": 100, "held": 40, "tenants": {}}],
    "refusals": [{}],
    "device_seconds": {'al"ice\n': 12.5},
    "tenants": [
        {
            "tenant": 'al"ice\n',
            "weight": 2.0,
            "priority": 1,
            "device_seconds": 12.5,
            "share": 0.75,
            "queued": 7,
            "waiting": 2,
            "in_flight": 3,
            "sessions": 1,
            "device_bytes": 4096,
        }
    ],
}


def samples(status: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """All samples by name and labels."""
    found = {}
    for family in text_string_to_metric_families(metrics.text(status).decode()):
        for sample in family.samples:
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


def test_a_scrape_says_what_the_status_says() -> None:
    alice = 'al"ice\n'
    expected: dict[tuple[str, ...], float] = {
        ("pathways_launches_total",): 1234,
        ("pathways_calls_served_total",): 77,
        ("pathways_island_device_seconds_total", "0"): 3.5,
        ("pathways_island_device_seconds_total", "1"): 0.0,
        ("pathways_transfer_bytes_total",): 4096,
        ("pathways_launches_in_flight",): 5,
        ("pathways_buffers",): 42,
        ("pathways_sessions",): 1,
        ("pathways_sessions_suspended",): 1,
        ("pathways_slices",): 2,
        ("pathways_islands", "up"): 1,
        ("pathways_islands", "away"): 0,
        ("pathways_islands", "draining"): 1,
        ("pathways_islands", "lost"): 0,
        ("pathways_tenants_file_broken",): 0,
        ("pathways_launch_seconds_bucket", "0.001", alice): 3,
        ("pathways_launch_seconds_bucket", "+Inf", alice): 5,
        ("pathways_launch_seconds_count", alice): 5,
        ("pathways_launch_seconds_sum", alice): 1.5,
        **{("pathways_launches_failed_total", kind): 0 for kind in metrics.KNOWN_FAILURES},
        ("pathways_launches_failed_total", "HostLost"): 2,
        **{("pathways_events_total", event): 0 for event in metrics.KNOWN_EVENTS},
        ("pathways_events_total", "host lost"): 1,
        ("pathways_island_queue_length", "0"): 7,
        ("pathways_island_queue_length", "1"): 0,
        ("pathways_memory_bytes", "0.0"): 100,
        ("pathways_memory_held_bytes", "0.0"): 40,
        ("pathways_refused_programs",): 1,
        ("pathways_hosts", "0", "cpu"): 2,
        ("pathways_hosts", "1", "gpu"): 1,
        ("pathways_hosts_up", "0", "cpu"): 1,
        ("pathways_hosts_up", "1", "gpu"): 1,
        ("pathways_devices", "0", "cpu"): 2,
        ("pathways_devices", "1", "gpu"): 2,
        ("pathways_tenant_device_seconds_total", alice): 12.5,
        ("pathways_tenant_share", alice): 0.75,
        ("pathways_tenant_weight", alice): 2,
        ("pathways_tenant_queue_length", alice): 7,
        ("pathways_tenant_launches_in_flight", alice): 3,
        ("pathways_tenant_sessions", alice): 1,
        ("pathways_tenant_device_bytes", alice): 4096,
    }
    assert samples(STATUS) == expected


def test_what_alerts_look_at_is_there_before_it_happens() -> None:
    """Prometheus has no increase for a series that begins at 4, as that of hosts lost at once would."""
    found = samples({**STATUS, "failures": {}, "events": {}})
    for event in ("host lost", "scheduler lost", "scheduler absent"):
        assert found["pathways_events_total", event] == 0
    for kind in ("HostLost", "OutOfMemory", "QuotaExceeded", "CompileError", "LaunchTimeout", "ExecutionError"):
        assert found["pathways_launches_failed_total", kind] == 0
    assert {kind for kind in metrics.KNOWN_FAILURES if not hasattr(errors, kind)} == set()


def test_sessions_of_the_runtimes_own_token_are_one_tenant_also_those_that_are_over() -> None:
    """Else each session would leave series behind, and its seconds be gone with it."""
    (alice,) = STATUS["tenants"]
    own = [{**alice, "tenant": anonymous(session), "share": 0.125, "device_seconds": 2.0} for session in (7, 9)]
    found = samples({**STATUS, "tenants": [alice, *own], "device_seconds": {'al"ice\n': 12.5, OPERATOR: 24.0}})
    assert found["pathways_tenant_device_seconds_total", OPERATOR] == 24.0
    assert found["pathways_tenant_share", OPERATOR] == 0.25
    assert found["pathways_tenant_weight", OPERATOR] == 4.0
    assert found["pathways_tenant_sessions", OPERATOR] == 2
    assert {name[1] for name in found if name[0].startswith("pathways_tenant_sessions")} == {alice["tenant"], OPERATOR}


def test_a_tenants_file_that_cannot_be_used_is_seen() -> None:
    broken = {**STATUS, "tenants_file": {"path": "t.json", "problem": "it is no table"}}
    assert samples(broken)["pathways_tenants_file_broken",] == 1
    assert samples({**STATUS, "tenants": []})["pathways_buffers",] == 42
