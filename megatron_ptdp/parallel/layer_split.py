"""The stages of a model: the layers of each, as the planner splits them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from megatron_ptdp.config.parallel import split_fault, split_layers
from megatron_ptdp.errors import BadSizes
from megatron_ptdp.models.interface import Stage


def cut(layers: int, stages: int, lighter: int = 0, counts: Sequence[int] | None = None) -> tuple[Stage, ...]:
    """The stages of a model of `layers` layers, from the first to the last.

    Args:
        layers: of the model
        stages: p·v
        lighter: layers that the first and the last stage have fewer, beside embedding and loss; 0: as `split_layers`
        counts: the layers of each stage; given, `lighter` is ignored.

    Raises:
        BadSizes: the layers do not divide so.
    """
    if fault := split_fault(layers, stages, lighter, counts or ()):
        raise BadSizes(fault)
    bounds = [0, *accumulate(counts or split_layers(layers, stages, lighter) or ())]
    return tuple(
        Stage(first, last, has_embedding=number == 0, has_loss=number == stages - 1)
        for number, (first, last) in enumerate(pairwise(bounds))
    )
