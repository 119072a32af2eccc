"""A pipeline of slices of tokens has the loss and the gradients of whole examples, which plain JAX computes here."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatron_ptdp.errors import BadSizes
from megatron_ptdp.parallel.token_slices import SliceGradients, SliceStage
from megatron_ptdp.schedules import Schedule, ScheduleError, check_slices, simulate, terapipe
from tests.unit.client.local import LocalSession

STAGES, MICROBATCHES, EXAMPLES, TOKENS, WIDE, VOCABULARY = 2, 2, 2, 12, 8, 11
BOUND = 1e-12


def attention(params: Any, x: Any, past: list[Any]) -> tuple[Any, Any]:
    """A layer of one head over the tokens before and those of `x`, [examples, tokens, wide]; and its keys, values."""
    own = x @ params["k"], x @ params["v"]
    keys, values = (jnp.concatenate([*(one[part] for one in past), own[part]], 1) for part in (0, 1))
    before = keys.shape[1] - x.shape[1]
    scores = jnp.einsum("ebw,esw->ebs", x @ params["q"], keys) / WIDE**0.5
    seen = jnp.arange(keys.shape[1]) <= before + jnp.arange(x.shape[1])[:, None]
    found = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)) @ values
    x = x + found @ params["o"]
    return x + jnp.tanh(x @ params["up"]) @ params["down"], own


def first(params: Any, tokens: Any, past: list[Any]) -> Any:
    return attention(params, params["embedding"][tokens], past)


def second(params: Any, given: Any, past: list[Any]) -> Any:
    values, targets = given
    x, own = attention(params, values, past)
    log = jax.nn.log_softmax(x @ params["head"])
    return -jnp.take_along_axis(log, targets[..., None], -1).sum(), own


def parameters() -> list[dict[str, np.ndarray[Any, Any]]]:
    draw = np.random.default_rng(0)
    sizes = {"q": (WIDE, WIDE), "k": (WIDE, WIDE), "v": (WIDE, WIDE), "o": (WIDE, WIDE)}
    sizes |= {"up": (WIDE, 2 * WIDE), "down": (2 * WIDE, WIDE)}
    ends = [{"embedding": (VOCABULARY, WIDE)}, {"head": (WIDE, VOCABULARY)}]
    return [{name: 0.4 * draw.standard_normal(shape) for name, shape in {**sizes, **end}.items()} for end in ends]


def stages(session: LocalSession) -> list[SliceStage]:
    return [SliceStage(session.virtual_slice((1,), ("x",)), function) for function in (first, second)]


@pytest.mark.parametrize("lengths", [pytest.param((4, 4, 4), marks=pytest.mark.long), (7, 3, 2)])
def test_slices_have_the_gradients_of_whole_examples(session: LocalSession, lengths: tuple[int, ...]) -> None:
    """The slices need not be equal: later ones look at more tokens, so that shorter ones take as long."""
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, VOCABULARY, (MICROBATCHES, EXAMPLES, TOKENS + 1)).astype(np.int32)
    params = parameters()

    def whole(params: Any) -> Any:
        losses = []
        for rows in tokens:
            x, _ = first(params[0], rows[:, :-1], [])
            losses.append(second(params[1], (x, rows[:, 1:]), [])[0])
        return sum(losses)

    wanted, expected = jax.jit(jax.value_and_grad(whole))(params)
    ends = [0, *itertools.accumulate(lengths)]
    units = [(rows, *cut) for rows in tokens for cut in itertools.pairwise(ends)]
    sliced = SliceGradients(stages(session), terapipe(STAGES, MICROBATCHES, len(lengths)), len(lengths))
    inputs = [rows[:, start:end] for rows, start, end in units]
    targets = [rows[:, start + 1 : end + 1] for rows, start, end in units]
    loss, found = sliced(params, inputs, targets)
    assert float(loss) == pytest.approx(float(wanted), rel=BOUND)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(np.asarray(one) - other) <= BOUND * np.linalg.norm(other)


def test_a_schedule_of_other_sizes_is_refused(session: LocalSession) -> None:
    with pytest.raises(BadSizes, match="terapipe has 3 stages, but there are 2"):
        SliceGradients(stages(session), terapipe(3, 2, 2), 2)


def test_its_bubble_shrinks_with_the_slices() -> None:
    for slices in (1, 2, 8):
        assert simulate(terapipe(4, 2, slices)).bubble.of_ideal == pytest.approx(3 / (2 * slices))


def test_slices_keep_their_order() -> None:
    check_slices(terapipe(3, 2, 4), 4)
    with pytest.raises(ScheduleError, match="4 units are no microbatches of 3 slices"):
        check_slices(terapipe(2, 2, 2), 3)
    with pytest.raises(ScheduleError, match="0B0 comes before 0B1, of the slice that it needs"):
        check_slices(Schedule.of("wrong", 2, (0,), [["0F0", "0F1", "0B0", "0B1"]]), 2)
    with pytest.raises(ScheduleError, match="at least 1 of its slices, but there are 0"):
        terapipe(2, 2, 0)
