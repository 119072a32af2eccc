"""A small decoder-only transformer over bytes, cut into two pipeline stages.

The model is a list of equal blocks between an embedding and a head. The first half of the blocks, with the embedding,
is the *first* stage; the second half, with final norm, head and loss, is the *last* stage. Everything is a pure
function of its arguments, so the same functions serve the unsplit model, a chain of `jax.jit` calls, and a Pathways
program.

Shapes: B sequences of a microbatch, T positions, D model width, H heads, V = 256 byte values. All floats are float32.
Losses are in nats per byte.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, Any]

V, T, D, H = 256, 64, 96, 4
BLOCKS = 4  # two per stage
# 4 x 2 x 64 = 512 bytes a step. B is small for one more reason: from B * T = 256 on, XLA's CPU matmuls split the sum in
# a weight gradient over the threads of the process, and its last bits then depend on how many threads there are.
MICROBATCHES, B = 4, 2

optimizer = optax.adamw(optax.linear_schedule(0.0, 4e-3, transition_steps=20), b2=0.95, weight_decay=0.1)


# -- the text ---------------------------------------------------------------------------------------------------------


def read_text() -> np.ndarray:
    """The help texts that come with CPython, about 700 KB, as uint8: some English that is on every machine."""
    source = importlib.util.find_spec("pydoc_data.topics").origin
    return np.frombuffer(Path(source).read_bytes(), dtype=np.uint8)


def batches(steps: int, seed: int = 0) -> Iterator[tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]]:
    """For each step: MICROBATCHES arrays of tokens (B, T) int32, and their targets, the same text one byte later."""
    text, random = read_text().astype(np.int32), np.random.default_rng(seed)
    for _ in range(steps):
        starts = random.integers(0, len(text) - T, size=(MICROBATCHES, B, 1))
        windows = text[starts + np.arange(T + 1)]  # (MICROBATCHES, B, T + 1)
        yield tuple(windows[..., :-1]), tuple(windows[..., 1:])


# -- the parameters, made by NumPy so that they do not depend on how the model is cut ---------------------------------


def init_params(seed: int = 0) -> tuple[Params, Params]:
    """Parameters of the first and of the last stage."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.02) -> np.ndarray:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    def block() -> Params:
        into_residual = 0.02 / np.sqrt(2 * BLOCKS)  # keeps the residual stream's variance independent of depth (GPT-2)
        return {
            "norm1": np.ones(D, np.float32),
            "qkv": normal(D, 3 * D),
            "out": normal(D, D, scale=into_residual),
            "norm2": np.ones(D, np.float32),
            "up": normal(D, 4 * D),
            "down": normal(4 * D, D, scale=into_residual),
        }

    blocks = [block() for _ in range(BLOCKS)]
    first = {"bytes": normal(V, D), "positions": normal(T, D), "blocks": blocks[: BLOCKS // 2]}
    last = {"blocks": blocks[BLOCKS // 2 :], "norm": np.ones(D, np.float32), "head": normal(D, V)}
    return first, last


# -- the model --------------------------------------------------------------------------------------------------------


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """(..., D), (D,) -> (..., D) with unit mean square along D."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attention(params: Params, x: jax.Array) -> jax.Array:
    """Causal self-attention with H heads: (B, T, D) -> (B, T, D)."""
    q, k, v = (a.reshape(*a.shape[:2], H, D // H) for a in jnp.split(x @ params["qkv"], 3, axis=-1))  # (B, T, H, D/H)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(x.shape) @ params["out"]


def block_forward(params: Params, x: jax.Array) -> jax.Array:
    """One transformer block: (B, T, D) -> (B, T, D)."""
    x = x + attention(params, rms_norm(x, params["norm1"]))
    return x + jax.nn.gelu(rms_norm(x, params["norm2"]) @ params["up"]) @ params["down"]


def first_forward(params: Params, tokens: jax.Array) -> jax.Array:
    """First stage: tokens (B, T) -> activations (B, T, D)."""
    x = params["bytes"][tokens] + params["positions"]
    for block in params["blocks"]:
        x = block_forward(block, x)
    return x


def last_loss(params: Params, activations: jax.Array, targets: jax.Array) -> jax.Array:
    """Last stage: activations (B, T, D), targets (B, T) -> this microbatch's share of the batch's mean loss, a scalar.

    The division by MICROBATCHES is here and nowhere else: losses and gradients of microbatches are then just summed.
    """
    x = activations
    for block in params["blocks"]:
        x = block_forward(block, x)
    logits = rms_norm(x, params["norm"]) @ params["head"]  # (B, T, V)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean() / MICROBATCHES


# -- what a pipeline runs ---------------------------------------------------------------------------------------------


def last_forward_backward(
    params: Params, activations: jax.Array, targets: jax.Array
) -> tuple[tuple[jax.Array, Params], jax.Array]:
    """Returns ((loss, gradients of params), gradient of activations (B, T, D))."""
    loss, (grads, grad_activations) = jax.value_and_grad(last_loss, argnums=(0, 1))(params, activations, targets)
    return (loss, grads), grad_activations


def first_backward(params: Params, tokens: jax.Array, grad_activations: jax.Array) -> Params:
    """Gradients of params. The forward pass is recomputed, so only tokens are kept between the two passes."""
    _, pull_back = jax.vjp(lambda p: first_forward(p, tokens), params)
    return pull_back(grad_activations)[0]


def accumulate(total: Any, more: Any) -> Any:
    """Adds two pytrees of the same structure."""
    return jax.tree.map(jnp.add, total, more)


def update(params: Params, opt_state: optax.OptState, grads: Params) -> tuple[Params, optax.OptState]:
    """One AdamW step of one stage. AdamW acts on each number alone, so cutting the model does not change it."""
    changes, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, changes), opt_state


def full_loss(params: tuple[Params, Params], tokens: tuple[Any, ...], targets: tuple[Any, ...]) -> jax.Array:
    """The whole model in one function: mean loss over all microbatches, a scalar."""
    first, last = params
    return sum(last_loss(last, first_forward(first, x), y) for x, y in zip(tokens, targets, strict=True))
