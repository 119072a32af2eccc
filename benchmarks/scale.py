"""What a launch costs the controller and the schedulers on up to 4,096 hosts and 32,768 devices, which nobody here has.

Three parts. `launches`: the real decisions and messages with hosts that are answered for (`benchmarks.controlplane`).
`plans`: what grows with devices when a program is registered. `streams`: what links add for each host, over real
connections (`benchmarks.fanout`), and from that, when a tree would be cheaper than a star.

Run it with `python -m benchmarks.scale --json scale.json --figure scale.png`; it takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import fanout, measure
from benchmarks.controlplane import SESSION, ControlPlane, Costs, Shape, chain, planned
from pathways_ray.controller.programs import decode_graph, plan_program
from pathways_ray.ir.exchange import exchange
from pathways_ray.ir.graph import Argument, Compute, Graph, Part, Recipe, Ref, Result
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, Layout, SliceType, Spec
from pathways_ray.transport.messages import encode

PARTS = ("launches", "plans", "streams")
DEVICES_PER_HOST = 8
ISLAND = 16  # hosts of each island where there are several
ONE, LINKS = "one", "over links"  # names of series: one island of simulated hosts, or of real streams
PROCESSES = ("controller", "scheduler", "hosts")
FEW, MANY = 16, 512  # hosts: what a launch costs at the second is compared with the first

MEASURED = (
    "No device and no host process: hosts are answered for. CPU time of one core. launches: {rounds} rounds after one "
    "to warm up, all clusters in turn; batches of {batches} launches for each island, {devices} devices on each host; "
    "per host is the time of the scheduler divided by its hosts. plans: a program of two computations on two slices, "
    "each of so many devices. streams: links over loopback, hosts in another process."
)


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        hosts: of all clusters; one island of all of them, and islands of 16.
        batches: launches that come at once, for each island.
        devices: of each of the two slices of a program.
        streams: hosts with real connections.
        rounds: that count, after one to warm up.
        parts: out of PARTS.
    """

    hosts: tuple[int, ...] = (2, 4, 16, 64, 256, 512, 1024, 4096)
    batches: tuple[int, ...] = (1, 64)
    devices: tuple[int, ...] = (2, 16, 128, 1024, 2048, 8192, 32768)
    streams: tuple[int, ...] = (2, 16, 64, 256, 512)
    rounds: int = 7
    parts: tuple[str, ...] = PARTS


SMOKE = Settings(hosts=(2, 16, 32), batches=(1, 4), devices=(2, 64), streams=(2, 4), rounds=1)


def run(settings: Settings = Settings()) -> dict[str, Any]:
    """Measures and returns the result as it is written to JSON."""
    shown = {
        "rounds": settings.rounds,
        "batches": " and ".join(map(str, settings.batches)),
        "devices": DEVICES_PER_HOST,
    }
    result: dict[str, Any] = {
        "benchmark": "scale",
        "machine": measure.machine(),
        "measured": MEASURED.format(**shown),
        "settings": asdict(settings),
    }
    if "launches" in settings.parts:
        result["launches"], result["ratios"] = asyncio.run(launches(settings))
    if "plans" in settings.parts:
        result["plans"] = [plans(devices, cut, settings.rounds) for devices in settings.devices for cut in CUTS]
        result["over_islands"] = [over_islands(hosts) for hosts in settings.hosts if hosts > ISLAND]
    if "streams" in settings.parts:
        took = asyncio.run(fanout.measured(settings.streams, settings.batches, settings.rounds))
        rows = fanout.rows(took)
        result["streams"] = {"rows": rows, **fanout.trees(rows)}
        per_host = {
            (LINKS, hosts, batch): [one.cpu_us / hosts for one in ones] for (hosts, batch), ones in took.items()
        }
        result["ratios"] = [*result.get("ratios", []), *ratios(per_host)]
    return result


# --- launches ---------------------------------------------------------------------------------------------------------


def shapes(hosts: Sequence[int]) -> dict[str, list[Shape]]:
    """The clusters by their islands: one, or several of 16 hosts, of which a launch runs on one or on all."""
    several = [n for n in hosts if n > ISLAND]
    return {
        ONE: [Shape(n, n, DEVICES_PER_HOST) for n in hosts],
        "of 16, one": [Shape(n, ISLAND, DEVICES_PER_HOST) for n in several],
        "of 16, all": [Shape(n, ISLAND, DEVICES_PER_HOST, crossing=True) for n in several],
    }


