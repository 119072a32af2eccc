"""No wait ends by its slice: what waits is woken."""

from __future__ import annotations

import os

import pytest

from pathways_ray import waits


@pytest.mark.slow
def test_every_wait_is_woken(python) -> None:
    """
    1. A cluster starts whose wait slices and ticks are an hour, client included.
    2. Slices, uploads, values, room for launches, deletions and cancellations are waited for. None hangs.
    """
    assert python.run("long_waits", timeout=150).split()[-1] == "all"


def test_the_shared_clusters_have_long_slices() -> None:
    assert "slices" in os.environ[waits.VARIABLE].split(",")
    assert waits.slice_s() == waits.LONG_S
