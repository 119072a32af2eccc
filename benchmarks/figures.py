"""Figures of JSON results: of dispatch and tenants, and what the others share. Nothing here measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

MODES = {
    "opbyop": "OpByOp\none call per computation",
    "chained": "Chained\ncalls of 128 nodes",
    "fused": "Fused\n128 computations in one node",
}
# Okabe and Ito's set: distinct without colour vision, and in print. More lines than colours begin again.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
SYSTEMS = {
    "pathways": ("Pathways on Ray", "#0072B2"),
    "jax": ("JAX called directly", "#E69F00"),
    "ray": ("Ray actors", "#999999"),
    "ray-stateful": ("Ray actor that keeps the value", "#c9a66b"),
}


def whiskers(spreads: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """Distances of the slowest and the fastest round from the medians, below and above, for matplotlib."""
    return [[one["median"] - one["min"] for one in spreads], [one["max"] - one["median"] for one in spreads]]


def points(axes: Axes, x: Sequence[float], spreads: Sequence[Mapping[str, float]], **style: Any) -> None:
    """A line of medians with whiskers."""
    medians = [one["median"] for one in spreads]
    axes.errorbar(x, medians, whiskers(spreads), **{"marker": "o", "capsize": 3, **style})


def caption(figure: Figure, text: str) -> None:
    """Small text below the figure."""
    figure.supxlabel(text, fontsize=8, color="#555555")


def dispatch(result: dict[str, Any], path: Path) -> None:
    """Bars of computations per second on a log scale; whiskers go from the slowest to the fastest round."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    rates = {(row["system"], row["mode"]): row["computations_per_second"] for row in result["rows"]}
    systems = [name for name in SYSTEMS if any(system == name for system, _ in rates)]
    width = 0.8 / len(systems)
    for place, name in enumerate(systems):
        label, colour = SYSTEMS[name]
        bars = [(at, rates[name, mode]) for at, mode in enumerate(MODES) if (name, mode) in rates]
        positions = [at + (place - (len(systems) - 1) / 2) * width for at, _ in bars]
        medians, ends = [rate["median"] for _, rate in bars], whiskers([rate for _, rate in bars])
        axes.bar(positions, medians, width * 0.92, label=label, color=colour, yerr=ends, capsize=3)
        for position, (_, rate) in zip(positions, bars, strict=True):
            above: dict[str, Any] = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            axes.annotate(f"{rate['median']:,.0f}", (position, rate["max"]), **above)
    lowest, highest = min(rate["min"] for rate in rates.values()), max(rate["max"] for rate in rates.values())
    axes.set_yscale("log")
    axes.set_ylim(10 ** math.floor(math.log10(lowest)), highest * 2)  # room above for the numbers
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xticks(range(len(MODES)), MODES.values())
    axes.set_ylabel("computations per second (log scale)")
    axes.set_title("Dispatch: one scalar all-reduce and one addition, over and over", fontsize=11)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    row, machine = result["rows"][0], result["machine"]
    where = f"{row['hosts']} host, {row['devices_per_host']} CPU devices, {machine['cores']} cores of {machine['cpu']}"
    caption(figure, f"{where}.\nBars: median; whiskers: slowest and fastest round.")
    figure.savefig(path, dpi=150)


def tenants(result: dict[str, Any], folder: Path) -> None:
    """Figures 8, 9 and 11, of what was measured."""
    if "rows" in result:
        throughput(result, folder / "tenants-throughput.png")
    if "timelines" in result:
        titles = [
            f"{one['clients']} client{'s' if one['clients'] > 1 else ''}: devices {one['utilisation']:.0%} busy"
            for one in result["timelines"]
        ]
        timelines(result, result["timelines"], titles, folder / "tenants-timelines.png")
    if "shares" in result:
        titles = [
            f"weights {':'.join(f'{weight:g}' for weight in one['weights'].values())}, computations of "
            f"{', '.join(dict.fromkeys(f'{length:g}' for length in one['length_ms'].values()))} ms: "
            f"{' : '.join(f'{100 * share:.1f}' for share in one['device_seconds']['achieved'].values())} % of the time"
            for one in result["shares"]
        ]
        timelines(result, result["shares"], titles, folder / "tenants-shares.png")


def throughput(result: dict[str, Any], path: Path) -> None:
    """Lines of computations per second over the number of clients, one for each length; dashed, JAX alone."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    lengths = sorted({row["length_ms"] for row in result["rows"]})
    for length, colour in zip(lengths, COLOURS, strict=False):
        mine = [row for row in result["rows"] if row["length_ms"] == length]
        rates = {row["clients"]: row["computations_per_second"] for row in mine}
        alone = rates.pop(0)["median"]
        points(axes, list(rates), list(rates.values()), label=f"{length:g} ms", color=colour)
        axes.axhline(alone, color=colour, linestyle="--", linewidth=1)
    axes.plot([], [], color="#555555", linestyle="--", linewidth=1, label="JAX alone")
    clients = sorted({row["clients"] for row in result["rows"]} - {0})
    axes.set_xscale("log", base=2)
    axes.set_xticks(clients, map(str, clients))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("concurrent clients")
    axes.set_ylabel("computations per second, all clients (log scale)")
    axes.set_title("Aggregate throughput of clients that share the devices", fontsize=11)
    figure.legend(frameon=False, title="one computation", loc="outside right upper")
    axes.spines[["top", "right"]].set_visible(False)
    tenants_caption(figure, result, "Points: median; whiskers: slowest and fastest round.")
    figure.savefig(path, dpi=150)


def timelines(result: dict[str, Any], found: list[dict[str, Any]], titles: list[str], path: Path) -> None:
    """Gangs on the devices over time: one row for each tenant, one bar for each gang."""
    heights = [0.9 + 0.22 * len(one["tenants"]) for one in found]
    figure = Figure(figsize=(10, 0.8 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, one, title in zip(panels, found, titles, strict=True):
        names = one["tenants"]
        for place, name in enumerate(names):
            bars = [(start, end - start) for tenant, start, end in one["picture"] if tenant == name]
            axes.broken_barh(
                bars, (place - 0.42, 0.84), color=COLOURS[place % len(COLOURS)], edgecolor="white", linewidth=0.3
            )
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(0, one["picture_ms"])
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
    panels[-1].set_xlabel("ms")
    tenants_caption(
        figure, result, "One bar is what the host ran as one: a gang, or a run of short ones of the same client."
    )
    figure.savefig(path, dpi=150)


def tenants_caption(figure: Figure, result: dict[str, Any], text: str) -> None:
    machine = result["machine"]
    where = f"{result['settings']['devices']} CPU devices of one host, {machine['cores']} cores of {machine['cpu']}"
    caption(figure, f"{where}.\n{text}")
