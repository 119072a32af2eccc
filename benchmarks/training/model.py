"""The model of all systems of `benchmarks.training`: one GPT, its first parameters, one batch, one optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.harness import option
from megatron_ptdp.models import Compute, Gpt, ModelConfig, initialise, whole

SEED = 0


@dataclass(frozen=True)
class Sizes:
    """The model and its optimizer.

    Attributes:
        examples: of one microbatch on one pipeline; a step of M microbatches takes M·examples in all systems
        unroll: layers are written out one by one, in this runtime and in plain JAX
    """

    layers: int = option(8, "of the model")
    hidden: int = option(128, "of the model")
    heads: int = 4
    sequence: int = 64
    vocabulary: int = 256
    examples: int = option(4, "of one microbatch on one pipeline")
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    unroll: bool = option(False, "write the layers out one by one")

    def tokens(self, microbatches: int) -> int:
        """Tokens of one step."""
        return microbatches * self.examples * self.sequence

    def model(self, tensor: int = 1) -> Gpt:
        config = ModelConfig(
            "gpt", self.layers, self.hidden, self.heads, self.sequence, vocabulary=self.vocabulary, tied=False
        )
        return Gpt(config, Compute(tensor=tensor, unroll=self.unroll))

    def optimizer(self, decay: Any) -> optax.GradientTransformation:
        return optax.adamw(self.learning_rate, weight_decay=self.weight_decay, mask=decay)

    def parameters(self) -> Any:
        model = self.model()
        return initialise(model, whole(model), SEED)

    def batch(self, microbatches: int) -> np.ndarray:
        """The first examples of one long batch: [M·examples, sequence + 1]."""
        shape = (microbatches * self.examples, self.sequence + 1)
        return np.random.default_rng(SEED).integers(0, self.vocabulary, shape).astype(np.int32)


def write(sizes: Sizes, microbatches: int, path: Path) -> None:
    """For the other systems: parameters by their path, and "batch", of this many microbatches."""
    found = jax.tree_util.tree_leaves_with_path(sizes.parameters())
    arrays: dict[str, Any] = {"/".join(entry.key for entry in path): array for path, array in found}
    np.savez(path, batch=sizes.batch(microbatches), **arrays)


def read(path: str | Path) -> tuple[Any, np.ndarray]:
    """The tree and the batch of `write`."""
    tree: dict[str, Any] = {}
    with np.load(path) as file:
        for name in file.files:
            if name != "batch":
                *above, last = name.split("/")
                place = tree
                for part in above:
                    place = place.setdefault(part, {})
                place[last] = file[name]
        return tree, file["batch"]
