"""A hostile client floods the controller with everything that the protocol has; another tenant goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TOKEN = "the hostile tenant's token"
MOST_GROWN = {"controller": 2 << 30, "manager": 256 << 20}
"""Bytes that the processes may grow by. What a session may have waiting there is bounded by `limits.py`."""


def flooded(python: Any, folder: Path, peace_s: float, flood_s: float) -> dict[str, Any]:
    table = folder / "tenants.json"
    table.write_text(json.dumps({"tenants": [{"name": "hostile", "token": TOKEN}]}))
    out = python.run("hostile_cluster", str(table), TOKEN, str(peace_s), str(flood_s), timeout=flood_s + 100)
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    print(found)
    assert found["alive"], "a process was restarted"
    assert found["client_status"] == 0
    assert found["launches"][1] > 0
    for name, most in MOST_GROWN.items():
        assert found["grown"].get(name, 0) < most, f"the {name} grew by {found['grown'][name] >> 20} MiB"
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_hostile_client_ends_nobody_and_another_tenant_goes_on(python: Any, tmp_path: Path) -> None:
    """Ten seconds: every kind of flood has its turn in the long test only."""
    found = flooded(python, tmp_path, 2.0, 10.0)
    assert found["client"]["floods"] >= 3


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_minute_of_every_flood_leaves_others_their_latency(python: Any, tmp_path: Path) -> None:
    """Sessions of the hostile client end with reasons, or are refused with typed errors; the other tenant's launches
    take less than three times as long as in peace."""
    found = flooded(python, tmp_path, 10.0, 60.0)
    assert found["client"]["floods"] >= 14
    assert any("a batch of" in reason for reason in found["client"]["ended"])
    assert {"WireError", "TooLarge"} & found["client"]["said"].keys()
    assert found["flooded_p99"] < 3 * found["quiet_p99"]
