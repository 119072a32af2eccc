"""GPT: a decoder with learned positions, a LayerNorm before each block and before the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

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
