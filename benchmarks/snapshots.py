"""The price of snapshots: stretches of training steps with one and without, in pairs.

A small GPT is trained as a pipeline of two stages on two islands (1F1B). A stretch is `every` steps. In one of a pair a
snapshot of the state is taken before the first step, as `pathways-train` does with `snapshot_every`: it leaves while
stages compute, and wait for each other. The order within a pair changes from one to the next. The ratio is that of the
times from the first launch until the last loss, pair by pair; `cpu` is that of the CPU time of all processes until the
copies are there too, which other work on the machine changes less. Beside both stand the bounds between which the
median lies with a confidence of 95 %.

Where devices are the machine's own cores, a snapshot takes from them the time of its copies, bubble or not: `floor` is
the ratio that is left if they cost what `memcpy` of their bytes does, on all cores at once. So there is a second
pipeline, whose stages wait in place of computing: devices of their own would not have copies made by the machine's
cores slow them down. What its step is longer by did not fall into bubbles.

Run it with `python -m benchmarks run snapshots --json snapshots.json`; about three minutes.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
    wait_ms: float = option(10.0, "that a stage waits for a microbatch, forward or backward")
    state_mib: int = option(10, "of each stage that waits")


SMOKE = Settings(pairs=2, every=2, hidden=32, layers=2, sequence=16, microbatches=2, wait_ms=1.0, state_mib=1)


class Pipeline:
    """A pipeline on the cluster of this process, as far as it is now. `kept` are its last two snapshots."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def parts(self) -> Any:
        """The arrays that a snapshot is taken of."""
        raise NotImplementedError

    def run(self, steps: int) -> None:
        """Makes so many steps, to the end."""
        raise NotImplementedError

    def seconds(self, steps: int, snapshot: bool) -> tuple[float, float]:
        """The time of a stretch, and the CPU time of all processes until its snapshot is whole."""
        import pathways_ray as pw

        cpu, began = measure.cpu_seconds(), time.perf_counter()
        if snapshot:
            self.kept = [*self.kept[-1:], pw.snapshot(self.parts(), local=True)]
        self.run(steps)
        seconds = time.perf_counter() - began
        for one in self.kept:
            one.wait()
        return seconds, measure.cpu_seconds() - cpu

    @property
    def bytes(self) -> int:
        """Bytes of a snapshot: the copies on other islands, and those beside the state."""
        return int(self.kept[-1].nbytes)


class Waiting(Pipeline):
    """Two stages in the order of 1F1B that wait for each microbatch, forward and backward, and have a state."""

    def __init__(self, settings: Settings) -> None:
        import jax

        import pathways_ray as pw

        super().__init__()

        def wait(v: Any) -> Any:
            time.sleep(settings.wait_ms / 1000)
            return v

        batch = np.zeros(64, np.float32)
        places = [pw.virtual_slice((1,), ("x",), island=k) for k in (0, 1)]
        kind = jax.ShapeDtypeStruct(batch.shape, batch.dtype)
        first, last = (pw.host(wait, slice=place, result=kind) for place in places)

        def updated(weights: Any, gradients: list[Any]) -> Any:
            return weights + sum(g.sum() for g in gradients)

        update = [pw.compiled(updated, slice=place, donate_argnums=(0,)) for place in places]

        def step(weights: list[Any], batch: Any) -> Any:
            forward = first(batch)
            gradients: tuple[list[Any], list[Any]] = [], []
            for k in range(settings.microbatches):
                here, forward = forward, first(batch) if k + 1 < settings.microbatches else None
                gradients[1].append(last(last(here)))
                gradients[0].append(first(gradients[1][-1]))
            return [one(w, g) for one, w, g in zip(update, weights, gradients, strict=True)]

        self._step, self._batch = pw.program(step), pw.put(batch, places[0])
        weights = np.zeros(settings.state_mib << 18, np.float32)
        self.state = [pw.put(weights, place) for place in places]

    def parts(self) -> Any:
        return self.state

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.state = self._step(self.state, self._batch)
        for one in self.state:
            one.block_until_ready()


