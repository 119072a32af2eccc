"""Sizes of a model and the way it is computed, checked when they are made; the named sizes; FLOPs for the MFU.

The named sizes are those of the planner (config/presets/models/*.toml), so that what is planned is what is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Literal, TypeAlias, get_args

from megatron_ptdp.config import load
from megatron_ptdp.config.model import Dimensions
from megatron_ptdp.config.model import Model as Planned
from megatron_ptdp.config.parallel import Recompute, indivisible
from megatron_ptdp.errors import ConfigError

Kind: TypeAlias = Literal["gpt", "t5"]
Activation: TypeAlias = Literal["gelu", "relu"]
DType: TypeAlias = Literal["float32", "bfloat16", "float64"]
Experts: TypeAlias = Literal["dispatched", "dense"]
Scatter: TypeAlias = Literal["psum_scatter", "psum"]

BUCKETS, FARTHEST = 32, 128
"""T5's relative positions: the number of buckets of distances, and the distance from which all are in one bucket."""


@dataclass(frozen=True)
class ModelConfig(Dimensions):
    """The sizes of a GPT (decoder) or a T5 (encoder and decoder); see `Dimensions`. There is no dropout.

    Attributes:
        sequence: tokens per example that the decoder reads and predicts.
        vocabulary: number of tokens. It need not divide: members of TENSOR pad it, which no result shows.
        experts: feed-forward parts of each layer, of which every token goes through `top_k`; 0 for an ordinary layer.
        balance: weight of the loss that keeps experts equally busy.
        capacity: tokens that an expert takes, as a multiple of the number that all would have if they were equally
            busy; the others go past it. 0: all that choose it.
    """

    kind: Kind
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    head_size: int = 0
    ffn: int = 0
    encoder_layers: int = 0
    encoder_sequence: int = 0
    activation: Activation = "gelu"
    tied: bool = True
    bias: bool = True
    experts: int = 0
    top_k: int = 2
    balance: float = 0.01
    capacity: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError.unknown("kind of model", self.kind, get_args(Kind))
        if self.activation not in get_args(Activation):
            raise ConfigError.unknown("activation", self.activation, get_args(Activation))
        if fault := self.fault():
            raise ConfigError(f"model {self.kind!r}: {fault}")
        for name in ("experts", "balance", "capacity"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(
                    f"model {self.kind!r}: {name} is {getattr(self, name)}, must not be negative, and must be finite"
                )
        encoder = (self.encoder_layers > 0, self.encoder_sequence > 0)
        if encoder != ((True, True) if self.kind == "t5" else (False, False)):
            raise ConfigError(
                f"encoder_layers is {self.encoder_layers} and encoder_sequence {self.encoder_sequence} in a "
                f"{self.kind}: a t5 needs both above 0, a gpt has neither"
            )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ConfigError(f"top_k is {self.top_k} of {self.experts} experts, must be 1 to {self.experts}")
        self.complete()

    def planned(self) -> Planned:
        """The planner's model of these sizes, with as many experts as a token goes through."""
        times = self.top_k if self.experts else 1
        sizes = {**self.common(), "ffn": self.ffn * times}
        return Planned(self.kind, **sizes, positions=self.kind == "gpt", dropout=False)


@dataclass(frozen=True)
class Compute:
    """The way a model is computed; results depend on it in their rounding only.

    Attributes:
        tensor: members that share each layer's matrices.
        sequence_parallel: whether members of TENSOR hold a part of the sequence each between the blocks of a layer.
        recompute: the part of the forward that the backward computes again.
        dtype: of parameters and of what passes between layers. Statistics of norms, softmax and the loss are computed
            in float32 at least. "float64" needs `jax_enable_x64`.
        scatter: "psum" sums everywhere and takes a part, for devices with a wrong reduce-scatter: the
            runtime refuses it between hosts of a CPU island.
        experts: whether an expert computes the tokens that chose it, or all, as a reference, without a capacity.
        unroll: whether layers are written out one by one: larger programs, that run faster when layers are small.
    """

    tensor: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    dtype: DType = "float32"
    scatter: Scatter = "psum_scatter"
    experts: Experts = "dispatched"
    unroll: bool = False

    def __post_init__(self) -> None:
        if self.tensor < 1:
            raise ConfigError(f"tensor is {self.tensor}, must be at least 1")
        for name, known in (("recompute", Recompute), ("dtype", DType), ("scatter", Scatter), ("experts", Experts)):
            if getattr(self, name) not in get_args(known):
                raise ConfigError.unknown(f"{name} setting", str(getattr(self, name)), get_args(known))


def check_sizes(config: ModelConfig, compute: Compute) -> None:
    """Refuses sizes that members of TENSOR cannot share.

    Raises:
        ConfigError: with the sizes.
    """
    shared = {"heads": config.heads, "experts" if config.experts else "ffn": config.experts or config.ffn}
    if compute.sequence_parallel:
        shared["sequence"] = config.sequence
        if config.kind == "t5":
            shared["encoder_sequence"] = config.encoder_sequence
    if name := indivisible(shared, compute.tensor):
        raise ConfigError(
            f"{name} {shared[name]} cannot be shared by tensor = {compute.tensor} members: it is no multiple of it; "
            f"change either" + (", or go without sequence_parallel" if "sequence" in name else "")
        )


def presets() -> list[str]:
    """The names of sizes that can be trained."""
    return [name for name in load.names("models") if not _missing(load.model(name))]


def preset(name: str, **changes: Any) -> ModelConfig:
    """The sizes of that name, or of a planner's file at that path, with some changed.

    Raises:
        ConfigError: there is no such name or field; the message has the nearest. Or the model cannot be trained.
        PlanningError: the file is missing, or no model's.
    """
    if name not in load.names("models") and not load.is_file("models", name):
        raise ConfigError.unknown("model", name, presets())
    planned = load.model(name)
    if missing := _missing(planned):
        raise ConfigError(f"the model {name!r} can be planned, not trained: it has {missing}; there are {presets()}")
    t5 = planned.encoder_layers > 0
    sizes = {**planned.common(), "encoder_sequence": planned.encoder_sequence if t5 else 0}
    config = ModelConfig("t5" if t5 else "gpt", **sizes, activation="relu" if t5 else "gelu")
    return changed(config, changes)


def changed(config: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    """The sizes with some changed. head_size and ffn follow the others when they did so before.

    Raises:
        ConfigError: there is no such field, or the sizes do not fit together.
    """
    known = {field.name for field in fields(ModelConfig)}
    for name in changes:
        if name not in known:
            raise ConfigError.unknown("size of a model", name, known)
    follow: dict[str, Any] = {}
    if config.head_size * config.heads == config.hidden:
        follow["head_size"] = 0
    if config.ffn == 4 * config.hidden:
        follow["ffn"] = 0
    return replace(config, **{**follow, **changes})


def _missing(planned: Planned) -> str:
    """A feature of a planner's model that the models here lack; "" if they lack no feature."""
    if planned.gated:
        return "a gated feed-forward part"
    if planned.key_heads != planned.heads:
        return "fewer heads of keys than of queries"
    if planned.parallel:
        return "attention and feed-forward part side by side"
    if not planned.positions and not planned.encoder_layers:
        return "positions that are not learned"
    if planned.positions and planned.encoder_layers:
        return "learned positions beside an encoder"
    return ""


@dataclass(frozen=True)
class Flops:
    """Per predicted token, forward and backward: what the model needs, and what runs with what is computed again."""

    model: float
    hardware: float


def flops_per_token(config: ModelConfig, recompute: Recompute = "none") -> Flops:
    """FLOPs in both conventions of MFU. Only predicted tokens count, as `Model.tokens` counts them.

    For GPT, per token: 72 l h² (1 + s/(6h) + V/(12lh)) of the model; 96 l h² (1 + s/(6h) + V/(16lh)) of the hardware
    with full recomputation (PTD-P eq. 3). With experts the model needs those a token goes through, and those run; rows
    that only pad them are not counted.
    """
    model = config.planned().model_flops(1)
    hardware = config.planned().hardware_flops(1, recompute)
    return Flops(model / config.sequence, hardware / config.sequence)
