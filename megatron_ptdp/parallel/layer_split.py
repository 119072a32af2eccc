"""The layers of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from megatron_ptdp.errors import BadSizes
from megatron_ptdp.models.interface import Stage


def cut(layers: int, stages: int, lighter: int = 0, counts: Sequence[int] | None = None) -> tuple[Stage, ...]:
    """The stages of a model of `layers` layers, from the first to the last.

    Args:
        layers: of the model
        stages: p·v
        lighter: how many layers fewer the first and the last stage have, beside embedding and loss
        counts: the layers of each stage; given, `lighter` is not looked at.

    Raises:
        BadSizes: there are fewer layers than stages, or they do not divide so.
    """
    if counts is None:
        counts = _even(layers, stages, lighter)
    elif len(counts) != stages or sum(counts) != layers or min(counts) < 0:
        raise BadSizes(
            f"layers per stage are {list(counts)}: {len(counts)} stages with {sum(counts)} layers, but {stages} stages "
            f"with {layers} layers together are needed"
        )
    bounds = [0, *accumulate(counts)]
    return tuple(
        Stage(first, last, has_embedding=number == 0, has_loss=number == stages - 1)
        for number, (first, last) in enumerate(pairwise(bounds))
    )


def _even(layers: int, stages: int, lighter: int) -> list[int]:
    if layers < stages:
        raise BadSizes(
            f"{layers} layers cannot fill {stages} stages (pipeline × chunks); choose at most {layers} stages"
        )
    edges = min(stages, 2) * lighter if stages > 1 else 0
    full, rest = divmod(layers + edges, stages)
    if rest or (edges and full - lighter < 1) or lighter < 0:
        light = f" where the first and the last have {lighter} fewer" if lighter else ""
        raise BadSizes(
            f"{layers} layers do not divide into {stages} stages{light}; choose other sizes, or give the layers of "
            f"each of the {stages} stages (stage_layers)"
        )
    counts = [full] * stages
    if edges:
        counts[0] -= lighter
        counts[-1] -= lighter
    return counts
