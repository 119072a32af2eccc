"""A plan: one parallel configuration, and the rules that make it legal for a model.

The names are those of a configuration of `pathways-train run`: a plan is its parallel part. Devices are numbered as in
Megatron-LM: tensor-parallel neighbours first, then replicas, then stages. So the groups of a plan are regular:

    tensor     t devices in a row
    data       d devices, t apart
    pipeline   p devices, t·d apart
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from megatron_ptdp.config.model import Model
from megatron_ptdp.config.parallel import ParallelConfig, batch_fault, indivisible, split_layers
from megatron_ptdp.schedules import ScheduleError, build, rules_of, states_rules


@dataclass(frozen=True, slots=True)
class Plan(ParallelConfig):
    """One configuration.

    Attributes:
        microbatch: examples per microbatch and replica, b.
        batch: examples per iteration, B.
        schedule: one of `schedules.schedule_names()`.
        recompute: work that the backward pass repeats: `none`, `selective` (the attention scores), `full` (each layer).
        sequence_parallel: norms and dropouts are sharded over the tensor axis too.
        zero: sharded over the data axis: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.
        token_slices: slices of its tokens in which a microbatch goes through the pipeline, n.
        scatter_gather: stages send 1/t of an activation per device and gather it behind the network.
    """

    microbatch: int = 1
    batch: int = 1
    schedule: str = "1f1b"
    recompute: str = "full"
    sequence_parallel: bool = False
    zero: int = 0
    scatter_gather: bool = True
    token_slices: int = 1

    @property
    def microbatches(self) -> int:
        """Microbatches per pipeline and iteration, m."""
        return self.batch // (self.data * self.microbatch)

    @property
    def units(self) -> int:
        """Microbatches or slices of these that go through the pipeline in an iteration, m·n."""
        return self.microbatches * self.token_slices

    def label(self) -> str:
        """The plan in one short line."""
        parts = [f"t{self.tensor} p{self.pipeline} d{self.data} b{self.microbatch}", self.schedule]
        if self.chunks > 1:
            parts.append(f"v{self.chunks}")
        parts += [f"n{self.token_slices}"] if self.token_slices > 1 else []
        parts.append(f"recompute={self.recompute}")
        parts += ["sp"] if self.sequence_parallel else []
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += ["no-sg"] if self.pipeline > 1 and self.tensor > 1 and not self.scatter_gather else []
        return " ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def illegal(plan: Plan, model: Model) -> str | None:
    """The rule that the plan breaks for this model, in one line; None where it can run."""
    p, t, v, m = plan.pipeline, plan.tensor, plan.chunks, plan.microbatches
    if fault := batch_fault(plan.batch, plan.data, plan.microbatch):
        return fault
    if fault := tensor_fault(model, t):
        return fault
    if split_layers(len(model.row), plan.stages) is None:
        return f"{len(model.row)} layers do not divide into {p} × {v} stages, with or without one fewer at the ends"
    if p == 1 and (v > 1 or plan.schedule != "1f1b"):
        return f"schedule {plan.schedule} with {v} chunks needs a pipeline of 2 or more"
    if fault := rules_of(plan.schedule).plan_fault(p, m, v) or _own_fault(plan.schedule, p, m, v):
        return f"schedule {fault}"
    if rules_of(plan.schedule).stale and (fault := _stale_fault(plan, model)):
        return f"schedule {plan.schedule} {fault}"
    if plan.token_slices > 1 and (fault := _slices_fault(plan, model)):
        return fault
    if plan.sequence_parallel and (t == 1 or any(length % t for length in model.lengths)):
        return f"sequence parallel needs tensor > 1 that divides the sequence, not tensor {t}"
    if plan.zero and plan.data == 1:
        return f"zero {plan.zero} needs data > 1"
    if plan.zero > 1 and p > 1:
        # DeepSpeed too allows stage 1 only with a pipeline (its issues 823, 1110).
        return f"zero {plan.zero} needs pipeline = 1: it would communicate for each microbatch"
    return None


def _stale_fault(plan: Plan, model: Model) -> str | None:
    """The reason why stages of this model cannot update at times of their own; None where they can."""
    if plan.zero:
        return f"keeps versions of whole parameters; it takes zero 0, not {plan.zero}"
    if model.tied:
        return "cannot update an array that two stages share: the embedding; set tied = false"
    return None


def _slices_fault(plan: Plan, model: Model) -> str | None:
    """The reason why microbatches of this model cannot be cut along their tokens; None where they can."""
    n = plan.token_slices
    if not rules_of(plan.schedule).token_slices:
        return f"schedule {plan.schedule} takes microbatches whole, not in {n} slices of their tokens"
    if plan.zero or plan.sequence_parallel or model.tied or model.encoder_layers:
        return (
            f"token_slices {n} go without zero, sequence_parallel, an encoder, and an embedding that two stages share"
        )
    if 0 in (split_layers(len(model.row), plan.stages) or ()):
        return f"token_slices {n} need a layer on each stage, but there are {len(model.row)} for {plan.stages} stages"
    if plan.recompute != "full":
        return f"backwards of token_slices {n} compute their forwards again: recompute is full, not {plan.recompute}"
    return f"token_slices {n} are more than the {model.sequence} tokens" if n > model.sequence else None


def tensor_fault(model: Model, tensor: int) -> str | None:
    """The size of a layer that members of the tensor axis cannot share; None where they can share all."""
    shared = {"heads": model.heads, "ffn": model.ffn, "hidden": model.hidden}
    if name := indivisible(shared, tensor):
        return f"{name} {shared[name]} is no multiple of tensor {tensor}; choose one that divides it"
    if model.key_heads % tensor and tensor % model.key_heads:
        return (
            f"key_heads {model.key_heads} is neither a multiple nor a divisor of tensor {tensor}; choose a tensor that "
            "members can share them with, or hold one each"
        )
    return None


def _own_fault(schedule: str, pipeline: int, microbatches: int, chunks: int) -> str | None:
    """The reason why a schedule of a user's own cannot be planned: only building it shows which sizes it takes."""
    return None if states_rules(schedule) else _building_fault(schedule, pipeline, microbatches, chunks)


@lru_cache(maxsize=1024)
def _building_fault(schedule: str, pipeline: int, microbatches: int, chunks: int) -> str | None:
    try:
        built = build(schedule, pipeline, microbatches, chunks)
    except ScheduleError as error:
        return f"{schedule}: {error}"
    if built.placement != rules_of(schedule).placement(pipeline, chunks):
        return (
            f"{schedule} has stages on devices {built.placement}; the planner knows those that go round and round "
            "(schedules.loop), or there and back (schedules.vee)"
        )
    return None
