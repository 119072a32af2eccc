"""Training: one model as SPMD, as pipelines, over islands; against plain JAX and torch.distributed.pipelining.

The shape of Tables 1 and 2 and Figures 10 and 12 of the Pathways paper, on two cores. `benchmarks.training_runtime` has
the cluster and its cases, `benchmarks.training_jax` and `benchmarks.peers.torch_pipeline` what they are compared with.

Run it with `python -m benchmarks.training --json training.json --figures .`; the peer with torch needs
`python -m benchmarks.peers.environments torch` first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks import measure, training_model, training_results
from benchmarks.training_model import Sizes
from benchmarks.training_peers import Peers
from benchmarks.training_results import Samples
from benchmarks.training_runtime import SPMD, Case, Runtime, bubbles, cluster, cores_listed

PARTS = ("spmd", "pipelines", "data", "bubbles", "torch", "bytes")
FIRST_STEPS = 3  # whose losses are compared
IDLE_S = 3.0  # over which the machine is looked at before the rounds
RECORDS = 5  # steps that are recorded for each bubble


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        sizes: of the model
        microbatches: M of the pipelines with 1F1B
        middle: M of all other pipelines, and of the peers
        schedules: beside 1F1B
        four: also pipelines of four stages, on two cores
        rounds: that count, after one to warm up
        seconds: that one measurement takes, about
        records: steps that are recorded for each bubble
        parts: out of PARTS
        fusion: of the cluster
    """

    sizes: Sizes = field(default_factory=Sizes)
    microbatches: tuple[int, ...] = (4, 8, 16)
    middle: int = 8
    schedules: tuple[str, ...] = ("gpipe", "interleaved", "zb-h1")
    four: bool = True
    rounds: int = 7
    seconds: float = 0.7
    records: int = RECORDS
    parts: tuple[str, ...] = PARTS
    fusion: bool = False


SMOKE = Settings(
    Sizes(layers=4, hidden=32, sequence=16, examples=1),
    microbatches=(4,),
    middle=4,
    schedules=("interleaved",),
    four=False,
    rounds=1,
    seconds=0.05,
    records=1,
)


def cases_of(settings: Settings) -> list[Case]:
    """All cases that the parts want, each once."""
    every, middle, parts = settings.microbatches, settings.middle, settings.parts
    spmd = {m: Case("pathways", SPMD, m) for m in every}
    found: list[Case] = []
    if "spmd" in parts:
        found += [case for m in every for case in (spmd[m], Case("jax", "scan", m), Case("jax", "calls", m))]
    if "pipelines" in parts:
        inside = [Case("pathways", "1f1b", m) for m in every]
        inside += [Case("pathways", how, middle) for how in settings.schedules]
        found += [case for pipeline in inside for case in (spmd[pipeline.microbatches], pipeline)]
        found += [Case("pathways", "1f1b", m, place="across") for m in every]
        if settings.four:
            found += [Case("pathways", "1f1b", m, 4) for m in every]
    if "data" in parts:
        found += [spmd[middle], Case("pathways", SPMD, middle, place="across")]
    if "bubbles" in parts:
        found += [Case("pathways", how, middle) for how in ("1f1b", *settings.schedules)]
    if "torch" in parts:
        found += [Case(system, how, middle) for how in ("1f1b", "gpipe") for system in ("torch", "pathways")]
    return list(dict.fromkeys(found))


