"""The status of a runtime as Prometheus metrics.

Counters begin at zero with each life of the controller, as Prometheus expects it. Labels are islands, platforms,
tenants, memory pools, and kinds of failures and events, whose numbers an operator knows; nothing is labelled by
session, launch or buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.exposition import generate_latest

from pathways_ray.observe.diagnosis import LOST
from pathways_ray.scheduler.policies import account_name

__all__ = ["CONTENT_TYPE", "families", "text"]

_OF_TENANTS: tuple[tuple[str, str, str], ...] = (
    ("share", "pathways_tenant_share", "Part of all device time of the last 10 s, 0 to 1."),
    ("weight", "pathways_tenant_weight", "What the share is to be in proportion to."),
    ("queued", "pathways_tenant_queue_length", "Launches that no device queue has yet."),
    ("in_flight", "pathways_tenant_launches_in_flight", "Launches admitted and without an outcome."),
    ("sessions", "pathways_tenant_sessions", "Open sessions."),
    ("device_bytes", "pathways_tenant_device_bytes", "Bytes that buffers take on devices."),
)


# Prometheus sees no increase in a series whose first value is not zero, so what alerts look at is there from the start.
KNOWN_EVENTS = tuple(sorted(LOST))
KNOWN_FAILURES = (
    "BufferDeleted",
    "BufferLost",
    "Cancelled",
    "CompileError",
    "ExecutionError",
    "HostFunctionError",
    "HostFunctionTimeout",
    "HostLost",
    "LaunchTimeout",
    "OutOfMemory",
    "ProgramRefused",
    "QuotaExceeded",
    "SessionSuspended",
    "UsageError",
    "WireError",
)


def text(status: Mapping[str, Any]) -> bytes:
    """The body of `/metrics`, in Prometheus' text format."""
    return generate_latest(_Found(status))


class _Found:
    """A registry as far as `generate_latest` needs one: it calls only `collect`."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self.status = status

    def collect(self) -> Iterator[Metric]:
        return families(self.status)


def families(status: Mapping[str, Any]) -> Iterator[Metric]:
    """The metrics of a status as `pathways status --json` shows it to the operator."""
    yield CounterMetricFamily("pathways_launches", "Launches admitted.", value=status["launches"])
    yield CounterMetricFamily(
        "pathways_calls_served", "Calls for their values alone, which hosts have served.", value=status["served"]
    )
    yield GaugeMetricFamily(
        "pathways_launches_in_flight", "Launches admitted and without an outcome.", value=status["in_flight"]
    )
    yield GaugeMetricFamily("pathways_buffers", "Live buffers, each counted once.", value=status["buffers"])
    yield GaugeMetricFamily("pathways_sessions", "Open sessions.", value=len(status["sessions"]))
    suspended = sum(bool(session.get("suspended")) for session in status["sessions"])
    yield GaugeMetricFamily("pathways_sessions_suspended", "Open sessions that hold no devices.", value=suspended)
    yield GaugeMetricFamily("pathways_slices", "Virtual slices that are held.", value=len(status["slices"]))
    broken = bool(status.get("tenants_file", {}).get("problem"))
    yield GaugeMetricFamily(
        "pathways_tenants_file_broken", "1 while the tenants file cannot be used; the last good one counts.", broken
    )
    yield from _of_islands(status["islands"])
    yield from _of_launches(status)
    yield from _of_tenants(status)


def _of_tenants(status: Mapping[str, Any]) -> Iterator[Metric]:
    """The figures of tenants. Each session of the runtime's own token is a tenant; here these are one."""
    sums: dict[str, dict[str, float]] = {}
    for tenant in status.get("tenants", ()):
        found = sums.setdefault(account_name(tenant["tenant"]), {})
        for key, *_ in _OF_TENANTS:
            found[key] = found.get(key, 0) + tenant[key]
    seconds = CounterMetricFamily(
        "pathways_tenant_device_seconds",
        "Seconds in which launches were on devices, summed over devices.",
        labels=("tenant",),
    )
    for name, used in status.get("device_seconds", {}).items():  # with those of sessions that are over
        seconds.add_metric((name,), used)
    yield seconds
    for key, metric, help_text in _OF_TENANTS:
        family = GaugeMetricFamily(metric, help_text, labels=("tenant",))
        for name, found in sums.items():
            family.add_metric((name,), found[key])
        yield family


