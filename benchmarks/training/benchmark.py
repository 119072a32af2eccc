"""Training: one model as SPMD, as pipelines, over islands; against plain JAX and torch.distributed.pipelining.

The shape of Tables 1 and 2 and Figures 10 and 12 of the Pathways paper, on two cores. `benchmarks.training.runtime` has
the cluster and its cases, `benchmarks.peers.jax_training` and `benchmarks.peers.torch_pipeline` the systems beside it.

Run it with `python -m benchmarks.training --json training.json --figures .`; the peer with torch needs
`python -m benchmarks.peers.environments torch` first.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.harness import Benchmark, Output, Progress, Result, drawn_by, option
from benchmarks.training import model, results
from benchmarks.training.model import Sizes
from benchmarks.training.peers import Peers
from benchmarks.training.results import Samples
from benchmarks.training.runtime import SPMD, Case, Runtime, bubbles, cluster, cores_listed

PARTS = ("spmd", "pipelines", "data", "bubbles", "torch", "bytes")
FIRST_STEPS = 3  # whose losses are compared
IDLE_S = 3.0  # over which the CPU use of the machine is measured before the rounds


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        sizes: of the model
        middle: M of the pipelines with other schedules than 1F1B, and of the peers
        schedules: beside 1F1B
        four: also pipelines of four stages, on two cores
        records: steps that are recorded for each bubble
    """

    sizes: Sizes = field(default_factory=Sizes)
    microbatches: tuple[int, ...] = option((4, 8, 16), "M of the pipelines with 1F1B")
    middle: int = field(init=False)
    schedules: tuple[str, ...] = ("gpipe", "interleaved", "zb-h1")
    four: bool = True
    rounds: int = option(7, "that count, after one to warm up")
    seconds: float = option(0.7, "of one measurement, about")
    records: int = 5
    parts: tuple[str, ...] = option(PARTS, choices=PARTS)
    fusion: bool = option(False, "let the runtime compose chains of nodes")

    def __post_init__(self) -> None:
        object.__setattr__(self, "middle", 8 if 8 in self.microbatches else self.microbatches[0])


SMOKE = Settings(
    Sizes(layers=4, hidden=32, sequence=16, examples=1),
    microbatches=(4,),
    schedules=("interleaved",),
    four=False,
    rounds=1,
    seconds=0.05,
    records=1,
)


def cases_of(settings: Settings) -> list[Case]:
    """All cases of the parts, each once."""
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


def run(settings: Settings, progress: Progress) -> Result:
    """Measures on a cluster of its own."""
    with cores_listed() as cores, cluster(settings.fusion) as session, peers_of(settings, cores) as peers:
        found = Bench(Runtime(session, settings.sizes), peers, settings, progress.say).measured()
    return {"cores": cores, **found}


@contextlib.contextmanager
def peers_of(settings: Settings, cores: Sequence[int]) -> Iterator[Peers]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "parameters.npz"
        model.write(settings.sizes, max(settings.microbatches), file)
        with contextlib.closing(Peers(settings.sizes, file, cores)) as peers:
            yield peers


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
            self.say(f"[{number}/{len(cases)}] {case.name}")
            if (found := self._of(case).prepare(case, FIRST_STEPS)) is not None:
                losses[case] = found
                step = self._of(case).seconds(case, 1)
                self.steps[case] = max(1, round(settings.seconds / step)) if step > 0 else 1
        idle = measure.busy_cores(IDLE_S)
        self.say(f"{settings.rounds} rounds; {idle:.2f} cores are busy while nothing is measured")
        rates = measure.interleaved(list(losses), self._rate, settings.rounds)
        rates = {case: values for case, values in rates.items() if not any(map(math.isnan, values))}
        samples = Samples(settings.sizes, losses, rates, self.cpu)
        self.say("single steps")
        if "bubbles" in settings.parts:
            own = [case for case in samples.rates if case.system == "pathways" and case.how != SPMD]
            samples.bubbles = [self._bubble(case) for case in own if case.devices == 2]
        if "pipelines" in settings.parts and settings.four:
            samples.stages = self.runtime.stage_costs(4, max(settings.records, 3))
        return {
            "measured": results.described(settings, self.peers.cores),
            "versions": self.peers.versions,
            "errors": self.peers.errors,
            "busy_cores_between_rounds": idle,
            **samples.result(),
            "bytes": self.runtime.moved(2, 2) if "bytes" in settings.parts else [],
        }

    def _of(self, case: Case) -> Runtime | Peers:
        return self.runtime if case.system == "pathways" else self.peers

    def _rate(self, case: Case) -> float:
        """Tokens a second; nan of a peer that failed."""
        before, steps = measure.cpu_seconds(), self.steps[case]
        seconds = self._of(case).seconds(case, steps)
        self.cpu.setdefault(case, []).append((measure.cpu_seconds() - before) / steps)
        return steps * self.settings.sizes.tokens(case.microbatches) / seconds

    def _bubble(self, case: Case) -> dict[str, Any]:
        if case.place not in self.hops:
            self.hops[case.place] = self.runtime.hop(case.devices, case.place, self.settings.records)
        records = [self.runtime.recorded(case) for _ in range(self.settings.records)]
        return bubbles(case, records, self.hops[case.place])


BENCHMARK = Benchmark(
    "training",
    __doc__,
    Settings,
    SMOKE,
    run,
    results.show,
    outputs=(Output("--figures", drawn_by("training")),),
    succeeded=lambda result: bool(result["rows"] or result["bytes"]),
)
