"""GPT: a decoder with learned positions, a LayerNorm before each block and before the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megatron_ptdp.models import layers, parameters
from megatron_ptdp.models.interface import DATA, Fetch, Stage, Tree
from megatron_ptdp.models.transformer import Transformer


class Gpt(Transformer):
    """A `Model`. Between stages: {"hidden": [B, S, H]}, with experts also {"balance": [B]}."""

    kind = "gpt"

    def stacks(self, stage: Stage) -> Mapping[str, tuple[int, int]]:
        return {"layers": (stage.first, stage.last)}

    def stack_parameters(self, name: str) -> Tree:
        c = self.config
        return {
            "attention_norm": parameters.norm(c),
            "attention": parameters.attention(c),
            "ffn_norm": parameters.norm(c),
            "ffn": parameters.feed_forward(c),
        }

    def values(self, stage: Stage, examples: int) -> Tree:
        """As `Model.values`."""
        if stage.has_embedding:
            return {}
        return {"hidden": self.value(examples, self.config.sequence), **self.balance_value(examples)}

    def forward(
        self, stage: Stage, params: Tree, values: Tree, batch: Mapping[str, Any], fetch: Fetch | None = None
    ) -> Any:
        """As `Model.forward`."""
        if stage.has_embedding:
            values = {"hidden": self.embedded(params["embedding"], batch["tokens"][:, :-1])}
        x, more = layers.vary(values["hidden"], DATA), []
        if "layers" in params:
            x, own = self.run("layers", self._layer, x, self.prepared(params["layers"]), fetch)
            more.append(own)
        balance = self.added({name: values[name] for name in values if name == "balance"}, more, len(x))
        if stage.has_loss:
            return self.loss(params, x, balance, batch)
        return {"hidden": x, **balance}

    def forward_after(
        self, stage: Stage, params: Tree, hidden: jax.Array | None, batch: Mapping[str, Any], past: Sequence[Any]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """`forward` of some neighbouring tokens of each example, without experts.

        Args:
            hidden: [B, S, H], what comes into the stage; None for one with the embedding
            batch: "tokens" [B, S+1], these and the one behind them, for the embedding and the loss
            past: for each earlier slice of the examples the keys and values that it left here

        Returns:
            What goes out of the stage, [B, S, H] or the loss, and the keys and values [layers, B, S, own heads, d].
        """
        if hidden is None:
            tokens = batch["tokens"][:, :-1]
            first = sum(keys.shape[2] for keys, _ in past)
            hidden = self.embed(params["embedding"]["tokens"], tokens)
            hidden = hidden + params["embedding"]["positions"][first : first + tokens.shape[1]]
        x = layers.vary(hidden, DATA)
        config, count = self.config, stage.last - stage.first
        none = jnp.zeros((count, len(x), 0, config.heads // self.compute.tensor, config.head_size), x.dtype)
        before = [jnp.concatenate([none, *each], axis=2) for each in (zip(*past, strict=True) if past else ((), ()))]

        def layer(x: jax.Array, own: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            params, past = own
            inside = layers.enter(layers.norm(x, params["attention_norm"]), self.compute)
            attended, kept = layers.attention_after(inside, past, params["attention"], self.compute)
            x, _ = self.feed_forward(x + attended, params)
            return x, kept

        x, kept = lax.scan(layer, x, (self.prepared(params["layers"]), tuple(before)))
        return (self.loss(params, x, {}, batch) if stage.has_loss else x), kept

    def embedded(self, params: Tree, tokens: jax.Array) -> jax.Array:
        """The input of the first layer, [B, S, H]."""
        positions = params["positions"]
        if self.compute.sequence_parallel:
            positions = layers.own_part(positions, 0)
        return self.embed(params["tokens"], tokens) + positions

    def attended(self, x: jax.Array, params: Tree) -> jax.Array:
        """The first half of a layer: x + attention(norm(x))."""
        inside = layers.enter(layers.norm(x, params["attention_norm"]), self.compute)
        return x + layers.attention(inside, inside, params["attention"], self.compute, causal=True)

    def _layer(self, x: jax.Array, params: Tree) -> tuple[jax.Array, jax.Array]:
        return self.feed_forward(self.attended(x, params), params)
