"""A scheduler's process: what it says when it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pathways_ray.scheduler.actor import IslandScheduler
from pathways_ray.scheduler.core import SchedulerCore
from pathways_ray.scheduler.events import Exit, HostConnected, Ticked
from pathways_ray.transport.messages import Done, FromHost, HostUp, Stored
from tests.unit.helpers import VECTOR


def test_a_scheduler_that_ends_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    """Its log may go with the machine, and Ray keeps what its actors print."""
    scheduler: Any = IslandScheduler.__new__(IslandScheduler)
    scheduler.process = "scheduler 0"
    scheduler.core = SimpleNamespace(handle=lambda event, now: [Exit("there was no controller for 60 s")])
    scheduler._handle(Ticked())
    assert capfd.readouterr().out == "scheduler 0 ends: there was no controller for 60 s\n"


@pytest.mark.parametrize("is_there", [True, False])
def test_what_hosts_report_together_goes_to_the_controller_in_its_order(is_there: bool) -> None:
    """What the scheduler knows nothing of itself, and what is for it too, or comes of a process that has ended. Without
    a controller it is lost."""
    told: list[FromHost] = []
    scheduler: Any = IslandScheduler.__new__(IslandScheduler)
    scheduler.core = SchedulerCore(0, (0,), 4)
    scheduler.controller = SimpleNamespace(send_all=told.extend, send=told.append) if is_there else None
    scheduler.core.handle(HostConnected(HostUp(0, 2, "t", "d", 2, 1)), 0.0)
    stored = [Stored(0, 1, number, 1, VECTOR, ()) for number in range(5)]
    scheduler._take(0, 2, stored[:2])
    scheduler._take(0, 1, stored[:2])
    scheduler._take(0, 2, stored[2:3])
    scheduler._take(0, 2, [stored[3], Done((99,)), stored[4]])
    scheduler._take(0, 2, [])
    assert told == (stored if is_there else [])
