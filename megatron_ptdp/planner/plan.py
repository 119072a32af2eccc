"""How it is trained: one parallel configuration, and whether it is legal for a model.

The names are those of a configuration of `pathways-train run`: a plan is its parallel part. Devices are numbered as in
Megatron-LM: tensor-parallel neighbours first, then replicas, then stages. So the groups of a plan are regular:

    tensor     t devices in a row
    data       d devices, t apart
    pipeline   p devices, t·d apart
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from megatron_ptdp.planner.errors import BadFigure, Illegal, UnknownName
from megatron_ptdp.planner.model import Model

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the planner knows of a pipeline schedule by its name.

    Attributes:
        fixed_chunks: chunks per device it needs; 0 when any number goes.
        min_chunks: fewest chunks per device.
        whole_groups: microbatches must be a multiple of the stages.
        min_microbatches_per_stage: fewest microbatches, in multiples of the stages (counted in devices).
        splits_backward: gradients of inputs and of weights are separate actions.
        v_placement: the first and the last stage are both on the first device.
        joins: a forward of the last stage is followed at once by its backward.
    """

    fixed_chunks: int = 1
    min_chunks: int = 1
    whole_groups: bool = False
    min_microbatches_per_stage: int = 0
    splits_backward: bool = False
    v_placement: bool = False
    joins: bool = False


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(),
    "1f1b": Schedule(joins=True),
    "interleaved": Schedule(fixed_chunks=0, min_chunks=2, whole_groups=True, joins=True),
    "looped-bfs": Schedule(fixed_chunks=0, min_chunks=2),
    "zb-h1": Schedule(splits_backward=True, min_microbatches_per_stage=1),
    "zb-v": Schedule(fixed_chunks=2, splits_backward=True, v_placement=True, min_microbatches_per_stage=1),
    "dualpipe-v": Schedule(fixed_chunks=2, splits_backward=True, v_placement=True, min_microbatches_per_stage=2),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration.

    Attributes:
        chunks: pieces of the model per device, v.
        microbatch: examples per microbatch and replica, b.
        batch: examples per iteration, B.
        recompute: what the backward pass runs again: `none`, `selective` (the attention scores), `full` (each layer).
        sequence_parallel: norms and dropouts are cut over the tensor axis too.
        zero: what is cut over the data axis: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.
        scatter_gather: stages send 1/t of an activation per device and gather it behind the network.
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    chunks: int = 1
    microbatch: int = 1
    batch: int = 1
    schedule: str = "1f1b"
    recompute: str = "full"
    sequence_parallel: bool = False
    zero: int = 0
    scatter_gather: bool = True

    @property
    def devices(self) -> int:
        return self.pipeline * self.tensor * self.data

    @property
    def microbatches(self) -> int:
        """Microbatches per pipeline and iteration, m."""
        return self.batch // (self.data * self.microbatch)

    @property
    def stages(self) -> int:
        """Stages of the model, p·v."""
        return self.pipeline * self.chunks

    def label(self) -> str:
        """The plan in one short line."""
        parts = [f"t{self.tensor} p{self.pipeline} d{self.data} b{self.microbatch}", self.schedule]
        if self.chunks > 1:
            parts.append(f"v{self.chunks}")
        parts.append(f"recompute={self.recompute}")
        parts += ["sp"] if self.sequence_parallel else []
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += ["no-sg"] if self.pipeline > 1 and self.tensor > 1 and not self.scatter_gather else []
        return " ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def with_settings(plan: Plan, settings: dict[str, Any]) -> Plan:
    """The plan with some settings replaced; names and values are checked.

    Raises:
        UnknownName, BadFigure: a setting that a plan does not have, or a value it cannot take.
    """
    known = plan.as_dict()
    for name, value in settings.items():
        if name not in known:
            raise UnknownName.of("setting", name, known)
        check_setting(name, value)
    return replace(plan, **settings)


