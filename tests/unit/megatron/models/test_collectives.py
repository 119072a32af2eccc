"""How often members of TENSOR talk to each other: counted in programs of models with one layer more or less."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import pytest

from megatron_ptdp.models import Compute, ModelConfig, build, whole
from tests.unit.megatron.models import members
from tests.unit.megatron.models.members import CONFIGS

NAMES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def lowered(config: ModelConfig, compute: Compute) -> jax.stages.Lowered:
    """Loss and gradients of the whole model, in one stage."""
    model = build(config, replace(compute, tensor=2, dtype="float64"))
    stage = whole(model)
    params = members.take(model, stage, members.started(config))
    return members.backward(model, stage, members.mesh(1, 2)).lower(params, {}, members.batch_of(model), None)


def of_one_layer(config: ModelConfig, compute: Compute, *, compiled: bool, more: str = "layers") -> dict[str, int]:
    """What a layer more adds."""
    counts = []
    changed: dict[str, Any]
    for layers in (1, 2):
        changed = {more: layers}
        program = lowered(replace(config, **changed), replace(compute, unroll=True))
        if compiled:
            text = program.compile().as_text() or ""
            counts.append(Counter({name: text.count(f" {name}(") for name in NAMES}))
        else:
            counts.append(called(program.as_text().replace("_", "-"), "main"))
    return {name: counts[1][name] - counts[0][name] for name in NAMES if counts[1][name] != counts[0][name]}


def called(text: str, function: str) -> Counter[str]:
    """The collectives of a StableHLO function and of those it calls, as often as it does."""
    body = next(part for part in text.split("func.func ") if re.match(rf"(public |private )?@{function}\(", part))
    counts = Counter(name for name in re.findall(r"stablehlo\.([a-z-]+)", body) if name in NAMES)
    for other in re.findall(r"call @([\w.-]+)\(", body):
        counts += called(text, other)
    return counts


def test_four_sums_in_a_layer() -> None:
    """Compiled: two forward, two backward (PTD-P section 2.3)."""
    assert of_one_layer(CONFIGS["gpt"], Compute(), compiled=True) == {"all-reduce": 4}


def test_four_gathers_and_four_scatters_in_a_layer_with_sequence_parallelism() -> None:
    """Compiled: the gradients of norms and biases are summed once for all layers, not in each."""
    how = Compute(sequence_parallel=True)
    assert of_one_layer(CONFIGS["gpt"], how, compiled=True) == {"all-gather": 4, "reduce-scatter": 4}


@pytest.mark.parametrize(
    "name, more, how, expected",
    [
        ("gpt", "layers", Compute(recompute="selective"), {"all-reduce": 4}),
        # The first sum is made again. What the second gives is needed by nothing that is made again.
        ("gpt", "layers", Compute(recompute="full"), {"all-reduce": 5}),
        ("gpt", "layers", Compute(sequence_parallel=True, scatter="psum"), {"all-gather": 4, "all-reduce": 4}),
        ("gpt-experts", "layers", Compute(), {"all-reduce": 4}),
        ("gpt-experts", "layers", Compute(sequence_parallel=True), {"all-gather": 4, "reduce-scatter": 4}),
        # Tokens go to their experts and back, forward and backward; the balance is summed. Attention gathers as before.
        (
            "gpt-experts-capacity",
            "layers",
            Compute(sequence_parallel=True),
            {"all-gather": 2, "reduce-scatter": 2, "all-to-all": 4, "all-reduce": 2},
        ),
        ("t5", "encoder_layers", Compute(), {"all-reduce": 4}),
        # Attention over the encoder's output is a third block; that output enters all layers at once.
        ("t5", "layers", Compute(), {"all-reduce": 6}),
    ],
)
def test_collectives_of_a_layer(name: str, more: str, how: Compute, expected: dict[str, int]) -> None:
    """As JAX writes them, before XLA."""
    assert of_one_layer(CONFIGS[name], how, compiled=False, more=more) == expected


def test_no_reduce_scatter_where_it_is_not_to_be_trusted() -> None:
    how = Compute(sequence_parallel=True, scatter="psum")
    assert "reduce_scatter" not in lowered(CONFIGS["t5"], how).as_text()
