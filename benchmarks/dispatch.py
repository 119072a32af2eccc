"""Rate at which small computations reach the devices, as in Figure 5 of the Pathways paper.

Compares this runtime, JAX called directly, and Ray actors, on one host with 4 CPU devices. The systems are those of
`benchmarks.peers`, in the environment of this process. All are started first and stay alive, and each is measured once
per round, in turn.

Run it with `python -m benchmarks.dispatch --json results.json --figure results.png`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from benchmarks import measure, printing
from benchmarks.harness import Benchmark, Output, Result, option
from benchmarks.peers import protocol, systems
from benchmarks.peers.protocol import ALLREDUCE, CHAIN, START

DEVICES = 4
SYSTEMS = ("pathways", "jax", "ray", "ray-stateful")
RUN_LIMIT_S = 120.0
SMOKE: dict[str, Any] = {
    "repetitions": 1,
    "computations": 2 * CHAIN,
}  # its numbers mean nothing

MEASURED = (
    "One computation is an all-reduce of a float32 scalar over {devices} CPU devices of one host, a division by "
    "{devices} and an addition of 1; its output feeds the next. opbyop: one call per computation, none waited for. "
    "chained: calls of {chain} nodes. fused: calls of one node with {chain} computations in it. Each run issues "
    "{computations} computations, fetches the last value within the measured time, and checks that it is exact. "
    "{repetitions} rounds after one warm-up, all systems alive and measured in turn; ratios are taken round by round."
)


@dataclass(frozen=True)
class Settings:
    repetitions: int = option(9, "rounds")
    computations: int = 2048  # per measured run: 16 chains, so that fetching the last value weighs little
    systems: tuple[str, ...] = option(SYSTEMS, choices=SYSTEMS)


@dataclass(frozen=True)
class Case:
    """One bar of the figure."""

    system: str
    mode: str

    def __str__(self) -> str:
        return f"{self.system} {self.mode}"


CASES = {
    Case("pathways", "opbyop"): ("pathways", "opbyop"),
    Case("pathways", "chained"): ("pathways", "chained"),
    Case("pathways", "fused"): ("pathways", "fused"),
    Case("jax", "opbyop"): ("jax-multicontroller", "opbyop"),
    Case("jax", "fused"): ("jax-multicontroller", "fused"),
    Case("ray", "opbyop"): ("ray-actors", "opbyop"),
    Case("ray", "chained"): ("ray-actors", "chained"),
    Case("ray", "fused"): ("ray-actors", "list"),
    Case("ray-stateful", "opbyop"): ("ray-actors", "kept-opbyop"),
}
"""The peer and its mode for each bar. A Ray actor's `list` is one method call that loops over its computations."""

# The pairs that are compared. JAX has nothing like `chained`, so that is held against its `opbyop`, as in the paper.
RATIOS = (
    (Case("pathways", "opbyop"), Case("jax", "opbyop")),
    (Case("pathways", "chained"), Case("jax", "opbyop")),
    (Case("pathways", "fused"), Case("jax", "fused")),
    (Case("pathways", "opbyop"), Case("ray", "opbyop")),
    (Case("pathways", "opbyop"), Case("ray-stateful", "opbyop")),
    (Case("pathways", "chained"), Case("ray", "chained")),
    (Case("pathways", "fused"), Case("ray", "fused")),
)


class Running(Protocol):
    """A started peer."""

    def ask(self, word: str, limit_s: float, **arguments: Any) -> dict[str, Any]: ...

    def close(self) -> None: ...


