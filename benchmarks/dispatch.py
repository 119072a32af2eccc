"""Rate at which small computations reach the devices, as in Figure 5 of the Pathways paper.

Compares this runtime, JAX called directly, and Ray actors, on one host with 4 CPU devices. The systems are those of
`benchmarks.peers`, in the environment of this process. All are started first and stay alive, and each is measured once
per round, in turn.

Run it with `python -m benchmarks.dispatch --json results.json --figure results.png`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from benchmarks import measure
from benchmarks.harness import Benchmark, Output, Result, drawn_by, option
from benchmarks.peers import protocol, systems
from benchmarks.peers.protocol import ALLREDUCE, CHAIN
from benchmarks.printing import Table, shows

DEVICES = 4
SYSTEMS = ("pathways", "jax", "ray", "ray-stateful")
RUN_LIMIT_S = 120.0
SMOKE: dict[str, Any] = {"repetitions": 1, "computations": 2 * CHAIN}  # its numbers mean nothing

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


class Case(NamedTuple):
    """One bar of the figure."""

    system: str
    mode: str


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
        WrongValue: a value is wrong; it is an AssertionError too.
        PeerError: a system did not start, or failed.
    """
    if computations % CHAIN:
        raise ValueError(f"computations must be a multiple of {CHAIN}, got {computations}")
    machine = measure.machine()
    cases = [case for case in CASES if case.system in systems]
    with contextlib.ExitStack() as stack:
        peers = {}
        for name in dict.fromkeys(CASES[case][0] for case in cases):
            peers[name] = stack.enter_context(contextlib.closing(started(name, reuse_session)))

        def rate(case: Case) -> float:
            peer, mode = CASES[case]
            return computations / peers[peer].seconds(RUN_LIMIT_S, mode, ALLREDUCE, computations)

        samples = measure.interleaved(cases, rate, repetitions)
    settings = {"devices": DEVICES, "chain": CHAIN, "computations": computations, "repetitions": repetitions}
    where = {"hosts": 1, "devices_per_host": DEVICES}
    return {
        "benchmark": "dispatch",
        "machine": machine,
        "measured": MEASURED.format(**settings),
        "rows": [
            {**case._asdict(), **where, "computations_per_second": measure.spread(values)}
            for case, values in samples.items()
        ],
        "ratios": [
            {
                "name": f"{' '.join(over)} / {' '.join(under)}",
                "numerator": over._asdict(),
                "denominator": under._asdict(),
                **measure.paired_ratios(samples[over], samples[under]),
            }
            for over, under in RATIOS
            if over in samples and under in samples
        ],
    }


show = shows(
    Table("rates", "rows", "system", "mode", "computations_per_second"),
    Table("ratios, round by round", "ratios", "name", ".:.2f"),
)

BENCHMARK = Benchmark(
    "dispatch",
    __doc__,
    Settings,
    Settings(**SMOKE),
    lambda settings, progress: run(**asdict(settings)),
    show,
    outputs=(Output("--figure", drawn_by("dispatch"), "dispatch.png"),),
    uses_peers=True,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
