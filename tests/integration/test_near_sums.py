"""Small sums over hosts of one machine, which go from one process to the other, on the real runtime."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_hosts_exchange_what_they_sum(python: Any) -> None:
    """
    1. All-reduces of one device on each of two hosts have their values, in streams and waited for, and both hosts say
       that they have exchanged them; so have those of four hosts, two by two.
    2. So do those of arguments that come late, on all hosts or on one, with others behind them.
    3. An argument that failed is a typed error in bounded time, and the next call has its value.
    4. Each host in turn gets SIGKILL amid a stream, which ends with a typed error in bounded time. The island restarts,
       and its hosts exchange sums again.
    """
    out = python.run("near_sums", timeout=220)
    print(out)
    assert out.rstrip().endswith("nothing was wrong")