def run(settings: Settings | None = None, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measures and returns the result as it is written to JSON; makes a cluster of its own. `say` is told how far."""
    settings = settings or Settings()
    machine = measure.machine()
    with cores_listed() as cores, cluster(settings.fusion) as session, peers_of(settings, cores) as peers:
        bench = Bench(Runtime(session, settings.sizes), peers, settings, say)
        found = bench.measured()
    return {
        "benchmark": "training",
        "machine": machine,
        "cores": cores,
        "settings": {**asdict(settings), "sizes": asdict(settings.sizes)},
        **found,
    }


@contextlib.contextmanager
def peers_of(settings: Settings, cores: Sequence[int]) -> Iterator[Peers]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "parameters.npz"
        training_model.write(settings.sizes, max(settings.microbatches), file)
        peers = Peers(settings.sizes, file, cores)
        try:
            yield peers
        finally:
            peers.close()


class Bench:
    """All cases, prepared once and measured in turn."""

    def __init__(self, runtime: Runtime, peers: Peers, settings: Settings, say: Callable[[str], None]) -> None:
        self.runtime, self.peers, self.settings, self.say = runtime, peers, settings, say
        self.steps: dict[Case, int] = {}
        self.cpu: dict[Case, list[float]] = {}
        self.hops: dict[str, float] = {}

    def measured(self) -> dict[str, Any]:
        settings = self.settings
        losses: dict[Case, list[float]] = {}
        cases = cases_of(settings)
        for number, case in enumerate(cases, 1):
            start = time.monotonic()
            found = self._prepared(case)
            if found is not None:
                losses[case] = found
            self.say(f"[{number}/{len(cases)}] {case.name}: ready after {time.monotonic() - start:.0f} s")
        idle = busy_cores(IDLE_S)
        self.say(f"{settings.rounds} rounds; {idle:.2f} cores are busy while nothing is measured")
        samples = Samples(settings.sizes, losses)
        rates = measure.interleaved(list(losses), self._rate, settings.rounds)
        samples.cpu = self.cpu
        samples.rates = {case: values for case, values in rates.items() if not any(map(math.isnan, values))}
        self.say("single steps")
        if "bubbles" in settings.parts:
            samples.bubbles = [self._bubble(case) for case in samples.rates if case.system == "pathways"]
            samples.bubbles = [found for found in samples.bubbles if found]
        if "pipelines" in settings.parts and settings.four:
            samples.stages = self.runtime.stage_costs(4, max(settings.records, 3))
        moved = self.runtime.moved(2, 2) if "bytes" in settings.parts else []
        return {
            "measured": training_results.described(settings, self.peers.cores),
            "versions": self.peers.versions,
            "errors": self.peers.errors,
            "busy_cores_between_rounds": idle,
            **samples.result(),
            "bytes": moved,
        }

    def _prepared(self, case: Case) -> list[float] | None:
        """The first losses of a case, and how many steps make a measurement; None where a peer cannot."""
        if case.system != "pathways":
            losses = self.peers.prepare(case, FIRST_STEPS)
            if losses is None:
                return None
        else:
            losses = self.runtime.prepare(case, FIRST_STEPS)
        self.steps[case] = 1
        step = self._seconds(case)
        self.steps[case] = max(1, round(self.settings.seconds / step)) if step > 0 else 1
        return losses

    def _seconds(self, case: Case) -> float:
        steps = self.steps[case]
        if case.system == "pathways":
            return self.runtime.seconds(case, steps)
        return self.peers.seconds(case, steps)

    def _rate(self, case: Case) -> float:
        """Tokens a second; nan of a peer that failed."""
        before = measure.cpu_seconds()
        seconds = self._seconds(case)
        self.cpu.setdefault(case, []).append((measure.cpu_seconds() - before) / self.steps[case])
        return self.steps[case] * self.settings.sizes.tokens(case.microbatches) / seconds

    def _bubble(self, case: Case) -> dict[str, Any]:
        if case.how == SPMD or case.devices > 2:
            return {}
        if case.place not in self.hops:
            self.hops[case.place] = self.runtime.hop(case.devices, case.place, self.settings.records)
        records = [self.runtime.recorded(case) for _ in range(self.settings.records)]
        return bubbles(case, records, self.hops[case.place])


def busy_cores(seconds: float) -> float:
    """What the machine does while nothing is measured: idle systems, and other people's work."""
    return psutil.cpu_percent(seconds) / 100 * (psutil.cpu_count() or 1)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.splitlines()[0])
    usual = Settings()
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw PNGs here")
    parser.add_argument("--smoke", action="store_true", help="one short round, to see that everything runs")
    parser.add_argument("--rounds", type=int, default=usual.rounds, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="of one measurement, about")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--microbatches", type=int, nargs="+", default=usual.microbatches, help="default: %(default)s")
    parser.add_argument("--fusion", action="store_true", help="let the runtime compose chains of nodes")
    for name in ("layers", "hidden", "examples"):
        default = getattr(usual.sizes, name)
        parser.add_argument(f"--{name}", type=int, default=default, help="of the model (default: %(default)s)")
    parser.add_argument("--unroll", action="store_true", help="write the layers out one by one")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    if options.smoke:
        return SMOKE
    every = tuple(options.microbatches)
    return Settings(
        sizes=Sizes(layers=options.layers, hidden=options.hidden, examples=options.examples, unroll=options.unroll),
        microbatches=every,
        middle=8 if 8 in every else every[0],
        rounds=options.rounds,
        seconds=options.seconds,
        parts=tuple(options.parts),
        fusion=options.fusion,
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    progress = Console(stderr=True)
    found = run(settings_of(options), lambda text: progress.print(text, highlight=False, markup=False))
    training_results.show(found, Console())
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.figures:
        from benchmarks import training_figure  # matplotlib is not needed to measure

        options.figures.mkdir(parents=True, exist_ok=True)
        training_figure.draw(found, options.figures / "training.png")
    return found


show = training_results.show


if __name__ == "__main__":
    main()
