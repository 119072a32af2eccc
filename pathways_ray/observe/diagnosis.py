"""Diagnosis: what is unhealthy in a runtime, from a look at everything. Each finding says what to do.

`findings` is a list of rules over one snapshot: the answer to a `Look` at "all", as JSON. An `error` makes a runtime
unhealthy; a `warning` is worth a look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

WAITS_LONG_S = 30.0
"""A launch that has waited for this long in an island's order is worth a look."""

RUNS_LONG = 0.5
"""The part of its limit after which a launch that keeps its devices is worth a look; so with compilations."""

LAUNCH_LIMIT_S = 60.0
COMPILE_LIMIT_S = 120.0
"""The limits of a launch and of a compilation where the status does not say them."""

NEARLY_FULL = 0.95
"""The part of a memory pool that is held beyond which launches wait soon."""

RECENT_S = 600.0
"""Losses of processes within this time are told."""

LOST = {"host lost", "scheduler lost", "scheduler absent"}

MAX_NAMED = 8
"""Hosts that a finding names."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that is not as it should be. `kind` is a fixed word for scripts; the runbook has a section for each."""

    severity: str
    kind: str
    what: str
    do: str


Rule = Callable[[Mapping[str, Any]], Iterator[Finding]]


def findings(snapshot: Mapping[str, Any]) -> list[Finding]:
    """All that is not as it should be, errors first."""
    found = [finding for rule in RULES for finding in rule(snapshot)]
    return sorted(found, key=lambda finding: finding.severity != "error")


