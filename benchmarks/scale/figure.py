"""Draws what `benchmarks.scale` measured. Nothing here measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures import COLOURS, caption, points


def draw(result: dict[str, Any], path: Path) -> None:
    """Costs of a launch by hosts, sizes of a plan by devices, a star against trees: the parts that were measured."""
    panels = [(part, panel) for part, panel in PANELS.items() if part in result]
    figure = Figure(figsize=(4.6 * len(panels), 4.2), layout="constrained")
    for axes, (part, panel) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set_xscale("log", base=2)  # before the panel sets limits, which would count as linear
        axes.set_yscale("log")
        panel(result[part], axes)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    machine = result["machine"]
    text = f"Simulated hosts; one core of {machine['cpu']}. Points: median; whiskers: lowest and highest round."
    caption(figure, text)
    figure.savefig(path, dpi=150)


def launches(rows: list[dict[str, Any]], axes: Axes) -> None:
    """Microseconds of a scheduler for one launch on one host: flat is what scales."""
    lines = sorted({(row["islands_are"], row["batch"]) for row in rows})
    for (islands, batch), colour in zip(lines, COLOURS, strict=False):
        mine = sorted((r for r in rows if (r["islands_are"], r["batch"]) == (islands, batch)), key=lambda r: r["hosts"])
        spreads = [row["scheduler_us_per_host"] for row in mine]
        label = f"islands: {islands}; {batch} at once"
        points(axes, [row["hosts"] for row in mine], spreads, label=label, color=colour, markersize=3, capsize=2)
    axes.set_ylim(top=60 * max(row["scheduler_us_per_host"]["max"] for row in rows))  # room for the legend
    axes.set_xlabel("hosts")
    axes.set_title("Scheduler, us per launch and host", fontsize=10)


def plans(rows: list[dict[str, Any]], axes: Axes) -> None:
    """Bytes of graph and plan, and what a plan would weigh if it listed its devices."""
    mine = [row for row in rows if row["edge"] == rows[0]["edge"]]
    devices = [row["devices"] for row in mine]
    for (key, label), colour in zip(
        {
            "graph_bytes": "graph",
            "plan_bytes": "plan of an island",
            "plan_bytes_with_lists": "plan, if it listed devices",
        }.items(),
        COLOURS,
        strict=False,
    ):
        axes.plot(devices, [row[key] for row in mine], label=label, color=colour, marker="o", markersize=3)
    axes.set_xlabel("devices of each slice")
    axes.set_title("Bytes of a program", fontsize=10)


def streams(found: dict[str, Any], axes: Axes) -> None:
    """Time until a lone launch is over on all hosts: measured with a star, computed beyond that and for trees."""
    lone = [row for row in found["rows"] if row["batch"] == 1]
    axes.plot(
        [row["hosts"] for row in lone],
        [row["latency_us"]["median"] for row in lone],
        label="star, measured",
        color=COLOURS[0],
        marker="o",
    )
    axes.plot(found["hosts"], found["star_us"], label="star, computed", color=COLOURS[0], linestyle="--", linewidth=1)
    for tree, colour in zip(found["trees"], COLOURS[1:], strict=False):
        label = f"tree of {tree['branching']}, computed"
        axes.plot(found["hosts"], tree["latency_us"], label=label, color=colour, linestyle="--", linewidth=1)
    axes.set_xlabel("hosts of one island")
    axes.set_title("A lone launch over links, us until all are done", fontsize=10)


PANELS: dict[str, Callable[[Any, Axes], None]] = {"launches": launches, "plans": plans, "streams": streams}
