"""Launches as spans for OpenTelemetry: one trace for each launch, out of the records that processes always keep.

The root is the launch at the controller, from admission to outcome. Below are the time with each island's hosts, the
time on each host's devices, and its waits for data of other hosts and for host functions. Numbers of traces and spans
follow from those of the launch, so that a launch that is exported twice is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from pathways_ray.observe.timeline import Ended, Interval, Records

Key: TypeAlias = tuple[int, int]
"""The session of a launch and its number in the cluster: a restarted controller counts from 1 again, sessions go on."""


ROOT = 1
"""The number of the root within its launch."""


class Span(NamedTuple):
    """A span. `id` counts within the launch, from that of the root. Times are seconds of the records' clock."""

    launch: Key
    id: int
    name: str
    start: float
    end: float
    attributes: Mapping[str, str | int]
    failed: bool = False


def spans(records: Records, sampled: float = 1.0) -> Iterator[Span]:
    """The spans of the launches that have ended, root first.

    Args:
        sampled: the part of launches that are taken, 0 to 1; a launch is taken by all who look, or by none.
    """
    below = [
        *((f"island {n}", {"pathways.island": n}, _by_launch(found)) for n, found in records.schedulers.items()),
        *((f"devices of host {n}", {"pathways.host": n}, _by_launch(found)) for n, found in records.ran.items()),
        *((f"data for host {n}", {"pathways.host": n}, _by_launch(found)) for n, found in records.waits.items()),
        *((f"Python on host {n}", {"pathways.host": n}, _by_launch(found)) for n, found in records.python.items()),
    ]
    for launch in records.ended:
        if not is_sampled(launch.sequence, sampled):
            continue
        root = _root(launch, records)
        yield root
        number = root.id
        for name, about, found in below:
            for one in found.get(launch.sequence, ()):
                number += 1
                yield Span(root.launch, number, name, one.start, one.end, about)


def is_sampled(launch: int, part: float) -> bool:
    """Whether a launch is taken: by its number, so that all decide alike."""
    return _number("", launch, 0, 4) < part * (1 << 32)


def trace_id(cluster: str, launch: Key) -> int:
    """The number of the trace of a launch, 128 bits."""
    return _number(cluster, launch, 0, 16) or 1


def span_id(cluster: str, launch: Key, number: int) -> int:
    """The number of a span, 64 bits."""
    return _number(cluster, launch, number, 8) or 1


def _number(cluster: str, launch: Key | int, number: int, size: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{cluster} {launch} {number}".encode()).digest()[:size], "big")


def _root(launch: Ended, records: Records) -> Span:
    program = records.programs.get(launch.program, "")
    about: dict[str, str | int] = {
        "pathways.launch": launch.sequence,
        "pathways.session": launch.session,
        "pathways.program": program,
        "pathways.tenant": records.tenants.get(launch.session, ""),
    }
    failed = launch.launch < 0
    return Span((launch.session, launch.sequence), ROOT, program or "launch", launch.start, launch.end, about, failed)


def _by_launch(found: list[Interval]) -> dict[int, list[Interval]]:
    made: dict[int, list[Interval]] = {}
    for one in found:
        made.setdefault(one.sequence, []).append(one)
    return made