class Trained(Pipeline):
    """A training."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        from megatron_ptdp import data
        from megatron_ptdp.train.config import load
        from megatron_ptdp.train.fitting import Fit
        from megatron_ptdp.train.setup import Training, batches_of

        super().__init__()
        tokens = folder / "corpus.tokens"
        data.prepare(tokens, [Path(pydoc_data.topics.__file__)], data.tokens_named(None))
        given = ("model=gpt-tiny", "pipeline=2", "microbatch=2", "check=false", f"path={tokens}")
        names = ("hidden", "layers", "sequence", "microbatches")
        config = load(None, [*given, *(f"{name}={getattr(settings, name)}" for name in names)])
        fit = Fit.of(config)
        self.training = Training.of(fit.config, fit.schedule, fit.sizes)
        self.batches, _ = batches_of(config, fit.sizes.batch)
        self.state, self.done = self.training.first_state(), 0

    def parts(self) -> Any:
        from megatron_ptdp.parallel.replicas import of_first_group

        return of_first_group(self.state)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.state, metrics = self.training.step(self.state, self.batches.at(self.done))
            self.done += 1
        float(metrics["loss"])


def copied_seconds(size: int) -> float:
    """The time of a copy of so many bytes in memory: the least of five."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    found = []
    for _ in range(5):
        began = time.perf_counter()
        target[:] = source
        found.append(time.perf_counter() - began)
    return min(found)


def run(settings: Settings, progress: Progress) -> Result:
    """Runs all pairs, after one that compiles."""
    import pathways_ray as pw

    rows, prices, sizes = [], [], []
    with tempfile.TemporaryDirectory() as folder, pw.init(islands=2, devices_per_host=1):
        for stages, pipeline in (("compute", Trained(settings, Path(folder))), ("wait", Waiting(settings))):
            times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for number in range(settings.pairs + 1):
                for snapshot in measure.in_turn((True, False), number):
                    measured = pipeline.seconds(settings.every, snapshot)
                    if number:
                        times[snapshot].append(measured)
                progress.say(f"stages that {stages}: pair {number} of {settings.pairs}")
            for name, key in (("with a snapshot", True), ("without", False)):
                steps = [1e3 * wall / settings.every for wall, _ in times[key]]
                rows.append({"stages": stages, "stretches": name, "step_ms": measure.spread(steps)})
            prices += [{"stages": stages, **price(what, k, times)} for k, what in enumerate(("time", "cpu"))]
            alone = float(np.median([wall for wall, _ in times[False]]))
            floor = 1 + copied_seconds(pipeline.bytes) / len(os.sched_getaffinity(0)) / alone
            size = {"stages": stages, "every": settings.every, "mib": pipeline.bytes / 2**20}
            sizes.append({**size, "floor": floor if stages == "compute" else 1.0})
    ratios = [
        {"name": f"with a snapshot / without, {one['of']}, stages that {one['stages']}", **one["ratio"]}
        for one in prices
    ]
    return {"rows": rows, "prices": prices, "snapshots": sizes, "ratios": ratios}


def price(what: str, k: int, times: dict[bool, list[tuple[float, float]]]) -> Result:
    """The ratio of the k-th figure with a snapshot and without, pair by pair."""
    pairs = zip(times[True], times[False], strict=True)
    ratios = [one[k] / other[k] for one, other in pairs]
    low, high = measure.median_within(ratios)
    return {"of": what, "ratio": measure.spread(ratios), "low": low, "high": high}


show = shows(
    Table("steps of stretches", "rows", "stages", "stretches", "step_ms:.1f"),
    Table("stretches with a snapshot ÷ without", "prices", "stages", "of", "ratio:.3f", "low:.3f", "high:.3f"),
    Table("snapshots", "snapshots", "stages", "every", "mib:.1f", "floor:.4f"),
)

BENCHMARK = Benchmark("snapshots", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
