"""A timeline as a picture: a row for each device, time to the right. matplotlib is imported when it is used."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from megatron_ptdp.schedules.actions import Action, Kind
from megatron_ptdp.schedules.timeline import Span, Timeline
from megatron_ptdp.schedules.trace import KIND_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Colour: TypeAlias = tuple[float, float, float]

COLOURS: dict[Kind, str] = {"F": "#0072B2", "B": "#009E73", "I": "#56B4E9", "W": "#E69F00"}
"""Of Okabe and Ito's set: told apart without colour vision, and in print."""

_POINTS = 72  # per inch, in which the sizes of texts are measured
_FONT_POINTS = 6.5
_MOST_ROWS_IN = 12.0  # inches of height; with more devices the rows become thin


def draw(timeline: Timeline, path: str | Path, title: str | None = None, width_in: float = 12.0) -> None:
    """Writes the picture as PNG, or as what the ending of `path` says.

    Colours are kinds of actions. Later chunks of a device are lighter. Numbers are microbatches, where they fit; white
    is the bubble.

    Args:
        timeline: to be drawn
        path: of the file
        title: left out, the schedule, its sizes and its bubble
        width_in: of the picture, in inches
    """
    from matplotlib.figure import Figure

    devices = len(timeline.rows)
    height = min(0.3 * devices, _MOST_ROWS_IN)
    figure = Figure(figsize=(width_in, height + 1.2), layout="constrained", dpi=120)
    axes = figure.subplots()
    axes.set_xlim(0, timeline.makespan or 1.0)
    axes.set_ylim(devices - 0.5, -0.5)
    fits = _POINTS * width_in * 0.93 / (timeline.makespan or 1.0) / _FONT_POINTS  # characters in a unit of time, about
    tall = height / devices * _POINTS > _FONT_POINTS
    _spans(axes, timeline, fits if tall else 0.0)
    axes.set_yticks(range(0, devices, max(1, devices // 16)))
    axes.set_ylabel("device")
    axes.set_xlabel("time")
    axes.set_title(title or _title(timeline), fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    _legend(axes, timeline)
    figure.savefig(path)


def _spans(axes: Axes, timeline: Timeline, fits: float) -> None:
    """All spans as two collections, for speed: a whole step has up to a hundred thousand."""
    from matplotlib.collections import PolyCollection

    corners, colours = [], []
    chunk = [timeline.schedule.chunk(stage) for stage in range(timeline.schedule.stages)]
    chunks = timeline.schedule.chunks
    for row in timeline.rows:
        for span in row:
            for part, left, right in _boxes(span):
                top, bottom = span.device - 0.42, span.device + 0.42
                corners.append([(left, top), (right, top), (right, bottom), (left, bottom)])
                colours.append(shade(part.kind, chunk[part.stage], chunks))
                text = str(part.microbatch)
                if (right - left) * fits > 0.62 * len(text) + 0.3:
                    ink = "white" if sum(colours[-1]) < 1.6 else "black"
                    middle = ((left + right) / 2, span.device)
                    axes.text(*middle, text, ha="center", va="center_baseline", fontsize=_FONT_POINTS, color=ink)
    edges = 0.4 if fits else 0.0
    axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=edges))


def _boxes(span: Span) -> list[tuple[Action, float, float]]:
    """The parts of a span side by side: those of a pair share its time by half."""
    parts = span.slot.parts
    share = (span.end - span.start) / len(parts)
    return [(part, span.start + at * share, span.start + (at + 1) * share) for at, part in enumerate(parts)]


def shade(kind: Kind, chunk: int, chunks: int) -> Colour:
    """The colour of a kind, lighter for later chunks."""
    code = COLOURS[kind]
    hue, light, full = colorsys.rgb_to_hls(*(int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)))
    return colorsys.hls_to_rgb(hue, light + (0.88 - light) * 0.75 * chunk / chunks, full)


def _title(timeline: Timeline) -> str:
    schedule, bubble = timeline.schedule, timeline.bubble
    return (
        f"{schedule.name}: {schedule.devices} devices, {schedule.stages} stages, {schedule.microbatches} microbatches; "
        f"bubble {bubble.of_ideal:.1%} of the ideal time, {bubble.of_total:.1%} of the whole"
    )


def _legend(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    kinds = {part.kind for row in schedule.rows for slot in row for part in slot.parts}
    patches = [
        Patch(
            color=shade(kind, chunk, schedule.chunks),
            label=KIND_NAMES[kind] + (f", chunk {chunk}" if schedule.chunks > 1 else ""),
        )
        for kind in COLOURS
        if kind in kinds
        for chunk in (range(schedule.chunks) if schedule.chunks <= 2 else (0, schedule.chunks - 1))
    ]
    axes.legend(
        handles=patches,
        ncols=8,
        frameon=False,
        fontsize=7,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.18),
        borderpad=0,
    )
