"""Many clients on the same devices: throughput, shares and interleaving, as Figures 8, 9 and 11 of the Pathways paper.

Clients are processes of their own, each with the token of a tenant of its own, all on the same CPU devices of one host,
under the policy "share". `benchmarks.clients` says what they run. JAX called directly, in one process with as many
devices, is measured in the same rounds.

Run it with `python -m benchmarks.tenants --json tenants.json --figures .`; it takes about six minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import measure
from benchmarks.clients import JaxAlone, Process
from benchmarks.sharing import WEIGHTS, Bench, Load, equal, start, weighted

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
    """What is measured.

    Args:
        clients: numbers of concurrent clients.
        lengths: of a computation, in seconds, by JAX alone.
        rounds: that count, after one to warm up.
        seconds: that one measurement of throughput takes.
        share_seconds: that one measurement of shares takes.
        devices: of the host, at least 2, or there is nothing to reduce.
        parts: out of PARTS.
        apart: the devices have a core for themselves; see `measure.devices_apart`.
    """

    clients: tuple[int, ...] = (1, 2, 4, 8)
    lengths: tuple[float, ...] = (0.00033, 0.001, 0.003, 0.01)
    rounds: int = 5
    seconds: float = 0.8
    share_seconds: float = 10.0
    devices: int = 2
    parts: tuple[str, ...] = PARTS
    apart: bool = True


SMOKE = Settings((1, 2), (0.001,), rounds=1, seconds=0.2, share_seconds=0.4, parts=PARTS[:-1])  # one cluster's worth


@dataclass(frozen=True)
class Case:
    """One point of Figure 8: `clients` is 0 for JAX alone."""

    length: float
    clients: int

    @property
    def system(self) -> str:
        return f"{self.clients} client{'s' if self.clients > 1 else ''}" if self.clients else "JAX alone"


def run(settings: Settings = Settings()) -> dict[str, Any]:
    """Measures and returns the result as it is written to JSON; makes clusters of its own."""
    with contextlib.ExitStack() as stack:
        machine = measure.machine()
        apart = settings.apart and stack.enter_context(measure.devices_apart())
        return {"benchmark": "tenants", "machine": machine, "devices_apart": apart, **measured(settings, apart)}


def measured(settings: Settings, apart: bool) -> dict[str, Any]:
    """Everything but the description of the machine."""
    result: dict[str, Any] = {
        "measured": MEASURED.format(**asdict(settings)) + (APART if apart else TOGETHER),
        "settings": asdict(settings),
    }
    jax = Process(JaxAlone, devices=settings.devices)
    try:
        jax.ready()
        steps = dict(zip(settings.lengths, jax.ask("calibrate", settings.lengths), strict=True))
        result["computations"] = [{"length_ms": 1e3 * length, "steps": n} for length, n in steps.items()]
        processes = max(*settings.clients, len(WEIGHTS))
        if set(settings.parts) - {"unfused"}:
            with start(settings.devices, processes, jax, steps, True) as bench:
                result |= on_a_cluster(bench, settings)
        if "unfused" in settings.parts:
            short = {length: n for length, n in steps.items() if length <= FUSED_S}
            with start(settings.devices, len(WEIGHTS), jax, short, False) as bench:
                result["unfused"] = without_fusion(bench, settings, tuple(short))
    finally:
        jax.close()
    return result


def on_a_cluster(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Everything that is measured on the cluster as it is by default."""
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
        found["shares"] = [
            bench.shares(loads, settings.share_seconds, alone) for loads in loads_to_share(settings.lengths)
        ]
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
    cases = [Case(length, n) for length in lengths for n in clients]
    return measure.interleaved(
        cases, lambda case: bench.rate(case.length, case.clients, settings.seconds), settings.rounds
    )


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
    samples = measure.interleaved(
        (1, 2), lambda tenants: bench.switching_rate(length, tenants, settings.seconds), settings.rounds
    )
    return {
        "length_ms": 1e3 * length,
        "one_tenant": measure.spread(samples[1]),
        "two_tenants": measure.spread(samples[2]),
        "two_to_one": measure.paired_ratios(samples[2], samples[1]),
        "microseconds_per_switch": measure.spread([1e6 / b - 1e6 / a for a, b in zip(*samples.values(), strict=True)]),
    }