class InThisProcess:
    """The peer for this runtime as a client in this process, on the session that is open."""

    def __init__(self) -> None:
        from benchmarks.peers.pathways import Pathways

        self._peer = Pathways(session=True)
        self._peer.configure(1, DEVICES)

    def ask(self, word: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        return protocol.measured(self._peer, **arguments)

    def close(self) -> None:
        self._peer.close()


@contextlib.contextmanager
def started(peers: Sequence[str], reuse_session: bool) -> Iterator[dict[str, Running]]:
    """Starts peers, and closes them in reverse."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Running] = {}
        for name in peers:
            if name == "pathways" and reuse_session:
                found[name] = InThisProcess()
            else:
                found[name], _ = systems.start(systems.SYSTEMS[name].here(), 1, DEVICES)
            stack.callback(found[name].close)
        yield found


def run(
    repetitions: int = Settings.repetitions,
    computations: int = Settings.computations,
    systems: Sequence[str] = SYSTEMS,
    reuse_session: bool = False,
) -> Result:
    """Measures and returns the result as it is written to JSON.

    Args:
        repetitions: rounds that count; one warm-up round comes before them.
        computations: per measured run; a multiple of 128.
        systems: names out of SYSTEMS.
        reuse_session: `pathways` is a client in this process, on the session that is open. It must have a host with 4
            free devices.

    Raises:
        AssertionError: a value is wrong.
        PeerError: a system did not start, or failed.
    """
    if computations % CHAIN:
        raise ValueError(f"computations must be a multiple of {CHAIN}, got {computations}")
    machine = measure.machine()
    cases = [case for case in CASES if case.system in systems]
    with started(list(dict.fromkeys(CASES[case][0] for case in cases)), reuse_session) as peers:

        def rate(case: Case) -> float:
            peer, mode = CASES[case]
            answer = peers[peer].ask("run", RUN_LIMIT_S, mode=mode, payload=ALLREDUCE, count=computations)
            expected = [START + computations] * DEVICES
            if answer["value"] != expected:
                value = answer["value"]
                raise AssertionError(f"{case}: after {computations} computations the value is {value}, not {expected}")
            return computations / float(answer["seconds"])

        samples = measure.interleaved(cases, rate, repetitions)
    settings = {"devices": DEVICES, "chain": CHAIN, "computations": computations, "repetitions": repetitions}
    return result(machine, MEASURED.format(**settings), samples)


def result(machine: dict[str, Any], measured: str, samples: dict[Case, list[float]]) -> Result:
    """The JSON form of the measurements; samples are computations per second."""
    rows = [
        {
            "system": case.system,
            "mode": case.mode,
            "hosts": 1,
            "devices_per_host": DEVICES,
            "computations_per_second": measure.spread(values),
        }
        for case, values in samples.items()
    ]
    ratios = [
        {
            "name": f"{over} / {under}",
            "numerator": vars(over),
            "denominator": vars(under),
            **measure.paired_ratios(samples[over], samples[under]),
        }
        for over, under in RATIOS
        if over in samples and under in samples
    ]
    return {"benchmark": "dispatch", "machine": machine, "measured": measured, "rows": rows, "ratios": ratios}


def show(result: Result, console: Console) -> None:
    printing.heading(result, console)
    rates = printing.table("computations per second", ["system", "mode"], [*printing.SPREAD, "us each"])
    ratios = printing.table("ratios, round by round", ["ratio"])
    for row in result["rows"]:
        rate = row["computations_per_second"]
        rates.add_row(row["system"], row["mode"], *printing.numbers(rate, ",.0f"), f"{1e6 / rate['median']:.1f}")
    for ratio in result["ratios"]:
        ratios.add_row(ratio["name"], *printing.numbers(ratio, ".2f"))
    console.print(rates)
    if result["ratios"]:
        console.print(ratios)


def draw(result: Result, path: Path) -> None:
    from benchmarks import figures  # matplotlib is not needed to measure

    figures.dispatch(result, path)


BENCHMARK = Benchmark(
    "dispatch",
    __doc__,
    Settings,
    Settings(**SMOKE),
    lambda settings, progress: run(**asdict(settings)),
    show,
    outputs=(Output("--figure", draw, "dispatch.png"),),
    uses_peers=True,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