def diagnosis(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The findings as `pathways status --diagnose` prints them: `healthy` unless one is an error."""
    found = findings(snapshot)
    return {
        "healthy": all(finding.severity != "error" for finding in found),
        "findings": [msgspec.to_builtins(finding) for finding in found],
    }


def _no_status(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    if not snapshot.get("status"):
        yield Finding("error", "no-status", "the resource manager does not answer", "look again; see its log")


def _hosts(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    about = snapshot.get("status")
    islands = about["islands"] if about else []
    if about and not any(host["up"] for island in islands for host in island["hosts"]):
        yield Finding("error", "no-hosts", "no host is up: nothing can run", "see whether Ray has nodes for them")
        return
    for island in islands:
        down = [host["host"] for host in island["hosts"] if not host["up"]]
        if down:
            named = ", ".join(map(str, down[:MAX_NAMED])) + (
                "" if len(down) <= MAX_NAMED else f" and {len(down) - 8} more"
            )
            what = f"island {island['island']} is {island['state']}: host {named} of {len(island['hosts'])} is down"
            yield Finding("error", "host-down", what, "it comes back by itself where Ray has room; see its log")


def _drains(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    about = snapshot.get("status") or {}
    for island in about.get("islands", []):
        number, reason, left_s = island["island"], island.get("reason", ""), island.get("drain_left_s")
        held = sum(one["island"] == number for one in about.get("slices", []))
        if island["state"] == "draining" and held and left_s is not None and left_s < 0:
            what = f"island {number} still has {held} slices {-left_s:.0f} s after the deadline of its drain"
            do = f"clients stand still, or nothing has room; 'pathways island remove {number}' ends it all the same"
            yield Finding("warning", "drain-late", what, do)
        elif island["state"] == "up" and reason:
            what = f"island {number} is to be drained, and is the last one that takes slices: {reason}"
            yield Finding("warning", "drain-refused", what, "'pathways island add' starts another one")


def _schedulers(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    answered = set(snapshot.get("islands", {}))
    for island in (snapshot.get("status") or {}).get("islands", []):
        if str(island["island"]) not in answered:
            what = f"the scheduler of island {island['island']} did not answer within a second"
            yield Finding("error", "scheduler-silent", what, "it restarts by itself; a machine that is crowded is slow")


def _launches(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    """Of launches that have a number: those of other tenants, which a tenant sees, have none."""
    about = snapshot.get("status") or {}
    limits = {tenant["tenant"]: tenant.get("launch_limit_s") for tenant in about.get("tenants", [])}
    for number, view in snapshot.get("islands", {}).items():
        owner = {one["sequence"]: one for one in view.get("dispatched", [])}
        for running in view.get("running", []):
            launch = owner.get(running["sequence"], {})
            limit = limits.get(launch.get("tenant")) or _limit(about, "launch_limit_s", LAUNCH_LIMIT_S)
            if running["sequence"] and running["seconds"] > RUNS_LONG * limit:
                name = f"launch {running['sequence']} of {launch.get('program', '')!r} ({launch.get('tenant', '')})"
                what = (
                    f"{name} has kept host {running['host']} for {running['seconds']:.0f} s; the limit is {limit:.0f} s"
                )
                yield Finding(
                    "warning", "launch-long", what, "at the limit the island restarts; cancel it, or raise it"
                )
        for compiling in view.get("compiling", []):
            if compiling["seconds"] > RUNS_LONG * _limit(about, "compile_limit_s", COMPILE_LIMIT_S):
                what = f"host {compiling['host']} compiles {compiling['name']!r} for {compiling['seconds']:.0f} s"
                yield Finding("warning", "compile-long", what, "at the limit its island restarts; split the program")
        for queue in view.get("queues", []):
            if queue["head"] and queue["age_s"] > WAITS_LONG_S:
                what = f"launch {queue['head']} ({queue['tenant']}) waits on island {number} for {queue['age_s']:.0f} s"
                yield Finding("warning", "queue-long", what, f"'pathways why {queue['head']}' says behind what")


def _limit(about: Mapping[str, Any], name: str, default: float) -> float:
    """A limit that the status says. JSON has no infinity: it is null there."""
    found = about.get(name, default)
    return math.inf if found is None else float(found)


def _host_functions(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    for view in snapshot.get("islands", {}).values():
        owner = {one["sequence"]: one for one in view.get("dispatched", [])}
        for on_host in view.get("stopped", []):
            sequence, *_, calls = on_host["launch"]
            launch = owner.get(sequence)
            if calls and launch is not None and launch["age_s"] > WAITS_LONG_S:
                name = f"launch {sequence} of {launch['program']!r} ({launch['tenant']})"
                since = f"it was sent there {launch['age_s']:.0f} s ago"
                what = f"{name} waits on host {on_host['host']} for Python, {calls[0]!r}; {since}"
                yield Finding(
                    "warning", "python-long", what, "its own limit ends it; its host's log has what it prints"
                )


def _memory(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    for pool in (snapshot.get("status") or {}).get("memory", []):
        if pool["bytes"] and pool["held"] > NEARLY_FULL * pool["bytes"]:
            what = f"memory {pool['pool'][:12]} is {pool['held'] / pool['bytes']:.0%} full"
            most = max(pool["tenants"], key=pool["tenants"].get, default="nobody")
            yield Finding("warning", "memory-full", what, f"launches wait; {most} holds most of it")


def _configuration(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    about = snapshot.get("status") or {}
    if problem := about.get("tenants_file", {}).get("problem"):
        yield Finding(
            "error", "tenants-file", f"the tenants file cannot be used: {problem}", "mend it; the last one counts"
        )
    for refusal in about.get("refusals", []):
        what = f"program {refusal['program']!r} of {refusal['tenant']} is refused: it ended hosts"
        yield Finding(
            "warning", "program-refused", what, f"'pathways refusals --lift {refusal['id']}' lets it run again"
        )
    if trusted := about.get("trusted_tenants"):
        yield Finding("warning", "trusted", f"code of {', '.join(trusted)} runs unchecked", "see docs/security.md")


def _losses(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    events = snapshot.get("overview", {}).get("events", [])
    lost = [event for event in events if event["event"] in LOST and event["age_s"] < RECENT_S]
    if lost:
        last = min(lost, key=lambda event: event["age_s"])
        what = f"{len(lost)} losses in the last {RECENT_S / 60:.0f} minutes, the last {last['age_s']:.0f} s ago: "
        text = f"{last['event']} {last['host'] if last['host'] >= 0 else last['detail']} ({last['cause']})"
        yield Finding("warning", "restarts", what + text, "'pathways logs' has what led to it")


RULES: tuple[Rule, ...] = (
    _no_status,
    _hosts,
    _drains,
    _schedulers,
    _launches,
    _host_functions,
    _memory,
    _configuration,
    _losses,
)
"""The rules; a further one is a function in this list, with a section in the runbook for its kind."""
