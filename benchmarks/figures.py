"""Draws the figures from the JSON results. Nothing here measures."""

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

MODES = {
    "opbyop": "OpByOp\none call per computation",
    "chained": "Chained\ncalls of 128 nodes",
    "fused": "Fused\n128 computations in one node",
}
# Blue, orange and grey of Okabe and Ito's set: told apart without colour vision, and in print.
SYSTEMS = {
    "pathways": ("Pathways on Ray", "#0072B2"),
    "jax": ("JAX called directly", "#E69F00"),
    "ray": ("Ray actors", "#999999"),
    "ray-stateful": ("Ray actor that keeps the value", "#c9a66b"),
}


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
        medians = [rate["median"] for _, rate in bars]
        whiskers = [
            [rate["median"] - rate["min"] for _, rate in bars],
            [rate["max"] - rate["median"] for _, rate in bars],
        ]
        axes.bar(positions, medians, width * 0.92, label=label, color=colour, yerr=whiskers, capsize=3)
        for position, (_, rate) in zip(positions, bars, strict=True):
            axes.annotate(
                f"{rate['median']:,.0f}",
                (position, rate["max"]),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
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
    figure.supxlabel(
        f"{row['hosts']} host, {row['devices_per_host']} CPU devices, {machine['cores']} cores of {machine['cpu']}.\n"
        "Bars: median; whiskers: slowest and fastest round.",
        fontsize=8,
        color="#555555",
    )
    figure.savefig(path, dpi=150)
