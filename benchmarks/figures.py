"""Figures of JSON results. Nothing here measures, and nothing that measures needs matplotlib."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.aims import aim_of
from megatron_ptdp.schedules.draw import COLOURS as KINDS

Record = Mapping[str, Any]

# Okabe and Ito's set: distinct without colour vision, and in print. More lines than colours begin again.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
STYLE: Any = {
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "errorbar.capsize": 2,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.markersize": 4,
    "savefig.dpi": 150,
}
MODES = {
    "opbyop": "OpByOp\none call per computation",
    "chained": "Chained\ncalls of 128 nodes",
    "fused": "Fused\n128 computations in one node",
}
SYSTEMS = {
    "pathways": "Pathways on Ray",
    "jax": "JAX called directly",
    "ray": "Ray actors",
    "ray-stateful": "Ray actor that keeps the value",
}
ROUNDS = "Points and bars: median; whiskers: slowest and fastest round."
RECORDED = 4  # single steps of training that are drawn


# --- what all have ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def drawing(
    path: Path, size: tuple[float, float], result: Record, where: str = "", text: str = ROUNDS
) -> Iterator[Figure]:
    """A figure that is written in the end, with a caption: the machine, and what points and whiskers are."""
    machine = result["machine"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.supxlabel(f"{where}{machine['cores']} cores of {machine['cpu']}.\n{text}", fontsize=8, color="#555555")
        figure.savefig(path)


def whiskers(spreads: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """Distances of the slowest and the fastest round from the medians, below and above, for matplotlib."""
    return [[one["median"] - one["min"] for one in spreads], [one["max"] - one["median"] for one in spreads]]


def lines(axes: Axes, rows: Iterable[Record], by: Callable[[Record], str], x: str, y: str, shift: float = 1.0) -> None:
    """A line of medians with whiskers for each group of rows.

    Args:
        by: the name of a row's group.
        x, y: keys of a row: a number, and a spread.
        shift: factor between the places of neighbouring lines, so that their whiskers stay apart.
    """
    groups: dict[str, list[Record]] = {}
    for row in rows:
        groups.setdefault(by(row), []).append(row)
    for place, (name, mine) in enumerate(groups.items()):
        mine = sorted(mine, key=lambda row: row[x])
        spreads = [row[y] for row in mine]
        axes.errorbar(
            [row[x] * shift ** (place - len(groups) / 2) for row in mine],
            [one["median"] for one in spreads],
            whiskers(spreads),
            label=name,
            color=COLOURS[place % len(COLOURS)],
            marker="osv^D"[place // len(COLOURS) % 5],
        )


def spans(axes: Axes, names: Sequence[str], found: Iterable[tuple[int, float, float, str]]) -> None:
    """Bars over time, a row for each name: the row, begin, end and colour of each bar."""
    for place, start, end, colour in found:
        axes.broken_barh([(start, end - start)], (place - 0.42, 0.84), color=colour, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)


def by_powers_of_two(axes: Axes, values: Iterable[int]) -> None:
    """A logarithmic x axis with these values marked."""
    marked = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(marked, map(str, marked))
    axes.minorticks_off()


def against_aims(axes: Axes, figures: Sequence[tuple[str, Mapping[str, float], Any]]) -> None:
    """Each figure as a point with its spread, and a black tick where its aim is: a name, values, and the aim if any."""
    for place, (_, values, aim) in enumerate(figures):
        colour = COLOURS[5] if aim and not aim.met_by(values["median"]) else COLOURS[0]
        axes.plot(
            [values.get("min", values["median"]), values.get("max", values["median"])], [place] * 2, color="#999999"
        )
        axes.plot([values["median"]], [place], "o", color=colour, zorder=3)
        if aim:
            axes.plot([aim.bound] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1)
    axes.set_yticks(range(len(figures)), [name for name, *_ in figures], fontsize=6.5)
    axes.set_ylim(len(figures) - 0.5, -0.5)


# --- dispatch, pipeline -----------------------------------------------------------------------------------------------


def dispatch(result: Record, path: Path) -> None:
    """Bars of computations per second on a log scale."""
    row, rates = result["rows"][0], {(row["system"], row["mode"]): row for row in result["rows"]}
    systems = [name for name in SYSTEMS if any(system == name for system, _ in rates)]
    where = f"{row['hosts']} host, {row['devices_per_host']} CPU devices, "
    with drawing(path, (8, 4.5), result, where) as figure:
        axes = figure.subplots()
        for place, name in enumerate(systems):
            found = [(at, rates[name, mode]) for at, mode in enumerate(MODES) if (name, mode) in rates]
            spreads = [rate["computations_per_second"] for _, rate in found]
            at = [at + (place - (len(systems) - 1) / 2) * 0.8 / len(systems) for at, _ in found]
            medians = [one["median"] for one in spreads]
            bars = axes.bar(at, medians, 0.74 / len(systems), label=SYSTEMS[name], yerr=whiskers(spreads))
            axes.bar_label(bars, fmt="{:,.0f}", padding=8, fontsize=8)
        axes.set_yscale("log")
        axes.margins(y=0.2)  # room above for the numbers
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xticks(range(len(MODES)), MODES.values())
        axes.set_ylabel("computations per second (log scale)")
        axes.set_title("Dispatch: one scalar all-reduce and one addition, over and over")
        axes.legend()


def pipeline(result: Record, path: Path) -> None:
    """Computations per second against stages, both ways of dispatch."""
    modes = list(dict.fromkeys(row["mode"] for row in result["rows"]))
    with drawing(path, (9, 3.8), result) as figure:
        panels = figure.subplots(1, len(modes))
        for mode, axes in zip(modes, panels, strict=True):
            rows = [row for row in result["rows"] if row["mode"] == mode]
            lines(axes, rows, lambda row: row["dispatch"], "stages", "computations_per_second")
            axes.set(title=mode, xlabel="stages, each on another host", xticks=result["settings"]["stages"])
            axes.set_ylim(bottom=0)
        panels[0].set_ylabel("computations per second")
        panels[0].legend()


# --- tenants ----------------------------------------------------------------------------------------------------------


def tenants(result: Record, folder: Path) -> None:
    """Figures 8, 9 and 11, of what was measured."""
    if "rows" in result:
        throughput(result, folder / "tenants-throughput.png")
    for part, title in (("timelines", title_of_timeline), ("shares", title_of_shares)):
        if part in result:
            timelines(result, result[part], title, folder / f"tenants-{part}.png")


def title_of_timeline(one: Record) -> str:
    return f"{one['clients']} client{'s' if one['clients'] > 1 else ''}: devices {one['utilisation']:.0%} busy"


def title_of_shares(one: Record) -> str:
    weights = ":".join(f"{weight:g}" for weight in one["weights"].values())
    lengths = ", ".join(dict.fromkeys(f"{length:g}" for length in one["length_ms"].values()))
    shares = " : ".join(f"{100 * share:.1f}" for share in one["device_seconds"]["achieved"].values())
    return f"weights {weights}, computations of {lengths} ms: {shares} % of the time"


def throughput(result: Record, path: Path) -> None:
    """Lines of computations per second over the number of clients, one for each length; dashed, JAX alone."""
    with drawing(path, (8, 4.5), result, devices_of(result)) as figure:
        axes = figure.subplots()
        rows = sorted(result["rows"], key=lambda row: row["length_ms"])
        together = [row for row in rows if row["clients"]]
        lines(axes, together, lambda row: f"{row['length_ms']:g} ms", "clients", "computations_per_second")
        for row, colour in zip((row for row in rows if not row["clients"]), itertools.cycle(COLOURS), strict=False):
            axes.axhline(row["computations_per_second"]["median"], color=colour, linestyle="--", linewidth=1)
        axes.plot([], [], color="#555555", linestyle="--", linewidth=1, label="JAX alone")
        by_powers_of_two(axes, (row["clients"] for row in together))
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_minor_formatter("")
        axes.set(xlabel="concurrent clients", ylabel="computations per second, all clients (log scale)")
        axes.set_title("Aggregate throughput of clients that share the devices")
        figure.legend(title="one computation", loc="outside right upper")


def timelines(result: Record, found: Sequence[Record], title: Callable[[Record], str], path: Path) -> None:
    """Gangs on the devices over time: one row for each tenant, one bar for each gang."""
    heights = [0.9 + 0.22 * len(one["tenants"]) for one in found]
    text = "One bar is what the host ran as one: a gang, or a run of short ones of the same client."
    with drawing(path, (10, 0.8 + sum(heights)), result, devices_of(result), text) as figure:
        panels = figure.subplots(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, one in zip(panels, found, strict=True):
            rows = {name: place for place, name in enumerate(one["tenants"])}
            places = ((rows[name], start, end) for name, start, end in one["picture"])
            spans(axes, one["tenants"], [(row, a, b, COLOURS[row % len(COLOURS)]) for row, a, b in places])
            axes.set_xlim(0, one["picture_ms"])
            axes.set_title(title(one), loc="left")
        panels[-1].set_xlabel("ms")


def devices_of(result: Record) -> str:
    return f"{result['settings']['devices']} CPU devices of one host, "


# --- scale ------------------------------------------------------------------------------------------------------------


def scale(result: Record, path: Path) -> None:
    """Costs of a launch by hosts, sizes of a plan by devices, times over links: the parts that were measured."""
    panels = [(part, panel) for part, panel in PANELS.items() if part in result]
    with drawing(path, (4.6 * len(panels), 4.4), result, "Simulated hosts; one of ") as figure:
        for axes, (part, panel) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            axes.set_xscale("log", base=2)  # before the panel sets limits, which would count as linear
            axes.set_yscale("log")
            panel(result[part], axes)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.legend()


def launches(rows: Sequence[Record], axes: Axes) -> None:
    """Microseconds of a scheduler for one launch on one host: flat is what scales."""
    rows = sorted(rows, key=lambda row: (row["islands_are"], row["batch"]))
    names = "islands: {islands_are}; {batch} at once".format_map
    lines(axes, rows, names, "hosts", "scheduler_us_per_host")
    axes.set_ylim(top=60 * max(row["scheduler_us_per_host"]["max"] for row in rows))  # room for the legend
    axes.set(xlabel="hosts", title="Scheduler, us per launch and host")


def plans(rows: Sequence[Record], axes: Axes) -> None:
    """Bytes of graph and plan, and what a plan would weigh if it listed its devices."""
    mine = [row for row in rows if row["edge"] == rows[0]["edge"]]
    labels = {"graph": "graph_bytes", "plan of an island": "plan_bytes"}
    for label, key in {**labels, "plan, if it listed devices": "plan_bytes_with_lists"}.items():
        axes.plot([row["devices"] for row in mine], [row[key] for row in mine], label=label, marker="o")
    axes.set(xlabel="devices of each slice", title="Bytes of a program")


def streams(found: Record, axes: Axes) -> None:
    """Time until a lone launch is over on all hosts."""
    lone = [row for row in found["rows"] if row["batch"] == 1]
    latencies = [row["latency_us"]["median"] for row in lone]
    axes.plot([row["hosts"] for row in lone], latencies, label="measured", color=COLOURS[0], marker="o")
    axes.set(xlabel="hosts of one island", title="A lone launch over links, us until all are done")


PANELS: dict[str, Callable[[Any, Axes], None]] = {"launches": launches, "plans": plans, "streams": streams}


# --- training ---------------------------------------------------------------------------------------------------------


def training(result: Record, folder: Path) -> None:
    """Tokens per second over the number of microbatches, ratios with their spread, and recorded steps."""
    found = result["bubbles"][:RECORDED]
    heights = [5.2, *([1.0 * len(found)] if found else [])]
    with drawing(folder / "training.png", (11, sum(heights)), result) as figure:
        above, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        left, right = above.subplots(1, 2)
        lines(left, result["rows"], way_to_train, "microbatches", "tokens_per_second", shift=1.01)
        by_powers_of_two(left, (row["microbatches"] for row in result["rows"]))
        left.yaxis.set_major_formatter("{x:,.0f}")
        left.set(xlabel="microbatches of a step", ylabel="tokens per second", title="Throughput on two cores")
        left.set_ylim(bottom=0)
        left.legend(fontsize=6.5, ncols=3, loc="upper left", bbox_to_anchor=(-0.1, -0.14))
        ratios = [(one["name"], one, aim_of("training", one["name"])) for one in result["ratios"]]
        against_aims(right, [one for one in ratios if one[2]])
        right.set_title("Ratios, round by round; black: the aim", loc="right")
        if found:
            steps(below[0], found)


def way_to_train(row: Record) -> str:
    where = f", {row['place']}" if row["place"] == "across" else ""
    stages = f", S {row['devices']}" if row["how"] != "spmd" and row["system"] == "pathways" else ""
    return f"{row['system']} {row['how']}{stages}{where}"


def steps(figure: Any, found: Sequence[Record]) -> None:
    """Recorded steps, as they ran, on one scale of time."""
    panels = figure.subplots(len(found), 1, squeeze=False, sharex=True)[:, 0]
    for axes, one in zip(panels, found, strict=True):
        devices = [f"device {k}" for k in range(1 + max(device for device, *_ in one["picture"]))]
        spans(axes, devices, [(device, start, end, KINDS[kind]) for device, kind, _, start, end in one["picture"]])
        for device, _, microbatch, start, end in one["picture"]:
            axes.text((start + end) / 2, device, microbatch, ha="center", va="center", fontsize=6, color="white")
        last = one["records"][-1]
        title = f"{one['case']}: bubble {last['measured']:.1%} of the ideal time, predicted {last['predicted']:.1%}"
        axes.set_title(title, fontsize=8, loc="left")
    panels[-1].set_xlabel("ms", fontsize=8)


# --- recovery ---------------------------------------------------------------------------------------------------------


def recovery(result: Record, path: Path) -> None:
    """Loss and devices over time of each run, with what happened marked."""
    runs = result["runs"]
    text = "Grey: devices that training uses, none while it waits. Steps that were run again are shown as they ended."
    with drawing(path, (10, 1.9 * len(runs) + 0.6), result, text=text) as figure:
        panels = figure.subplots(len(runs), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        marks = {what: COLOURS[1 + k] for k, what in enumerate(dict.fromkeys(row["what"] for row in result["rows"]))}
        for axes, one in zip(panels, runs, strict=True):
            seconds, _, losses, _ = zip(*one["curve"], strict=True)
            axes.plot(seconds, losses, linewidth=1, color=COLOURS[0])
            axes.set_ylabel("loss", fontsize=8)
            for event in one["events"]:
                axes.axvline(event["time"], color=marks[event["what"]], linewidth=1)
            below = axes.twinx()
            below.fill_between(*devices_used(one), step="post", color="#bbbbbb", alpha=0.5, linewidth=0)
            below.set(ylim=(0, 8), yticks=(0, 1, 2))
            below.set_ylabel("devices", fontsize=8, loc="bottom")
            axes.set_title(f"losses: {one['kind']}", fontsize=9, loc="left")
        handles = [panels[0].plot([], [], color=colour, label=what)[0] for what, colour in marks.items()]
        panels[0].legend(handles=handles, ncols=len(marks), loc="upper right")
        panels[-1].set_xlabel("seconds", fontsize=8)


def devices_used(run: Record) -> tuple[list[float], list[int]]:
    """Times, and the devices that training uses from each on: none from a loss until it goes on. While an island is
    added it goes on."""
    points = [(seconds, devices) for seconds, _, _, devices in run["curve"]]
    stopped = [(one["time"], one["time"] + one["seconds"]) for one in run["events"] if one["source"] != "devices"]
    kept = [(at, n) for at, n in points if not any(start <= at < end for start, end in stopped)]
    times, devices = zip(*sorted([*kept, *((start, 0) for start, _ in stopped)]), strict=True)
    return list(times), list(devices)
