"""Cost of a launch for the controller and the schedulers on up to 4,096 simulated hosts and 32,768 devices.

Three parts. `launches`: the real decisions and messages, with simulated hosts (`benchmarks.scale.controlplane`).
`plans`: sizes and times of registering a program, by devices. `streams`: the cost of links for each host, over real
connections (`benchmarks.scale.fanout`).

Run it with `python -m benchmarks.scale --json scale.json --figure scale.png`; it takes some minutes on two cores.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import measure
from benchmarks.harness import QUIET, Benchmark, Output, Progress, Result, drawn_by, option
from benchmarks.printing import Table, shows
from benchmarks.scale import fanout
from benchmarks.scale.controlplane import ControlPlane, Costs, Shape
from benchmarks.scale.plans import CUTS, DEVICES_PER_HOST, ISLAND, planning

PARTS = ("launches", "plans", "streams")
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
    hosts: tuple[int, ...] = option(
        (2, 4, 16, 64, 256, 512, 1024, 4096), "of all clusters: one island of all of them, and islands of 16"
    )
    batches: tuple[int, ...] = option((1, 64), "launches that come at once, for each island")
    devices: tuple[int, ...] = option((2, 16, 128, 1024, 2048, 8192, 32768), "of each of the two slices of a program")
    streams: tuple[int, ...] = option((2, 16, 64, 256, 512), "hosts with real connections")
    rounds: int = option(7, "that count, after one to warm up")
    parts: tuple[str, ...] = option(PARTS, choices=PARTS)


SMOKE = Settings(hosts=(2, 16, 32), batches=(1, 4), devices=(2, 64), streams=(2, 4), rounds=1)


def run(settings: Settings, progress: Progress = QUIET) -> Result:
    if "streams" in settings.parts:  # known before the parts that take minutes
        fanout.check_descriptors(settings.streams)
    batches = " and ".join(map(str, settings.batches))
    measured = MEASURED.format(rounds=settings.rounds, batches=batches, devices=DEVICES_PER_HOST)
    result: Result = {"measured": measured}
    if "launches" in settings.parts:
        result["launches"], result["ratios"] = launches(settings)
    if "plans" in settings.parts:
        result["plans"] = [planning(devices, cut, settings.rounds) for devices in settings.devices for cut in CUTS]
    if "streams" in settings.parts:
        took = fanout.measured(settings.streams, settings.batches, settings.rounds)
        result["streams"] = {"rows": fanout.rows(took)}
        per_host = {
            (LINKS, hosts, batch): [one.cpu_us / hosts for one in ones] for (hosts, batch), ones in took.items()
        }
        result["ratios"] = [*result.get("ratios", []), *ratios(per_host)]
    return result


# --- launches ---------------------------------------------------------------------------------------------------------


def shapes(hosts: Sequence[int]) -> dict[str, list[Shape]]:
    """The clusters by their islands: one, or several of 16 hosts, of which a launch runs on one or on all."""
    several = [n for n in hosts if n > ISLAND and n % ISLAND == 0]
    return {
        ONE: [Shape(n, n, DEVICES_PER_HOST) for n in hosts],
        "of 16, one": [Shape(n, ISLAND, DEVICES_PER_HOST) for n in several],
        "of 16, all": [Shape(n, ISLAND, DEVICES_PER_HOST, cross_island=True) for n in several],
    }


def launches(settings: Settings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of costs for each cluster and batch, and the ratios between many hosts and few."""
    rows, per_host = [], {}
    with asyncio.Runner() as runner:
        for name, clusters in shapes(settings.hosts).items():
            planes = {shape: runner.run(started(shape)) for shape in clusters}

            def launch(case: tuple[Shape, int], planes: Mapping[Shape, ControlPlane] = planes) -> Costs:
                return runner.run(planes[case[0]].launch(launches_of(*case)))

            gc.collect()
            found = measure.interleaved(list(itertools.product(clusters, settings.batches)), launch, settings.rounds)
            for (shape, batch), ones in found.items():
                rows.append(row(name, shape, batch, ones, planes[shape]))
                per_host[name, shape.hosts, batch] = [scheduler_us(one, shape, batch) for one in ones]
            for plane in planes.values():
                plane.close()
    return rows, ratios(per_host)


async def started(shape: Shape) -> ControlPlane:
    return ControlPlane(shape)


def launches_of(shape: Shape, batch: int) -> int:
    """Of cross-island launches, an island takes 64 at a time; others have a window for each island."""
    return batch * (1 if shape.cross_island else shape.islands)


def scheduler_us(costs: Costs, shape: Shape, batch: int) -> float:
    """Microseconds of a scheduler for one launch on one of its hosts."""
    return 1e6 * costs.seconds["scheduler"] / (batch * shape.hosts)


def row(name: str, shape: Shape, batch: int, ones: Sequence[Costs], plane: ControlPlane) -> dict[str, Any]:
    """`microseconds` are per launch and process; those of schedulers and hosts are of all of them together. `joining`
    is what the last host to join cost the controller: its decision, and what it sent to all islands."""
    count = launches_of(shape, batch)
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


PER_HOST = "scheduler_us_per_host.median:,.2f"
show = shows(
    Table(
        "CPU us per launch",
        "launches",
        *("islands_are", "hosts", "batch", *(f"microseconds.{name}.median:,.0f" for name in PROCESSES), PER_HOST),
    ),
    Table(
        "a program on two slices",
        "plans",
        *("edge", "devices", "graph_bytes", "plan_bytes", "planning_ms.median:.2f", "deriving_ms.median:.2f"),
    ),
    Table(
        "over links, us per batch",
        "streams.rows",
        *("hosts", "batch", "latency_us.median", "scheduler_us.median", PER_HOST, "most_per_second.median"),
    ),
    Table("ratios, round by round", "ratios", "name", ".:.2f"),
)

BENCHMARK = Benchmark(
    "scale", __doc__, Settings, SMOKE, run, show, outputs=(Output("--figure", drawn_by("scale"), "scale.png"),)
)