def rows(samples: Mapping[Case, list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "length_ms": 1e3 * case.length,
            "system": case.system,
            "clients": case.clients,
            "computations_per_second": measure.spread(values),
        }
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


# --- for people -------------------------------------------------------------------------------------------------------


def show(result: Mapping[str, Any], console: Console) -> None:
    """Prints what was measured, on what, and the numbers."""
    console.print(result["measured"], f"Machine: {measure.describe(result['machine'])}.", sep="\n", highlight=False)
    for found, title in ((result, ""), (result.get("unfused", {}), ", without fusion")):
        if "rows" in found:
            show_rates(found, title, console)
        if "switching" in found:
            show_switching(found["switching"], title, console)
    if "timelines" in result:
        show_timelines(result["timelines"], console)
    if "shares" in result:
        show_shares(result["shares"], console)


def show_rates(found: Mapping[str, Any], title: str, console: Console) -> None:
    table = Table("ms", "system", title=f"computations per second{title}")
    for heading in ("per second", "/ JAX alone", "/ 1 client"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found["rows"]:
        against = {
            ratio["against"]: f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
            for ratio in found["ratios"]
            if (ratio["length_ms"], ratio["clients"]) == (row["length_ms"], row["clients"])
        }
        rate = f"{row['computations_per_second']['median']:,.0f}"
        table.add_row(f"{row['length_ms']:g}", row["system"], rate, against.get(0, ""), against.get(1, ""))
    console.print(table)


def show_switching(found: Mapping[str, Any], title: str, console: Console) -> None:
    ratio, cost = found["two_to_one"], found["microseconds_per_switch"]
    console.print(
        f"Two tenants in turn / one, {found['length_ms']:g} ms{title}: {ratio['median']:.3f} ({ratio['min']:.3f} to "
        f"{ratio['max']:.3f}); {cost['median']:+.0f} us per switch ({cost['min']:+.0f} to {cost['max']:+.0f})",
        highlight=False,
    )


def show_timelines(found: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = Table("clients", title=f"what was on the devices, computations of {found[0]['length_ms']:g} ms")
    for heading in ("busy", "switches/s", "turn ms", "away ms", "99 %"):
        table.add_column(heading, justify="right")
    for one in found:
        table.add_row(str(one["clients"]), *interleaved(one))
    console.print(table)


def interleaved(found: Mapping[str, Any]) -> list[str]:
    away = found["away_ms"]
    return [
        f"{found['utilisation']:.1%}",
        f"{found['switches_per_second']:,.0f}",
        f"{found['turn_ms']['median']:.2f}",
        *([f"{away['median']:.2f}", f"{away['p99']:.2f}"] if away else ["", ""]),
    ]


def show_shares(found: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Errors are the largest of a tenant: by the runtime's account, by the trace, and by computations done."""
    table = Table(title="shares of four clients, percent of the device time", padding=0)
    for heading in ("weights", "ms", "achieved", "error", "trace", "work", "away ms", "99 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        table.add_row(
            ":".join(f"{weight:g}" for weight in one["weights"].values()),
            ", ".join(dict.fromkeys(f"{length:g}" for length in one["length_ms"].values())),
            " ".join(f"{100 * share:.1f}" for share in one["device_seconds"]["achieved"].values()),
            *(f"{one[name]['error']:.1%}" for name in ("device_seconds", "traced_seconds", "computations")),
            *interleaved(one["interleaving"])[-2:],
        )
    console.print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tenants", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw PNGs here")
    parser.add_argument("--smoke", action="store_true", help="one short round, to see that everything runs")
    usual = Settings()
    for name, kind in (("clients", int), ("lengths", float)):
        parser.add_argument(
            f"--{name}", type=kind, nargs="+", default=getattr(usual, name), help="default: %(default)s"
        )
    parser.add_argument("--rounds", type=int, default=usual.rounds, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="of one rate (default: %(default)s)")
    parser.add_argument("--share-seconds", type=float, default=usual.share_seconds, help="default: %(default)s")
    parser.add_argument("--devices", type=int, default=usual.devices, help="of the host (default: %(default)s)")
    parser.add_argument(
        "--together",
        dest="apart",
        action="store_false",
        help="let devices and all else share the cores; collectives then depend on where the kernel puts threads",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    settings = SMOKE
    if not options.smoke:
        given = {name: getattr(options, name) for name in asdict(SMOKE)}
        settings = Settings(**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})
    found = run(settings)
    show(found, Console())
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.figures:
        from benchmarks import figures  # matplotlib is not needed to measure

        options.figures.mkdir(parents=True, exist_ok=True)
        figures.tenants(found, options.figures)
    return found


if __name__ == "__main__":
    main()