async def launches(settings: Settings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of costs for each cluster and batch, and the ratios between many hosts and few."""
    rows, per_host = [], {}
    for name, clusters in shapes(settings.hosts).items():
        planes = {shape: ControlPlane(shape) for shape in clusters}
        cases = [(shape, batch) for shape in clusters for batch in settings.batches]
        found: dict[tuple[Shape, int], list[Costs]] = {case: [] for case in cases}
        gc.collect()
        for number in range(-1, settings.rounds):
            for shape, batch in cases[number % len(cases) :] + cases[: number % len(cases)]:
                # Of launches that cross, an island takes 64 at a time; others have a window for each island.
                count = batch * (1 if shape.crossing else shape.islands)
                costs = await planes[shape].launch(count)
                if number >= 0:
                    found[shape, batch].append(costs)
        for (shape, batch), ones in found.items():
            rows.append(row(name, shape, batch, ones, planes[shape]))
            per_host[name, shape.hosts, batch] = [scheduler_us(one, shape, batch) for one in ones]
        for plane in planes.values():
            plane.close()
    return rows, ratios(per_host)


def scheduler_us(costs: Costs, shape: Shape, batch: int) -> float:
    """Microseconds of a scheduler for one launch on one of its hosts."""
    return 1e6 * costs.seconds["scheduler"] / (batch * shape.hosts)


def row(name: str, shape: Shape, batch: int, ones: Sequence[Costs], plane: ControlPlane) -> dict[str, Any]:
    """`microseconds` are per launch and process; those of schedulers and hosts are of all of them together. `joining`
    is what the last host to join cost the controller: its decision, and what it sent to all islands."""
    count = batch * (1 if shape.crossing else shape.islands)
    return {
        "islands_are": name,
        "hosts": shape.hosts,
        "islands": shape.islands,
        "devices": shape.hosts * shape.devices_per_host,
        "batch": batch,
        "microseconds": {p: measure.spread([1e6 * one.seconds[p] / count for one in ones]) for p in PROCESSES},
        "scheduler_us_per_host": measure.spread([scheduler_us(one, shape, batch) for one in ones]),
        "bytes": {link: total / count for link, total in ones[-1].bytes.items()},
        "joining_ms": 1e3 * plane.joining_s,
        "joining_bytes": plane.joining_bytes,
    }


def ratios(per_host: Mapping[tuple[str, int, int], list[float]]) -> list[dict[str, Any]]:
    """Cost per launch and host at many hosts against few, round by round."""
    found = []
    for (name, hosts, batch), samples in per_host.items():
        few = per_host.get((name, FEW, batch))
        if name in (ONE, LINKS) and hosts > FEW and few is not None:
            over = "" if name == ONE else f" {name}"
            text = f"scheduler cost per launch and host{over}, {hosts} / {FEW} hosts, {batch} at once"
            pair = {"hosts": hosts, "against": FEW, "batch": batch}
            found.append({"name": text, **pair, **measure.paired_ratios(samples, few)})
    return found


# --- plans ------------------------------------------------------------------------------------------------------------

CUTS: dict[str, tuple[Spec, Spec]] = {
    "shard by shard": ((("x",),), (("x",),)),
    "replicated": ((), ()),
    "all to all": ((("x",),), ((), ("x",))),
}
MOST_PARCELS = 1 << 18  # of one host; all to all on more devices makes more than a host could hold


def two_slices(devices: int, cut: tuple[Spec, Spec]) -> tuple[Graph, list[PlacedSlice]]:
    """One computation on each of two slices, and the value between them in another layout."""
    hosts = -(-devices // DEVICES_PER_HOST)
    places = [divmod(k, DEVICES_PER_HOST) for k in range(devices)]
    slices = [
        PlacedSlice.on(SliceType(k + 1, (devices,), ("x",)), k, [Device(k * hosts + h, index) for h, index in places])
        for k in range(2)
    ]
    array = ArrayType((devices, devices), "float32")
    one, two = Layout(1, cut[0]), Layout(2, cut[1])
    recipe = Recipe((Part("add", "add", (Ref(-1),)),), (Ref(0),))
    nodes = (
        Argument(0, array, one),
        Compute("add", 0, 1, (Ref(0),), (one,), (array,), (one,)),
        Compute("add", 0, 2, (Ref(1),), (two,), (array,), (two,)),
        Result((Ref(2),)),
    )
    return Graph("two slices", tuple(s.mesh for s in slices), (recipe,), nodes), slices


def plans(devices: int, cut: str, rounds: int) -> dict[str, Any]:
    """Bytes and milliseconds of a program, by the devices of its slices."""
    graph, slices = two_slices(devices, CUTS[cut])
    data, placement = encode(graph), {s.mesh.id: s for s in slices}
    found: dict[str, list[float]] = {"planning_ms": [], "deriving_ms": []}
    parcels = devices * min(devices, DEVICES_PER_HOST)
    for _ in range(rounds):
        before = time.thread_time()
        made = plan_program(1, SESSION, decode_graph(data), {"add": b""}, placement, fusion=True)
        found["planning_ms"].append(1e3 * (time.thread_time() - before))
        if cut != "all to all" or parcels < MOST_PARCELS:
            (edge,) = made.plans[0].edges
            before = time.thread_time()
            exchange(edge, *slices, host=0)
            found["deriving_ms"].append(1e3 * (time.thread_time() - before))
    (message, _) = made.messages.values()
    listed = encode(message.plan) + b"".join(encode(device) for s in slices for device in s.devices)
    return {
        "devices": devices,
        "edge": cut,
        "graph_bytes": len(data),
        "plan_bytes": len(message.plan),
        "plan_bytes_with_lists": len(listed),
        **{name: measure.spread(values) if values else None for name, values in found.items()},
    }


def over_islands(hosts: int) -> dict[str, Any]:
    """Planning one computation on each island: plans of all islands together."""
    shape = Shape(hosts, ISLAND, DEVICES_PER_HOST, crossing=True)
    slices = [shape.slice(island) for island in range(shape.islands)]
    before = time.thread_time()
    made = planned(1, slices)
    return {
        "hosts": hosts,
        "islands": shape.islands,
        "graph_bytes": len(encode(chain(slices))),
        "plan_bytes": sum(len(message.plan) for message in made.messages.values()),
        "planning_ms": 1e3 * (time.thread_time() - before),
    }


# --- for people -------------------------------------------------------------------------------------------------------


def show(result: Mapping[str, Any], console: Console) -> None:
    """Prints what was measured, on what, and the numbers."""
    console.print(result["measured"], f"Machine: {measure.describe(result['machine'])}.", sep="\n", highlight=False)
    if "launches" in result:
        show_launches(result, console)
    if "plans" in result:
        show_plans(result, console)
    if "streams" in result:
        show_streams(result["streams"], console)
    for one in result.get("ratios", ()):
        console.print(f"{one['name']}: {one['median']:.2f} ({one['min']:.2f} to {one['max']:.2f})", highlight=False)


def table(title: str, *headings: str) -> Table:
    made = Table(title=title)
    for place, heading in enumerate(headings):
        made.add_column(heading, justify="left" if place == 0 else "right", no_wrap=place == 0)
    return made


def show_launches(result: Mapping[str, Any], console: Console) -> None:
    costs = table("CPU us per launch", "islands", "hosts", "at once", *PROCESSES, "per host")
    for one in result["launches"]:
        costs.add_row(
            one["islands_are"],
            str(one["hosts"]),
            str(one["batch"]),
            *(f"{one['microseconds'][process]['median']:,.0f}" for process in PROCESSES),
            f"{one['scheduler_us_per_host']['median']:.2f}",
        )
    console.print(costs)


def show_plans(result: Mapping[str, Any], console: Console) -> None:
    made = table(
        "a program on two slices", "edge", "devices", "graph B", "plan B", "planning ms", "deriving ms, a host"
    )
    for one in result["plans"]:
        deriving = f"{one['deriving_ms']['median']:.2f}" if one["deriving_ms"] else "not run"
        sizes = (f"{one[key]:,}" for key in ("devices", "graph_bytes", "plan_bytes"))
        made.add_row(one["edge"], *sizes, f"{one['planning_ms']['median']:.2f}", deriving)
    console.print(made)


def show_streams(found: Mapping[str, Any], console: Console) -> None:
    made = table("over links, us per batch", "hosts", "at once", "until done", "scheduler CPU", "per host", "most/s")
    for one in found["rows"]:
        keys = ("latency_us", "scheduler_us", "scheduler_us_per_host", "most_per_second")
        numbers = (one[key]["median"] for key in keys)
        made.add_row(str(one["hosts"]), str(one["batch"]), *(f"{number:,.0f}" for number in numbers))
    console.print(made)
    for tree in found["trees"]:
        when = f"from {tree['pays_from']} hosts" if tree["pays_from"] else "never"
        console.print(f"A tree with {tree['branching']} branches is quicker than a star {when}.", highlight=False)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--figure", type=Path, help="draw a PNG here")
    parser.add_argument("--smoke", action="store_true", help="small and short, to see that everything runs")
    usual = Settings()
    for name in ("hosts", "batches", "devices", "streams"):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=getattr(usual, name), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=usual.rounds, help="default: %(default)s")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    settings = SMOKE
    if not options.smoke:
        given = {name: getattr(options, name) for name in asdict(SMOKE)}
        settings = Settings(**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})
    measured = run(settings)
    show(measured, Console())
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")
    if options.figure:
        from benchmarks import scale_figure  # matplotlib is not needed to measure

        scale_figure.draw(measured, options.figure)
    return measured


if __name__ == "__main__":
    main()
