"""The common part of GPT and T5: embedding, stacks of equal layers, last norm, table of the logits, and loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from megatron_ptdp.errors import ConfigError
from megatron_ptdp.models import layers, moe, parameters
from megatron_ptdp.models.config import Compute, ModelConfig, check_sizes
from megatron_ptdp.models.interface import DATA, TENSOR, Fetch, Parameter, Stage, Tree, Value

Layer = Callable[[jax.Array, Tree], tuple[jax.Array, jax.Array]]
"""Function from [B, S, H] and a layer's parameters to [B, S, H] and the balance of its experts [B]."""


class Counted(NamedTuple):
    """The parameters of a model, each once; and those that one token goes through: of experts the ones it chooses."""

    parameters: int
    for_a_token: int


class Transformer:
    """The common part of the models.

    Attributes:
        config: the sizes.
        compute: the way they are computed.
        weighted: whether batches have "weights" (float32, like the predicted tokens), by which losses are multiplied.
    """

    kind: str

    def __init__(self, config: ModelConfig, compute: Compute | None = None, *, weighted: bool = False) -> None:
        """Raises `ConfigError` when members of TENSOR cannot share these sizes."""
        if config.kind != self.kind:
            raise ConfigError(f"these are the sizes of a {config.kind}, not of a {self.kind}")
        self.config, self.compute, self.weighted = config, compute or Compute(), weighted
        check_sizes(self.config, self.compute)

    @property
    def layers(self) -> int:
        return self.config.encoder_layers + self.config.layers

    def stacks(self, stage: Stage) -> Mapping[str, tuple[int, int]]:
        """Ranges of the layers that the stage has of each whole stack, by the stack's name in the tree."""
        raise NotImplementedError

    def stack_parameters(self, name: str) -> Tree:
        """The parameters of one layer of a stack."""
        raise NotImplementedError

    def parameters(self, stage: Stage) -> Tree:
        """As `Model.parameters`: {"embedding", a stack's name ..., "final", "head"}, each where the stage has it."""
        self._check(stage)
        c, t5 = self.config, self.config.kind == "t5"
        tree: Tree = {}
        for name, (first, last) in self.stacks(stage).items():
            if last > first:
                tree[name] = parameters.stacked(self.stack_parameters(name), last - first)
        if stage.has_embedding or (stage.has_loss and c.tied):
            tied = c.tied and not (stage.has_embedding and stage.has_loss)
            scale = 1.0 if t5 else 0.02
            tree["embedding"] = {"tokens": parameters.table(c, self.compute.tensor, tied=tied, scale=scale)}
        if stage.has_embedding and not t5:
            tree["embedding"]["positions"] = parameters.positions(c)
        if stage.has_loss:
            tree["final"] = parameters.norm(c)
            if not c.tied:
                scale = c.hidden**-0.5 if t5 else 0.02
                tree["head"] = {"tokens": parameters.table(c, self.compute.tensor, tied=False, scale=scale)}
        return tree

    def counted(self) -> Counted:
        """The numbers of the whole model's parameters; with a `tensor` of 1 there is no padding among them."""
        c, every, idle = self.config, 0, 0
        tree = self.parameters(Stage(0, self.layers, has_embedding=True, has_loss=True))
        for path, one in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, Parameter)):
            names, size = {key.key for key in path}, math.prod(one.shape)
            every += size
            if c.experts and "ffn" in names and "router" not in names:
                idle += size // c.experts * (c.experts - c.top_k)
        return Counted(every, every - idle)

    def batch(self, examples: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """As `Model.batch`: "tokens" [B, S+1], of which the first S are read and the last S predicted."""
        c = self.config
        arrays: dict[str, tuple[tuple[int, ...], str]] = {}
        if c.encoder_sequence:
            arrays["encoder_tokens"] = ((examples, c.encoder_sequence), "int32")
        arrays["tokens"] = ((examples, c.sequence + 1), "int32")
        if self.weighted:
            arrays["weights"] = ((examples, c.sequence), "float32")
        return arrays

    def tokens(self, batch: Mapping[str, Any]) -> float:
        """As `Model.tokens`."""
        if "weights" in batch:
            return float(np.sum(batch["weights"], dtype=np.float64))
        examples, length = batch["tokens"].shape
        return float(examples * (length - 1))

    def value(self, examples: int, sequence: int) -> Value:
        """The `Value` of activations [B, S, H] between layers."""
        hidden, tensor = self.config.hidden, self.compute.tensor
        if self.compute.sequence_parallel:
            return Value((examples, sequence, hidden), self.compute.dtype, P(DATA, TENSOR, None))
        split = next((i for i, size in ((1, sequence), (2, hidden)) if tensor > 1 and size % tensor == 0), None)
        return Value((examples, sequence, hidden), self.compute.dtype, P(DATA, None, None), split)

    def balance_value(self, examples: int) -> Tree:
        """With experts: {"balance": the `Value` of each example's balance so far}."""
        if not self.config.experts:
            return {}
        return {"balance": Value((examples,), self._wide, P(DATA))}

    @property
    def _wide(self) -> str:
        return "float64" if self.compute.dtype == "float64" else "float32"

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        return layers.embed(tokens, table, self.compute)

    def prepared(self, params: Tree) -> Tree:
        """The parameters of layers and norms as they meet activations.

        With sequence parallelism each member sees a part of the tokens, and each member's experts need a part of what
        the router gives: then gradients of what all hold are summed over TENSOR. Casting here, outside of the loop over
        layers, does so once for all layers.
        """
        if self.compute.sequence_parallel:
            return layers.vary(params, TENSOR)
        if "router" in params.get("ffn", {}):
            return {**params, "ffn": {**params["ffn"], "router": layers.vary(params["ffn"]["router"], TENSOR)}}
        return params

    def feed_forward(self, x: jax.Array, params: Tree) -> tuple[jax.Array, jax.Array]:
        """The second half of a layer: x + FFN(norm(x)), and the balance [B] of its experts."""
        normed = layers.norm(x, params["ffn_norm"])
        if moe.by_parts(self.config, self.compute):
            y, balance = moe.experts_of_parts(normed, params["ffn"], self.config)
            return x + y, balance
        inside = layers.enter(normed, self.compute)
        if self.config.experts:
            y, balance = moe.experts(inside, params["ffn"], self.config, self.compute)
            return x + y, balance
        y = layers.feed_forward(inside, params["ffn"], self.compute, self.config.activation)
        return x + y, jnp.zeros(x.shape[0], self._wide)

    def run(
        self, name: str, layer: Layer, x: jax.Array, params: Tree, fetch: Fetch | None
    ) -> tuple[jax.Array, jax.Array]:
        """All layers of a stack, one after the other; and the sum of their balances, typed as varying over TENSOR."""
        count = len(jax.tree.leaves(params)[0])
        alone = count == 1 or self.compute.unroll

        def body(carry: tuple[jax.Array, jax.Array], own: Tree) -> tuple[tuple[jax.Array, jax.Array], None]:
            x, balance = carry
            x, more = layer(x, fetch(name, own) if fetch else own)
            return (x, balance + more), None

        if self.compute.recompute == "full":
            # Inside a loop, XLA cannot see that forward and backward compute the same.
            body = jax.checkpoint(body, prevent_cse=alone)
        elif fetch:
            body = jax.checkpoint(body, prevent_cse=alone, policy=not_fetched)
        balance = layers.vary(jnp.zeros(x.shape[0], self._wide), *layers.varying(x), TENSOR)
        (x, balance), _ = lax.scan(body, (x, balance), params, unroll=count if self.compute.unroll else 1)
        return x, balance

    def added(self, balance: Tree, more: list[jax.Array], examples: int) -> Tree:
        """The balance of earlier stages ({} for none) and of this one, which all members of TENSOR computed alike.

        Their mean is one value again, and has a gradient on each of them.
        """
        if not self.config.experts:
            return {}
        total = balance.get("balance", layers.vary(jnp.zeros(examples, self._wide), DATA))
        return {"balance": total + lax.psum(sum(more), TENSOR) / self.compute.tensor if more else total}

    def loss(self, params: Tree, x: jax.Array, balance: Tree, batch: Mapping[str, Any]) -> jax.Array:
        """The sum of the token losses of this member's examples from the last layer's output."""
        if self.compute.recompute == "full":
            # Nothing as large as the logits is kept. Where one computation has forward and backward, XLA sees that both
            # compute the same here, and does it once.
            return jax.checkpoint(self._loss, prevent_cse=False)(params, x, balance, batch)
        return self._loss(params, x, balance, batch)

    def _loss(self, params: Tree, x: jax.Array, balance: Tree, batch: Mapping[str, Any]) -> jax.Array:
        c = self.config
        x = layers.norm(x, self.prepared(params["final"]))
        if c.kind == "t5" and c.tied:
            x = x * c.hidden**-0.5
        table = params["embedding" if c.tied else "head"]["tokens"]
        losses = layers.token_losses(layers.enter(x, self.compute), table, batch["tokens"][:, 1:], c.vocabulary)
        if "balance" in balance:  # weighted like a loss of each of the example's tokens
            losses = losses + c.balance * balance["balance"][:, None]
        weights = batch.get("weights")
        return jnp.sum(losses if weights is None else losses * weights.astype(losses.dtype))

    def _check(self, stage: Stage) -> None:
        whole = 0 <= stage.first <= stage.last <= self.layers
        if not whole or (stage.has_embedding and stage.first) or (stage.has_loss and stage.last != self.layers):
            raise ConfigError(
                f"{stage} is no stage of a model of {self.layers} layers: 0 <= first <= last <= {self.layers}, the "
                f"embedding stands before layer 0 and the loss after the last"
            )


_CHEAP = frozenset({"reshape", "transpose", "squeeze", "broadcast_in_dim", "convert_element_type", "pvary", "pcast"})
"""Primitives that only change the layout of an array: applied to a fetched array, they give the whole array again."""


def not_fetched(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy for `jax.checkpoint`: saves everything but the arrays that `fetch` gathered over DATA, and copies in
    another layout, which may be copies of these."""
    name = str(primitive)
    return name not in _CHEAP and not (name.startswith("all_gather") and DATA in params.get("axis_name", ()))
