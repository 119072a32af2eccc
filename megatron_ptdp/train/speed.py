"""Utilization of the devices in training: model FLOPs and hardware FLOPs over their peak.

MFU counts FLOPs that the model needs; the PTD-P paper counts those that run: with recomputation, more. The peak is the
makers' figure where the configuration has it. Else it is measured: products of matrices on all devices at once, as
cores that share a memory reach less than one.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from megatron_ptdp.models import Flops
from megatron_ptdp.models.interface import DATA, TENSOR
from megatron_ptdp.parallel import Layout

SIDES, PRODUCTS, ROUNDS = (512, 2048, 8192), 8, 4
"""Sizes of the measurement: the smallest is some 2 GFLOP for each device and round, which takes a core 20 to 100 ms;
the largest is 9 TFLOP, which takes a GPU 10."""

LONG_S = 0.01
"""A round that takes this long is one of products; what a launch takes beside them does not count."""


class Peak(NamedTuple):
    """FLOP/s of one device, and the origin of the figure."""

    flops: float
    source: str


def peak_of(layout: Layout, given: float, dtype: str) -> Peak:
    """The configuration's figure, or a measured one."""
    if given:
        return Peak(given, "as configured")
    flops, side = measured(layout, dtype)
    return Peak(flops, f"measured: {dtype} products of {side} × {side} on all devices at once")


def measured(layout: Layout, dtype: str) -> tuple[float, int]:
    """FLOP/s of one device while all of the layout's compute, and the side of the matrices: the first to take long."""
    for side in SIDES:
        seconds = seconds_of(layout, dtype, side)
        if seconds >= LONG_S:
            break
    return 2.0 * side**3 * PRODUCTS / seconds, side


def seconds_of(layout: Layout, dtype: str, side: int) -> float:
    """The shortest of some rounds of products of matrices (side, side), on all devices of a layout."""
    slices = list(chain.from_iterable(layout.slices))

    def products(matrices: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, PRODUCTS, lambda _, x: (x @ x) * (1.0 / side), matrices)

    run = [pw.compiled(products, slice=one, in_specs=P(DATA, TENSOR), out_specs=P(DATA, TENSOR)) for one in slices]
    program = pw.program(lambda given: [each(own) for each, own in zip(run, given, strict=True)], name="peak")
    given = [
        pw.put(np.ones((*one.shape, side, side), jnp.dtype(dtype)), slice=one, spec=P(DATA, TENSOR)) for one in slices
    ]
    best = float("inf")
    for turn in range(ROUNDS + 1):
        start = time.perf_counter()
        for array in program(given):
            array.block_until_ready(timeout=300.0)
        if turn:  # the first one compiles
            best = min(best, time.perf_counter() - start)
    return best


class Utilization(NamedTuple):
    """Shares of the peak: of what the model needs, and of what runs."""

    mfu: float
    hardware: float

    @classmethod
    def of(cls, tokens_per_second: float, flops: Flops, peak: Peak, devices: int) -> Utilization:
        whole = peak.flops * devices
        return cls(tokens_per_second * flops.model / whole, tokens_per_second * flops.hardware / whole)
