"""Failures and money: how often a run stops, how often to save, how much longer and dearer that makes it.

With n devices of mean time between failures F, the system's is M = F/n. Saving takes δ. The best interval between saves
is near √(2 δ M) - δ (Young 1974, Daly 2006); the expected time of a run of T useful seconds, saved every τ, restarted
in R, failures exponential (Daly 2006, eq. 13):

    T · M/τ · e^(R/M) · (e^((τ + δ)/M) - 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt

from megatron_ptdp.planner.estimate import DAY, Estimate, Question

MASTER_BYTES = 12
"""The most of the optimizer's bytes per parameter that a checkpoint has: fp32 weights and two moments. With 2 of
weights a checkpoint of 1T parameters is 14 TB (PTD-P section 5.10: 13.8)."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The effect of failures on a run.

    Attributes:
        mtbf: seconds between failures of the whole system.
        checkpoint_bytes: of one checkpoint.
        save: seconds one save stops the training.
        interval: seconds of training between saves.
        share: useful time over all time.
        failures: expected in the run.
        days: of the run, failures and saves included.
        price: of the run, likewise.
    """

    mtbf: float
    checkpoint_bytes: float
    save: float
    interval: float
    share: float
    failures: float
    days: float
    price: float


def goodput(question: Question, estimate: Estimate) -> Goodput:
    """The expected course of a run of `question.tokens`."""
    operations, devices = question.cluster.operations, estimate.plan.devices
    mtbf = operations.mtbf_hours * 3600 / devices
    software = question.software
    size = question.model.parameters * (software.weight_bytes + min(software.optimizer_bytes, MASTER_BYTES))
    writers = devices if estimate.plan.zero else estimate.plan.pipeline * estimate.plan.tensor
    save = size / min(writers * operations.checkpoint_bandwidth, operations.checkpoint_limit)
    interval = best_interval(save, mtbf)
    useful = estimate.days * DAY
    # e^x overflows for a system that fails before it has saved once: then there is no goodput.
    exponent = operations.restart_seconds / mtbf + (interval + save) / mtbf
    stretch = float("inf") if exponent > 600 else expected_stretch(interval, save, operations.restart_seconds, mtbf)
    days = estimate.days * stretch
    return Goodput(
        mtbf=mtbf,
        checkpoint_bytes=size,
        save=save,
        interval=interval,
        share=1 / stretch,
        failures=useful * stretch / mtbf,
        days=days,
        price=estimate.price * stretch,
    )


def best_interval(save: float, mtbf: float) -> float:
    """Seconds of training between saves: √(2 δ M) - δ; M where saving takes more than half of M (Daly 2006, eq. 37)."""
    return mtbf if save >= mtbf / 2 else sqrt(2 * save * mtbf) - save


def expected_stretch(interval: float, save: float, restart: float, mtbf: float) -> float:
    """All time over useful time, for failures that come at random."""
    return mtbf / interval * exp(restart / mtbf) * (exp((interval + save) / mtbf) - 1)
