"""Ratios of what is seen and unseen are named as they are taken."""

from __future__ import annotations

from typing import Any

from benchmarks import observing


def test_ratios_are_those_of_their_names() -> None:
    """With records a stream takes twice the wall time and four times the CPU time."""
    result: dict[str, Any] = {"rows": [], "ratios": []}
    found = {observing.OFF: [(1.0, 1.0)], observing.RECORDS: [(2.0, 4.0)]}
    observing._note(result, observing.COALESCED, 100, found)
    rate, cpu = result["ratios"]
    records = observing.RECORDS
    assert (rate["name"], rate["median"]) == (f"{records} / nothing, {observing.COALESCED}", 0.5)
    assert (cpu["name"], cpu["median"]) == (f"CPU time, nothing / {records}, {observing.COALESCED}", 0.25)
