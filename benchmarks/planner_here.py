"""The planner on this machine: calibrated, then predicted step times beside those of the benchmark `training`.

The probes of `pathways-plan calibrate` and the configurations of `benchmarks.training` run on one cluster, in turn,
round by round, so that what disturbs the machine disturbs both. The probes make a cluster file; from that file, the
model's sizes and the plan alone each configuration is predicted. Nothing is fitted to a configuration: the steps that
the calibration runs are of one device, and of other models than those that are predicted.

Run it with `python -m benchmarks.planner_here --json planner_here.json`; about ten minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from rich.console import Console

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows
from benchmarks.training.model import Sizes
from benchmarks.training.runtime import ACROSS, INSIDE, SPMD, Case, Runtime, cluster, cores_listed
from megatron_ptdp.config import load
from megatron_ptdp.config.cluster import Cluster
from megatron_ptdp.planner import Model, Plan, Question, estimate_exactly
from megatron_ptdp.planner.calibration.file import cluster_text
from megatron_ptdp.planner.calibration.fit import cluster_of, step_seconds

SOFTWARE = "xla-f32"
MEMORY = 8e9  # bytes of a device; all of it fits
AIM = 0.15
CALIBRATION = "calibration"
PLACES = ("inside", "across")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1")
MODELS = (Sizes(), Sizes(layers=4, hidden=160, heads=5, examples=2))
TINY = Sizes(layers=4, hidden=32, sequence=16, examples=1)


@dataclass(frozen=True)
class Settings:
    rounds: int = option(7)
    seconds: float = option(0.5, "of one measurement, about")
    microbatches: tuple[int, ...] = option((4, 8, 16))
    places: tuple[str, ...] = option(PLACES, choices=PLACES)
    models: tuple[int, ...] = option((1, 2), choices=(1, 2))
    schedules: tuple[str, ...] = SCHEDULES

    def runs(self) -> list[Run]:
        """All configurations; of the smallest model if there is no other."""
        models = [MODELS[number - 1] for number in self.models] or [TINY]
        return runs(models, self.microbatches, self.places, self.schedules)


SMOKE = Settings(1, 0.05, (4,), ("across",), models=(), schedules=SCHEDULES[:1])


@dataclass(frozen=True)
class Run:
    """A configuration: a model and a case of `benchmarks.training.runtime`."""

    sizes: Sizes
    case: Case

    @property
    def model(self) -> Model:
        sizes = self.sizes
        shape = (sizes.layers, sizes.hidden, sizes.heads, sizes.sequence, sizes.vocabulary)
        return Model(f"{sizes.layers} x {sizes.hidden}", *shape, tied=False, dropout=False)

    @property
    def plan(self) -> Plan:
        case, examples = self.case, self.sizes.examples
        shape: dict[str, Any] = {"microbatch": examples, "batch": case.microbatches * examples, "recompute": "none"}
        if case.how == SPMD:
            return Plan(data=case.devices, **shape)
        chunks = case.cut(examples).chunks
        return Plan(pipeline=case.devices, schedule=case.how, chunks=chunks, **shape)

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.case.how}, M {self.case.microbatches}, {self.case.place}"

    def seconds(self, here: Cluster) -> tuple[float, Mapping[str, float]]:
        """The prediction: of a step, and of its parts. Across islands of one device there is no network inside."""
        if self.case.place == "across":
            here = replace(here, levels=here.levels[-1:])
        plan = self.plan
        question = Question(self.model, here, load.software(SOFTWARE), plan.devices, plan.batch)
        found = estimate_exactly(question, plan)
        return found.seconds, {name: getattr(found.time, name) for name in found.time.__dataclass_fields__}


def runs(
    models: Sequence[Sizes], microbatches: Sequence[int], places: Sequence[str], schedules: Sequence[str] = SCHEDULES
) -> list[Run]:
    """1F1B with each number of microbatches; all else, and other models than the first, with the middle one."""
    middle = sorted(microbatches)[len(microbatches) // 2]
    found = []
    for number, sizes in enumerate(models):
        for place in places:
            found.append(Run(sizes, Case("pathways", SPMD, middle, place=place)))
            many = sorted(microbatches) if number == 0 else [middle]
            found += [Run(sizes, Case("pathways", "1f1b", m, place=place)) for m in many]
            found += [Run(sizes, Case("pathways", how, middle, place=place)) for how in schedules[1:]]
    return found


def run(settings: Settings, progress: Progress) -> Result:
    """Measures on a cluster of its own."""
    from megatron_ptdp.planner.calibration.measure import Bench

    software, wanted = load.software(SOFTWARE), settings.runs()
    with cores_listed() as cores, cluster(fusion=False) as session:
        bench = Bench("cpu", INSIDE[0], (ACROSS[0], ACROSS[1]))
        progress.say(f"{len(bench.probes)} probes are ready")
        runtimes = {one.sizes: Runtime(session, one.sizes) for one in wanted}
        steps: dict[Run, int] = {}
        for one in wanted:
            runtimes[one.sizes].prepare(one.case, 2)
            steps[one] = max(1, round(settings.seconds / runtimes[one.sizes].seconds(one.case, 1)))
            progress.say(f"{one.name}: ready")

        def sample(what: Run | str) -> float:
            if isinstance(what, str):
                bench.round()
                return 0.0
            return runtimes[what.sizes].seconds(what.case, steps[what]) / steps[what]

        cases: list[Run | str] = [CALIBRATION, *wanted]
        taken = measure.interleaved(cases, sample, settings.rounds)
        seen = bench.seen()
    here = cluster_of(seen, MEMORY, software)
    rows = [row_of(one, taken[one], here) for one in wanted]
    return {
        "cores": cores,
        "rounds": settings.rounds,
        "cluster": cluster_text(here),
        "references": [
            {"reference": str(one), "ms": 1e3 * found, "model_ms": 1e3 * step_seconds(here, one, software)}
            for one, found in seen.steps.items()
        ],
        "probes": {str(key): probe.value for key, probe in bench.probes.items()},
        "rows": rows,
        "best": rankings(rows),
        "ratios": [],
        "figures": figures(rows),
    }


def quartile(values: Sequence[float]) -> float:
    """The lower one, as of the calibration's steps: other work makes single ones longer, none shorter."""
    return sorted(values)[len(values) // 4]


def row_of(one: Run, taken: Sequence[float], here: Cluster) -> dict[str, Any]:
    predicted, parts = one.seconds(here)
    return {
        "name": one.name,
        "group": f"{one.model.name}, M {one.case.microbatches}",
        "measured_ms": {**measure.spread([1e3 * value for value in taken]), "quartile": 1e3 * quartile(taken)},
        "predicted_ms": 1e3 * predicted,
        "error": predicted / quartile(taken) - 1,
        "error_of_median": predicted / median(taken) - 1,
        "parts_ms": {name: 1e3 * value for name, value in parts.items()},
    }


def rankings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each model and batch: the fastest that was measured, the one that the planner picks, and what that costs."""
    found = []
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group]
        if len(own) < 2:
            continue
        fastest = min(own, key=lambda row: row["measured_ms"]["quartile"])
        picked = min(own, key=lambda row: row["predicted_ms"])
        costs = picked["measured_ms"]["quartile"] / fastest["measured_ms"]["quartile"] - 1
        found.append({"group": group, "fastest": fastest["name"], "picked": picked["name"], "costs": costs})
    return found


def figures(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    off, median_off = ([abs(row[name]) for row in rows] for name in ("error", "error_of_median"))
    return [
        {"name": "step time, off its prediction", "min": min(off), "median": median(off), "max": max(off)},
        {"name": "step time, off its prediction, mean", "median": fmean(off)},
        {"name": "median step time, off its prediction, mean", "median": fmean(median_off)},
        {"name": f"configurations predicted within {AIM:.0%}", "median": sum(one <= AIM for one in off) / len(off)},
    ]


TABLES = shows(
    Table("reference steps, to which four constants were fitted", "references", "reference", "ms:.1f", "model_ms:.1f"),
    Table(
        "a step",
        "rows",
        *(
            "name",
            "measured_ms.quartile:.1f",
            "measured_ms:.1f",
            "predicted_ms:.1f",
            "error:+.1%",
            "error_of_median:+.1%",
        ),
    ),
    Table("figures", "figures", "name", ".:.1%"),
)


def show(result: Mapping[str, Any], console: Console) -> None:
    console.print(result["cluster"], highlight=False, markup=False)
    TABLES(result, console)
    for one in result["best"]:
        verdict = "the same" if one["picked"] == one["fastest"] else f"picks {one['picked']}, {one['costs']:.1%} slower"
        console.print(f"{one['group']}: fastest is {one['fastest']}; the planner: {verdict}", highlight=False)


BENCHMARK = Benchmark("planner_here", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
