"""Islands of several hosts: one JAX group each, compiled functions that span them, transfers between islands."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.timeout(240)
def test_islands_of_two_hosts(python: Any) -> None:
    out = python.run("islands_of_two_hosts", timeout=220)
    for part in ("layouts ok", "sums ok", "scatter refused", "both ok"):
        assert part in out
    python.assert_none_left()
