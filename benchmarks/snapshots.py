"""The price of snapshots: stretches of training steps with one and without, in pairs.

A small GPT is trained as a pipeline of two stages on two islands (1F1B). A stretch is `every` steps. In one of a pair a
snapshot of the state is taken before the first step, as `pathways-train` does with `snapshot_every`: it leaves while
stages compute, and wait for each other. The order within a pair changes from one to the next. The ratio is that of the
times from the first launch until the last loss, pair by pair; `cpu` is that of the CPU time of all processes until the
copies are there too, which other work on the machine changes less. Beside both stand the bounds between which the
median lies with a confidence of 95 %.

Run it with `python -m benchmarks run snapshots --json snapshots.json`; about three minutes.
"""

from __future__ import annotations

import pydoc_data.topics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows


@dataclass(frozen=True)
class Settings:
    pairs: int = option(15)
    every: int = option(10, "steps of a stretch")
    hidden: int = option(128, "size of a token")
    layers: int = option(4)
    sequence: int = option(128, "tokens of an example")
    microbatches: int = option(8, "of a step")


SMOKE = Settings(pairs=2, every=2, hidden=32, layers=2, sequence=16, microbatches=2)


class Trained:
    """A training on the cluster of this process, as far as it is now. `kept` are its last two snapshots."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        from megatron_ptdp import data
        from megatron_ptdp.train.config import load
        from megatron_ptdp.train.fitting import Fit
        from megatron_ptdp.train.setup import Training, batches_of

        tokens = folder / "corpus.tokens"
        data.prepare(tokens, [Path(pydoc_data.topics.__file__)], data.tokens_named(None))
        given = ("model=gpt-tiny", "pipeline=2", "microbatch=2", "check=false", f"path={tokens}")
        names = ("hidden", "layers", "sequence", "microbatches")
        config = load(None, [*given, *(f"{name}={getattr(settings, name)}" for name in names)])
        fit = Fit.of(config)
        self.training = Training.of(fit.config, fit.schedule, fit.sizes)
        self.batches, _ = batches_of(config, fit.sizes.batch)
        self.state, self.done, self.kept = self.training.first_state(), 0, list[Any]()

    def seconds(self, steps: int, snapshot: bool) -> tuple[float, float]:
        """The time of a stretch, and the CPU time of all processes until its snapshot is whole."""
        import pathways_ray as pw
        from megatron_ptdp.parallel.replicas import of_first_group

        batches = [self.batches.at(self.done + k) for k in range(steps)]
        cpu, began = measure.cpu_seconds(), time.perf_counter()
        if snapshot:
            self.kept = [*self.kept[-1:], pw.snapshot(of_first_group(self.state), local=True)]
        for batch in batches:
            self.state, metrics = self.training.step(self.state, batch)
        float(metrics["loss"])
        seconds = time.perf_counter() - began
        for one in self.kept:
            one.wait()
        self.done += steps
        return seconds, measure.cpu_seconds() - cpu

    @property
    def bytes(self) -> int:
        """Bytes of a snapshot: the copies on other islands, and those beside the state."""
        return int(self.kept[-1].nbytes)


def run(settings: Settings, progress: Progress) -> Result:
    """Runs all pairs, after one that compiles."""
    import pathways_ray as pw

    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder, pw.init(islands=2, devices_per_host=1):
        trained = Trained(settings, Path(folder))
        for number in range(settings.pairs + 1):
            for snapshot in measure.in_turn((True, False), number):
                measured = trained.seconds(settings.every, snapshot)
                if number:
                    times[snapshot].append(measured)
            progress.say(f"pair {number} of {settings.pairs}")
        size = trained.bytes
    rows = [
        {"stretches": name, "step_ms": measure.spread([1e3 * wall / settings.every for wall, _ in times[key]])}
        for name, key in (("with a snapshot", True), ("without", False))
    ]
    prices = [price(what, k, times) for k, what in enumerate(("time", "cpu"))]
    return {"rows": rows, "prices": prices, "snapshot": {"every": settings.every, "mib": size / 2**20}}


def price(what: str, k: int, times: dict[bool, list[tuple[float, float]]]) -> Result:
    """The ratio of the k-th figure with a snapshot and without, pair by pair."""
    pairs = zip(times[True], times[False], strict=True)
    ratios = [one[k] / other[k] for one, other in pairs]
    low, high = measure.median_within(ratios)
    return {"of": what, "ratio": measure.spread(ratios), "low": low, "high": high}


show = shows(
    Table("steps of stretches", "rows", "stretches", "step_ms:.1f"),
    Table("stretches with a snapshot ÷ without", "prices", "of", "ratio:.3f", "low:.3f", "high:.3f"),
    Table("snapshots", "snapshot", "every", "mib:.1f"),
)

BENCHMARK = Benchmark("snapshots", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
