"""Predictions of the planner beside printed figures: `python -m benchmarks.paper_tables --json FILE --html FILE`.

Every table and figure of the PTD-P paper with a printed throughput, those of the Pathways paper on training, and what
other systems print with their plans. For each row the printed figure, the planner's, and the error; for each table the
mean and the worst; for each comparison whether the planner picks the paper's winner. Two constants of `a100-80g` were
set on three rows of table 1, one of `h100` on three rows of others, and one of `tpu-v4` was chosen with PaLM's (all
marked); no other number was fitted. `--calibrate` repeats the fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.harness import Benchmark, Output, Progress, Result, option
from benchmarks.paper_tables.pathways import ratios
from benchmarks.paper_tables.rows import CALIBRATION, H100_CALIBRATION, SEEN, Line, Row, printed
from benchmarks.printing import Table
from megatron_ptdp.config import load
from megatron_ptdp.config.cluster import Cluster
from megatron_ptdp.planner.estimate import Estimate, Question, estimate
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.search import estimate_exactly

GOALS = {  # mean and worst absolute error that were aimed at
    "PTD-P table 1": (0.05, 0.10),
    "PTD-P table 2, PTD-P": (0.07, None),
    "PTD-P table 2, ZeRO-3": (0.15, None),
    "Pathways table 2": (0.05, 0.05),
}
FIGURES_GOAL = 0.12
CALIBRATED = {("PTD-P table 1", label) for label in CALIBRATION} | set(H100_CALIBRATION) | set(SEEN)


Estimator = Callable[[Question, Plan], Estimate]
"""By closed forms, or with the pipeline simulated."""


def predict(row: Row, cluster: Cluster | None = None, by: Estimator = estimate_exactly) -> float:
    """The planner's figure for a row, in its unit; on the row's cluster if no other is given."""
    cluster = cluster or load.cluster(row.cluster)
    software = load.software(row.software or cluster.software)
    one = by(Question(row.model, cluster, software, row.plan.devices, row.plan.batch), row.plan)
    figures = {
        "TFLOP/s": one.hardware_flops / 1e12,
        "model TFLOP/s": one.model_flops / 1e12,
        "seq/s": row.plan.batch / one.seconds,
        "s": one.seconds,
        "tokens/s": one.tokens_per_second / row.plan.devices,
    }
    return figures[row.unit]


def lines() -> list[Line]:
    """All rows of both papers, and of other systems."""
    made = [
        Line(
            *(row.table, row.label, row.plan.label(), row.printed, predict(row), row.unit),
            read=row.read,
            calibrated=(row.table, row.label) in CALIBRATED,
            compare=row.compare,
        )
        for row in printed()
    ]
    return [*made, *ratios()]


def summaries(made: list[Line]) -> list[dict[str, Any]]:
    """Mean, worst and bias of each table's errors, and of all figures together."""
    groups: dict[str, list[float]] = defaultdict(list)
    for line in made:
        if line.counted and line.error is not None:
            groups[line.table].append(line.error)
            if line.read:
                groups["PTD-P figures 11 to 18"].append(line.error)
    rows = []
    for table, errors in groups.items():
        size = [abs(error) for error in errors]
        goal = GOALS.get(table, (FIGURES_GOAL, None) if "figures" in table else (None, None))
        figures = {"mean": fmean(size), "worst": max(size), "bias": fmean(errors), "goal": goal}
        rows.append({"table": table, "rows": len(errors), **figures})
    return sorted(rows, key=lambda row: "figures" in row["table"])


def winners(made: list[Line]) -> list[dict[str, Any]]:
    """For each comparison, the paper's winner and the planner's."""
    groups: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in made:
        if line.compare:
            groups[line.table.split(",")[0], line.compare].append(line)
    found = []
    for (table, compare), group in groups.items():
        printed = [line for line in group if line.printed is not None]
        if len(group) < 2 or not printed:
            continue
        paper = max(printed, key=lambda line: line.printed or 0.0)
        ours = max(group, key=lambda line: line.predicted)
        names = {"table": table, "compare": compare, "paper": paper.label, "planner": ours.label}
        found.append({**names, "same": ours is paper, "lead": ours.predicted / paper.predicted - 1})
    return found


def constants() -> list[dict[str, Any]]:
    """The constants that were used."""
    used = []
    for name in ("a100-80g", "a100-80g-jean-zay", "h100", "tpu-v3", "tpu-v4"):
        cluster = load.cluster(name)
        levels = [asdict(level) for level in cluster.levels]
        used.append({"name": name, "device": asdict(cluster.device), "network": levels, "software": cluster.software})
    for name in ("ptdp", "megatron-2022", "megatron-deepspeed", "megatron-core", "xla"):
        used.append(asdict(load.software(name)))
    return used


