"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_ptdp.schedules.timeline import Timeline

_DEVICES, _LINKS = 0, 1
KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def chrome_trace(timeline: Timeline, microseconds: float = 1e6) -> str:
    """The trace as JSON: a track for each device, and one for each link; more if its messages overlap.

    Args:
        timeline: to be shown
        microseconds: that one unit of its time stands for
    """
    events = [*_device_events(timeline, microseconds), *_link_events(timeline, microseconds)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _device_events(timeline: Timeline, unit: float) -> Iterator[dict[str, Any]]:
    yield _named("process_name", _DEVICES, 0, f"{timeline.schedule.name}: devices")
    for device, row in enumerate(timeline.rows):
        yield _named("thread_name", _DEVICES, device, f"device {device}")
        for span in row:
            about = [{"stage": stage, "kind": KIND_NAMES[kind], "microbatch": k} for stage, kind, k in span.entry.parts]
            yield {
                "ph": "X",
                "pid": _DEVICES,
                "tid": device,
                "name": str(span),
                "cat": "+".join(KIND_NAMES[part.kind] for part in span.entry.parts),
                "ts": span.start * unit,
                "dur": (span.end - span.start) * unit,
                "args": about[0] if len(about) == 1 else {"forward": about[0], "backward": about[1]},
            }


def _link_events(timeline: Timeline, unit: float) -> Iterator[dict[str, Any]]:
    """Messages from their start to their arrival. Messages of a link that overlap, by its latency, get more tracks."""
    yield _named("process_name", _LINKS, 0, f"{timeline.schedule.name}: links")
    track, pair = -1, (-1, -1)
    taken: list[tuple[int, float]] = []  # of the pair: tracks, and until when each is taken
    for transfer in sorted(timeline.transfers, key=lambda at: (at.source, at.target, at.start)):
        if pair != (transfer.source, transfer.target):
            pair, taken = (transfer.source, transfer.target), []
        place = next((place for place, (_, until) in enumerate(taken) if until <= transfer.start), len(taken))
        if place == len(taken):
            track += 1
            taken.append((track, 0.0))
            yield _named(
                "thread_name", _LINKS, track, f"device {pair[0]} to {pair[1]}" + (f", {place + 1}" if place else "")
            )
        taken[place] = (taken[place][0], transfer.arrival)
        yield {
            "ph": "X",
            "pid": _LINKS,
            "tid": taken[place][0],
            "name": str(transfer),
            "cat": "activation" if transfer.value == "F" else "gradient",
            "ts": transfer.start * unit,
            "dur": (transfer.arrival - transfer.start) * unit,
            "args": {
                "stage": transfer.stage,
                "microbatch": transfer.microbatch,
                "link held until": transfer.end * unit,
            },
        }


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
