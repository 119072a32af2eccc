"""Tables: a look at everything as rows of text, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pathways_ray.observe.why import bytes_text

MAX_ROWS = 512
"""Rows of a table; a last row says how many are left out."""


class Table(NamedTuple):
    """A table: its columns, and its rows of as many texts."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(snapshot: Mapping[str, Any]) -> dict[str, Table]:
    """The tables of a snapshot, by their titles."""
    made = {
        "devices": _devices(snapshot),
        "tenants": _tenants(snapshot),
        "sessions": _sessions(snapshot),
        "launches": _launches(snapshot),
        "queue": _queue(snapshot),
        "programs": _programs(snapshot),
        "transfers": _transfers(snapshot),
        "memory": _memory(snapshot),
        "events": _events(snapshot),
    }
    return {title: _bounded(table) for title, table in made.items()}


def on_devices(snapshot: Mapping[str, Any]) -> dict[str, str]:
    """The launch that is first on each device, in words, by the device's name."""
    found: dict[str, str] = {}
    for view in snapshot.get("islands", {}).values():
        for one in view.get("dispatched", []):
            name = f"{one['sequence'] or ''} {one['program'] or one['tenant']}".strip()
            for device in one.get("devices", []):
                found.setdefault(device, name)
    return found


def _status(snapshot: Mapping[str, Any]) -> Mapping[str, Any]:
    return snapshot.get("status") or {}


_NO_DEVICE: list[dict[str, Any]] = [{"device": "-", "slices": []}]


def _devices(snapshot: Mapping[str, Any]) -> Table:
    runs = on_devices(snapshot)
    rows = [
        (
            _named(island),
            str(host["host"]),
            device["device"],
            "up" if host["up"] else "down",
            runs.get(device["device"], ""),
            ", ".join(device["slices"]),
        )
        for island in _status(snapshot).get("islands", [])
        for host in island["hosts"]
        for device in (host["devices"] if host["up"] else _NO_DEVICE)
    ]
    return Table(("island", "host", "device", "state", "first on it", "held by"), rows)


def _named(island: Mapping[str, Any]) -> str:
    """An island with its state, and why it is to be drained."""
    reason = f": {island['reason']}" if island.get("reason") else ""
    return f"{island['island']} {island.get('state', '')}".strip() + reason


def _sessions(snapshot: Mapping[str, Any]) -> Table:
    rows = [
        (
            str(one["session"]),
            one["name"],
            one["tenant"],
            "suspended" if one.get("suspended") else "",
            str(one["programs"]),
            str(one["buffers"]),
            bytes_text(one["bytes"]),
            str(one["in_flight"]),
            str(one["waiting"]),
        )
        for one in _status(snapshot).get("sessions", [])
    ]
    columns = ("session", "name", "tenant", "state", "programs", "buffers", "bytes", "in flight", "waiting")
    return Table(columns, rows)


def _tenants(snapshot: Mapping[str, Any]) -> Table:
    rows = [
        (
            one["tenant"],
            f"{one['weight']:g}",
            str(one["priority"]),
            f"{one['share']:.0%}",
            f"{one['device_seconds']:.1f}",
            str(one["queued"]),
            str(one["in_flight"]),
            str(one["sessions"]),
            bytes_text(one["device_bytes"]),
        )
        for one in _status(snapshot).get("tenants", [])
    ]
    columns = ("tenant", "weight", "priority", "share", "device s", "queued", "in flight", "sessions", "bytes")
    return Table(columns, rows)


def _launches(snapshot: Mapping[str, Any]) -> Table:
    rows = [
        (
            str(one["sequence"] or f"{one['session']}.{one['launch']}"),
            one["tenant"],
            f"{one['session']}.{one['launch']}",
            one["program"],
            one["state"],
            " ".join(map(str, one["islands"])),
        )
        for one in snapshot.get("overview", {}).get("launches", [])
    ]
    return Table(("launch", "tenant", "of session", "program", "state", "islands"), rows)


def _queue(snapshot: Mapping[str, Any]) -> Table:
    rows = [
        (
            number,
            str(rank),
            one["tenant"],
            str(one["session"]),
            str(one["launches"]),
            str(one["head"]),
            one["program"],
            f"{one['age_s']:.1f} s",
        )
        for number, view in snapshot.get("islands", {}).items()
        for rank, one in enumerate(view.get("queues", []), 1)
    ]
    return Table(("island", "rank", "tenant", "session", "launches", "next", "program", "waits"), rows)


def _programs(snapshot: Mapping[str, Any]) -> Table:
    rows = [
        (
            one["name"],
            str(one["session"]),
            " ".join(map(str, one["islands"])),
            str(one["devices"]),
            f"{one['ready']}/{one['hosts']}",
            str(one["launches"]),
            str(one["in_flight"]),
            one["failure"],
        )
        for one in snapshot.get("overview", {}).get("programs", [])
    ]
    columns = ("program", "session", "islands", "devices", "compiled", "launches", "in flight", "failure")
    return Table(columns, rows)


def _transfers(snapshot: Mapping[str, Any]) -> Table:
    moved = snapshot.get("overview", {}).get("transfers", [])
    rows = [(str(a), str(b), bytes_text(size)) for a, b, size in sorted(moved, key=lambda one: -one[2])]
    return Table(("from host", "to host", "bytes"), rows)


def _memory(snapshot: Mapping[str, Any]) -> Table:
    rows = [
        (
            one["pool"][:16],
            bytes_text(one["bytes"]),
            bytes_text(one["held"]),
            ", ".join(f"{name} {bytes_text(held)}" for name, held in one["tenants"].items()),
        )
        for one in _status(snapshot).get("memory", [])
    ]
    return Table(("memory", "size", "held", "by"), rows)


def _events(snapshot: Mapping[str, Any]) -> Table:
    rows = [
        (
            f"{one['age_s']:.1f} s ago",
            one["event"],
            one["detail"],
            one["cause"],
            str(one["session"] or ""),
            str(one["host"]) if one["host"] >= 0 else "",
        )
        for one in snapshot.get("overview", {}).get("events", [])
    ]
    return Table(("when", "event", "detail", "cause", "session", "host"), rows)


def _bounded(table: Table) -> Table:
    left = len(table.rows) - MAX_ROWS
    if left <= 0:
        return table
    more = (f"{left} more", *("" for _ in table.columns[1:]))
    return Table(table.columns, [*table.rows[:MAX_ROWS], more])
