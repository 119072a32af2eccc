"""The cluster that measurements describe: latencies and rates of lines, and constants that are fitted.

Directly measured are products of several sizes, an elementwise pass, an empty launch, what a launch takes from devices
that compute, all-reduces and messages of several sizes at each level of the network, and what a message takes from
devices that compute. Two points or more on a line give a latency and a rate.

Four constants have no probe of their own, because a training step's products and other operations are neither large nor
isolated. They are fitted, once, to the steps of a few small reference models on one device each (`Reference`):

    matrix_efficiency    of the rate of the measured products, at most 1
    memory_efficiency    of the rate of the elementwise pass, at most 1: exponentials, reductions, copies into and
                         out of loops over layers cost more than a pass
    kernel_overhead      of an operation
    step                 of an iteration

What cannot be measured from inside (memory, power, price, failures) is given or left at a stated default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from megatron_ptdp.config.cluster import Cluster, Device, Level, Operations, Software
from megatron_ptdp.config.model import Model
from megatron_ptdp.errors import PlanningError
from megatron_ptdp.planner.estimate import Question, time_split
from megatron_ptdp.planner.plan import Plan

VOCABULARY = 256
NOT_MEASURED = Operations(100, 50, 0, 100_000, 1e8, 1e9, 60)
MIN_MESSAGE_S = 1e-6  # seconds of a message: less is noise
FITS = 4  # least squares in a row: products that are bound by their bytes change sides


@dataclass(frozen=True)
class Reference:
    """A GPT and a batch whose training step is measured on one device. `examples` is of a microbatch."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    examples: int
    microbatches: int

    def model(self) -> Model:
        sizes = (self.layers, self.hidden, self.heads, self.sequence)
        return Model("reference", *sizes, vocabulary=VOCABULARY, tied=False, dropout=False)

    def plan(self) -> Plan:
        return Plan(microbatch=self.examples, batch=self.examples * self.microbatches, recompute="none")


