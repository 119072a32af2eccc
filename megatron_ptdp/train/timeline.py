"""Draws a step as it ran beside its prediction: its schedule, simulated with the measured times of its actions."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jax

import pathways_ray as pw
from megatron_ptdp.schedules import Action, Costs, Kind, Link, Schedule, Span, Timeline, chrome_trace, simulate
from megatron_ptdp.schedules.draw import draw_below

RECORD_LIMIT_S = 600.0

MIN_SEEN_S = 20e-6
"""An action that seems to take less was over before the host looked, as on steps of some milliseconds: no computation
is launched in less."""

_KINDS: dict[str, Kind] = {"forward": "F", "backward": "B", "input_gradient": "I", "weight_gradient": "W"}
"""Kinds of actions by the names of the functions of stages, behind `stage3_`."""


class OtherComputation(NamedTuple):
    """A computation of one pipeline device beside its actions, as the reduction of gradients or the update."""

    device: int
    name: str
    start: float
    end: float


class Measured(NamedTuple):
    """A step that ran: its actions as a timeline, and other computations. Seconds from the first action."""

    timeline: Timeline
    others: tuple[OtherComputation, ...]

    @property
    def unseen(self) -> int:
        """The number of actions that were over before the host looked, whose times are unknown."""
        return sum(not is_seen(span) for span in self.timeline.started)


def is_seen(span: Span) -> bool:
    """True where the time of an action is known."""
    return span.end - span.start >= MIN_SEEN_S


def record(step: Any, state: Any, batch: Mapping[str, Any]) -> tuple[Any, Mapping[int, Sequence[Any]]]:
    """Runs a step while nothing else runs.

    Returns its result, and for each host its computations as `pw.recording` has them: nothing where a host did not
    answer, for a picture is not worth a training. The loss of a host is for the step to report.

    Raises:
        UsageError: another process started the cluster.
    """
    _wait(state)
    with pw.recording() as computed:
        result = step(state, batch)
        _wait(result)
    return result, computed


def _wait(arrays: Any) -> None:
    jax.tree.map(lambda array: array.block_until_ready(RECORD_LIMIT_S), arrays)


def measured(schedule: Schedule, slices: Sequence[Any], seen: Mapping[int, Sequence[Any]]) -> Measured:
    """The step on one row of slices, one for each pipeline device.

    The actions of a stage are identified by their order, which is the schedule's. Where forward and backward of the
    last stage run as one, that is its backward.

    Args:
        seen: for each host what it computed, in the order in which it was enqueued
    """
    expected = _expected(schedule)
    spans: list[list[Span]] = [[] for _ in slices]
    others = []
    for device, placed in enumerate(slices):
        on = {(place.host, place.index) for place in placed.placed.devices}
        host = min(host for host, _ in on)
        for one in seen.get(host, ()):
            stage, kind = _meant(one.name)
            if not 0 <= stage < schedule.stages or schedule.placement[stage] != device:
                continue
            if kind is None:
                others.append(OtherComputation(device, one.name, one.start, one.end))
                continue
            waiting = expected[stage, kind]
            if kind == "F" and stage == schedule.stages - 1 and not waiting:
                continue
            spans[device].append(Span(device, Action(stage, kind, waiting.pop(0)), one.start, one.end))
    start = min((row[0].start for row in spans if row), default=0.0)
    rows = tuple(tuple(span._replace(start=span.start - start, end=span.end - start) for span in row) for row in spans)
    started = tuple(sorted((span for row in rows for span in row), key=lambda span: span.start))
    nothing = (None,) * len(started)
    timeline = Timeline(schedule, rows, (), (0.0,) * len(rows), started, (nothing, ()))
    return Measured(timeline, tuple(one._replace(start=one.start - start, end=one.end - start) for one in others))


def _meant(name: str) -> tuple[int, Kind | None]:
    """Stage and kind of a function's name; -1 where it belongs to none. Slices of experts have higher numbers."""
    stage, _, what = name.partition("_")
    number = stage.removeprefix("stage")
    if number == stage or not number.isdigit():
        return -1, None
    return int(number), _KINDS.get(what)


