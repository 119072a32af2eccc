"""Rate at which small computations reach the devices, as in Figure 5 of the Pathways paper.

Compares this runtime, JAX called directly, and Ray actors, on one host with 4 CPU devices. The systems are those of
`benchmarks.peers`, in the environment of this process. All are started first and stay alive, and each is measured once
per round, in turn.

Run it with `python -m benchmarks.dispatch --json results.json --figure results.png`.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import measure
from benchmarks.harness import Benchmark, Output, Progress, Result, drawn_by, option
from benchmarks.peers import protocol, systems
from benchmarks.peers.protocol import ALLREDUCE, CHAIN
from benchmarks.printing import Table, shows

DEVICES = 4
SYSTEMS = ("pathways", "jax", "ray", "ray-stateful")
RUN_LIMIT_S = 120.0

MEASURED = (
    "One computation is an all-reduce of a float32 scalar over {devices} CPU devices of one host, a division by "
    "{devices} and an addition of 1; its output feeds the next. opbyop: one call per computation, none waited for. "
    "chained: calls of {chain} nodes. fused: calls of one node with {chain} computations in it. Each run issues "
    "{computations} computations, fetches the last value within the measured time, and checks that it is exact. "
    "{repetitions} rounds after one warm-up, all systems alive and measured in turn; ratios are taken round by round."
)


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        computations: per measured run, a multiple of 128: usually 16 chains, so that fetching the last value weighs
            little
        reuse_session: `pathways` is a client in this process, on the session that is open. It must have a host with 4
            free devices.
    """

    repetitions: int = option(9, "rounds that count, after one to warm up")
    computations: int = 2048
    systems: tuple[str, ...] = option(SYSTEMS, choices=SYSTEMS)
    reuse_session: bool = False


SMOKE = Settings(repetitions=1, computations=2 * CHAIN)


CASES = {
    "pathways opbyop": ("pathways", "opbyop"),
    "pathways chained": ("pathways", "chained"),
    "pathways fused": ("pathways", "fused"),
    "jax opbyop": ("jax-multicontroller", "opbyop"),
    "jax fused": ("jax-multicontroller", "fused"),
    "ray opbyop": ("ray-actors", "opbyop"),
    "ray chained": ("ray-actors", "chained"),
    "ray fused": ("ray-actors", "list"),
    "ray-stateful opbyop": ("ray-actors", "kept-opbyop"),
}
"""The peer and its mode for each bar, a system and a mode. A Ray actor's `list` is one method call that loops over its
computations."""

RIVALS = {
    "pathways opbyop": ("jax opbyop", "ray opbyop", "ray-stateful opbyop"),
    "pathways chained": ("jax opbyop", "ray chained"),
    "pathways fused": ("jax fused", "ray fused"),
}
"""What each way to run this runtime is compared with. JAX has nothing like `chained`, so that is held against its
`opbyop`, as in the paper."""


def named(case: str) -> dict[str, str]:
    system, mode = case.split()
    return {"system": system, "mode": mode}


class Here:
    """The peer for this runtime as a client in this process, on the session that is open."""

    def __init__(self) -> None:
        from benchmarks.peers.pathways import Pathways

        self._peer = protocol.Measured(Pathways(session=True))
        self.close = self._peer.close

    def ask(self, word: str, limit_s: float, **arguments: Any) -> Any:
        return getattr(self._peer, word)(**arguments)


def started(name: str, reuse_session: bool) -> systems.Running:
    if name != "pathways" or not reuse_session:
        return systems.start(systems.SYSTEMS[name].here(), 1, DEVICES)
    here = Here()
    return systems.Running(here, here.ask("configure", 0, hosts=1, devices=DEVICES), DEVICES)


def run(settings: Settings, progress: Progress) -> Result:
    """
    Raises:
        WrongValue: a value is wrong; it is an AssertionError too.
        PeerError: a system did not start, or failed.
    """
    computations = settings.computations
    if computations % CHAIN:
        raise ValueError(f"computations must be a multiple of {CHAIN}, got {computations}")
    cases = [case for case in CASES if named(case)["system"] in settings.systems]
    with contextlib.ExitStack() as stack:
        peers = {}
        for name in dict.fromkeys(CASES[case][0] for case in cases):
            peers[name] = stack.enter_context(contextlib.closing(started(name, settings.reuse_session)))

        def rate(case: str) -> float:
            peer, mode = CASES[case]
            return computations / peers[peer].seconds(RUN_LIMIT_S, mode, ALLREDUCE, computations)

        samples = measure.interleaved(cases, rate, settings.repetitions)
    where = {"hosts": 1, "devices_per_host": DEVICES}
    pairs = [(over, under) for over, rivals in RIVALS.items() for under in rivals if {over, under} <= samples.keys()]
    return {
        "measured": MEASURED.format(devices=DEVICES, chain=CHAIN, **asdict(settings)),
        "rows": [
            {**named(case), **where, "computations_per_second": measure.spread(values)}
            for case, values in samples.items()
        ],
        "ratios": [
            {"name": f"{over} / {under}", "numerator": named(over), "denominator": named(under)}
            | measure.paired_ratios(samples[over], samples[under])
            for over, under in pairs
        ],
    }


show = shows(
    Table("rates", "rows", "system", "mode", "computations_per_second"),
    Table("ratios, round by round", "ratios", "name", ".:.2f"),
)

FIGURE = Output("--figure", drawn_by("dispatch"), "dispatch.png")
BENCHMARK = Benchmark("dispatch", __doc__, Settings, SMOKE, run, show, outputs=(FIGURE,), uses_peers=True)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
