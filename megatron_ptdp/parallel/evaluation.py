"""The loss of a batch without a gradient: forwards only, traced as a program of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ptdp.models.interface import Tree
from megatron_ptdp.parallel.nodes import StageNodes


def losses(
    row: Sequence[StageNodes],
    params: Sequence[Tree],
    batch: Sequence[Mapping[str, Any]],
    numbers: Sequence[Sequence[Any]],
    placement: Sequence[int],
) -> list[Any]:
    """Losses [members] of each microbatch, of one group of replicas.

    One microbatch after the other goes through all stages. A device enqueues them in this order too, so the stages work
    on different ones at the same time.

    Args:
        row: the nodes of each stage
        params: of each stage, as forward takes them
        batch, numbers: for each pipeline device its arrays, and the number of each microbatch
        placement: the device of each stage
    """
    found = []
    for k in range(len(numbers[0])):
        value: Any = {}
        for nodes, own, device in zip(row, params, placement, strict=True):
            seen = {name: batch[device][name] for name in nodes.math.wanted}
            value = nodes.evaluate(own, value, seen, numbers[device][k])
        found.append(value)
    return found
