"""Printed figures of training in the Pathways paper, beside the planner: tables 1 and 2, figures 10 and 12.

The paper compares configurations with one another, and leaves out what an absolute prediction needs: sequence lengths
and heads of the 3B decoder, batches of T5 and of the 64B and 136B models. So ratios count, and absolute figures are
shown with what was assumed and do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.paper_tables.rows import Line
from megatron_ptdp.config import load
from megatron_ptdp.config.cluster import Cluster
from megatron_ptdp.config.model import Model
from megatron_ptdp.planner.estimate import Estimate, Question
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.search import estimate_exactly, search
from megatron_ptdp.planner.traffic import traffic

PIPELINES = {  # microbatches of 4 examples per core, replicas inside each stage: the batches close so
    "S=4 M=16": (Plan(4, 1, 32, microbatch=4, batch=2048, schedule="gpipe"), 133.7),
    "S=8 M=32": (Plan(8, 1, 16, microbatch=4, batch=2048, schedule="gpipe"), 132.7),
    "S=16 M=64": (Plan(16, 1, 8, microbatch=4, batch=2048, schedule="gpipe"), 131.4),
    "S=16 M=64, 512 cores": (Plan(16, 1, 32, microbatch=4, batch=8192, schedule="gpipe"), 507.8),
}
"""Table 2's plans, with thousands of tokens a second."""

SPMD = Plan(tensor=4, data=32, microbatch=4, batch=2048)
"""The paper does not say how its SPMD model is cut: here over the tensor axis alone, over as few devices as fit."""

DISPATCH = 200e-6
"""Seconds of host work per step that a single controller adds and does not hide, at most (DESIGN.md section 9: a launch
on many hosts). Table 1 asks whether it shows."""


@cache
def pod(island: int = 2048) -> Cluster:
    """TPU v3 in islands of this many cores, joined by the data centre's network."""
    whole = load.cluster("tpu-v3")
    ici, dcn = whole.levels
    return replace(whole, levels=(replace(ici, size=island), dcn))


def estimated(model: Model, plan: Plan, island: int = 2048) -> tuple[Question, Estimate]:
    question = Question(model, pod(island), load.software("xla"), plan.devices, plan.batch)
    return question, estimate_exactly(question, plan)


def ratios() -> Iterator[Line]:
    yield from _table_1()
    yield from _table_2()
    yield from _figure_10()
    yield from _figure_12()


def _table_1() -> Iterator[Line]:
    """T5: the same speed under one controller as under many; absolute speed by the best plan without a pipeline."""
    for name, cores, printed in (("base", 32, 618.0), ("large", 32, 90.4), ("3b", 512, 282.8), ("11b", 512, 84.8)):
        question = Question(load.model(f"t5-{name}"), pod(), load.software("xla"), cores, 2048)
        best = search(question, {"pipeline": 1}, top=1, simulate=False).best[0]
        ratio = best.seconds / (best.seconds + DISPATCH)
        yield Line("Pathways table 1", f"T5 {name}, Pathways over JAX", "", 1.0, ratio, "ratio")
        note = f"batch of 2,048 assumed, {best.plan.label()}"
        predicted = best.tokens_per_second / 1e3
        yield Line(
            "Pathways table 1, absolute", f"T5 {name}", "", printed, predicted, "k tokens/s", counted=False, note=note
        )


def _table_2() -> Iterator[Line]:
    """The 3B decoder: each row over the first pipeline's."""
    model = load.model("pathways-3b")
    rows = {"SPMD": (SPMD, 125.7), **PIPELINES}
    tokens = {name: estimated(model, plan)[1].tokens_per_second / 1e3 for name, (plan, _) in rows.items()}
    first = "S=4 M=16"
    for name, (_, printed) in rows.items():
        if name != first:
            over = tokens[name] / tokens[first]
            yield Line("Pathways table 2", f"{name} over {first}", "", printed / rows[first][1], over, "ratio")
        note = "1,024 tokens, heads of 128, T5's vocabulary assumed"
        yield Line(
            "Pathways table 2, absolute", name, "", printed, tokens[name], "k tokens/s", counted=False, note=note
        )


def _figure_10() -> Iterator[Line]:
    model, plan = load.model("pathways-3b"), PIPELINES["S=16 M=64"][0]
    ratio = estimated(model, plan)[1].seconds / estimated(model, plan, 32)[1].seconds
    yield Line("Pathways figure 10", "4 islands of 32 cores over 1 of 128", "", 1.0, ratio, "ratio")


def _figure_12() -> Iterator[Line]:
    """Two islands, gradients summed over the network between them: bytes, and speed over one island of double size."""
    cases = (("64B", 80, 8192, 1024, 457.0, 0.972), ("136B", 42, 16384, 2048, 1030.0, 0.97))
    for name, layers, hidden, island, gigabytes, share in cases:
        model = Model(name, layers, hidden, hidden // 128, 1024, 32128, dropout=False)
        tensor = 32 if island == 1024 else 64
        plan = Plan(tensor=tensor, data=2 * island // tensor, microbatch=4, batch=2048)
        question, apart = estimated(model, plan, island)
        together = estimated(model, plan, 2 * island)[1]
        crossing = next(level for level in traffic(question, apart) if level.level == "dcn")
        note = f"{layers} layers of {hidden}, batch of 2 M tokens, t={tensor} assumed"
        total = crossing.data * plan.devices / 1e9
        assumed: dict[str, Any] = {"counted": False, "note": note}
        yield Line("Pathways figure 12", f"{name}, GB between the islands", "", gigabytes, total, "GB", **assumed)
        speed = together.seconds / apart.seconds
        yield Line("Pathways figure 12", f"{name}, 2 islands over 1", "", share, speed, "ratio", **assumed)