def _expected(schedule: Schedule) -> dict[tuple[int, Kind], list[int]]:
    """For each stage and kind the microbatches in their order."""
    found: dict[tuple[int, Kind], list[int]] = defaultdict(list)
    for row in schedule.rows:
        for entry in row:
            for stage, kind, microbatch in entry.parts:
                found[stage, kind].append(microbatch)
    return found


def stage_times(schedule: Schedule, ran: Timeline) -> dict[Kind, tuple[float, ...]]:
    """For each kind of action the mean time of each stage, in seconds, of those whose time is known; 0 for none."""
    times: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in filter(is_seen, ran.started):
        part = span.entry.parts[0]
        times[part.stage, part.kind].append(span.end - span.start)
    kinds: tuple[Kind, ...] = ("F", "I", "W", "B")
    return {kind: tuple(fmean(times[stage, kind] or [0.0]) for stage in range(schedule.stages)) for kind in kinds}


def predicted(schedule: Schedule, ran: Timeline, hop_s: float = 0.0) -> Timeline:
    """The schedule, simulated with the mean time of each stage's actions.

    Args:
        hop_s: seconds from the end of an action to where its output is on another device.
    """
    times, hops = stage_times(schedule, ran), schedule.stages - 1
    costs = Costs(times["F"], times["I"], times["W"], times["B"], message=(0.0,) * hops, link=Link(hop_s))
    return simulate(schedule, costs)


PROGRAM = "training_step"
"""The name of the program of a step."""


def prediction(model: Timeline, slices: Sequence[Any]) -> str:
    """A predicted step as `pathways trace --predicted` takes it: for each host what it is expected to do, in seconds
    from the start of the step.

    Args:
        slices: one for each pipeline device; its first host stands for it
    """
    hosts: dict[int, list[tuple[str, float, float]]] = defaultdict(list)
    for row, placed in zip(model.rows, slices, strict=True):
        host = min(place.host for place in placed.placed.devices)
        hosts[host] += [(str(span), span.start, span.end) for span in row]
    return json.dumps({"program": PROGRAM, "seconds": model.makespan, "hosts": hosts}, separators=(",", ":"))


class Drawn(NamedTuple):
    """The files of a traced step."""

    picture: Path
    trace: Path


def trace_text(ran: Measured, model: Timeline) -> str:
    """A Chrome trace with both: what ran as processes 0 and 1, what was predicted as 10 and 11."""
    events: list[dict[str, Any]] = []
    for what, offset, timeline in (("measured", 0, ran.timeline), ("predicted", 10, model)):
        for event in json.loads(chrome_trace(timeline))["traceEvents"]:
            event["pid"] += offset
            if event["name"] == "process_name":
                event["args"]["name"] = f"{what}, {event['args']['name']}"
            events.append(event)
    for one in ran.others:
        times = {"ts": one.start * 1e6, "dur": (one.end - one.start) * 1e6}
        events.append({"ph": "X", "pid": 0, "tid": one.device, "name": one.name, "cat": "other", **times})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def write(directory: Path, number: int, ran: Measured, model: Timeline) -> Drawn:
    """Draws a recorded step and its prediction as `step-N.png`, and writes `step-N.trace.json` for ui.perfetto.dev."""
    picture, trace = directory / f"step-{number}.png", directory / f"step-{number}.trace.json"
    trace.write_text(trace_text(ran, model), encoding="utf-8")
    draw_below(
        {
            f"step {number} as it ran: {_about(ran.timeline)}{_and_unseen(ran)}": ran.timeline,
            f"{model.schedule.name}, simulated with the measured times of actions: {_about(model)}": model,
        },
        picture,
    )
    return Drawn(picture, trace)


def _and_unseen(ran: Measured) -> str:
    if not ran.unseen:
        return ""
    return f"; {ran.unseen} of {len(ran.timeline.started)} actions were over before they were seen"


def _about(timeline: Timeline) -> str:
    bubble = timeline.bubble
    return f"{timeline.makespan * 1e3:,.1f} ms, bubble {bubble.of_ideal:.1%} of the ideal time"
