"""Experts on slices of their own have the loss and the gradients of experts that lie with their layer."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import pathways_ray as pw
from megatron_ptdp.errors import BadSizes
from megatron_ptdp.models import DATA, TENSOR, Compute, Gpt, build, preset, whole
from megatron_ptdp.parallel.expert_slices import ExpertSlices
from tests.unit.client.local import LocalSession
from tests.unit.megatron.models import members

SIZES = {**members.TINY_GPT, "layers": 1, "experts": 4, "top_k": 2}
BOUND = 1e-12


def slices(session: LocalSession, *sizes: int) -> list[pw.VirtualSlice]:
    return [session.virtual_slice((1, size), (DATA, TENSOR)) for size in sizes]


@pytest.mark.parametrize(
    "capacity", [pytest.param(0.0, marks=pytest.mark.long), pytest.param(1.0, marks=pytest.mark.slow)]
)
def test_loss_and_gradients_are_those_of_one_slice(session: LocalSession, capacity: float) -> None:
    """Two slices of one and of two members have two experts each. With a capacity the same choices find no room."""
    config = preset("gpt-tiny", **SIZES, capacity=capacity)
    model = build(config, Compute(tensor=2, dtype="float64"))
    assert isinstance(model, Gpt)
    home, *others = slices(session, 2, 1, 2)
    apart = ExpertSlices(model, home, others, members.EXAMPLES)
    loss, gradients, dropped = apart(*apart.place(members.started(config)), members.batch_of(model))
    wanted = members.computed(model, [whole(model)])
    assert float(loss) == pytest.approx(wanted.loss, rel=BOUND)
    assert (sum(int(one) for one in dropped) > 0) == (capacity > 0)
    agree(apart.gather(*gradients), wanted.gradients)


def agree(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) <= BOUND * (1 + np.linalg.norm(other))


def test_what_cannot_be_shared_is_refused(session: LocalSession) -> None:
    def check(text: str, sizes: tuple[int, ...], tensor: int = 1, **changes: Any) -> None:
        model: Any = build(preset("gpt-tiny", **{**SIZES, **changes}), Compute(tensor=tensor, dtype="float64"))
        home, *others = slices(session, *sizes)
        with pytest.raises(BadSizes, match=text):
            ExpertSlices(model, home, others, 4)

    check("need experts", (1, 1), experts=0)
    check("4 experts cannot be shared evenly by 3 slices", (1, 1, 1, 1))
    check("and their members", (1, 4, 4))
    check("have the shape", (1, 1), tensor=2)
