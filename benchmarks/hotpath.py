"""The time of a launch: a blocking round trip in parts, and the CPU time of a stream of launches by process.

    there: call -> client sends -> host enqueues -> device ends; behind it client -> controller -> scheduler -> host
    back:  host -> client has the value, or knows that it is there; host -> scheduler -> controller -> client has the
           outcome

The round trip is one launch at a time of a function of one node that adds 1 to its argument: until the value, asked for
at once, is at the client; and, for itself, until `block_until_ready` returns; and the time of each of as
many whose values are waited for in a row. Beside each, in turn, the floor: 40 bytes through three relay processes and
back (`benchmarks/relays.py`), when nothing is under way any more. Its parts are read off one clock: the client's, and
the host's trace of what ran. The stream is as many launches as `launches` says, none waited
for but the last; each process's CPU time is divided by their number. Once as users have it, where hosts execute runs
of small launches as one computation, and once without (`fusion=False, coalesce=False`), where each is a message and one
call of JAX. The same for a loop of three programs, launched in turn (`x = f(x); x = g(x); x = h(x)`).

Run it with `python -m benchmarks.hotpath --json hotpath.json`; it takes about a minute.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.cores import devices_apart
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows
from benchmarks.relays import Relays

PROCESSES = {
    "client": "client",
    "controller": "Controller 0",
    "scheduler": "IslandScheduler 0",
    "host": "HostExecutor 0",
}
TURNS = (lambda v: v + 2, lambda v: v - 1, lambda v: v * 1 + 2)
"""Programs of a loop that adds 1 for each of them."""

TRACED = 300
"""Round trips that are divided into parts."""

PARTS = ("call", "to the device", "device", "to the client")
"""Until the client's call returns; until it is enqueued on the devices, by the host that it was handed to or through
controller, scheduler and host; until the host sees that it is over; until numpy.asarray returns, which asked for the
value before it was there."""


@dataclass(frozen=True)
class Settings:
    devices: tuple[int, ...] = option((1, 4), "of the host, and of the slice")
    round_trips: int = option(1000, "round trips that count")
    launches: int = option(20_000, "of the stream")
    rounds: int = option(3, "of everything, each on a cluster with fusion and on one without")
    apart: bool = option(True, "let devices and everything else share the cores", flags=["--together"])

    def __post_init__(self) -> None:
        if self.round_trips < 2 or self.launches < len(TURNS):
            raise ValueError(f"there must be 2 round trips and {len(TURNS)} launches")


SMOKE = Settings((1,), round_trips=20, launches=200, rounds=1)


def run(settings: Settings, progress: Progress) -> Result:
    """Measures on clusters of its own."""
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        apart = settings.apart and stack.enter_context(devices_apart())
        for devices in settings.devices:
            for fusion in (True, False):
                progress.say(f"{devices} devices, {'with' if fusion else 'without'} fusion")
                rows.append({"devices": devices, "fusion": fusion, **on_a_cluster(devices, fusion, settings)})
    return {
        "devices_apart": apart,
        "measured": " ".join(__doc__.split("\n\n")[2].split()),
        "rows": rows,
        "figures": [
            {"name": f"blocking round trip, {row['devices']} devices", "unit": "us", **row["round_trip_us"]["value"]}
            for row in rows
            if row["fusion"]
        ]
        + [
            {"name": f"the same, of the floor, {row['devices']} devices", "unit": "x", **row["of_floor"]}
            for row in rows
            if row["fusion"]
        ],
    }


def on_a_cluster(devices: int, fusion: bool, settings: Settings) -> dict[str, Any]:
    """Everything for one number of devices, with or without fusion."""
    from jax.sharding import PartitionSpec as P

    import pathways_ray as pw

    with (
        pw.init(devices_per_host=devices, fusion=fusion, coalesce=fusion),
        contextlib.closing(Relays()) as relays,
    ):
        where = pw.virtual_slice((devices,), ("x",))
        step = pw.compiled(lambda v: v + 1, slice=where, in_specs=P("x"), out_specs=P("x"))
        start = pw.put(np.zeros(devices, np.float32), slice=where, spec=P("x"))
        turns = [pw.compiled(made, slice=where, in_specs=P("x"), out_specs=P("x")) for made in TURNS]
        for warm in ([step], turns):
            stream(warm, start, min(settings.launches, 3000), devices)  # everything is compiled, loops of launches too
        trips, in_a_row, streams, in_turn = [], [], [], []
        for _ in range(settings.rounds):
            trips.append(round_trips(step, start, relays, settings.round_trips))
            began = time.perf_counter()
            for _ in range(settings.round_trips):
                np.asarray(step(start))
            in_a_row.append(1e6 * (time.perf_counter() - began) / settings.round_trips)
            with cpu() as used:
                began = time.perf_counter()
                stream([step], start, settings.launches, devices)
                elapsed = time.perf_counter() - began
            streams.append({"elapsed": elapsed, **used})
            began = time.perf_counter()
            stream(turns, start, settings.launches, devices)
            in_turn.append(1e6 * (time.perf_counter() - began) / settings.launches)
        parts = traced(step, start, min(TRACED, settings.round_trips))
    per_launch = {name: measure.spread([1e6 * one[name] / settings.launches for one in streams]) for name in streams[0]}
    known, value, floor = ([one[k] for one in trips] for k in (0, 1, 2))
    ratios = [statistics.median(one) / statistics.median(other) for one, other in zip(value, floor, strict=True)]
    return {
        "round_trip_us": {"known": spread_of(known), "value": spread_of(value), "floor": spread_of(floor)},
        "of_floor": measure.spread(ratios),
        "in_a_row_us": measure.spread(in_a_row),
        "parts_us": parts,
        "stream_us_per_launch": per_launch,
        "in_turn_us_per_launch": measure.spread(in_turn),
    }


def spread_of(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """The median of all, with the medians of the best and the worst round beside it; and the 99th percentile."""
    medians = [statistics.median(one) for one in rounds]
    together = [value for one in rounds for value in one]
    return {**measure.spread(medians), "median": statistics.median(together), "p99": measure.p99(together)}


def round_trips(step: Any, start: Any, relays: Relays, count: int) -> tuple[list[float], list[float], list[float]]:
    """Microseconds from a call until the client knows that it is over; of another one until it has the value; and of
    bytes through relays."""
    import pathways_ray as pw

    known, valued, floor = list[float](), list[float](), list[float]()

    def ready(result: Any) -> None:
        result.block_until_ready()

    waits: Sequence[tuple[list[float], Callable[[Any], Any]]] = ((known, ready), (valued, np.asarray))
    for number in range(count):
        for took, wait in measure.in_turn(waits, number):  # who comes behind the relays finds colder caches
            began = time.perf_counter()
            result = step(start)
            wait(result)
            took.append(1e6 * (time.perf_counter() - began))
            pw.wait([result])  # what is left of the launch would come between the bytes
        floor.append(1e6 * relays.round_trip())
    np.testing.assert_array_equal(np.asarray(result), np.asarray(start) + 1)
    return known, valued, floor


def stream(steps: Sequence[Any], start: Any, count: int, devices: int) -> None:
    """Launches in turn, each with the result of the one before; waits for the last, which must be right."""
    value, count = start, count - count % len(steps)
    for _ in range(count // len(steps)):
        for step in steps:
            value = step(value)
    found = np.asarray(value)
    if found.tolist() != [float(count)] * devices:
        raise AssertionError(f"after {count} launches the value is {found}")


def traced(step: Any, start: Any, count: int) -> dict[str, dict[str, float]]:
    """The parts of round trips, in microseconds: medians, and the middle half of them."""
    import pathways_ray as pw

    seen = []
    with pw.recording() as computed:
        for _ in range(count):
            times = [time.perf_counter()]
            result = step(start)
            times.append(time.perf_counter())
            np.asarray(result)
            seen.append([*times, time.perf_counter()])
    (ran,) = computed.values()
    found: dict[str, list[float]] = {name: [] for name in PARTS}
    for (called, returned, valued), one in zip(seen, ran[-count:], strict=True):
        begun = max(returned, one.start)
        parts = (returned - called, begun - returned, one.end - begun, valued - one.end)
        for name, seconds in zip(PARTS, parts, strict=True):
            found[name].append(1e6 * seconds)
    quarters = {name: statistics.quantiles(values, n=4) for name, values in found.items()}
    return {name: dict(zip(("low", "median", "high"), three, strict=True)) for name, three in quarters.items()}


@contextlib.contextmanager
def cpu() -> Iterator[dict[str, float]]:
    """CPU seconds of each process of the runtime, filled in at the end."""
    there = measure.runtime_processes()
    if missing := PROCESSES.values() - there.keys():
        raise RuntimeError(f"no process of the runtime was found for: {', '.join(sorted(missing))}")
    watched = {name: there[process] for name, process in PROCESSES.items()}

    def seconds() -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in watched.items()}

    before = seconds()
    used: dict[str, float] = {}
    yield used
    used.update({name: after - before[name] for name, after in seconds().items()})


show = shows(
    Table(
        "blocking round trip, us",
        "rows",
        *("devices", "fusion", *(f"parts_us.{name}.median:.0f" for name in PARTS)),
        *("round_trip_us.value:.0f", "round_trip_us.value.p99:.0f", "round_trip_us.known.median:.0f"),
        *("round_trip_us.floor.median:.0f", "of_floor:.2f", "in_a_row_us:.0f"),
    ),
    Table(
        "stream of launches: us per launch, CPU by process",
        "rows",
        *("devices", "fusion", *(f"stream_us_per_launch.{name}.median:.1f" for name in ("elapsed", *PROCESSES))),
        "in_turn_us_per_launch:.1f",
    ),
)

BENCHMARK = Benchmark("hotpath", __doc__, Settings, SMOKE, run, show, result="profile")

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
