"""Traces of a running cluster: what its processes have recorded, fetched through Ray, beside their jobs.

Records are always made (`observe.ring`); a trace only reads them. Processes of one boot of one machine share a clock;
that of another machine is compared on a connection of its own (`clocks`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray

from pathways_ray import names
from pathways_ray.deployment import detached
from pathways_ray.errors import PathwaysError, UsageError
from pathways_ray.observe.predictions import PREDICTION, Prediction
from pathways_ray.observe.timeline import Clock, Ended, Interval, Records, moved_by, offset_of, share_of, trace_file
from pathways_ray.os_process import clock
from pathways_ray.transport.clocks import ClockServer

ANSWER_LIMIT_S = 20.0
"""A process that does not answer within this time is left out of a trace."""

CLOCK_SAMPLES = 9
"""Answers through Ray, where a machine cannot come here on a connection of its own."""

PROFILE_LIMIT_S = 60.0
"""Seconds that JAX takes to write a profile, at most."""


def processes(name: str) -> dict[str, Any]:
    """The actors of a runtime on this process's Ray cluster, by name: controller, "scheduler 0", "host 3".

    Raises:
        UsageError: there is no such runtime.
    """
    found: dict[str, Any] = {}
    for actor in detached.actors(name):
        kind, _, number = actor.removeprefix(f"{name}-").partition("-")
        if kind in ("controller", "scheduler", "host"):
            with contextlib.suppress(ValueError):  # it has ended since it was listed
                found[f"{kind} {number}".strip()] = ray.get_actor(actor, names.NAMESPACE)
    if "controller" not in found:
        raise UsageError(f"no runtime named {name!r} is on this Ray cluster")
    return found


def trace(
    actors: Mapping[str, Any],
    since: float,
    client: Mapping[int, list[Interval]] | None = None,
    predictions: Iterable[Prediction] = (),
) -> Records:
    """The records of all processes that answer, from `since` on, by `time.monotonic` of this process; of more than a
    file can hold, the last ones.

    Args:
        client: launches of this process's sessions: numbers, calls, outcomes.
        predictions: to be drawn beside launches of the programs that they are about.

    Raises:
        PathwaysError: the controller does not answer.
    """
    known = clocks_of(actors)
    most = share_of(2 * len(known))
    asked = {name: actors[name].traced.remote(since + one.offset_s, most) for name, one in known.items()}
    said = _answers(asked)
    if said.get("controller") is None:
        raise PathwaysError("the controller does not answer; try again in a few seconds")
    ended, programs, tenants, moved = said["controller"]
    by = known["controller"].offset_s
    over = [Ended(s, session, key, at - by, end - by, launch) for s, session, key, at, end, launch in ended]
    schedulers: dict[int, list[Interval]] = {}
    ran: dict[int, list[Interval]] = {}
    waits: dict[int, list[Interval]] = {}
    python: dict[int, list[Interval]] = {}
    for name, found in said.items():
        kind, _, number = name.partition(" ")
        if found is not None and kind == "scheduler":
            schedulers[int(number)] = _intervals(found, known[name])
        elif found is not None and kind == "host":
            for table, part in zip((ran, waits, python), found, strict=True):
                table[int(number)] = _intervals(part, known[name])
    lists: list[Sequence[Ended | Interval]] = [over, *schedulers.values(), *ran.values(), *waits.values()]
    begin = max((found[0].end for found in lists if len(found) >= most), default=since)
    return Records(
        ended=[one for one in over if one.end >= begin],
        programs=programs,
        tenants=tenants,
        moved=moved,
        schedulers=_since(schedulers, begin),
        ran=_since(ran, begin),
        waits=_since(waits, begin),
        python=_since(python, begin),
        client=_since(client or {}, begin),
        clocks=known,
        predictions=list(predictions),
        left_out_s=max(0.0, begin - since),
    )


def _since(found: Mapping[int, list[Interval]], begin: float) -> dict[int, list[Interval]]:
    return {number: [one for one in intervals if one.end >= begin] for number, intervals in found.items()}


def text(records: Records) -> str:
    """The content of the file for Perfetto (https://ui.perfetto.dev opens it)."""
    return json.dumps(trace_file(records), separators=(",", ":"))


def write(records: Records, path: Path) -> None:
    """Writes the file for Perfetto."""
    path.write_text(text(records), encoding="utf-8")


def profile(actors: Mapping[str, Any], seconds: float, folder: Path) -> tuple[Path, dict[str, str]]:
    """Has JAX's profiler run on all hosts, as one session below `folder`, where TensorBoard looks for it.

    Returns the folder of the session, and the hosts whose profile is not in it, with the reason: those of machines that
    do not share the folder and whose profile is too large to be fetched.
    """
    session = folder.absolute() / "plugins" / "profile" / time.strftime("%Y_%m_%d_%H_%M_%S")
    session.mkdir(parents=True, exist_ok=True)
    asked = {name: actor.profile.remote(seconds) for name, actor in actors.items() if name.startswith("host")}
    lacking = {}
    for name, reference in asked.items():
        made = _answer(reference, seconds + PROFILE_LIMIT_S)
        if made is None:
            lacking[name] = "it did not answer"
        elif isinstance(made, str):
            lacking[name] = made
        else:
            (session / f"{name.replace(' ', '-')}.xplane.pb").write_bytes(made)
    return session, lacking


def read_prediction(path: Path) -> Prediction:
    """The prediction in a file.

    Raises:
        UsageError: it has none, or cannot be read.
    """
    try:
        return PREDICTION.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"the prediction {path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is no prediction: {error}") from error


def clocks_of(actors: Mapping[str, Any]) -> dict[str, Clock]:
    """The clocks of all processes that answer, beside this one's. Processes of one boot of one machine share one, so
    each other machine is compared once."""
    here, _ = clock()
    said = _answers({name: actor.clock.remote() for name, actor in actors.items()})
    boots = {name: answer[0] for name, answer in said.items() if answer is not None}
    compared: dict[str, Clock | None] = {here: Clock()} if here else {}
    found = {}
    for name, boot in boots.items():
        made = compared.get(boot) if boot else None
        if made is None:
            made = compared[boot] = _directly(actors[name]) or _through_ray(actors[name])
        if made is not None:
            found[name] = made
    return found


def _directly(actor: Any) -> Clock | None:
    """The clock of a process that comes here on a connection of its own; None where it cannot."""
    try:
        with ClockServer(ray.util.get_node_ip_address()) as server:
            actor.compare_clock.remote(server.address, server.port, server.nonce)
            return server.compare()
    except (OSError, ValueError, ray.exceptions.RayError):
        return None


def _through_ray(actor: Any) -> Clock | None:
    samples = []
    for _ in range(CLOCK_SAMPLES):
        sent = time.monotonic()
        answer = _answer(actor.clock.remote())
        if answer is None:
            return None
        samples.append((sent, answer[1], time.monotonic()))
    return offset_of(samples)


def _intervals(found: Iterable[tuple[int, float, float]], by: Clock) -> list[Interval]:
    return moved_by([Interval(*record) for record in found], by)


def _answers(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The answers to what was asked at once, None where none came: all of them together have the time of one."""
    deadline = time.monotonic() + ANSWER_LIMIT_S
    return {name: _answer(one, max(0.0, deadline - time.monotonic())) for name, one in asked.items()}


def _answer(reference: Any, limit_s: float = ANSWER_LIMIT_S) -> Any:
    try:
        return ray.get(reference, timeout=limit_s)
    except ray.exceptions.RayError:
        return None
