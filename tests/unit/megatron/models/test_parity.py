"""Loss and every gradient, in float64, against one device computing plainly: relative error of 1e-12 at most."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from megatron_ptdp.models import Compute, build, cut, take, whole
from tests.unit.megatron.models import members
from tests.unit.megatron.models.members import CONFIGS

BOUND = 1e-12


def compute(**settings: object) -> Compute:
    return Compute(dtype="float64", **settings)  # type: ignore[arg-type]


slow = functools.partial(pytest.param, marks=pytest.mark.slow)

# Each row has another mixture, so that every model and every setting meets several others.
ROWS = [
    ("gpt", 1, 2, compute(tensor=2, unroll=True)),
    ("gpt", 1, 2, compute(tensor=4, sequence_parallel=True)),
    ("gpt-untied", 2, 2, compute(tensor=4, sequence_parallel=True, recompute="selective", scatter="psum")),
    slow("gpt-experts", 2, 1, compute(tensor=2, sequence_parallel=True, recompute="full")),
    ("t5", 4, 1, compute(tensor=2, sequence_parallel=True, recompute="selective")),
    slow("t5-experts", 1, 2, compute(tensor=2, sequence_parallel=True, scatter="psum")),
    *(
        pytest.param(*row, marks=pytest.mark.long)
        for row in (
            ("gpt", 1, 1, compute()),
            ("gpt", 2, 1, compute(tensor=4, recompute="selective")),
            ("gpt", 2, 1, compute(tensor=2, sequence_parallel=True, recompute="full", scatter="psum")),
            ("gpt-experts", 1, 2, compute(tensor=4)),
            ("t5", 1, 2, compute(tensor=4)),
            ("t5", 1, 2, compute(tensor=4, sequence_parallel=True, scatter="psum", recompute="full", unroll=True)),
        )
    ),
]


@pytest.mark.parametrize("name, pipeline, data, how", ROWS)
def test_loss_and_gradients_are_those_of_one_device(name: str, pipeline: int, data: int, how: Compute) -> None:
    model = build(CONFIGS[name], how, weighted=True)
    stages = cut(model, [model.layers // pipeline] * pipeline)
    errors = members.difference(members.computed(model, stages, data), members.expected(CONFIGS[name]))
    assert max(errors.values()) <= BOUND, errors


def test_stages_may_be_uneven_and_hold_only_the_embedding_or_the_loss() -> None:
    model = build(CONFIGS["gpt-experts"], compute(tensor=2), weighted=True)
    errors = members.difference(
        members.computed(model, cut(model, [0, 2, 0])), members.expected(CONFIGS["gpt-experts"])
    )
    assert max(errors.values()) <= BOUND, errors


def test_padding_counts_for_nothing_whatever_stands_in_it() -> None:
    config = CONFIGS["gpt"]
    model = build(config, compute(tensor=4), weighted=True)
    stage = whole(model)
    table = model.parameters(stage)["embedding"]["tokens"]
    assert (table.shape, table.padded) == ((12, 16), (0, 9))
    params = take(model, stage, members.started(config))
    assert not params["embedding"]["tokens"][9:].any()
    params["embedding"]["tokens"][9:] = 100.0
    backward = members.backward(model, stage, members.mesh(1, 4))
    loss, gradients, _ = backward(params, {}, members.batch_of(model), None)
    assert float(loss) == pytest.approx(members.expected(config).loss, rel=BOUND)
    assert not np.asarray(gradients["embedding"]["tokens"])[9:].any()
