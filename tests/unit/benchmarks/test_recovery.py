"""Training under losses: settings that leave no room for them, and losses that did not come."""

from __future__ import annotations

import pytest

from benchmarks import recovery
from benchmarks.recovery import Settings


def test_steps_have_room_for_all_losses() -> None:
    with pytest.raises(ValueError, match="5 losses of a kind in 120 steps: give --steps 125 or more"):
        Settings(steps=120)
    assert Settings(steps=125).apart == 2 * recovery.APART


@pytest.mark.parametrize(("hosts", "islands", "succeeded"), [(1, 2, True), (0, 2, False), (1, 1, False)])
def test_a_run_whose_training_was_over_before_its_losses_has_failed(hosts: int, islands: int, succeeded: bool) -> None:
    """An island that is lost comes again, which is another event."""
    curve = [[1.0, 1, 5.5, 2]]
    runs = [
        {"kind": kind, "seconds": 1.0, "curve": curve, "events": [{"what": kind}] * count}
        for kind, count in (("none", 0), ("host", hosts), ("island", islands))
    ]
    kinds = recovery.kinds_of(runs)
    assert [one["events"] for one in kinds] == [0, hosts, islands]
    result = {"settings": {"losses": 1}, "runs": runs, "kinds": kinds}
    assert recovery.BENCHMARK.succeeded(result) is succeeded
