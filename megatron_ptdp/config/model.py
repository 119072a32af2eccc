"""The shape of a transformer, its parameters and its FLOPs.

A model is a row of layers between an embedding and the logits. Most layers of a model are alike; an encoder-decoder has
two kinds. Counts here are of the whole model, not of a device. FLOPs are multiply and add counted as two.

Symbols of the papers: l layers, h hidden, a heads, s sequence, V vocabulary, B batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_ptdp.errors import BadFigure

MAX_SIZES = {
    "layers": 10**4,
    "encoder_layers": 10**4,
    "hidden": 10**7,
    "heads": 10**6,
    "sequence": 10**8,
    "encoder_sequence": 10**8,
    "vocabulary": 10**9,
    "ffn": 10**8,
}
"""Larger sizes are typing errors; the planner's search goes through layers and heads one by one."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer: attention, perhaps attention over an encoder's output, and a feed-forward part.

    Attributes:
        sequence: tokens per example that go through it.
        cross: tokens of the encoder's output it attends to; 0 when it does not.
        parallel: attention and feed-forward part read the same input, and their outputs are summed as one.
        key_heads: heads of keys and values; fewer than `heads` with grouped queries.
        gated: the feed-forward part has two matrices in, whose products are multiplied (SwiGLU).
    """

    hidden: int
    heads: int
    key_heads: int
    head_size: int
    ffn: int
    gated: bool
    sequence: int
    cross: int = 0
    parallel: bool = False

    @property
    def blocks(self) -> int:
        """Parts that follow one another, each with a norm and a sum over the tensor axis."""
        return 1 if self.parallel else 3 if self.cross else 2

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        return self.key_heads * self.head_size

    def key_copies(self, tensor: int) -> int:
        """Members of the tensor axis that each key head lies on: with fewer heads than members, on several."""
        return max(1, tensor // self.key_heads)

    def member_key_width(self, tensor: int) -> float:
        """`key_width` on each member of the tensor axis: one head at least."""
        return self.key_width * self.key_copies(tensor) / tensor

    @property
    def matrix_parameters(self) -> int:
        """Weights in matrices: 12 h² for GPT."""
        attention = self.hidden * (2 * self.attention_width + 2 * self.key_width)
        up = 2 if self.gated else 1
        return attention * (2 if self.cross else 1) + (up + 1) * self.hidden * self.ffn

    @property
    def score_flops(self) -> float:
        """FLOPs of one example in scores and their use, forward: 4 s² h for GPT, a causal mask not taken off."""
        keys = self.sequence + self.cross
        return 4.0 * self.sequence * keys * self.attention_width

    @property
    def forward_flops(self) -> float:
        """FLOPs of one example, forward: 24 s h² + 4 s² h for GPT (PTD-P section 5.1, appendix)."""
        weights = 2.0 * self.sequence * self.matrix_parameters
        if self.cross:  # keys and values are made from the encoder's output
            weights += 4.0 * (self.cross - self.sequence) * self.hidden * self.key_width
        return weights + self.score_flops


class Dimensions:
    """Sizes that every description of a transformer has: what can be planned (`Model`), and what can be trained
    (`models.ModelConfig`). A base of frozen dataclasses with these fields; `COMMON` names them.

    Attributes:
        layers: of the decoder; `encoder_layers` come before them.
        head_size: 0 stands for hidden / heads, `ffn` 0 for 4 hidden.
        sequence: tokens per example that the decoder reads; `encoder_sequence` those that the encoder reads.
        tied: whether the logits use the embedding's matrix.
        bias: whether matrices and norms have biases.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    head_size: int
    ffn: int
    encoder_layers: int
    encoder_sequence: int
    tied: bool
    bias: bool

    def fault(self) -> str | None:
        """The first size that is out of range or does not divide; None where all are sound."""
        for name in NEEDED:
            if getattr(self, name) < 1:
                return f"{name} is {getattr(self, name)}, must be at least 1"
        for name, most in MAX_SIZES.items():
            if getattr(self, name) > most:
                return f"{name} is {getattr(self, name):,}, must be {most:,} at most"
        for name in ("head_size", "ffn", "encoder_layers", "encoder_sequence"):
            if getattr(self, name) < 0:
                return f"{name} is {getattr(self, name)}, must not be negative"
        if not self.head_size and self.hidden % self.heads:
            return f"hidden {self.hidden} is no multiple of heads {self.heads}: set head_size"
        return None

    def complete(self) -> None:
        """Fills in the sizes that are 0 and follow from others."""
        object.__setattr__(self, "head_size", self.head_size or self.hidden // self.heads)
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)

    def common(self) -> dict[str, Any]:
        """The fields of this class by name."""
        return {name: getattr(self, name) for name in COMMON}


NEEDED = ("layers", "hidden", "heads", "sequence", "vocabulary")
"""Sizes without a default."""
COMMON = tuple(Dimensions.__annotations__)


