"""Dispatch of small computations, this runtime against its peers: see benchmarks/README.md.

python -m benchmarks.peers --json peers.json
python -m benchmarks.peers --hosts 2x1 --only pathways,jax-multicontroller --modes opbyop,fused
"""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import measure
from benchmarks.peers import comparisons, rounds
from benchmarks.peers.process import leaving_nothing
from benchmarks.peers.protocol import CHAIN
from benchmarks.peers.systems import SYSTEMS, SystemInfo

ROUNDS = 7
DEVICES_OF_HOSTS = {1: 4, 2: 1, 4: 1}  # what `--hosts` stands for
TOPOLOGIES = ((1, 4), (2, 1), (4, 1))
SMOKE_TARGET_S = 0.0  # the smallest counts; the numbers mean nothing

MEASURED = (
    "One computation is an all-reduce of a float32 scalar over all devices, a division by their number and an addition "
    "of 1 (allreduce), or the addition alone (noop); its output feeds the next. A run issues the count of computations "
    "that took about {target_s:g} s in the warm-up, and fetches the last value within the measured time; the value "
    "must be exact on every device. {rounds} rounds after the warm-up; all systems of a topology are alive and "
    "measured in turn; ratios are taken round by round. chained, fused and list put {chain} computations in a call."
)


def run(
    topologies: Sequence[tuple[int, int]] = TOPOLOGIES,
    number: int = ROUNDS,
    systems: Sequence[str] = tuple(SYSTEMS),
    modes: Sequence[str] = (),
    payloads: Sequence[str] = (),
    target_s: float = rounds.TARGET_S,
    say: Callable[[str], None] = lambda text: None,
    save: Callable[[dict[str, Any]], object] = lambda result: None,
    apart: bool = False,
) -> dict[str, Any]:
    """Measures and returns the result as it is written to JSON.

    Args:
        topologies: (hosts, devices of each), measured one after the other.
        number: rounds that count.
        systems, modes, payloads: which; for the last two, none means all.
        target_s: how long a run is to take.
        say: told what is under way.
        save: given the result after each topology, so that what was measured is not lost with what comes after.
        apart: devices have a core for themselves (`measure.devices_apart`). Only for systems whose payload is JAX.
    """
    result: dict[str, Any] = {
        "benchmark": "peers",
        "machine": measure.machine(),
        "measured": MEASURED.format(rounds=number, target_s=target_s, chain=CHAIN),
        "topologies": [],
        "rows": [],
        "ratios": [],
    }
    wanted = {name: info for name, info in SYSTEMS.items() if name in systems}
    result["devices_apart"] = apart
    for topology in topologies:
        with contextlib.ExitStack() as stack:
            if apart:
                result["devices_apart"] &= stack.enter_context(measure.devices_apart(topology[0]))
            _measured(result, wanted, topology, number, (modes, payloads, target_s), say)
        save(result)
    return result


def _measured(
    result: dict[str, Any],
    wanted: Mapping[str, SystemInfo],
    topology: tuple[int, int],
    number: int,
    cases: tuple[Sequence[str], Sequence[str], float],
    say: Callable[[str], None],
) -> None:
    """Adds what is measured on one topology to the result."""
    modes, payloads, target_s = cases
    hosts, devices = topology
    with rounds.session(hosts, devices, wanted, lambda text: say(f"{hosts}x{devices}: {text}")) as made:
        made.warm_up(made.cases(modes, payloads), target_s)
        for k in range(number):
            made.say(f"round {k + 1} of {number}")
            made.round(k)
        result["rows"] += rounds.rows(made)
        result["ratios"] += comparisons.ratios(made)
        result["topologies"].append(
            {
                "hosts": hosts,
                "devices_per_host": devices,
                "versions": {name: running.described.get("versions") for name, running in made.systems.items()},
                "busy_cores_between_rounds": measure.spread(made.busy) if made.busy else None,
                "errors": made.errors,
            }
        )


