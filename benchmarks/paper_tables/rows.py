"""Printed figures of the PTD-P and Pathways papers, as data: each row with its plan.

Tables are exact. Values of figures were read off the charts, within about 3 TFLOP/s. Settings that a table leaves out
come from the published scripts (sc21/run_table_1.sh and its neighbours). A row's `compare` names the group in which the
paper picks a winner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megatron_ptdp.config.model import Model
from megatron_ptdp.planner.plan import Plan

CALIBRATION = ("1.7B", "18.4B", "529.6B")
"""The rows of PTD-P table 1 on which `a100-80g` was set: no tensor axis, a full one, and a pipeline of 35 stages."""


@dataclass(frozen=True)
class Row:
    """One printed figure.

    Attributes:
        table: where it is printed.
        software: left out, the cluster's.
        printed: the figure, in `unit`; None if only the winner is printed.
        read: whether it was read off a chart.
        compare: rows of one table with the same text here are one comparison, of which the paper shows the winner.
        counted: whether the row counts in the table's error.
    """

    table: str
    label: str
    model: Model
    plan: Plan
    printed: float | None
    unit: str = "TFLOP/s"
    cluster: str = "a100-80g"
    software: str = ""
    read: bool = False
    compare: str = ""
    counted: bool = True


@dataclass(frozen=True)
class Line:
    """One row of the page. `printed` is None if only the winner of its comparison is printed."""

    table: str
    label: str
    plan: str
    printed: float | None
    predicted: float
    unit: str
    read: bool = False
    calibrated: bool = False
    counted: bool = True
    compare: str = ""
    note: str = ""

    @property
    def error(self) -> float | None:
        return None if self.printed is None else self.predicted / self.printed - 1


def gpt(name: str, layers: int, hidden: int, heads: int) -> Model:
    """A GPT of the paper: 2,048 tokens, a vocabulary of 51,200."""
    return Model(name, layers, hidden, heads, sequence=2048, vocabulary=51200)


GPT3 = gpt("175B", 96, 12288, 96)
GPT_530B = gpt("529.6B", 105, 20480, 128)

# name, heads, hidden, layers, t, p, devices, batch, printed, microbatch, chunks
TABLE_1 = (
    ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
    ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138, 16, 1),
    ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142, 16, 1),
    ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1),
    ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138, 4, 1),
    ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
    ("1008.0B", 160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1),
)


def plan_of(p: int, t: int, d: int, v: int, b: int, batch: int, **more: object) -> Plan:
    """A plan as in the paper: 1F1B or interleaved, full recompute, scatter/gather."""
    schedule = "interleaved" if v > 1 else "1f1b"
    settings = {"schedule": schedule, **more}
    return Plan(pipeline=p, tensor=t, data=d, chunks=v, microbatch=b, batch=batch, **settings)  # type: ignore[arg-type]


def ptdp_table_1() -> Iterator[Row]:
    for name, a, h, layers, t, p, n, batch, printed, b, v in TABLE_1:
        yield Row("PTD-P table 1", name, gpt(name, layers, h, a), plan_of(p, t, n // (t * p), v, b, batch), printed)


def ptdp_table_2() -> Iterator[Row]:
    ptdp = (
        (GPT3, 12, 1536, (384, 768, 1536), (153, 149, 141)),
        (GPT_530B, 35, 2240, (560, 1120, 2240), (171, 167, 159)),
    )
    for model, p, batch, devices, printed in ptdp:
        for n, value in zip(devices, printed, strict=True):
            plan = plan_of(p, 8, n // (8 * p), 1, 1, batch)
            label = f"{model.name} on {n}"
            yield Row("PTD-P table 2, PTD-P", label, model, plan, value, compare=label)
    zero = (
        (GPT3, (1536, 1536, 1536), (384, 768, 1536), (144, 88, 44)),
        (GPT_530B, (2560, 2240, 2240), (640, 1120, 2240), (138, 98, 48)),
    )
    for model, batches, devices, printed in zero:
        for batch, n, value, b in zip(batches, devices, printed, (4, 2, 1), strict=True):
            plan = Plan(data=n, microbatch=b, batch=batch, zero=3)
            label, near = f"{model.name} on {n}", f"{model.name} on {560 if n == 640 else n}"
            yield Row("PTD-P table 2, ZeRO-3", label, model, plan, value, compare=near)


def read_off(figure: int, label: str, model: Model, plan: Plan, printed: float | None, unit: str = "TFLOP/s") -> Row:
    """A point of a chart; the points of one batch are compared."""
    group = f"B={plan.batch}"
    return Row(f"PTD-P figure {figure}", f"{label} {group}", model, plan, printed, unit, read=True, compare=group)


def figures_of_shape() -> Iterator[Row]:
    """Figures 11, 13, 14, 15: how the axes trade."""
    ends = {(1, 8): 165, (8, 8): 88, (1, 128): 178, (8, 128): 163}
    for batch, p in product((8, 128), (1, 2, 4, 8)):
        model = gpt(f"{3 * p} layers", 3 * p, 20480, 128)
        yield read_off(11, f"p={p}", model, plan_of(p, 8, 1, 1, 1, batch), ends.get((p, batch)))
    for (batch, best), (p, t) in product(((32, 142), (128, 165)), ((2, 32), (4, 16), (8, 8), (16, 4), (32, 2))):
        model = gpt("162.2B", 32, 20480, 128)
        yield read_off(13, f"p={p} t={t}", model, plan_of(p, t, 1, 1, 1, batch), best if p == 8 else None)
    small = gpt("5.9B", 32, 3840, 32)
    for (batch, first, last), p in product(((32, 62, 42), (512, 148, 90)), (2, 4, 8, 16, 32)):
        plan = plan_of(p, 1, 64 // p, 1, 1, batch)
        yield read_off(14, f"p={p}", small, plan, {2: first, 32: last}.get(p))
    for (batch, start), t in product(((32, 58), (128, 103), (512, 128)), (2, 4, 8, 16, 32)):
        plan = plan_of(1, t, 64 // t, 1, 1, batch)
        yield read_off(15, f"t={t}", small, plan, {2: start, 32: 23.5}.get(t))


def figures_of_schedule() -> Iterator[Row]:
    """Figures 12, 16, 17, 18: schedules, microbatches, recomputation, scatter/gather."""
    batches = (12, 24, 36, 48, 60)
    for v, values in ((1, (82, 109, 122, 130, 135)), (4, (119, 134, 141, 143, 146))):
        for batch, value in zip(batches, values, strict=True):
            plan = plan_of(12, 8, 1, v, 1, batch)
            yield read_off(12, plan.schedule, GPT3, plan, value)
    for batch, four in ((128, (155, 158, 140, 120)), (512, (163, 172, 160, 155))):
        for b, value in zip((1, 2, 4, 8), four, strict=True):
            yield read_off(16, f"b={b}", gpt("91B", 32, 15360, 128), plan_of(8, 8, 1, 1, b, batch), value)
    for batch, recompute, sequences in ((8, "none", 4.0), (8, "full", 3.0), (256, "full", 7.8)):
        plan = plan_of(16, 8, 1, 1, 1, batch, recompute=recompute)
        yield read_off(17, f"recompute {recompute}", gpt("145B", 80, 12288, 96), plan, sequences, "seq/s")
    for scatter, values in ((False, (107, 120, 127, 130, 131)), (True, (119, 134, 142, 144, 147))):
        for batch, value in zip(batches, values, strict=True):
            plan = plan_of(12, 8, 1, 4, 1, batch, scatter_gather=scatter)
            yield read_off(18, f"scatter/gather {'on' if scatter else 'off'}", GPT3, plan, value)


def pathways_plans() -> dict[str, tuple[Plan, float]]:
    """Table 2's pipelines: microbatches of 4 examples per core, replicas inside each stage (the batches close so)."""
    same = {"microbatch": 4, "schedule": "gpipe"}
    return {
        "S=4 M=16": (Plan(pipeline=4, data=32, batch=2048, **same), 133.7),  # type: ignore[arg-type]
        "S=8 M=32": (Plan(pipeline=8, data=16, batch=2048, **same), 132.7),  # type: ignore[arg-type]
        "S=16 M=64": (Plan(pipeline=16, data=8, batch=2048, **same), 131.4),  # type: ignore[arg-type]
        "S=16 M=64, 512 cores": (Plan(pipeline=16, data=32, batch=8192, **same), 507.8),  # type: ignore[arg-type]
    }


def ptdp_rows() -> list[Row]:
    return [*ptdp_table_1(), *ptdp_table_2(), *figures_of_shape(), *figures_of_schedule()]
