"""The benchmarks run from end to end, at their smallest size: that they do, not how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.long
@pytest.mark.timeout(240)  # a dozen processes start, most of them with JAX
def test_tenants(python: Any, tmp_path: Path) -> None:
    target = tmp_path / "tenants.json"
    process = python.command(
        "-m", "benchmarks.tenants", "--smoke", "--json", str(target), "--figures", str(tmp_path), RAY_ADDRESS=""
    )
    python.finish(process, timeout=220)
    found = json.loads(target.read_text())
    assert {(row["length_ms"], row["clients"]) for row in found["rows"]} == {(1.0, 0), (1.0, 1), (1.0, 2)}
    assert all(row["computations_per_second"]["min"] > 0 for row in found["rows"])
    assert {(ratio["clients"], ratio["against"]) for ratio in found["ratios"]} == {(1, 0), (2, 0), (2, 1)}
    assert found["switching"]["two_to_one"]["median"] > 0
    assert [one["clients"] for one in found["timelines"]] == [1, 2]
    assert [list(one["weights"].values()) for one in found["shares"]] == [[1, 1, 1, 1], [1, 2, 4, 8], [1, 1, 1, 1]]
    for one in found["shares"]:
        for way in ("device_seconds", "traced_seconds", "computations"):
            assert sum(one[way]["achieved"].values()) == pytest.approx(1)
        assert {tenant for tenant, *_ in one["picture"]} <= set(one["tenants"])
    names = {file.name for file in tmp_path.glob("*.png")}
    assert names == {"tenants-throughput.png", "tenants-timelines.png", "tenants-shares.png"}
