"""Steps that update while microbatches are under way compute the papers' rules, which plain JAX computes here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest

from megatron_ptdp.errors import ConfigError
from megatron_ptdp.models import Compute, Gpt, ModelConfig, initialise, split, whole
from megatron_ptdp.models.reference import reference_loss
from megatron_ptdp.parallel import Layout, Options, Sizes, Step, build_step
from megatron_ptdp.schedules import Schedule, build, pipedream, pipedream_2bw
from tests.unit.client.local import LocalSession

CONFIG = ModelConfig("gpt", layers=2, hidden=8, heads=2, sequence=6, vocabulary=13, tied=False)
MICROBATCHES, EXAMPLES, RATE, BOUND = 6, 2, 0.1, 1e-12


def sgd(decay: Any) -> optax.GradientTransformation:
    return optax.sgd(RATE)


def unchanged(decay: Any) -> optax.GradientTransformation:
    return optax.set_to_zero()


def made(schedule: Schedule, config: ModelConfig = CONFIG, rule: Any = sgd, **options: Any) -> Step:
    model = Gpt(config, Compute(dtype="float64"))
    sizes = Sizes(pipeline=schedule.devices, microbatches=schedule.microbatches, examples=EXAMPLES)
    layout = Layout.of(model, sizes, placement="together")
    return build_step(model, rule, layout, schedule, Options(master="float64", compute="float64", **options))


def stale(params: Any, batch: Any, stages: Sequence[Any], seen: Any, every: int) -> tuple[Any, float]:
    """The rule, microbatch by microbatch: the parameters at the end, and the loss.

    Args:
        seen: the version that a stage uses for a microbatch.
    """
    model = Gpt(CONFIG, Compute(dtype="float64"))
    tokens = EXAMPLES * CONFIG.sequence

    @jax.jit
    def gradient(params: Any, rows: Any) -> Any:
        return jax.value_and_grad(lambda tree: reference_loss(CONFIG, tree, {"tokens": rows}) / tokens)(params)

    weights = [[split.take(model, stage, params)] for stage in stages]
    sums: list[Any] = [None] * len(stages)
    losses = []
    for k in range(MICROBATCHES):
        used = split.join(model, stages, [weights[s][seen(s, k)] for s in range(len(stages))])
        loss, found = gradient(used, batch["tokens"][k * EXAMPLES : (k + 1) * EXAMPLES])
        losses.append(float(loss))
        for s, stage in enumerate(stages):
            own = split.take(model, stage, jax.tree.map(np.asarray, found))
            sums[s] = own if sums[s] is None else jax.tree.map(np.add, sums[s], own)
            if (k + 1) % every == 0:
                scaled = jax.tree.map(lambda w, g: w - RATE * g / every, weights[s][-1], sums[s])
                weights[s].append(scaled)
                sums[s] = None
    return split.join(model, stages, [versions[-1] for versions in weights]), float(np.mean(losses))


CASES = {
    "pipedream": (pipedream(2, MICROBATCHES), lambda s, k: max(0, k - (1 - s)), 1),
    "2bw": (pipedream_2bw(2, MICROBATCHES), lambda s, k: max(0, k // 2 - 1), 2),
    "2bw, larger": (pipedream_2bw(2, MICROBATCHES, every=3), lambda s, k: max(0, k // 3 - 1), 3),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param("pipedream", marks=pytest.mark.slow), "2bw", pytest.param("2bw, larger", marks=pytest.mark.long)],
)
def test_updates_on_the_way_are_those_of_the_rule(session: LocalSession, case: str) -> None:
    schedule, seen, every = CASES[case]
    step = made(schedule)
    params = initialise(step.model, whole(step.model), 1, "float64")
    batch = {"tokens": np.random.default_rng(0).integers(0, 13, (MICROBATCHES * EXAMPLES, 7)).astype(np.int32)}
    wanted, loss = stale(params, batch, step.layout.stages, seen, every)
    state, metrics = step(step.initial(params), batch)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=BOUND)
    assert bool(metrics["applied"])
    found = step.gather(state)["params"]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(one - other) <= BOUND * np.linalg.norm(other)
    flushed, _ = stale(params, batch, step.layout.stages, lambda s, k: 0, MICROBATCHES)
    apart = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(flushed), strict=True)]
    assert max(apart) > 1e-3, "the rule is another one than that of schedules with a flush"


@pytest.mark.parametrize("case", ["pipedream", "2bw"])
def test_what_is_not_finite_in_an_update_on_the_way_is_seen_at_the_end(session: LocalSession, case: str) -> None:
    """One token, of the first microbatch alone, has infinite values; weights stay as they are."""
    step = made(CASES[case][0], rule=unchanged)
    params = initialise(step.model, whole(step.model), 1, "float64")
    params["embedding"]["tokens"] = params["embedding"]["tokens"].copy()
    params["embedding"]["tokens"][12] = np.inf
    tokens = np.random.default_rng(0).integers(0, 12, (MICROBATCHES * EXAMPLES, 7)).astype(np.int32)
    _, metrics = step(step.initial(params), {"tokens": tokens})
    assert step.first_bad(metrics) is None
    tokens[0, 0] = 12
    _, metrics = step(step.initial(params), {"tokens": tokens})
    found = step.first_bad(metrics)
    assert found is not None
    assert found[0] == 1
    assert not metrics["applied"].item()


def test_what_needs_all_gradients_at_once_is_refused(session: LocalSession) -> None:
    with pytest.raises(ConfigError, match="no norm of the whole gradient, by which clip"):
        made(pipedream(2, 4), clip=1.0)
    with pytest.raises(ConfigError, match="takes zero 0, not 1"):
        made(pipedream(2, 4), zero=1)
    with pytest.raises(ConfigError, match="two stages share: embedding/tokens"):
        made(pipedream(2, 4), ModelConfig("gpt", layers=2, hidden=8, heads=2, sequence=6, vocabulary=13))
    assert made(build("1f1b", 2, 4), clip=1.0).schedule.updates is None
