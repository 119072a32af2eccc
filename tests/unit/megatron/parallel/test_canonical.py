"""The canonical state of another optimizer is refused, whatever that one kept."""

from __future__ import annotations

from typing import Any

import optax
import pytest

from megatron_ptdp.errors import CheckpointError
from megatron_ptdp.models import Compute, Gpt, ModelConfig
from megatron_ptdp.parallel import Options, Sizes, cut
from megatron_ptdp.parallel.canonical import slots_of
from megatron_ptdp.parallel.shapes import StageShapes
from megatron_ptdp.parallel.update import Update

CONFIG = ModelConfig("gpt", layers=1, hidden=8, heads=2, sequence=4, vocabulary=13)


@pytest.mark.parametrize(
    ("optimizer", "whole", "message"),
    [
        (optax.sgd(1.0, momentum=0.9), {"params": {}}, "the state has no '0/trace', .* it has nothing"),
        (optax.adam(1.0), {"params": {}}, "the state has no '0/count', .* it has nothing"),
        (optax.adam(1.0), {"params": {}, "counts": {"1/count": 3}}, "the state has no '0/count', .* it has 1/count"),
        (optax.adam(1.0), {"params": {}, "counts": {"0/count": 3}}, "the state has no '0/mu', .* it has nothing"),
    ],
)
def test_what_an_optimizer_keeps_and_the_state_has_not_is_named(
    optimizer: optax.GradientTransformation, whole: dict[str, Any], message: str
) -> None:
    """A checkpoint has no `slots` where its optimizer kept none, and no `counts` where it counted nothing."""
    shapes = StageShapes.of(Gpt(CONFIG, Compute()), cut(1, 1), 0, Sizes(), Options(), [True])
    update = Update(shapes, lambda decay: optimizer, shapes.parameters, "float32")
    with pytest.raises(CheckpointError, match=message):
        slots_of(lambda tree: tree, update, whole)
