"""T5 as in T5.1.0: an encoder and a decoder, RMSNorm, no biases, ReLU, scores that are not scaled.

Two deviations. Every layer has its own table of relative position biases, where T5 shares one among a stack's layers:
a table is a thousand numbers, and shared it would have to be kept equal on all stages of a pipeline. And no token is
padding: encoder tokens are all attended to, and the weights of a batch say which predicted tokens count.

Layers are counted through: the encoder's first, then the decoder's. The decoder's tokens are embedded on the first
stage and travel along, so that the embedding is tied over two stages and not three.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from megatron_ptdp.models import layers, parameters
from megatron_ptdp.models.config import BUCKETS, FARTHEST
from megatron_ptdp.models.interface import DATA, Fetch, Stage, Tree
from megatron_ptdp.models.transformer import Transformer


class T5(Transformer):
    """A `Model`. Between stages: {"encoder": [B, K, H], "decoder": [B, S, H]}, with experts also {"balance": [B]}.

    "encoder" is what came out of the encoder's layers so far; after the last of them, normed. "decoder" likewise.
    """

    kind = "t5"

    def stacks(self, stage: Stage) -> Mapping[str, tuple[int, int]]:
        border = self.config.encoder_layers
        encoder = (min(stage.first, border), min(stage.last, border))
        return {"encoder": encoder, "decoder": (max(stage.first, border) - border, max(stage.last, border) - border)}

    def stack_parameters(self, name: str) -> Tree:
        c = self.config
        tree = {
            "attention_norm": parameters.norm(c),
            "attention": parameters.attention(c),
            "relative": parameters.relative_positions(c),
            "ffn_norm": parameters.norm(c),
            "ffn": parameters.feed_forward(c),
        }
        if name == "decoder":
            tree |= {"cross_norm": parameters.norm(c), "cross": parameters.attention(c)}
        return tree

    def parameters(self, stage: Stage) -> Tree:
        """As `Model.parameters`; "encoder_final" is the norm after the encoder's last layer, on the stage with that."""
        tree = super().parameters(stage)
        if self._ends_encoder(stage):
            tree["encoder_final"] = parameters.norm(self.config)
        return tree

    def values(self, stage: Stage, examples: int) -> Tree:
        """As `Model.values`."""
        if stage.has_embedding:
            return {}
        c = self.config
        values = {"encoder": self.value(examples, c.encoder_sequence), "decoder": self.value(examples, c.sequence)}
        return values | self.balance_value(examples)

    def forward(
        self, stage: Stage, params: Tree, values: Tree, batch: Mapping[str, Any], fetch: Fetch | None = None
    ) -> Any:
        """As `Model.forward`."""
        if stage.has_embedding:
            table = params["embedding"]["tokens"]
            values = {
                "encoder": self.embed(table, batch["encoder_tokens"]),
                "decoder": self.embed(table, batch["tokens"][:, :-1]),
            }
        encoder, decoder = layers.vary((values["encoder"], values["decoder"]), DATA)
        more = []
        if "encoder" in params:
            encoder, own = self.run("encoder", self._encode, encoder, self.prepared(params["encoder"]), fetch)
            more.append(own)
        if "encoder_final" in params:
            encoder = layers.norm(encoder, self.prepared(params["encoder_final"]))
        if "decoder" in params:
            # Into all blocks at once: its gradient is summed over TENSOR once, not in each layer.
            seen = layers.enter(encoder, self.compute)
            layer, own_params = partial(self._decode, seen), self.prepared(params["decoder"])
            decoder, own = self.run("decoder", layer, decoder, own_params, fetch)
            more.append(own)
        balance = self.added({name: values[name] for name in values if name == "balance"}, more, len(decoder))
        if stage.has_loss:
            return self.loss(params, decoder, balance, batch)
        return {"encoder": encoder, "decoder": decoder, **balance}

    def _ends_encoder(self, stage: Stage) -> bool:
        return stage.first < self.config.encoder_layers <= stage.last

    def _encode(self, x: jax.Array, params: Tree) -> tuple[jax.Array, jax.Array]:
        return self.feed_forward(self._attend(x, params, causal=False), params)

    def _decode(self, seen: jax.Array, x: jax.Array, params: Tree) -> tuple[jax.Array, jax.Array]:
        x = self._attend(x, params, causal=True)
        inside = layers.enter(layers.norm(x, params["cross_norm"]), self.compute)
        x = x + layers.attention(inside, seen, params["cross"], self.compute, scaled=False)
        return self.feed_forward(x, params)

    def _attend(self, x: jax.Array, params: Tree, *, causal: bool) -> jax.Array:
        inside = layers.enter(layers.norm(x, params["attention_norm"]), self.compute)
        places = buckets(inside.shape[1], causal=causal)
        bias = jnp.moveaxis(jnp.take(params["relative"], places, axis=0), -1, 0)
        return x + layers.attention(
            inside, inside, params["attention"], self.compute, causal=causal, scaled=False, bias=bias
        )


def buckets(length: int, *, causal: bool) -> jax.Array:
    """Buckets of distances [length, length] between queries and keys at each of `length` positions, as in T5.

    Half of the kinds are single distances, the others grow with the logarithm up to `FARTHEST`. Without a causal mask
    one half is for keys that come later.
    """
    places = jnp.arange(length)
    ahead = places[None, :] - places[:, None]
    count = BUCKETS if causal else BUCKETS // 2
    side = jnp.zeros_like(ahead) if causal else jnp.where(ahead > 0, count, 0)
    distance = jnp.maximum(-ahead, 0) if causal else jnp.abs(ahead)
    near = count // 2
    share = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / near) / jnp.log(jnp.float32(FARTHEST / near))
    far = jnp.minimum(near + (share * (count - near)).astype(jnp.int32), count - 1)
    return side + jnp.where(distance < near, distance, far)