@dataclass(frozen=True)
class Model(Dimensions):
    """A transformer language model; see `Dimensions` for the sizes that every description has.

    Attributes:
        encoder_sequence: 0 stands for `sequence`, `key_heads` 0 for `heads`.
        gated: the feed-forward part has two matrices in (SwiGLU).
        positions: whether positions are learned, and so parameters (GPT); others (rotary, ALiBi, relative) have none.
        parallel: whether a layer's attention and feed-forward part run side by side (GPT-J, PaLM); decoders only.
        dropout: whether training drops activations; the masks are then stored.
        source: of the figures.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    key_heads: int = 0
    head_size: int = 0
    ffn: int = 0
    gated: bool = False
    positions: bool = True
    tied: bool = True
    bias: bool = True
    dropout: bool = True
    parallel: bool = False
    encoder_layers: int = 0
    encoder_sequence: int = 0
    source: str = ""

    def __hash__(self) -> int:  # few fields: models are looked up in tables often
        return hash((self.name, self.layers, self.hidden))

    def __post_init__(self) -> None:
        if fault := self.fault():
            raise BadFigure(f"model {self.name!r}: {fault}")
        self.complete()
        if not self.encoder_sequence:
            object.__setattr__(self, "encoder_sequence", self.sequence)

    def fault(self) -> str | None:
        if fault := super().fault():
            return fault
        if self.key_heads < 0:
            return f"key_heads is {self.key_heads}, must not be negative"
        if self.parallel and self.encoder_layers:
            return f"parallel layers are decoders'; encoder_layers is {self.encoder_layers}"
        if self.key_heads and self.heads % self.key_heads:
            return f"heads {self.heads} is no multiple of key_heads {self.key_heads}"
        return None

    def complete(self) -> None:
        super().complete()
        if not self.key_heads:
            object.__setattr__(self, "key_heads", self.heads)

    @cached_property
    def row(self) -> tuple[Layer, ...]:
        """All layers in order."""
        shape = (self.hidden, self.heads, self.key_heads, self.head_size, self.ffn, self.gated)
        encoder = Layer(*shape, sequence=self.encoder_sequence)
        cross = self.encoder_sequence if self.encoder_layers else 0
        decoder = Layer(*shape, sequence=self.sequence, cross=cross, parallel=self.parallel)
        return (encoder,) * self.encoder_layers + (decoder,) * self.layers

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens per example that the decoder reads; and those that the encoder reads, where there is one."""
        return (self.sequence, self.encoder_sequence) if self.encoder_layers else (self.sequence,)

    @property
    def tokens_per_example(self) -> int:
        return sum(self.lengths)

    def layer_parameters(self, layer: Layer) -> int:
        """Parameters of one layer: 12 h² + 13 h for GPT (PTD-P eq. 2)."""
        norms = layer.blocks * layer.hidden * (2 if self.bias else 1)
        biases = 0
        if self.bias:
            attention = layer.attention_width + 2 * layer.key_width + layer.hidden
            biases = attention * (2 if layer.cross else 1) + layer.ffn * (2 if layer.gated else 1) + layer.hidden
        return layer.matrix_parameters + norms + biases

    def member_parameters(self, layer: Layer, tensor: int) -> float:
        """Parameters of one layer on each member of the tensor axis, with the copies of key heads that there are."""
        keys = 2 * layer.key_width * (layer.hidden + self.bias) * (2 if layer.cross else 1)
        return (self.layer_parameters(layer) + (layer.key_copies(tensor) - 1) * keys) / tensor

    @cached_property
    def embedding_parameters(self) -> int:
        """The embedding with learned positions: V h + s h."""
        return (self.vocabulary + (self.sequence if self.positions else 0)) * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All parameters, each once: 12 l h² (1 + 13/(12 h) + (V + s)/(12 l h)) for GPT (PTD-P eq. 2).

        The norm before the logits, 2 h, is left out as in the paper.
        """
        logits = 0 if self.tied else self.vocabulary * self.hidden
        return sum(self.layer_parameters(layer) for layer in self.row) + self.embedding_parameters + logits

    @cached_property
    def logits_flops(self) -> float:
        """FLOPs of one example in the logits, forward: 2 s h V."""
        return 2.0 * self.sequence * self.hidden * self.vocabulary

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of one example in all layers, forward, without the logits."""
        return sum(layer.forward_flops for layer in self.row)

    def model_flops(self, batch: int) -> float:
        """FLOPs an iteration needs: 72 B l s h² (1 + s/(6 h) + V/(12 l h)) for GPT (Korthikanti et al. 2022, eq. 7)."""
        return 3.0 * batch * (self.forward_flops + self.logits_flops)

    def paper_flops(self, batch: int) -> float:
        """FLOPs with each layer run forward again: 96 B s l h² (1 + s/(6 h) + V/(16 l h)) for GPT (PTD-P eq. 3)."""
        return batch * (4.0 * self.forward_flops + 3.0 * self.logits_flops)

    def hardware_flops(self, batch: int, recompute: str) -> float:
        """FLOPs that run, as the papers print them: the needed ones and what is run again.

        Full: PTD-P eq. 3. Selective: 72 B l s h² (1 + s/(3 h) + V/(12 l h)) (Korthikanti et al. 2022, eq. 8), which
        counts the scores twice in all three passes, although they are run again in one.
        """
        if recompute == "full":
            return self.paper_flops(batch)
        again = 3.0 * sum(layer.score_flops for layer in self.row) if recompute == "selective" else 0.0
        return self.model_flops(batch) + batch * again
