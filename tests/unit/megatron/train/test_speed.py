"""The peak that is measured is that of the products, and not of launches."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ptdp.train import speed
from megatron_ptdp.train.speed import LONG_S, PRODUCTS, SIDES


@pytest.mark.parametrize(
    ("flops", "launch_s", "side"), [(1e11, 1e-4, SIDES[0]), (1e13, 1e-3, SIDES[1]), (7e14, 1e-3, SIDES[2])]
)
def test_products_are_as_large_as_a_device_needs_to_take_long(
    flops: float, launch_s: float, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds_of(layout: Any, dtype: str, side: int) -> float:
        return launch_s + 2.0 * side**3 * PRODUCTS / flops

    monkeypatch.setattr(speed, "seconds_of", seconds_of)
    found, chosen = speed.measured(None, "bfloat16")  # type: ignore[arg-type]
    assert chosen == side
    assert 0.85 * flops < found < flops
    peak = speed.peak_of(None, 0.0, "bfloat16")  # type: ignore[arg-type]
    assert (peak.flops, peak.source) == (
        found,
        f"measured: bfloat16 products of {side} × {side} on all devices at once",
    )
    assert seconds_of(None, "", side) >= LONG_S
