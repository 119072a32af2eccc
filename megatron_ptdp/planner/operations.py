"""Seconds of one operation on a device, by a roofline.

A matrix product runs tile by tile on the device's units, so a product that fills its last wave badly, or has a short
inner dimension, is slower; it is never faster than its bytes. Everything else is bound by memory. Each kernel costs
its start and end beside that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from megatron_ptdp.config.cluster import Device

SPLITS = (1, 2, 4)
"""Ways to cut the inner dimension of a product over units, as libraries do for small results."""


@dataclass(frozen=True, slots=True)
class Product:
    """`count` matrix products of m×k by k×n. `resident` bytes never go to memory (scores of flash attention).

    `element` is bytes of a number: 2 in half precision.
    """

    m: int
    n: int
    k: int
    count: int = 1
    resident: float = 0.0
    element: int = 2

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def bytes(self) -> float:
        moved = self.element * self.count * (self.m * self.k + self.k * self.n + self.m * self.n)
        return max(0.0, moved - self.resident)


@lru_cache(maxsize=65536)
def product_seconds(device: Device, product: Product) -> float:
    """Seconds of a matrix product: the best of the device's tiles, or its bytes."""
    per_unit = device.peak_flops * device.matrix_efficiency / device.units
    best = float("inf")
    for rows, columns, speed in device.tiles:
        tiles = product.count * ceil(product.m / rows) * ceil(product.n / columns)
        for split in SPLITS:
            waves = ceil(tiles * split / device.units)
            work = 2.0 * rows * columns * (product.k / split + device.tile_depth)
            best = min(best, waves * work / (per_unit * speed))
    return max(best, copy_seconds(device, product.bytes)) + device.kernel_overhead


def copy_seconds(device: Device, size: float) -> float:
    """Seconds to read and write `size` bytes in all, without a kernel's start."""
    return size / (device.memory_bandwidth * device.memory_efficiency)


def kernels_seconds(device: Device, sizes: tuple[float, ...]) -> float:
    """Seconds of kernels that each read and write one of the sizes, in bytes."""
    return copy_seconds(device, sum(sizes)) + len(sizes) * device.kernel_overhead
