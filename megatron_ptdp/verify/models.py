"""The models that are verified, tiny, and what they are computed on: parameters in which nothing is zero, and a batch.

The vocabulary of 13 divides by no t, so that members of TENSOR pad it. The batch has weights, zeros among them: no two
microbatches and no two replicas have the same number of tokens that count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import numpy as np

from megatron_ptdp.models import ModelConfig, build, initialise, whole
from megatron_ptdp.models.interface import Tree
from megatron_ptdp.verify.cases import BATCH, LAYERS

VOCABULARY = 13

_GPT = ModelConfig("gpt", layers=LAYERS, hidden=16, heads=4, ffn=24, sequence=8, vocabulary=VOCABULARY)
_T5 = ModelConfig(
    "t5", layers=LAYERS // 2, hidden=16, heads=4, head_size=6, ffn=24, sequence=8, vocabulary=VOCABULARY,
    encoder_layers=LAYERS // 2, encoder_sequence=12, activation="relu", bias=False,
)  # fmt: skip


CONFIGS: Mapping[str, ModelConfig] = {
    "gpt": _GPT,
    "gpt-untied": replace(_GPT, tied=False, bias=False),
    "moe": replace(_GPT, experts=4),
    "t5": _T5,
    "t5-moe": replace(_T5, tied=False, experts=4, top_k=1),
}
"""Models by name: tied and untied, with biases and without, mixtures of experts with one and two experts per token."""


def parameters(name: str, dtype: str) -> Tree:
    """The whole tree to begin with. Biases and norms are not what they are filled with, so that they show."""
    model = build(CONFIGS[name])
    random = np.random.default_rng(5)
    tree = initialise(model, whole(model), seed=3, dtype="float64")
    return jax.tree.map(lambda x: (x + 0.05 * random.standard_normal(x.shape)).astype(dtype), tree)


def batch(name: str, step: int = 0) -> dict[str, np.ndarray]:
    """Random tokens with weights 0, 1/2 and 1, of `BATCH` examples; others for each step."""
    random = np.random.default_rng((7, step))
    made: dict[str, np.ndarray] = {}
    for key, (shape, dtype) in build(CONFIGS[name], weighted=True).batch(BATCH).items():
        tokens = random.integers(0, VOCABULARY, shape)
        made[key] = (random.integers(0, 3, shape) / 2 if key == "weights" else tokens).astype(dtype)
    return made
