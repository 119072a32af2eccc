"""A timeline as a picture: a row for each device, time to the right. matplotlib is imported when it is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from megatron_ptdp.schedules.actions import Action, Kind
from megatron_ptdp.schedules.timeline import Span, Timeline
from megatron_ptdp.schedules.trace import KIND_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour: TypeAlias = tuple[float, float, float]

COLOURS: dict[Kind, str] = {"F": "#0072B2", "B": "#009E73", "I": "#CC79A7", "W": "#E69F00"}
"""Of Okabe and Ito's set: distinct without colour vision, and in print."""

_PALEST = 0.6  # the share of white in the colour of the last chunk
_POINTS = 72  # per inch, in which the sizes of texts are measured
_FONT_POINTS = 6.5
_EDGED_POINTS = 2.5  # spans that are narrower than this have no edges
_MAX_ROWS_IN = 12.0  # inches of height; with more devices the rows become thin


def draw(timeline: Timeline, path: str | Path, title: str | None = None, width_in: float = 10.0) -> None:
    """Writes the picture as PNG, or as what the ending of `path` says.

    Colours are kinds of actions. Later chunks of a device are lighter. Numbers are microbatches, where they fit; a
    forward and a backward in one frame run together. White is the bubble.

    Args:
        timeline: to be drawn
        path: of the file
        title: left out, the schedule, its sizes and its bubble
        width_in: of the picture, in inches
    """
    draw_below({title or _title(timeline): timeline}, path, width_in)


def draw_below(timelines: Mapping[str, Timeline], path: str | Path, width_in: float = 10.0) -> None:
    """Writes a picture of several timelines by title, one below the other, with one scale of time.

    Args:
        timelines: to be drawn, as `draw` does
        path: of the file
        width_in: of the picture, in inches
    """
    from matplotlib.figure import Figure

    heights = [min(0.3 * len(timeline.rows), _MAX_ROWS_IN) for timeline in timelines.values()]
    figure = Figure(figsize=(width_in, sum(heights) + 0.3 + 0.7 * len(heights)), layout="constrained", dpi=110)
    longest = max(timeline.makespan for timeline in timelines.values()) or 1.0
    unit = _POINTS * width_in * 0.93 / longest  # points for a unit of time, about
    every = figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
    for axes, height, (title, timeline) in zip(every, heights, timelines.items(), strict=True):
        devices = len(timeline.rows)
        axes.set_xlim(0, longest)
        axes.set_ylim(devices - 0.5, -0.5)
        _spans(axes, timeline, unit, numbers=height / devices * _POINTS > _FONT_POINTS)
        axes.set_yticks(range(0, devices, max(1, devices // 16)))
        axes.set_ylabel("device", fontsize=8)
        axes.set_xlabel("time", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.tick_params(length=0, labelsize=8)
        axes.spines[:].set_visible(False)
    _legend(figure, next(iter(timelines.values())))
    figure.savefig(path)


def _spans(axes: Axes, timeline: Timeline, unit: float, numbers: bool) -> None:
    """All spans as one collection, for speed: a whole step has up to a hundred thousand."""
    from matplotlib.collections import PolyCollection

    corners, colours, frames = [], [], []
    chunk = [timeline.schedule.chunk(stage) for stage in range(timeline.schedule.stages)]
    chunks = timeline.schedule.chunks
    average = timeline.makespan / max(1, *map(len, timeline.rows))
    for row in timeline.rows:
        for span in row:
            for part, left, right in _boxes(span):
                corners.append(_corners(span.device, left, right))
                colours.append(shade(part.kind, chunk[part.stage], chunks))
                text = str(part.microbatch)
                if numbers and (right - left) * unit > (0.62 * len(text) + 0.3) * _FONT_POINTS:
                    ink = "white" if sum(colours[-1]) < 1.6 else "black"
                    middle = ((left + right) / 2, span.device)
                    axes.text(*middle, text, ha="center", va="center_baseline", fontsize=_FONT_POINTS, color=ink)
            if len(span.entry.parts) > 1:
                frames.append(_corners(span.device, span.start, span.end))
    for device, end in _update_ends(timeline):
        axes.plot([end, end], [device - 0.46, device + 0.46], color="black", linewidth=1.4, solid_capstyle="butt")
    wide = average * unit > _EDGED_POINTS
    spans = PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.4 if wide else 0.0)
    spans.set_antialiased(wide)  # narrow ones would pale
    axes.add_collection(spans)
    if wide:
        axes.add_collection(PolyCollection(frames, facecolors="none", edgecolors="black", linewidths=0.8))


def _update_ends(timeline: Timeline) -> list[tuple[int, float]]:
    """The device and the end of each backward behind which a stage updates, where stages do so on the way."""
    updates, ended, found = timeline.schedule.updates, Counter[int](), []
    for span in (span for row in timeline.rows for span in row) if updates is not None else ():
        for part, _, right in _boxes(span):
            if part.kind in "BW":
                ended[part.stage] += 1
                if updates is not None and ended[part.stage] % updates.every == 0:
                    found.append((span.device, right))
    return found


def _corners(device: int, left: float, right: float) -> list[tuple[float, float]]:
    top, bottom = device - 0.42, device + 0.42
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _boxes(span: Span) -> list[tuple[Action, float, float]]:
    """The parts of a span side by side: those of a pair share its time by half."""
    parts = span.entry.parts
    share = (span.end - span.start) / len(parts)
    return [(part, span.start + at * share, span.start + (at + 1) * share) for at, part in enumerate(parts)]


def shade(kind: Kind, chunk: int, chunks: int) -> Colour:
    """The colour of a kind, lighter for later chunks."""
    code = COLOURS[kind]
    white = _PALEST * chunk / max(1, chunks - 1)
    red, green, blue = (int(code[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return (red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white)


def _title(timeline: Timeline) -> str:
    schedule, bubble = timeline.schedule, timeline.bubble
    return (
        f"{schedule.name}: {schedule.devices} devices, {schedule.stages} stages, {schedule.microbatches} microbatches; "
        f"bubble {bubble.of_ideal:.1%} of the ideal time, {bubble.of_total:.1%} of the whole"
    )


def _legend(figure: Figure, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    kinds = {part.kind for row in schedule.rows for entry in row for part in entry.parts}
    patches = [Patch(color=COLOURS[kind], label=KIND_NAMES[kind]) for kind in COLOURS if kind in kinds]
    if schedule.chunks > 1:
        patches.append(Patch(color="lightgrey", label="lighter: later chunks"))
    if any(len(entry.parts) > 1 for row in schedule.rows for entry in row):
        patches.append(Patch(facecolor="white", edgecolor="black", label="framed: run together"))
    if schedule.updates is not None:
        patches.append(Patch(color="black", label="line: the stage updates"))
    figure.legend(handles=patches, ncols=6, frameon=False, fontsize=7, loc="outside lower center")
