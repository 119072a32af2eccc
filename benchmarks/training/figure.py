"""Draws what `benchmarks.training` measured. Nothing here measures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures import COLOURS, caption, points
from benchmarks.report.aims import aim_of
from megatron_ptdp.schedules.draw import COLOURS as KINDS

SHOWN = 4  # recorded steps that are drawn


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Tokens per second over the number of microbatches, ratios with their spread, and recorded steps."""
    found = result["bubbles"][:SHOWN]
    figure = Figure(figsize=(11, 5.2 + 1.0 * len(found)), layout="constrained")
    above, *below = figure.subfigures(
        1 + bool(found), 1, height_ratios=[5.2, 1.0 * len(found)][: 1 + bool(found)], squeeze=False
    )[:, 0]
    left, right = above.subplots(1, 2, width_ratios=[1, 1])
    rates(left, result)
    bars(right, result)
    if found:
        steps(below[0], found)
    machine = result["machine"]
    where = f"{machine['cores']} cores of {machine['cpu']}"
    caption(figure, f"{where}. Points and bars: median; whiskers: slowest and fastest round.")
    figure.savefig(path, dpi=150)


def rates(axes: Axes, result: Mapping[str, Any]) -> None:
    """One line for each way to train, as in Table 2 and Figure 10."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        where = f", {row['place']}" if row["place"] == "across" else ""
        stages = f", S {row['devices']}" if row["how"] != "spmd" and row["system"] == "pathways" else ""
        lines.setdefault(f"{row['system']} {row['how']}{stages}{where}", []).append(row)
    for place, (name, rows) in enumerate(lines.items()):
        rows = sorted(rows, key=lambda row: row["microbatches"])
        points(
            axes,
            [row["microbatches"] * 1.01 ** (place - len(lines) / 2) for row in rows],
            [row["tokens_per_second"] for row in rows],
            label=name,
            color=COLOURS[place % len(COLOURS)],
            marker="osv^D"[place // len(COLOURS) % 5],
            markersize=4,
            capsize=2,
            linewidth=1,
        )
    microbatches = sorted({row["microbatches"] for row in result["rows"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(microbatches, map(str, microbatches))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="microbatches of a step", ylabel="tokens per second", ylim=(0, None))
    axes.set_title("Throughput on two cores", fontsize=10)
    axes.set_xlim(microbatches[0] / 1.3, microbatches[-1] * 1.3)
    axes.legend(frameon=False, fontsize=6.5, ncols=3, loc="upper left", bbox_to_anchor=(-0.1, -0.14))
    axes.spines[["top", "right"]].set_visible(False)


def bars(axes: Axes, result: Mapping[str, Any]) -> None:
    """The ratios that have an aim, with it."""
    found = [(one, aim) for one in result["ratios"] if (aim := aim_of("training", one["name"]))]
    for place, (one, aim) in enumerate(found):
        met = aim.met_by(one["median"])
        axes.plot([one["min"], one["max"]], [place, place], color="#999999", linewidth=2, zorder=1)
        axes.plot([one["median"]], [place], "o", color=COLOURS[0] if met else COLOURS[5], zorder=3)
        axes.plot([aim.bound] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1, zorder=2)
    axes.set_yticks(range(len(found)), [one["name"] for one, _ in found], fontsize=6.5)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_title("Ratios, round by round; black: the aim", fontsize=10, loc="right")
    axes.spines[["top", "right"]].set_visible(False)


def steps(figure: Any, found: list[Mapping[str, Any]]) -> None:
    """Recorded steps, as they ran, on one scale of time."""
    panels = figure.subplots(len(found), 1, squeeze=False, sharex=True)[:, 0]
    for axes, one in zip(panels, found, strict=True):
        for device, kind, microbatch, start, end in one["picture"]:
            axes.broken_barh(
                [(start, end - start)], (device - 0.42, 0.84), color=KINDS[kind], edgecolor="white", linewidth=0.4
            )
            axes.text((start + end) / 2, device, str(microbatch), ha="center", va="center", fontsize=6, color="white")
        last = one["records"][-1]
        axes.set_title(
            f"{one['case']}: bubble {last['measured']:.1%} of the ideal time, predicted {last['predicted']:.1%}",
            fontsize=8,
            loc="left",
        )
        devices = sorted({span[0] for span in one["picture"]})
        axes.set_yticks(devices, [f"device {device}" for device in devices], fontsize=7)
        axes.set_ylim(max(devices) + 0.5, -0.5)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False, labelsize=7)
    panels[-1].set_xlabel("ms", fontsize=8)