def error_of(rows: Sequence[Row], cluster: Cluster, by: Estimator, **efficiencies: Any) -> float:
    """The root of the mean squared error of speed on some rows, when the devices have these efficiencies."""
    tried = replace(cluster, device=replace(cluster.device, **efficiencies))
    errors = []
    for row in rows:
        over = predict(row, tried, by) / (row.printed or 1.0)
        errors.append((1 / over if row.unit == "s" else over) - 1)
    return fmean(error**2 for error in errors) ** 0.5


def calibrate(
    matrices: Iterable[int] = range(68, 86), memories: Iterable[int] = range(60, 92, 2)
) -> tuple[float, float, float]:
    """Matrix and memory efficiency of `a100-80g` with the least error on the calibration rows, and that error."""
    cluster, rows = load.cluster("a100-80g"), [row for row in printed("PTD-P table 1") if row.label in CALIBRATION]
    tried = ((matrix / 100, memory / 100) for memory, matrix in product(memories, matrices))  # from percent
    found = ((error_of(rows, cluster, estimate, matrix_efficiency=a, memory_efficiency=b), a, b) for a, b in tried)
    error, matrix, memory = min(found)
    return matrix, memory, error


def calibrate_h100(matrices: Iterable[int] = range(50, 71)) -> tuple[float, float]:
    """Matrix efficiency of `h100` with the least error on its rows, and that error."""
    cluster, rows = load.cluster("h100"), [row for row in printed() if (row.table, row.label) in H100_CALIBRATION]
    error, matrix = min(
        (error_of(rows, cluster, estimate_exactly, matrix_efficiency=a / 100), a / 100) for a in matrices
    )
    return matrix, error


@dataclass(frozen=True)
class Settings:
    calibrate: bool = option(False, "only repeat the fits")


def run(settings: Settings, progress: Progress) -> Result:
    if settings.calibrate:
        matrix, memory, error = calibrate()
        h100, h100_error = calibrate_h100()
        return {
            "calibrated": {
                "a100-80g": {"matrix_efficiency": matrix, "memory_efficiency": memory, "error": error},
                "h100": {"matrix_efficiency": h100, "error": h100_error},
            },
        }
    made = lines()
    return {
        "lines": [{**asdict(line), "error": line.error} for line in made],
        "tables": summaries(made),
        "winners": winners(made),
        "calibration_rows": sorted(f"{table}, {label}" for table, label in CALIBRATED),
        "constants": constants(),
    }


TABLES = (
    Table("printed and predicted", "lines", "table", "label", "plan", "shown", "predicted:.4g", "unit", "error:+.1%"),
    Table("errors", "tables", "table", "rows", "mean:.1%", "worst:.1%", "bias:+.1%", "goal"),
    Table("winners", "winners", "table", "compare", "paper", "planner", "lead:.1%", "same"),
)
MARKS = "* calibrated on   ~ read off a chart   ° shown, not counted: the paper leaves out what it needs"


def show(result: Result, console: Console) -> None:
    """Prints the page, or the repeated fits."""
    for name, found in result.get("calibrated", {}).items():
        constants = ", ".join(f"{key} {value}" for key, value in found.items() if key != "error")
        console.print(f"{name}: {constants}, error {found['error']:.2%} (root of mean)")
    if "winners" in result:
        for table in TABLES:
            table.show(marked(result), console)
        console.print(MARKS)
        same = sum(one["same"] for one in result["winners"])
        console.print(f"same winner in {same} of {len(result['winners'])} comparisons")
        console.print(f"calibrated on {'; '.join(result['calibration_rows'])}; no other number was fitted")
        console.print("docs/planner.md says which choices were made with the tables in sight")


def marked(result: Result) -> Result:
    """A result whose lines have the printed figure with its marks; without a figure if only the winner is printed."""
    lines = []
    for line in result["lines"]:
        marks = {"~": line["read"], "*": line["calibrated"], "°": not line["counted"]}
        text = "".join(mark for mark, there in marks.items() if there)
        lines.append({**line, "shown": None if line["printed"] is None else f"{line['printed']:.4g}{text}"})
    return {**result, "lines": lines}


def html(result: Result) -> str:
    """The page as one file without anything else."""
    about = f"Calibrated on {escape('; '.join(result['calibration_rows']))}. {MARKS}"
    parts = [f"<h1>Prediction beside print</h1><p>{about}</p>"]
    for table in TABLES:
        rows = [dict(zip(table.headings, row, strict=True)) for row in table.rows(marked(result))]
        parts.append(f"<h2>{escape(table.title)}</h2>{report.table(rows)}")
    parts.append(f"<h2>Constants</h2>{report.table(result['constants'])}")
    return report.page("Planner: prediction beside print", "\n".join(parts))


def write_page(result: Result, path: Path) -> None:
    if "calibrated" not in result:
        path.write_text(html(result))


BENCHMARK = Benchmark(
    "paper_tables",
    __doc__,
    Settings,
    Settings(),
    run,
    show,
    outputs=(Output("--html", write_page, "paper_tables.html"),),
)
