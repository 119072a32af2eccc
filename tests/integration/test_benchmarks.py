"""The benchmarks run from end to end, at their smallest size: that they do, not how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.registry import BENCHMARKS, entry_of


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


@pytest.mark.long
@pytest.mark.timeout(360)  # six clusters start, one after the other
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "tenants"])
def test_others(name: str, python: Any, tmp_path: Path) -> None:
    """Each writes a result; a system that did not run is one whose environment is not built."""
    target = tmp_path / f"{name}.json"
    process = python.command("-m", "benchmarks", "run", name, "--smoke", "--json", str(target), RAY_ADDRESS="")
    python.finish(process, timeout=340)
    found = json.loads(target.read_text())
    assert entry_of(found["benchmark"]) is BENCHMARKS[name]
    assert any(found.get(key) for key in ("rows", "launches", "lines"))
    for topology in (found, *found.get("topologies", ())):
        assert all("its environment" in error for error in topology.get("errors", {}).values()), topology["errors"]
