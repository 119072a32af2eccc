"""Transformers as stages of a pipeline: GPT, T5, mixtures of experts; and the interface of models.

`preset` gives sizes by name, `build` makes the model of them. `initialise` fills its parameters, `take` and `join`
split them into stages and join them again.
"""

from megatron_ptdp.models.config import Compute, Flops, ModelConfig, flops_per_token, preset, presets
from megatron_ptdp.models.gpt import Gpt
from megatron_ptdp.models.initial import initialise
from megatron_ptdp.models.interface import DATA, TENSOR, Model, Parameter, Stage, Value
from megatron_ptdp.models.split import cut, join, take, whole
from megatron_ptdp.models.t5 import T5

__all__ = [
    "DATA",
    "T5",
    "TENSOR",
    "Compute",
    "Flops",
    "Gpt",
    "Model",
    "ModelConfig",
    "Parameter",
    "Stage",
    "Value",
    "build",
    "cut",
    "flops_per_token",
    "initialise",
    "join",
    "preset",
    "presets",
    "take",
    "whole",
]


def build(config: ModelConfig, compute: Compute | None = None, *, weighted: bool = False) -> Gpt | T5:
    """The model of these sizes, computed in this way; `weighted` when batches have "weights".

    Raises:
        ConfigError: members of TENSOR cannot share these sizes.
    """
    return (T5 if config.kind == "t5" else Gpt)(config, compute, weighted=weighted)
