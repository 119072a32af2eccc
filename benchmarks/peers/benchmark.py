"""Dispatch of small computations, this runtime against its peers: see benchmarks/README.md.

python -m benchmarks.peers --json peers.json
python -m benchmarks.peers --hosts 2x1 --only pathways,jax-multicontroller --modes opbyop,fused
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks import measure
from benchmarks.cores import devices_apart
from benchmarks.harness import Benchmark, Progress, Result, has_rows, option
from benchmarks.peers import rounds
from benchmarks.peers.protocol import ALLREDUCE, CHAIN, NOOP
from benchmarks.peers.rounds import TARGET_S
from benchmarks.peers.systems import FLOOR, JAX, SYSTEMS
from benchmarks.printing import Table, shows

DEVICES_OF_HOSTS = {1: 4, 2: 1, 4: 1}  # for a number of hosts without one of devices
TOPOLOGIES = ((1, 4), (2, 1), (4, 1))
NAMES = ", ".join(SYSTEMS)

MEASURED = (
    "One computation is an all-reduce of a float32 scalar over all devices, a division by their number and an addition "
    "of 1 (allreduce), or the addition alone (noop); its output feeds the next. A run issues the count of computations "
    "that took about {target_s:g} s in the warm-up, and fetches the last value within the measured time; the value "
    "must be exact on every device. {rounds} rounds after the warm-up; all systems of a topology are alive and "
    "measured in turn; ratios are taken round by round. chained, fused and list put {chain} computations in a call."
)


def topologies_of(text: str) -> tuple[tuple[int, int], ...]:
    """`1x4,2x1` as numbers of hosts and of devices of each; `2` alone is the usual one of two hosts."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", part.strip())
        if not match or int(match[1]) < 1 or int(match[2] or 1) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is not HOSTSxDEVICES, as in 2x1")
        hosts = int(match[1])
        found.append((hosts, int(match[2] or DEVICES_OF_HOSTS.get(hosts, 1))))
    return tuple(found)


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@dataclass(frozen=True)
class Settings:
    hosts: tuple[tuple[int, int], ...] = option(
        TOPOLOGIES,
        "HOSTSxDEVICES, with commas between; 1, 2 and 4 alone are 1x4, 2x1 and 4x1 (default: 1,2,4)",
        flags=["--hosts", "--topologies"],
        parse=topologies_of,
    )
    rounds: int = option(7)
    only: tuple[str, ...] = option(tuple(SYSTEMS), f"of {NAMES} (default: all)", parse=words)
    modes: tuple[str, ...] = option((), "default: all", parse=words)
    payloads: tuple[str, ...] = option((), "of allreduce, noop (default: both)", parse=words)
    apart: bool = option(
        False,
        "give the JAX devices of one host the first core for themselves, and everything else the others; of several "
        "hosts, a core for each one's devices; for --only pathways,jax-multicontroller, as the devices of others are "
        "not threads of their own",
    )
    here: bool = option(False, "run JAX in this environment if its own is not built")
    target_s: float = TARGET_S  # of one run

    def __post_init__(self) -> None:
        unknown = set(self.only) - set(SYSTEMS)
        if unknown:
            raise ValueError(f"no such system: {', '.join(sorted(unknown))}; there are {NAMES}")
        if self.rounds < 1:
            raise ValueError("there must be a round")
        if unknown := set(self.payloads) - {ALLREDUCE, NOOP}:
            raise ValueError(f"no such payload: {', '.join(sorted(unknown))}; there are {ALLREDUCE}, {NOOP}")


SMOKE = Settings(((2, 1),), rounds=1, here=True, target_s=0.0)  # the smallest counts


