"""Many clients on the same devices: throughput, shares and interleaving, as Figures 8, 9 and 11 of the Pathways paper.

Clients are processes of their own, each with the token of a tenant of its own, all on the same CPU devices of one host,
under the policy "share". `benchmarks.tenants.clients` has the processes. JAX called directly, in one process with as
many devices, is measured in the same rounds.

Run it with `python -m benchmarks.tenants --json tenants.json --figures .`; it takes about six minutes.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from benchmarks import measure
from benchmarks.cores import devices_apart
from benchmarks.harness import QUIET, Benchmark, Output, Progress, Result, drawn_by, option
from benchmarks.printing import Table, shows
from benchmarks.tenants.clients import JaxAlone
from benchmarks.tenants.sharing import WEIGHTS, Bench, Load, equal, start, weighted
from benchmarks.workers import Worker

PARTS = ("throughput", "timelines", "shares", "switching", "unfused")
FUSED_S = 0.00125  # at least 4 launches of at most 5 ms leave as one: those of shorter computations
TRACED_S = 1.0

MEASURED = (
    "Clients are processes, each with a tenant of its own, on the same {devices} CPU devices of one host. A computation"
    " is a loop of all-reduces of a scalar; its output feeds the next. Each client keeps computations in flight all "
    "the time, and waits for a value some way back before it issues more. Lengths are by JAX alone, called from one "
    "process with as many devices. {rounds} rounds of {seconds} s each after one to warm up, all cases in turn; ratios "
    "are taken round by round. Every final value is checked."
)
APART = " The devices share a core of their own, for JAX alone as well; everything else has the other cores."
TOGETHER = " Devices and everything else share the cores."


@dataclass(frozen=True)
class Settings:
    clients: tuple[int, ...] = option((1, 2, 4, 8), "numbers of concurrent clients")
    lengths: tuple[float, ...] = option((0.00033, 0.001, 0.003, 0.01), "of a computation, in seconds, by JAX alone")
    rounds: int = option(5, "that count, after one to warm up")
    seconds: float = option(0.8, "of one measurement of throughput")
    share_seconds: float = option(10.0, "of one measurement of shares")
    devices: int = option(2, "of the host, at least 2, or there is nothing to reduce")
    parts: tuple[str, ...] = option(PARTS, choices=PARTS)
    apart: bool = option(
        True,
        "let devices and all else share the cores; collectives then depend on where the kernel puts threads",
        flags=["--together"],
    )


SMOKE = Settings((1, 2), (0.001,), rounds=1, seconds=0.2, share_seconds=0.4, parts=PARTS[:-1])  # one cluster's worth


@dataclass(frozen=True)
class Case:
    """One point of Figure 8: `clients` is 0 for JAX alone."""

    length: float
    clients: int

    @property
    def system(self) -> str:
        return f"{self.clients} client{'s' if self.clients > 1 else ''}" if self.clients else "JAX alone"


def run(settings: Settings, progress: Progress = QUIET) -> Result:
    """Measures on clusters of its own."""
    with contextlib.ExitStack() as stack:
        apart = settings.apart and stack.enter_context(devices_apart())
        return measured(settings, apart, progress)


def measured(settings: Settings, apart: bool, progress: Progress) -> dict[str, Any]:
    """The measurements, without the description of the machine; they are saved after each cluster, in case the next one
    fails."""
    about = MEASURED.format(**asdict(settings)) + (APART if apart else TOGETHER)
    result: Result = {"devices_apart": apart, "measured": about}
    jax = Worker(JaxAlone, devices=settings.devices)
    try:
        jax.answer()
        steps = dict(zip(settings.lengths, jax.ask("calibrate", settings.lengths), strict=True))
        result["computations"] = [{"length_ms": 1e3 * length, "steps": n} for length, n in steps.items()]
        if set(settings.parts) - {"unfused"}:
            with start(settings.devices, max(*settings.clients, len(WEIGHTS)), jax, steps, True) as bench:
                result |= on_a_cluster(bench, settings)
            progress.save(result)
        short = {length: n for length, n in steps.items() if length <= FUSED_S}
        if "unfused" in settings.parts and not short:
            progress.say(f"unfused: left out, as no computation is at most {1e3 * FUSED_S:g} ms long")
        elif "unfused" in settings.parts:
            with start(settings.devices, len(WEIGHTS), jax, short, False) as bench:
                result["unfused"] = without_fusion(bench, settings, tuple(short))
    finally:
        jax.close()
    return result


def on_a_cluster(bench: Bench, settings: Settings) -> dict[str, Any]:
    """All measurements on a cluster with the usual settings."""
    found: dict[str, Any] = {}
    alone = {length: length for length in settings.lengths}
    if "throughput" in settings.parts:
        samples = rates(bench, settings.lengths, (0, *settings.clients), settings)
        alone = {case.length: 1 / statistics.median(s) for case, s in samples.items() if not case.clients}
        found["rows"], found["ratios"] = rows(samples), ratios(samples)
    if "timelines" in settings.parts:
        shortest = min(settings.lengths)
        found["timelines"] = [bench.timeline(shortest, n, min(TRACED_S, settings.seconds)) for n in settings.clients]
    if "shares" in settings.parts:
        loads = loads_to_share(settings.lengths)
        found["shares"] = [bench.shares(ones, settings.share_seconds, alone) for ones in loads]
    if "switching" in settings.parts:
        found["switching"] = switching(bench, settings)
    return found


def without_fusion(bench: Bench, settings: Settings, lengths: Sequence[float]) -> dict[str, Any]:
    """The same for short computations on a cluster whose host runs every launch by itself."""
    samples = rates(bench, lengths, (0, 1, len(WEIGHTS)), settings)
    return {"rows": rows(samples), "ratios": ratios(samples), "switching": switching(bench, settings)}


def rates(
    bench: Bench, lengths: Sequence[float], clients: Sequence[int], settings: Settings
) -> dict[Case, list[float]]:
    """Computations a second of each case in each round."""

    def rate(case: Case) -> float:
        return bench.rate(case.length, case.clients, settings.seconds)

    return measure.interleaved([Case(length, n) for length in lengths for n in clients], rate, settings.rounds)


def loads_to_share(lengths: Sequence[float]) -> list[list[Load]]:
    """Equal weights and unequal ones, with every tenant's computations alike; last, equal ones with unlike ones."""
    middle = min(lengths, key=lambda length: abs(length - 0.001))
    clients = range(len(WEIGHTS))
    unequal = [length for length in lengths if length <= 0.003]
    return [
        [Load(equal(k), 1, middle) for k in clients],
        *([Load(weighted(k), WEIGHTS[k], length) for k in clients] for length in unequal),
        [Load(equal(k), 1, lengths[k % len(lengths)]) for k in clients],
    ]


