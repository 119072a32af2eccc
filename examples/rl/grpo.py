"""Sampling and learning, as functions of JAX: GRPO with a clipped ratio, and Adam.

For each prompt there are `SAMPLES` answers; an answer's advantage is its reward beside those of the others.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.rl.model import Params, empty_cache, logits, next_logits
from examples.rl.task import END, LENGTH, PAD, PROMPT

SAMPLES = 8
CLIP = 0.2
LEARNING_RATE, BETA1, BETA2 = 2e-3, 0.9, 0.95


class Rollout(NamedTuple):
    """Sampled rows, prompts by prompt: tokens int32[B, T]; the logarithms of the probabilities that the sampler gave
    them, and whether it sampled them, float32[B, T]."""

    tokens: jax.Array
    logprobs: jax.Array
    mask: jax.Array


class State(NamedTuple):
    """The learner's parameters, with both moments of their gradients and the number of updates."""

    params: Params
    first: Params
    second: Params
    count: jax.Array


def start(params: Params) -> State:
    """The state before the first update."""
    zeros = jax.tree.map(lambda p: 0 * p, params)
    return State(params, zeros, zeros, jnp.int32(0))


def rollout(params: Params, step: jax.Array, prompts: jax.Array) -> Rollout:
    """`SAMPLES` answers to each prompt: a `while_loop` until all have ended, with a cache of keys and values."""
    rows = jnp.repeat(prompts, SAMPLES, axis=0)
    count = rows.shape[0]
    key = jax.random.key(step)
    tokens = jnp.full((count, LENGTH), PAD, jnp.int32).at[:, :PROMPT].set(rows)
    zeros = jnp.zeros((count, LENGTH), jnp.float32)

    def going(state: Any) -> jax.Array:
        at, _, ended, _ = state
        return (at < LENGTH - 1) & ~ended.all()

    def sample(state: Any) -> Any:
        at, (tokens, logprobs, mask), ended, cache = state
        found, cache = next_logits(params, cache, at, tokens[:, at])
        drawn = jax.random.categorical(jax.random.fold_in(key, at), found).astype(jnp.int32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(found), drawn[:, None], 1)[:, 0]
        live = (at + 1 >= PROMPT) & ~ended
        tokens = tokens.at[:, at + 1].set(jnp.where(live, drawn, tokens[:, at + 1]))
        logprobs = logprobs.at[:, at + 1].set(jnp.where(live, chosen, 0.0))
        mask = mask.at[:, at + 1].set(live.astype(jnp.float32))
        return at + 1, Rollout(tokens, logprobs, mask), ended | (live & (drawn == END)), cache

    first = (jnp.int32(0), Rollout(tokens, zeros, zeros), jnp.zeros(count, bool), empty_cache(count))
    return jax.lax.while_loop(going, sample, first)[1]


def loss(params: Params, batch: Rollout, rewards: jax.Array) -> jax.Array:
    """The clipped objective of GRPO, negative, averaged over sampled tokens."""
    groups = rewards.reshape(-1, SAMPLES)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
    found = jax.nn.log_softmax(logits(params, batch.tokens[:, :-1]))
    logprobs = jnp.take_along_axis(found, batch.tokens[:, 1:, None], 2)[..., 0]
    ratio = jnp.exp(logprobs - batch.logprobs[:, 1:])
    weight = advantages.reshape(-1, 1)
    gain = jnp.minimum(ratio * weight, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * weight)
    mask = batch.mask[:, 1:]
    return -(gain * mask).sum() / mask.sum()


def gradient(params: Params, batch: Rollout, rewards: jax.Array) -> tuple[Params, dict[str, jax.Array]]:
    """The gradient of the loss for a batch, and its figures."""
    value, found = jax.value_and_grad(loss)(params, batch, rewards)
    return found, {"loss": value, "reward": rewards.mean(), "right": (rewards == 1.0).mean()}


def apply(state: State, gradients: Params) -> State:
    """One step of Adam."""
    count = state.count + 1
    first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state.first, gradients)
    second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, state.second, gradients)
    done = count.astype(jnp.float32)
    scale = LEARNING_RATE * jnp.sqrt(1 - BETA2**done) / (1 - BETA1**done)
    params = jax.tree.map(lambda p, m, v: p - scale * m / (jnp.sqrt(v) + 1e-8), state.params, first, second)
    return State(params, first, second, count)


def update(state: State, batch: Rollout, rewards: jax.Array) -> tuple[State, dict[str, jax.Array]]:
    """One step of the learner on a whole batch."""
    gradients, figures = gradient(state.params, batch, rewards)
    return apply(state, gradients), figures
