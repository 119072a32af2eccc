"""Islands of several hosts: one JAX group each, compiled functions that span them, transfers between islands."""

from __future__ import annotations

import pytest

from tests.integration.conftest import Cluster, Scripts


@pytest.mark.timeout(240)
def test_islands_of_two_hosts(python: Scripts, pairs: Cluster) -> None:
    out = python.run("islands_of_two_hosts", pairs.url, pairs.token, timeout=220)
    assert out.splitlines() == ["layouts ok", "sums ok", "scatter refused", "both ok"]
