"""Runs a model as its trainer does, by hand: a chain of stages, each in `shard_map` over its mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megatron_ptdp.models import (
    DATA,
    T5,
    TENSOR,
    Gpt,
    ModelConfig,
    Parameter,
    Stage,
    Value,
    build,
    initialise,
    preset,
    take,
    whole,
)
from megatron_ptdp.models.interface import Tree
from megatron_ptdp.models.reference import reference_loss
from megatron_ptdp.models.split import join

EXAMPLES = 4
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compiling is what takes long

TINY_GPT = {"layers": 2, "hidden": 16, "heads": 4, "ffn": 24, "sequence": 8, "vocabulary": 32}
TINY_T5 = {"hidden": 16, "heads": 4, "head_size": 6, "ffn": 24, "sequence": 8, "encoder_sequence": 24, "vocabulary": 32}
CONFIGS = {
    # Of 4 members that share a vocabulary of 9, the last has nothing but padding.
    "gpt": preset("gpt-tiny", **{**TINY_GPT, "layers": 4, "vocabulary": 9}),
    "gpt-untied": preset("gpt-tiny", **TINY_GPT, tied=False, bias=False),
    "gpt-experts": preset("gpt-tiny", **TINY_GPT, experts=4),
    "gpt-experts-capacity": preset("gpt-tiny", **TINY_GPT, experts=4, capacity=1.25),
    "t5": preset("t5-tiny", **TINY_T5),
    "t5-experts": preset("t5-tiny", **{**TINY_T5, "layers": 1, "encoder_layers": 1}, experts=4, top_k=1),
}


class Result(NamedTuple):
    loss: float
    gradients: Tree  # whole trees


def mesh(data: int, tensor: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: data * tensor]).reshape(data, tensor), (DATA, TENSOR))


def specs(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.spec, tree, is_leaf=lambda leaf: isinstance(leaf, (Parameter, Value)))


def batch_of(model: Gpt | T5, seed: int = 0, examples: int = EXAMPLES) -> dict[str, np.ndarray]:
    """Random tokens, and weights with zeros among them."""
    random = np.random.default_rng(seed)
    made = {}
    for name, (shape, dtype) in model.batch(examples).items():
        integers = dtype == "int32"
        made[name] = (
            random.integers(0, model.config.vocabulary, shape) if integers else random.integers(0, 3, shape) / 2
        ).astype(dtype)
    return made


def started(config: ModelConfig) -> Tree:
    """The whole tree, with biases and norms that are not what they are filled with, so that they show."""
    model = build(config)
    random = np.random.default_rng(5)
    tree = initialise(model, whole(model), seed=3, dtype="float64")
    return jax.tree.map(lambda x: x + 0.05 * random.standard_normal(x.shape), tree)


@cache
def expected(config: ModelConfig) -> Result:
    batch, tree = batch_of(build(config, weighted=True)), started(config)
    function = jax.value_and_grad(lambda tree: reference_loss(config, tree, batch))
    loss, gradients = jax.jit(function, compiler_options=QUICK)(tree)
    return Result(float(loss), jax.device_get(gradients))


def computed(model: Gpt | T5, stages: Sequence[Stage], data: int = 1) -> Result:
    """The loss and gradients of stages chained by hand: forward one after the other, then backward."""
    place = mesh(data, model.compute.tensor)
    batch, tree = batch_of(model), started(model.config)
    params = [take(model, stage, tree) for stage in stages]
    values: list[Tree] = [{}]
    for stage, own in zip(stages[:-1], params, strict=False):
        values.append(forward(model, stage, place)(own, values[-1], batch))
    gradients: list[Tree] = [None] * len(stages)
    cotangents: Tree = None
    loss = 0.0
    for i in reversed(range(len(stages))):
        result, gradients[i], cotangents = backward(model, stages[i], place)(params[i], values[i], batch, cotangents)
        loss = result if i == len(stages) - 1 else loss
    add_tied(model, stages, gradients)
    return Result(float(loss), join(model, stages, jax.device_get(gradients)))


@cache
def forward(model: Gpt | T5, stage: Stage, place: Mesh) -> Any:
    """From (parameters, values, batch): the values that go out."""
    following = Stage(stage.last, model.layers, has_embedding=False, has_loss=False)

    def run(params: Tree, values: Tree, batch: Mapping[str, Any]) -> Tree:
        return model.forward(stage, params, values, batch)

    own, inputs = specs(model.parameters(stage)), specs(model.values(stage, EXAMPLES))
    outputs = specs(model.values(following, EXAMPLES))
    return compiled(run, place, (own, inputs, P(DATA)), outputs)


@cache
def backward(model: Gpt | T5, stage: Stage, place: Mesh) -> Any:
    """From (parameters, values, batch, gradients of what goes out): loss or None, gradients of the first two."""
    own, inputs = specs(model.parameters(stage)), specs(model.values(stage, EXAMPLES))
    following = Stage(stage.last, model.layers, has_embedding=False, has_loss=False)

    def run(params: Tree, values: Tree, batch: Mapping[str, Any], cotangents: Tree) -> Tree:
        # Gradients stay unsummed over DATA until the end, as with several microbatches.
        params = lax.pcast(params, DATA, to="varying")
        out, back = jax.vjp(lambda params, values: model.forward(stage, params, values, batch), params, values)
        if stage.has_loss:
            cotangents = lax.pcast(jnp.ones((), out.dtype), DATA, to="varying")
            loss = lax.psum(out, DATA)
        else:
            loss = jnp.zeros(())
        gradients, back_values = back(cotangents)
        return loss, lax.psum(gradients, DATA), back_values

    comes = P() if stage.has_loss else specs(model.values(following, EXAMPLES))
    return compiled(run, place, (own, inputs, P(DATA), comes), (P(), own, inputs))


def compiled(run: Any, place: Mesh, inputs: Any, outputs: Any) -> Any:
    return jax.jit(jax.shard_map(run, mesh=place, in_specs=inputs, out_specs=outputs), compiler_options=QUICK)


def add_tied(model: Gpt | T5, stages: Sequence[Stage], gradients: list[Tree]) -> None:
    """Sums the gradients of what two stages hold, in place."""
    holders = [i for i, s in enumerate(stages) if any(p.tied for p in leaves(model.parameters(s)))]
    assert len(holders) in (0, 2)
    if holders:
        first, last = (gradients[i]["embedding"] for i in holders)
        first["tokens"] = last["tokens"] = first["tokens"] + last["tokens"]


def leaves(tree: Tree) -> list[Parameter]:
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Parameter))


def difference(one: Result, other: Result) -> dict[str, float]:
    """The relative error of the loss and of each gradient (Frobenius), by path."""
    errors = {"loss": abs(one.loss - other.loss) / abs(other.loss)}
    with_paths = jax.tree_util.tree_leaves_with_path(other.gradients)
    for (path, wanted), got in zip(with_paths, jax.tree.leaves(one.gradients), strict=True):
        assert wanted.shape == got.shape
        errors[jax.tree_util.keystr(path)] = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
    return errors