RIVALS = {
    "pathways-no-fusion opbyop": (f"{JAX} opbyop",),
    "pathways opbyop-wait": (f"{JAX} opbyop-wait",),
    "pathways opbyop": (
        *(f"{JAX} opbyop", "ray-actors opbyop-wait", "ray-actors opbyop", "ray-actors kept-opbyop"),
        *("ray-compiled-graphs opbyop", "tf1-sessions opbyop-wait", "monarch-actors opbyop-wait"),
        "monarch-actors opbyop",
    ),
    "pathways chained": (
        *(f"{JAX} opbyop", f"{JAX} fused", "ray-actors chained", "ray-actors list", "ray-compiled-graphs chained"),
        *("tf1-sessions chained", "monarch-actors chained", "monarch-actors list"),
    ),
    "pathways fused": (f"{JAX} fused", "ray-actors fused"),
    f"{FLOOR} opbyop": (f"{JAX} opbyop",),
    f"{FLOOR} opbyop-wait": (f"{JAX} opbyop-wait",),
}
"""What each way to run this runtime is compared with, and the floor of a single controller."""


def ratios(made: rounds.Session) -> list[dict[str, Any]]:
    """Rates over rates of others, round by round, for every payload that both have.

    Where the other's payload is another operation (TensorFlow brings its own all-reduce) the ratio says so.
    """
    found = []
    pairs = [(over, under) for over, rivals in RIVALS.items() for under in rivals]
    for (over, under), payload in itertools.product(pairs, ("allreduce", "noop")):
        fast, slow = (rounds.Case.of(words, payload) for words in (over, under))
        if made.samples.get(fast) and made.samples.get(slow):
            is_payload = [made.systems[case.system].described["payloads"][payload] for case in (fast, slow)]
            about = {"name": f"{over} / {under}", "payload": payload, "same_payload": is_payload[0] == is_payload[1]}
            both = {"numerator": vars(fast), "denominator": vars(slow), **made.where}
            # A sample is a time, and the ratio is one of rates: so the other way round.
            found.append({**about, **both, **measure.paired_ratios(made.samples[slow], made.samples[fast])})
    return found


def run(settings: Settings, progress: Progress) -> Result:
    """Measures one topology after the other; saves the result after each, in case the next one fails."""
    measured = MEASURED.format(rounds=settings.rounds, target_s=settings.target_s, chain=CHAIN)
    result: Result = {"measured": measured, "topologies": [], "rows": [], "ratios": []}
    result["devices_apart"] = settings.apart
    systems = {name: SYSTEMS[name] for name in SYSTEMS if name in settings.only}
    wanted = {name: system.or_here(settings.here and system.is_jax) for name, system in systems.items()}
    for hosts, devices in settings.hosts:
        with contextlib.ExitStack() as stack:
            if settings.apart:
                result["devices_apart"] &= stack.enter_context(devices_apart(hosts))
            say = progress.about(f"{hosts}x{devices}")
            made = stack.enter_context(rounds.session(hosts, devices, wanted, say))
            cases = made.cases(settings.modes, settings.payloads)
            for mode in sorted(set(settings.modes) - {case.mode for case in cases}):
                made.fail(f"mode {mode}", "no system that runs has it")
            made.warm_up(cases, settings.target_s)
            for k in range(settings.rounds):
                say(f"round {k + 1} of {settings.rounds}")
                made.round(k)
            result["rows"] += rounds.rows(made)
            result["ratios"] += ratios(made)
            versions = {name: running.described.get("versions") for name, running in made.systems.items()}
            busy = measure.spread(made.busy) if made.busy else None
            about = {"versions": versions, "busy_cores_between_rounds": busy, "errors": made.errors}
            result["topologies"].append({**made.where, **about})
        progress.save(result)
    return result


WHERE = ("hosts", "devices_per_host")
TABLES = shows(
    Table("topologies", "topologies", "hosts", "devices_per_host", "busy_cores_between_rounds:.2f"),
    Table("times", "rows", *WHERE, "system", "mode", "payload", "payload_is", "us_per_computation:,.1f"),
    Table("ratios of rates, round by round", "ratios", *WHERE, "name", "payload", "same_payload", ".:.2f"),
)


def show(result: Result, console: Console) -> None:
    errors = {
        f"{one['hosts']}x{one['devices_per_host']}, {what}": error
        for one in result["topologies"]
        for what, error in one["errors"].items()
    }
    TABLES({**result, "errors": errors}, console)


BENCHMARK = Benchmark("peers", __doc__, Settings, SMOKE, run, show, succeeded=has_rows, uses_peers=True)
