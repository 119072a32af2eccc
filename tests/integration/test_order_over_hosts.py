"""Computations over hosts run in one order on all of them, on the real runtime."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_calls_over_hosts_keep_their_order(python: Any) -> None:
    """Calls over two hosts that do not depend on each other, and that nobody waits for, have their values: of many
    sizes, with arguments that are there or come along, and on slices that have devices in common."""
    out = python.run("order_over_hosts", timeout=220)
    print(out)
    assert out.rstrip().endswith("nothing was wrong")
