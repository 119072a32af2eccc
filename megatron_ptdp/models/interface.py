"""The interface of models: parameters of a stage, and the function from its input to its output.

A model is a row of layers between an embedding and a loss. It is cut into stages of neighbouring layers. `forward` of a
stage runs inside `jax.shard_map` over the mesh of the stage's slice, with the axes DATA and TENSOR, and replication is
tracked (`check_vma=True`): then autodiff puts the sums over TENSOR where they belong, and a forgotten one is an error
of types. Everything `forward` sees is one member's part. Members of DATA have different examples and never talk to each
other in `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from jax.sharding import PartitionSpec

DATA, TENSOR = "data", "tensor"
"""The axes of a stage's mesh, in this order: replicas of the stage, and members that share its matrices."""

Tree: TypeAlias = Any
"""A nested dict; the leaves are named where it is used."""

Fetch: TypeAlias = Callable[[str, Tree], Tree]
"""Function from the name of a stack and one layer's parameters, sharded over DATA, to the whole parameters. Its result
must not be saved for the backward: see `Transformer.run`."""

Initial: TypeAlias = Literal["normal", "ones", "zeros"]


@dataclass(frozen=True)
class Stage:
    """The layers [first, last) of the whole model, with the embedding before or the loss after them."""

    first: int
    last: int
    has_embedding: bool
    has_loss: bool


@dataclass(frozen=True)
class Parameter:
    """One array of a stage's parameters.

    Attributes:
        shape: of the whole array. If `stacked`, dimension 0 counts the stage's layers of one kind.
        spec: how members of TENSOR share it; DATA is not in it.
        initial: its first values; "normal" has standard deviation `scale`.
        decay: whether weight decay acts on it (matrices, not norms and biases).
        padded: (dimension, size without padding), when `shape` was rounded up so that members share it evenly. The
            padding is zero, and stays so: its gradient is zero.
        tied: another stage of the pipeline holds the same array, under the same path: the gradient is the sum of both.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec
    initial: Initial = "normal"
    scale: float = 0.0
    decay: bool = True
    stacked: bool = False
    padded: tuple[int, int] | None = None
    tied: bool = False


@dataclass(frozen=True)
class Value:
    """One array that a stage gives to the next, for one microbatch.

    Attributes:
        shape: of the whole array; dimension 0 counts examples.
        dtype: by name.
        spec: over DATA and TENSOR.
        split: a dimension along which members of TENSOR that all hold the same could each send a part; None where they
            do not hold the same, or it is too small to matter.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    split: int | None = None


class Model(Protocol):
    """A model with its sizes, and the way it is computed: tensor parallel size, sequence parallel, recompute, dtype."""

    @property
    def layers(self) -> int:
        """The number of layers: encoder layers, then decoder layers."""

    def parameters(self, stage: Stage) -> Tree:
        """The `Parameter`s of a stage: nested dicts whose leaves have the same path in every stage that has them."""

    def stacks(self, stage: Stage) -> Mapping[str, tuple[int, int]]:
        """Below which names of the tree the parameters are stacked: the first layer there and the one after the last,
        counted within the whole model's stack of that name."""

    def batch(self, examples: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array of a batch of `examples` examples; dimension 0 counts examples.

        Arrays of tokens are in the order of the text that they are cut from.
        """

    def values(self, stage: Stage, examples: int) -> Tree:
        """The `Value`s that come into a stage; of one with the embedding: {}."""

    def forward(
        self, stage: Stage, params: Tree, values: Tree, batch: Mapping[str, Any], fetch: Fetch | None = None
    ) -> Any:
        """The values for the next stage, or of the last stage the loss.

        Args:
            params: the member's parts. Varying over DATA or not, as the caller likes.
            values: the member's parts, as `values(stage)` says; {} for a stage with the embedding.
            batch: the member's examples, the same on all members of TENSOR.
            fetch: to be called with each layer's parameters just before they are used, in the forward and again in the
                backward. None where they are whole already. A model without it cannot be trained with ZeRO-3.

        Returns:
            The loss is a scalar in nats (float32, or float64 when that is the dtype): the sum over this member's
            predicted tokens, times their weights when the batch has "weights". It varies over DATA and not over TENSOR.
        """

    def tokens(self, batch: Mapping[str, Any]) -> float:
        """The sum of weights of predicted tokens of a whole NumPy batch: what the summed loss is divided by."""
