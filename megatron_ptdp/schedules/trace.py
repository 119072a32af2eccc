"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_ptdp.schedules.timeline import Timeline

_DEVICES, _LINKS = 0, 1
KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def chrome_trace(timeline: Timeline, microseconds: float = 1e6) -> str:
    """The trace as JSON: a track for each device, and one for each link between two of them.

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
    """From the start of a message to its arrival. Those of one link may overlap by its latency: asynchronous events."""
    yield _named("process_name", _LINKS, 0, f"{timeline.schedule.name}: links")
    tracks: dict[tuple[int, int], int] = {}
    for number, transfer in enumerate(timeline.transfers):
        pair = (transfer.source, transfer.target)
        if pair not in tracks:
            tracks[pair] = len(tracks)
            yield _named("thread_name", _LINKS, tracks[pair], f"device {transfer.source} to {transfer.target}")
        common = {"pid": _LINKS, "tid": tracks[pair], "cat": "message", "name": str(transfer), "id": number}
        yield common | {"ph": "b", "ts": transfer.start * unit}
        yield common | {"ph": "e", "ts": transfer.arrival * unit}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
