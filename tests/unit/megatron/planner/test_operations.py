"""The roofline of single operations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ptdp.planner.operations import Product, copy_seconds, kernels_seconds, product_seconds
from tests.unit.megatron.planner.helpers import selene

DEVICE = selene().device
SIZES = st.integers(1, 20000)


@given(m=SIZES, n=SIZES, k=SIZES, count=st.integers(1, 64))
def test_no_product_beats_the_peak_or_its_bytes(m: int, n: int, k: int, count: int) -> None:
    product = Product(m, n, k, count)
    seconds = product_seconds(DEVICE, product)
    assert seconds >= product.flops / (DEVICE.peak_flops * DEVICE.matrix_efficiency)
    assert seconds >= copy_seconds(DEVICE, product.bytes)


def test_large_products_reach_the_efficiency_and_small_ones_do_not() -> None:
    large, small = Product(8192, 16384, 16384), Product(256, 256, 64)
    reached = [product.flops / product_seconds(DEVICE, product) / DEVICE.peak_flops for product in (large, small)]
    assert reached[0] == pytest.approx(DEVICE.matrix_efficiency, rel=0.05)
    assert reached[1] < 0.02


def test_a_product_that_spills_into_one_more_wave_is_slower() -> None:
    """108 units, tiles of 128 × 256: 108 tiles are one wave."""
    full, spilled = Product(128 * 12, 256 * 9, 4096), Product(128 * 12, 256 * 9 + 1, 4096)
    assert product_seconds(DEVICE, spilled) > 1.2 * product_seconds(DEVICE, full)


def test_scores_that_stay_on_the_chip_cost_no_bytes() -> None:
    product = Product(2048, 2048, 64, 96)
    resident = Product(2048, 2048, 64, 96, resident=2.0 * 96 * 2048 * 2048)
    assert resident.bytes == product.bytes - 2.0 * 96 * 2048 * 2048
    assert product_seconds(DEVICE, resident) < product_seconds(DEVICE, product)


def test_kernels_cost_their_bytes_and_their_starts() -> None:
    rate = DEVICE.memory_bandwidth * DEVICE.memory_efficiency
    assert kernels_seconds(DEVICE, (1e9, 2e9)) == pytest.approx(3e9 / rate + 2 * DEVICE.kernel_overhead)
