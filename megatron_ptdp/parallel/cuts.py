"""The cuts of a model beside the stages of `build_step`, chosen by the sizes: the seam at which others plug in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ptdp.errors import ConfigError
from megatron_ptdp.models.interface import Model, Stage
from megatron_ptdp.parallel import expert_slices, token_pipeline
from megatron_ptdp.parallel.gradient_step import Cut
from megatron_ptdp.parallel.layout import Layout
from megatron_ptdp.parallel.options import Options
from megatron_ptdp.parallel.sizes import Sizes
from megatron_ptdp.schedules import Schedule


def check(model: Model, sizes: Sizes, options: Options, stages: Sequence[Stage]) -> None:
    """Makes sure that a model can be cut so.

    Args:
        stages: the layers of each

    Raises:
        ConfigError, BadSizes: another part of the configuration, or of the model, does not go with it.
    """
    expert_slices.check(model, sizes, options)
    token_pipeline.check(model, sizes, options, stages)
    if options.join and (sizes.expert_slices or sizes.token_slices > 1):
        raise ConfigError(
            "join is for stages that take whole microbatches; with expert_slices or token_slices set it to false"
        )


def cut_of(model: Any, layout: Layout, schedule: Schedule, options: Options) -> Cut | None:
    """The cut that the sizes ask for: experts on slices of their own, or slices of tokens. None: stages.

    Raises:
        As `check`.
    """
    sizes = layout.sizes
    check(model, sizes, options, layout.stages)
    if sizes.expert_slices:
        return expert_slices.ExpertSlices(model, layout.slices[0], sizes, options.compute)
    if sizes.token_slices > 1:
        return token_pipeline.TokenPipeline(model, layout, schedule, options)
    return None
