"""optax transformations from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from megatron_ptdp.train.config import Optimizer

Rate = Callable[[Any], Any]
"""The learning rate of a step, counted from 0."""


def rate(config: Optimizer, steps: int) -> Rate:
    """Up in a line for `warmup_steps`, then down to `final_learning_rate`, which is first that of step `decay_steps`
    (0: `steps`): the steps of a run are counted from 0, so its last one is a little above it."""
    high, low = config.learning_rate, config.final_learning_rate
    length = max(1, (config.decay_steps or steps) - config.warmup_steps)
    after: Any
    match config.decay:
        case "constant":
            after = optax.constant_schedule(high)
        case "linear":
            after = optax.linear_schedule(high, low, length)
        case "cosine":
            after = optax.cosine_decay_schedule(high, length, low / high if high else 0.0)
    if not config.warmup_steps:
        return after
    # The first step has a part of the rate, not none of it.
    before = optax.linear_schedule(high / config.warmup_steps, high, max(1, config.warmup_steps - 1))
    return optax.join_schedules([before, after], [config.warmup_steps])


def transformation(config: Optimizer, steps: int, updates: int = 1) -> Callable[[Any], optax.GradientTransformation]:
    """Makes the optimizer of a tree of parameters from the tree of booleans that says which of them decay.

    Clipping is not in it: it needs the norm over all stages.

    Args:
        updates: of each parameter in a step; all of them have the learning rate of the step
    """
    of_step = rate(config, steps)
    how_fast: Rate = of_step if updates == 1 else lambda count: of_step(count // updates)

    def make(decay: Any) -> optax.GradientTransformation:
        if config.optimizer == "sgd":
            return optax.chain(
                optax.add_decayed_weights(config.weight_decay, mask=decay),
                optax.sgd(how_fast, momentum=config.beta1 or None),
            )
        return optax.adamw(
            how_fast, config.beta1, config.beta2, config.epsilon, weight_decay=config.weight_decay, mask=decay
        )

    return make
