"""The islands that a layout of a training run uses."""

from __future__ import annotations

from typing import Any

from megatron_ptdp.parallel.layout import devices_there


def island(number: int, state: str = "up", tenant: str = "", devices: int = 2) -> dict[str, Any]:
    return {"island": number, "state": state, "tenant": tenant, "hosts": [{"up": True, "devices": [{}] * devices}]}


def test_a_layout_uses_islands_that_take_slices() -> None:
    there = [island(0, "draining"), island(1), island(2, "lost"), island(3), island(4, devices=0)]
    assert devices_there(there) == {1: 2, 3: 2}
    assert devices_there(there, asked=(0, 1)) == {0: 2, 1: 2, 3: 2}, "the error is about the one that was asked for"


def test_the_operator_leaves_the_islands_of_tenants_alone() -> None:
    bobs = [island(2, tenant="bob"), island(3, tenant="bob")]
    assert devices_there([*bobs, island(0), island(1)]) == {0: 2, 1: 2}
    assert devices_there(bobs) == {2: 2, 3: 2}, "as bob sees them"
    assert devices_there([]) == {}