@dataclass(frozen=True)
class MeasuredLevel:
    """Measurements of one level of the network.

    Attributes:
        devices: that it joins; 0 for no limit
        reductions: bytes of an all-reduce over all of them, and its seconds; empty where not measured
        messages: bytes from a device to another, and their seconds
        still: seconds that an overlapped message of the middle size takes from devices that compute
        arrays: of the gradients, each summed in a collective of its own where all-reduces are measured
    """

    name: str
    devices: int
    reductions: Sequence[tuple[float, float]]
    messages: Sequence[tuple[float, float]]
    still: float
    arrays: int

    def level(self, inner: int, fastest: float) -> Level:
        """The level of a cluster, above one of `inner` devices whose memory has a rate of `fastest` bytes/s.

        An all-reduce of S bytes over n groups sends 2 (n-1)/n S and has 2 (n-1) steps, or 2 log2 n above the first
        level. Where no all-reduce was measured, messages carry it.
        """
        latency, rate = self._messages(fastest)
        middle = sorted(size for size, _ in self.messages)[len(self.messages) // 2]
        share = min(1.0, self.still / (latency + middle / rate))
        if not self.reductions:
            return Level(self.name, self.devices, rate, 1.0, latency, 1.0, rate, latency, share)
        start, speed = line(self.reductions)
        n = self.devices // inner
        steps = 2 * (n - 1) if inner == 1 else 2 * (n - 1).bit_length()
        return Level(
            name=self.name,
            size=self.devices,
            bandwidth=speed * 2 * (n - 1) / n,
            efficiency=1.0,
            latency=start / steps,
            message_bandwidth=rate,
            message_latency=latency,
            message_share=share,
            collectives=self.arrays,
        )

    def _messages(self, fastest: float) -> tuple[float, float]:
        """Latency and rate: the largest message against the mean of the others, as each is a difference of noisy times;
        no rate is above `fastest`."""
        *small, (size, seconds) = sorted(self.messages)
        mean_size, mean_seconds = (fmean(values) for values in zip(*small, strict=True))
        slope = max((seconds - mean_seconds) / (size - mean_size), 1 / fastest)
        return max(MIN_MESSAGE_S, fmean(taken - slope * bytes_ for bytes_, taken in self.messages)), 1 / slope


@dataclass(frozen=True)
class Measured:
    """Measurements of a cluster.

    Attributes:
        name: of the devices.
        flops: best FLOP/s of a product, by its size n (n×n×n).
        copy_rate: bytes/s read and written.
        launch: seconds of an empty launch that is waited for.
        action: seconds that one launch more takes from devices that compute.
        levels: of the network, from the inside out.
        steps: seconds of the reference models' training steps.
    """

    name: str
    flops: Mapping[int, float]
    copy_rate: float
    launch: float
    action: float
    levels: Sequence[MeasuredLevel]
    steps: Mapping[Reference, float]


def rate_of(work: float, seconds: float, what: str) -> float:
    """The rate of a probe that took so long.

    Raises:
        PlanningError: it took no time, as the difference of two that other work on the machine disturbed.
    """
    if seconds <= 0:
        raise PlanningError(f"{what} took no time: the machine is too noisy, measure again with more --rounds")
    return work / seconds


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency in seconds and rate in bytes/s of the line through (bytes, seconds), by least squares.

    Errors are relative, so that small messages count as much as large ones. The latency is never below zero.

    Raises:
        PlanningError: fewer than two sizes, or seconds that do not grow with bytes.
    """
    if len({size for size, _ in points}) < 2:
        raise PlanningError("a latency and a rate need messages of two sizes or more")
    if min(seconds for _, seconds in points) <= 0:
        raise PlanningError("it took no time: the machine is too noisy, measure again")
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    mean_time = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    slope = (
        sum(w * (size - mean_size) * (time - mean_time) for w, (size, time) in zip(weights, points, strict=True))
        / spread
    )
    if slope <= 0:
        raise PlanningError("larger messages took no longer than small ones: the machine is too noisy, measure again")
    return max(0.0, mean_time - slope * mean_size), 1 / slope


def tile_depth(flops: Mapping[int, float]) -> int:
    """The inner dimension that a product's start and end are worth, from the smallest and the largest size.

    The model says rate(n) = peak · n/(n + depth); two sizes give the depth.
    """
    small, large = min(flops), max(flops)
    ratio = flops[large] / flops[small]
    if small == large or ratio <= 1:
        return 0
    return round(small * large * (ratio - 1) / max(large - ratio * small, small))


def cluster_of(seen: Measured, memory_bytes: float, software: Software, name: str = "here") -> Cluster:
    """The cluster that was measured, its constants fitted to the reference steps."""
    depth, fastest = tile_depth(seen.flops), max(seen.flops, key=lambda size: seen.flops[size])
    device = Device(
        name=seen.name,
        peak_flops=seen.flops[fastest] * (1 + depth / fastest),
        matrix_efficiency=1.0,
        units=1,
        tiles=((1, 1, 1.0),),
        tile_depth=depth,
        memory_bytes=memory_bytes,
        memory_bandwidth=seen.copy_rate,
        memory_efficiency=1.0,
        kernel_overhead=0.0,
        launch=seen.launch,
        reserved_bytes=0.0,
        fragmentation=0.05,
        action=seen.action,
    )
    levels, inner = [], 1
    for level in seen.levels:
        levels.append(level.level(inner, seen.copy_rate))
        inner = level.devices or inner
    found = Cluster(name, device, tuple(levels), NOT_MEASURED, software.name, "pathways-plan calibrate")
    return fitted(found, seen.steps, software) if seen.steps else found


# --- the four constants -----------------------------------------------------------------------------------------------


def fitted(cluster: Cluster, steps: Mapping[Reference, float], software: Software) -> Cluster:
    """The cluster with the constants that predict the reference steps best; squares of relative errors count.

    A step is linear in `_amounts`, but for products bound by their bytes; so a few least squares in a row do.
    """
    least = _amounts(cluster.device)
    for _ in range(FITS):
        now = _amounts(cluster.device)
        columns = []
        for position in range(len(least)):
            columns.append([_slope(cluster, one, position, software) / taken for one, taken in steps.items()])
        # What is left of each step for the amounts, all in shares of it.
        wanted = [
            1
            - step_seconds(cluster, one, software) / taken
            + sum(x * column[row] for x, column in zip(now, columns, strict=True))
            for row, (one, taken) in enumerate(steps.items())
        ]
        found = nonnegative(columns, wanted, least)
        cluster = replace(cluster, device=_with(cluster.device, found))
    return cluster


def step_seconds(cluster: Cluster, one: Reference, software: Software) -> float:
    """Seconds of a reference step by the time model."""
    plan = one.plan()
    return time_split(Question(one.model(), cluster, software, 1, plan.batch), plan).total


def _amounts(device: Device) -> list[float]:
    """The amounts that a step's time is linear in: seconds of a FLOP, of a byte, of a kernel, of a step."""
    return [
        1 / (device.peak_flops * device.matrix_efficiency),
        1 / (device.memory_bandwidth * device.memory_efficiency),
        device.kernel_overhead,
        device.step,
    ]


def _with(device: Device, amounts: Sequence[float]) -> Device:
    flop, byte, kernel, step = amounts
    return replace(
        device,
        matrix_efficiency=1 / (device.peak_flops * flop),
        memory_efficiency=1 / (device.memory_bandwidth * byte),
        kernel_overhead=kernel,
        step=step,
    )


def _slope(cluster: Cluster, one: Reference, position: int, software: Software) -> float:
    """The derivative of a step's seconds by an amount."""
    amounts = _amounts(cluster.device)
    by = max(1e-4 * amounts[position], 1e-15 if position < 2 else 1e-9)
    amounts[position] += by
    more = replace(cluster, device=_with(cluster.device, amounts))
    return (step_seconds(more, one, software) - step_seconds(cluster, one, software)) / by


def nonnegative(columns: Sequence[Sequence[float]], wanted: Sequence[float], least: Sequence[float]) -> list[float]:
    """The amounts x ≥ least with the least squares of Σ x_i column_i - wanted, one coordinate after the other."""
    norms = [sum(value * value for value in column) for column in columns]
    found = list(least)
    rest = [
        want - sum(x * column[row] for x, column in zip(found, columns, strict=True)) for row, want in enumerate(wanted)
    ]
    for _ in range(3000):
        for position, column in enumerate(columns):
            if not norms[position]:
                continue
            change = sum(value * left for value, left in zip(column, rest, strict=True)) / norms[position]
            change = max(change, least[position] - found[position])
            found[position] += change
            rest = [left - change * value for value, left in zip(column, rest, strict=True)]
    return found