def _of_launches(status: Mapping[str, Any]) -> Iterator[Metric]:
    """Latencies and failures of launches, queues, memory, refusals, and events that are few."""
    latency = HistogramMetricFamily(
        "pathways_launch_seconds", "Time of launches from admission to outcome.", labels=("tenant",)
    )
    for tenant, found in status.get("latencies", {}).items():
        latency.add_metric((tenant,), [(bound, count) for bound, count in found["buckets"]], found["sum"])
    yield latency
    failed = CounterMetricFamily(
        "pathways_launches_failed", "Launches that ended in an error, also those never admitted.", labels=("kind",)
    )
    for kind, count in (dict.fromkeys(KNOWN_FAILURES, 0) | status.get("failures", {})).items():
        failed.add_metric((kind,), count)
    yield failed
    events = CounterMetricFamily("pathways_events", "Lifecycle events of the controller.", labels=("event",))
    for event, count in (dict.fromkeys(KNOWN_EVENTS, 0) | status.get("events", {})).items():
        events.add_metric((event,), count)
    yield events
    queue = GaugeMetricFamily("pathways_island_queue_length", "Launches that wait on an island.", labels=("island",))
    for island, count in status.get("queued", {}).items():
        queue.add_metric((str(island),), count)
    yield queue
    busy = CounterMetricFamily(
        "pathways_island_device_seconds",
        "Seconds in which launches were on the island's devices, summed over them.",
        labels=("island",),
    )
    for island, seconds in status.get("busy", {}).items():
        busy.add_metric((str(island),), seconds)
    yield busy
    moved = status.get("moved_bytes", 0)
    yield CounterMetricFamily("pathways_transfer_bytes", "Bytes that launches moved between hosts.", value=moved)
    size = GaugeMetricFamily("pathways_memory_bytes", "Memory of devices for arrays.", labels=("pool",))
    held = GaugeMetricFamily("pathways_memory_held_bytes", "Memory that buffers hold.", labels=("pool",))
    for pool in status.get("memory", ()):
        size.add_metric((pool["pool"],), pool["bytes"])
        held.add_metric((pool["pool"],), pool["held"])
    yield from (size, held)
    refused = len(status.get("refusals", ()))
    yield GaugeMetricFamily("pathways_refused_programs", "Programs that the circuit breaker refuses.", value=refused)


def _of_islands(islands: list[dict[str, Any]]) -> Iterator[Metric]:
    labels = ("island", "platform")
    hosts = GaugeMetricFamily("pathways_hosts", "Hosts of the island.", labels=labels)
    up = GaugeMetricFamily("pathways_hosts_up", "Hosts of the island that are up.", labels=labels)
    devices = GaugeMetricFamily("pathways_devices", "Devices of the island's hosts that are up.", labels=labels)
    for island in islands:
        where = (str(island["island"]), island["platform"])
        there = [host for host in island["hosts"] if host["up"]]
        hosts.add_metric(where, len(island["hosts"]))
        up.add_metric(where, len(there))
        devices.add_metric(where, sum(len(host["devices"]) for host in there))
    states = GaugeMetricFamily("pathways_islands", "Islands by state: up, away, draining, lost.", labels=("state",))
    found = Counter(island.get("state", "up") for island in islands)
    for state in sorted({"up", "away", "draining", "lost"} | found.keys()):
        states.add_metric((state,), found[state])
    yield from (hosts, up, devices, states)