def switching(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Throughput of computations of 1 ms issued by one process, for two tenants in turn, against those for one."""
    length = min(bench.steps, key=lambda length: abs(length - 0.001))

    def rate(tenants: int) -> float:
        return bench.switching_rate(length, tenants, settings.seconds)

    samples = measure.interleaved((1, 2), rate, settings.rounds)
    return {
        "length_ms": 1e3 * length,
        "one_tenant": measure.spread(samples[1]),
        "two_tenants": measure.spread(samples[2]),
        "two_to_one": measure.paired_ratios(samples[2], samples[1]),
        "microseconds_per_switch": measure.spread([1e6 / b - 1e6 / a for a, b in zip(*samples.values(), strict=True)]),
    }


def rows(samples: Mapping[Case, list[float]]) -> list[dict[str, Any]]:
    return [
        {"length_ms": 1e3 * case.length, "system": case.system, "clients": case.clients}
        | {"computations_per_second": measure.spread(values)}
        for case, values in samples.items()
    ]


def ratios(samples: Mapping[Case, list[float]]) -> list[dict[str, Any]]:
    """Every number of clients against JAX alone, and against one client."""
    return [
        {
            "name": f"{over.system} / {under.system}",
            "length_ms": 1e3 * over.length,
            "clients": over.clients,
            "against": under.clients,
            **measure.paired_ratios(samples[over], samples[under]),
        }
        for over in samples
        for under in (Case(over.length, 0), Case(over.length, 1))
        if over.clients > under.clients and under in samples
    ]


# --- printing ---------------------------------------------------------------------------------------------------------


RATES = (
    Table("rates", "rows", "length_ms", "system", "computations_per_second"),
    Table("ratios, round by round", "ratios", "length_ms", "name", ".:.2f"),
    Table("two tenants in turn / one", "switching", "length_ms", "two_to_one:.3f", "microseconds_per_switch:+.0f"),
)
TRACED = ("utilisation:.1%", "switches_per_second:,.0f", "turn_ms.median:.2f", "away_ms.median:.2f", "away_ms.p99:.2f")
SHARES = ("length_ms", "weights", "device_seconds.achieved:.1%", "device_seconds.error:.1%")
TABLES = shows(
    *RATES,
    Table("what was on the devices", "timelines", "clients", "length_ms", *TRACED),
    Table("shares of four clients", "shares", *SHARES, "traced_seconds.error:.1%", "computations.error:.1%"),
    Table("turns meanwhile", "shares", "weights", *(f"interleaving.{column}" for column in TRACED)),
)


def show(result: Mapping[str, Any], console: Console) -> None:
    TABLES(result, console)
    if "unfused" in result:
        console.print("Without fusion:")
        for table in RATES:
            table.show(result["unfused"], console)


BENCHMARK = Benchmark(
    "tenants", __doc__, Settings, SMOKE, run, show, outputs=(Output("--figures", drawn_by("tenants")),)
)