def show(result: dict[str, Any], console: Console) -> None:
    """Prints what was measured, on what, and the numbers; what did not run comes last."""
    console.print(result["measured"], f"Machine: {measure.describe(result['machine'])}.", sep="\n", highlight=False)
    for topology in result["topologies"]:
        where = {key: topology[key] for key in ("hosts", "devices_per_host")}
        title = f"{where['hosts']} host{'s' * (where['hosts'] > 1)} x {where['devices_per_host']} devices"
        times = Table("system", "mode", "payload", title=f"{title}: us per computation")
        ratios = Table("ratio of rates", "payload", title=f"{title}: ratios, round by round")
        for table in (times, ratios):
            for heading in ("min", "median", "max"):
                table.add_column(heading, justify="right")
        for row in (row for row in result["rows"] if where.items() <= row.items()):
            numbers = (f"{row['us_per_computation'][key]:,.1f}" for key in ("min", "median", "max"))
            times.add_row(row["system"], row["mode"], row["payload"], *numbers)
        for ratio in (ratio for ratio in result["ratios"] if where.items() <= ratio.items()):
            payload = ratio["payload"] if ratio["same_payload"] else f"{ratio['payload']}, each its own"
            ratios.add_row(ratio["name"], payload, *(f"{ratio[key]:.2f}" for key in ("min", "median", "max")))
        console.print(times)
        meanings = {
            (row["payload"], row["payload_is"], row["system"]) for row in result["rows"] if where.items() <= row.items()
        }
        for payload, is_payload in sorted({(payload, is_payload) for payload, is_payload, _ in meanings}):
            systems = ", ".join(sorted(system for *both, system in meanings if both == [payload, is_payload]))
            console.print(f"{payload} is {is_payload} in {systems}.", highlight=False)
        if ratios.row_count:
            console.print(ratios)
        busy = topology["busy_cores_between_rounds"]
        if busy:
            console.print(f"Busy between rounds, when nothing is measured: {busy['median']:.2f} cores.")
        for what, error in topology["errors"].items():
            console.print(f"Not run, {what}: {error}", markup=False)


def topologies_of(text: str) -> list[tuple[int, int]]:
    """`1x4,2x1` as numbers of hosts and of devices of each; `2` alone is the usual one of two hosts."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", part.strip())
        if not match or int(match[1]) < 1 or int(match[2] or 1) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is not HOSTSxDEVICES, as in 2x1")
        hosts = int(match[1])
        found.append((hosts, int(match[2] or DEVICES_OF_HOSTS.get(hosts, 1))))
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument(
        "--hosts",
        "--topologies",
        dest="topologies",
        type=topologies_of,
        default=list(TOPOLOGIES),
        help="HOSTSxDEVICES, with commas between; 1, 2 and 4 alone are 1x4, 2x1 and 4x1 (default: 1,2,4)",
    )
    names = ", ".join(SYSTEMS)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SYSTEMS), help=f"of {names}")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=[], help="default: all")
    parser.add_argument("--payloads", type=lambda text: text.split(","), default=[], help="of allreduce, noop")
    parser.add_argument(
        "--apart",
        action="store_true",
        help="give the JAX devices of one host the first core for themselves, and everything else the others; of "
        "several hosts, a core for each one's devices; for --only pathways,jax-multicontroller, as the devices of "
        "others are not threads of their own",
    )
    parser.add_argument("--smoke", action="store_true", help="one short round, to see that everything runs")
    options = parser.parse_args(arguments)
    unknown = set(options.only) - set(SYSTEMS)
    if unknown:
        parser.error(f"no such system: {', '.join(sorted(unknown))}; there are {names}")
    if options.rounds < 1:
        parser.error("there must be a round")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)

    def save(result: dict[str, Any]) -> None:
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")

    with leaving_nothing():
        result = run(
            options.topologies,
            1 if options.smoke else options.rounds,
            options.only,
            options.modes,
            options.payloads,
            SMOKE_TARGET_S if options.smoke else rounds.TARGET_S,
            say=lambda text: print(text, file=sys.stderr, flush=True),
            save=save,
            apart=options.apart,
        )
    show(result, Console())
    return result


if __name__ == "__main__":
    main()
