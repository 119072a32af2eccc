"""A case on the runtime: the step as a user builds it, and its results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron_ptdp import schedules
from megatron_ptdp.models import Compute, build
from megatron_ptdp.models.interface import Tree
from megatron_ptdp.parallel import Layout, Options, Step, build_step
from megatron_ptdp.verify import models, reference
from megatron_ptdp.verify.cases import Case
from megatron_ptdp.verify.compare import DType


@contextlib.contextmanager
def built(case: Case, dtype: DType, clip: float | None = None) -> Iterator[Step]:
    """The step of a case on the current session; its slices are given back after the block.

    Raises:
        BadSizes, ConfigError, ScheduleError: the case cannot run on these devices.
    """
    compute = Compute(case.t, case.sp, case.recompute, dtype)
    model = build(models.CONFIGS[case.model], compute, weighted=True)
    layout = Layout.of(model, case.sizes, counts=case.counts, placement=case.place)
    try:
        schedule = schedules.build(case.schedule, case.p, case.m, case.v)
        options = Options(
            clip=clip,
            zero=case.zero,
            scatter_gather=case.sg,
            keep=case.keep,
            join=case.join,
            master=dtype,
            compute=dtype,
        )
        yield build_step(model, reference.optimizer, layout, schedule, options)
    finally:
        layout.release()


def gradients(case: Case, dtype: DType) -> tuple[float, Tree]:
    """Loss per token and its whole gradient."""
    with built(case, dtype) as step:
        return step.gradients(step.initial(models.parameters(case.model, dtype)), models.batch(case.model))


def trained(case: Case) -> dict[str, Any]:
    """Results as of `reference.trained`, by the runtime in float64."""
    losses, norms = [], []
    with built(case, "float64", reference.CLIP) as step:
        state = step.initial(models.parameters(case.model, "float64"))
        for number in range(reference.STEPS):
            state, metrics = step(state, models.batch(case.model, number))
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["norm"]))
        return {"params": step.gather(state)["params"], "losses": losses, "norms": norms}
