"""Sizes of a parallel configuration, as the planner and the trainer both have them, and the rules between them.

`ParallelConfig` is the part that a plan (`planner.plan.Plan`) and the sizes of a training step (`parallel.Sizes`)
share. `split_layers` says which stage has how many layers: the planner estimates these stages, and the trainer cuts the
model into them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

Recompute: TypeAlias = Literal["none", "selective", "full"]
"""Work that the backward repeats: nothing; the scores of attention; everything inside a layer."""
RECOMPUTE: tuple[str, ...] = get_args(Recompute)

Zero: TypeAlias = Literal[0, 1, 2, 3]
"""State that replicas share in place of copies: nothing; optimizer state; gradients too; parameters too."""
ZERO: tuple[int, ...] = get_args(Zero)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes of a parallel configuration, all whole numbers of at least 1.

    Attributes:
        pipeline: p, devices (slices) of the pipeline
        tensor: t, members that share the matrices of a stage
        data: d, replicas of the model
        chunks: v, stages on each pipeline device
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    chunks: int = 1

    @property
    def devices(self) -> int:
        """p·t·d."""
        return self.pipeline * self.tensor * self.data

    @property
    def stages(self) -> int:
        """Stages of the model, p·v."""
        return self.pipeline * self.chunks


def batch_fault(batch: int, data: int, microbatch: int) -> str | None:
    """The reason why a batch cannot be cut into microbatches on each replica, and what to do; None where it can.

    Args:
        batch: examples of a step, B
        data: replicas, d
        microbatch: examples of a microbatch on one replica, b
    """
    if batch >= 1 and batch % (data * microbatch) == 0:
        return None
    each = data * microbatch
    return f"batch {batch} is no multiple of data {data} × microbatch {microbatch}; make it a multiple of {each}"


def indivisible(sizes: Mapping[str, int], members: int) -> str | None:
    """The name of the first size that the members cannot share evenly; None where they can share all."""
    return next((name for name, size in sizes.items() if size % members), None)


@lru_cache(maxsize=4096)
def split_layers(layers: int, stages: int, end_stage_layer_deficit: int = 0) -> tuple[int, ...] | None:
    """Layers of each stage; None where they do not divide.

    With a deficit, the first and the last stage have that many layers fewer than the others. With none, stages are
    equal; or, where one or two layers are missing for that, the last stage, or the first and the last, have one layer
    fewer, perhaps none: the logits and the embedding take their places (Pathways table 2: 62 = 64 - 2; Llama 3:
    126 = 128 - 2).
    """
    if stages == 1:
        return (layers,)
    if end_stage_layer_deficit:
        return _split(layers, stages, end_stage_layer_deficit, end_stage_layer_deficit)
    splits = (_split(layers, stages, first, last) for first, last in ((0, 0), (0, 1), (1, 1)))
    return next(filter(None, splits), None)


def _split(layers: int, stages: int, first: int, last: int) -> tuple[int, ...] | None:
    """Equal stages, but for the layers that the first and the last have fewer."""
    each, rest = divmod(layers + first + last, stages)
    if rest or each < max(1, first, last) or min(first, last) < 0:
        return None
    return (each - first, *(each,) * (stages - 2), each - last)


def split_fault(layers: int, stages: int, end_stage_layer_deficit: int = 0, counts: Sequence[int] = ()) -> str | None:
    """The reason why a model cannot be cut into stages, and what to do; None where it can.

    Args:
        layers: of the model
        stages: p·v
        end_stage_layer_deficit: as `split_layers` has it
        counts: the layers of each stage; given, the deficit is ignored.
    """
    if counts:
        if len(counts) == stages and sum(counts) == layers and min(counts) >= 0:
            return _empty_fault(counts)
        return (
            f"layers per stage are {list(counts)}: {len(counts)} stages with {sum(counts)} layers, but {stages} stages "
            f"with {layers} layers together are needed"
        )
    if split_layers(layers, stages, end_stage_layer_deficit):
        return None
    if layers + 2 < stages:
        return f"{layers} layers cannot fill {stages} stages (pipeline × chunks); choose at most {layers} stages"
    fewer = end_stage_layer_deficit
    ends = f" where the first and the last have {fewer} fewer" if fewer else ", with or without one fewer at the ends"
    return (
        f"{layers} layers do not divide into {stages} stages{ends}; choose other sizes, or give the layers of each of "
        f"the {stages} stages (stage_layers)"
    )


def _empty_fault(counts: Sequence[int]) -> str | None:
    """The reason why stages without layers have nothing to train: only the ends have embedding and logits beside."""
    if 0 not in counts[1:-1]:
        return None
    return (
        f"layers per stage are {list(counts)}: stage {counts.index(0, 1)} has none, and so nothing to train; only the "
        "first and the last, which have the embedding and the logits, may be without layers: give every other at least "
        "one, or choose fewer stages (pipeline × chunks)"
    )
