"""Traces of a running cluster: what its processes have recorded, fetched through Ray, beside their jobs.

Records are always made (`observe.ring`); a trace only reads them. Processes of one boot of one machine share a clock;
that of another machine is compared by asking for it several times (`observe.timeline.offset_of`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray

from pathways_ray import names
from pathways_ray.deployment import detached
from pathways_ray.errors import PathwaysError, UsageError
from pathways_ray.observe.timeline import Clock, Ended, Interval, Records, moved_by, offset_of, trace_file
from pathways_ray.os_process import clock

ANSWER_LIMIT_S = 20.0
"""A process that does not answer within this time is left out of a trace."""

CLOCK_SAMPLES = 9


def processes(name: str) -> dict[str, Any]:
    """The actors of a runtime on this process's Ray cluster, by name: controller, "scheduler 0", "host 3".

    Raises:
        UsageError: there is no such runtime.
    """
    found: dict[str, Any] = {}
    for actor in detached.actors(name):
        kind, _, number = actor.removeprefix(f"{name}-").partition("-")
        if kind in ("controller", "scheduler", "host"):
            found[f"{kind} {number}".strip()] = ray.get_actor(actor, names.NAMESPACE)
    if "controller" not in found:
        raise UsageError(f"no runtime named {name!r} is on this Ray cluster")
    return found


def trace(actors: Mapping[str, Any], since: float, client: Mapping[int, list[Interval]] | None = None) -> Records:
    """The records of all processes that answer, from `since` on, by `time.monotonic` of this process.

    Args:
        client: launches of this process's sessions: numbers, calls, outcomes.

    Raises:
        PathwaysError: the controller does not answer.
    """
    clocks = {name: _clock(actor) for name, actor in actors.items()}
    known = {name: one for name, one in clocks.items() if one is not None}
    asked = {name: actors[name].traced.remote(since + one.offset_s) for name, one in known.items()}
    said = {name: _answer(reference) for name, reference in asked.items()}
    if said.get("controller") is None:
        raise PathwaysError("the controller does not answer; try again in a few seconds")
    ended, programs, tenants, moved = said["controller"]
    by = known["controller"].offset_s
    schedulers: dict[int, list[Interval]] = {}
    ran: dict[int, list[Interval]] = {}
    waits: dict[int, list[Interval]] = {}
    for name, found in said.items():
        kind, _, number = name.partition(" ")
        if found is not None and kind == "scheduler":
            schedulers[int(number)] = _intervals(found, known[name])
        elif found is not None and kind == "host":
            ran[int(number)], waits[int(number)] = (_intervals(part, known[name]) for part in found)
    return Records(
        ended=[Ended(s, session, key, at - by, end - by, launch) for s, session, key, at, end, launch in ended],
        programs=programs,
        tenants=tenants,
        moved=moved,
        schedulers=schedulers,
        ran=ran,
        waits=waits,
        client=dict(client or {}),
        clocks=known,
    )


def write(records: Records, path: Path) -> None:
    """Writes the file for Perfetto (https://ui.perfetto.dev opens it)."""
    path.write_text(json.dumps(trace_file(records), separators=(",", ":")), encoding="utf-8")


def profile(actors: Mapping[str, Any], seconds: float, folder: str) -> dict[str, str]:
    """Has JAX's profiler run on all hosts; where each wrote, on its own machine."""
    asked = {name: actor.profile.remote(seconds, folder) for name, actor in actors.items() if name.startswith("host")}
    answers = {name: _answer(reference, seconds + 60.0) for name, reference in asked.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


def _intervals(found: Iterable[tuple[int, float, float]], by: Clock) -> list[Interval]:
    return moved_by([Interval(*record) for record in found], by)


def _clock(actor: Any) -> Clock | None:
    """The clock of a process beside this one's; None where it does not answer."""
    boot, _ = clock()
    samples = []
    for _ in range(CLOCK_SAMPLES):
        sent = time.monotonic()
        answer = _answer(actor.clock.remote())
        if answer is None:
            return None
        if answer[0] == boot != "":
            return Clock()
        samples.append((sent, answer[1], time.monotonic()))
    return offset_of(samples)


def _answer(reference: Any, limit_s: float = ANSWER_LIMIT_S) -> Any:
    try:
        return ray.get(reference, timeout=limit_s)
    except ray.exceptions.RayError:
        return None