def check_setting(name: str, value: Any) -> None:
    """Refuses a value that no plan can have."""
    if name == "schedule":
        if value not in SCHEDULES:
            raise UnknownName.of("schedule", str(value), SCHEDULES)
    elif name == "recompute":
        if value not in RECOMPUTE:
            raise UnknownName.of("kind of recompute", str(value), RECOMPUTE)
    elif name in ("sequence_parallel", "scatter_gather"):
        if not isinstance(value, bool):
            raise BadFigure(f"{name} is {value!r}, must be true or false")
    elif not isinstance(value, int) or isinstance(value, bool):
        raise BadFigure(f"{name} is {value!r}, must be a whole number")
    elif name == "zero":
        if value not in (0, 1, 2, 3):
            raise BadFigure(f"zero is {value}, must be 0, 1, 2 or 3")
    elif value < 1:
        raise BadFigure(f"{name} is {value}, must be at least 1")


@lru_cache(maxsize=4096)
def split_layers(layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers per stage, or None when they do not divide.

    Equal stages; or, where one or two layers are missing for that, the last stage, or the first and the last, have one
    layer fewer, perhaps none: the logits and the embedding take their places (Pathways table 2: 62 = 64 - 2; Llama 3:
    126 = 128 - 2).
    """
    each, rest = divmod(layers, stages)
    if not rest and each:
        return (each,) * stages
    for missing in (1, 2):
        each, rest = divmod(layers + missing, stages)
        if not rest and stages > missing:
            first = each - 1 if missing == 2 else each
            return (first, *(each,) * (stages - 2), each - 1)
    return None


def illegal(plan: Plan, model: Model) -> str | None:
    """Why the plan cannot run this model, in one line; None when it can."""
    schedule = SCHEDULES[plan.schedule]
    p, t, v, m = plan.pipeline, plan.tensor, plan.chunks, plan.microbatches
    if m < 1 or plan.batch % (plan.data * plan.microbatch):
        return f"batch {plan.batch} is no multiple of data {plan.data} × microbatch {plan.microbatch}"
    for name, size in (("heads", model.heads), ("ffn", model.ffn), ("hidden", model.hidden)):
        if size % t:
            return f"{name} {size} is no multiple of tensor {t}"
    if split_layers(len(model.row), plan.stages) is None:
        return f"{len(model.row)} layers do not divide into {p} × {v} stages, with or without one fewer at the ends"
    if p == 1 and (v > 1 or plan.schedule != "1f1b"):
        return f"schedule {plan.schedule} with {v} chunks needs a pipeline of 2 or more"
    if schedule.fixed_chunks and v != schedule.fixed_chunks:
        return f"schedule {plan.schedule} needs chunks = {schedule.fixed_chunks}, not {v}"
    if v < schedule.min_chunks:
        return f"schedule {plan.schedule} needs chunks of {schedule.min_chunks} or more, not {v}"
    if schedule.whole_groups and m % p:
        return f"schedule {plan.schedule} needs microbatches ({m}) in multiples of pipeline {p}"
    if m < schedule.min_microbatches_per_stage * p:
        least = schedule.min_microbatches_per_stage * p
        return f"schedule {plan.schedule} needs {least} microbatches or more, not {m}"
    if plan.sequence_parallel and (t == 1 or any(layer.sequence % t for layer in model.row)):
        return f"sequence parallel needs tensor > 1 that divides the sequence, not tensor {t}"
    if plan.zero and plan.data == 1:
        return f"zero {plan.zero} needs data > 1"
    if plan.zero > 1 and p > 1:
        # DeepSpeed too allows stage 1 only with a pipeline (its issues 823, 1110).
        return f"zero {plan.zero} needs pipeline = 1: it would communicate for each microbatch"
    return None


def check(plan: Plan, model: Model) -> None:
    """Raises `Illegal` when the plan cannot run this model."""
    for name, value in plan.as_dict().items():
        check_setting(name, value)
    why = illegal(plan, model)
    if why:
        raise Illegal(f"{plan.label()}: {why}")
