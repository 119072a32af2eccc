"""Measurements of a cluster as a cluster file. Pure: `measure` takes the measurements, this makes sense of them.

What is measured: products of several sizes, a large copy, all-reduces inside an island and messages between islands of
several sizes, empty launches. Two points or more on a line give a latency and a rate. What cannot be measured from
inside (memory, power, price, failures) is given or left at a stated default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ptdp.planner.errors import PlanningError


@dataclass(frozen=True)
class Measured:
    """What was seen.

    Attributes:
        name: of the devices.
        devices: in one island.
        flops: best FLOP/s of a product, by its size n (n×n×n).
        copy_rate: bytes/s read and written.
        reductions: bytes of an all-reduce over the island's devices, and its seconds.
        messages: bytes from an island to another, and their seconds; empty with one island.
        launch: seconds of an empty launch.
    """

    name: str
    devices: int
    flops: dict[int, float]
    copy_rate: float
    reductions: Sequence[tuple[float, float]]
    messages: Sequence[tuple[float, float]]
    launch: float


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency in seconds and rate in bytes/s of the line through (bytes, seconds), by least squares.

    Errors are relative, so that small messages count as much as large ones. The latency is never below zero.

    Raises:
        PlanningError: fewer than two sizes, or seconds that do not grow with bytes.
    """
    if len({size for size, _ in points}) < 2:
        raise PlanningError("a latency and a rate need messages of two sizes or more")
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


def tile_depth(flops: dict[int, float]) -> int:
    """The inner dimension that a product's start and end are worth, from the smallest and the largest size.

    The model says rate(n) = peak · n/(n + depth); two sizes give the depth.
    """
    small, large = min(flops), max(flops)
    ratio = flops[large] / flops[small]
    if small == large or ratio <= 1:
        return 0
    return round(small * large * (ratio - 1) / max(large - ratio * small, small))


def cluster_text(seen: Measured, memory_bytes: float, software: str) -> str:
    """The TOML of a cluster file."""
    depth, fastest = tile_depth(seen.flops), max(seen.flops, key=lambda size: seen.flops[size])
    best = seen.flops[fastest] * (1 + depth / fastest)
    latency, rate = line(seen.reductions) if seen.devices > 1 else (1e-6, seen.copy_rate)
    # An all-reduce of S bytes over n devices sends 2 (n-1)/n S and has 2 (n-1) steps.
    share = 2 * (seen.devices - 1) / seen.devices if seen.devices > 1 else 1.0
    steps = max(1, 2 * (seen.devices - 1))
    text = f"""# Measured through the runtime. Shared machines wander: measure again when plans and runs disagree.
source = "pathways-plan calibrate"
software = "{software}"

[device]
name = "{seen.name}"
peak_flops = {best:.4g}         # the limit of the products of {", ".join(str(size) for size in sorted(seen.flops))}
matrix_efficiency = 1.0
units = 1
tiles = [[1, 1, 1.0]]
tile_depth = {depth}
memory_bytes = {memory_bytes:.4g}
memory_bandwidth = {seen.copy_rate:.4g}
memory_efficiency = 1.0
kernel_overhead = 0
launch = {seen.launch:.3g}        # an empty launch, the host's work included
reserved_bytes = 0
fragmentation = 0.05

[[network]]
name = "island"
size = {max(2, seen.devices)}
bandwidth = {rate * share:.4g}
efficiency = 1.0
latency = {latency / steps:.3g}

"""
    if seen.messages:
        latency, rate = line(seen.messages)
        text += f"""[[network]]
name = "dcn"
size = 0
bandwidth = {rate:.4g}
efficiency = 1.0
latency = {latency:.3g}

"""
    return (
        text
        + """[operations]                 # not measured
power_busy = 100
power_idle = 50
price = 0
mtbf_hours = 100000
checkpoint_bandwidth = 1e8
checkpoint_limit = 1e9
restart_seconds = 60
"""
    )
