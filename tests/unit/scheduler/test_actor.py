"""A scheduler's process: what it says when it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pathways_ray.scheduler.actor import IslandScheduler
from pathways_ray.scheduler.events import Exit, Ticked


def test_a_scheduler_that_ends_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    """Its log may go with the machine, and Ray keeps what its actors print."""
    scheduler: Any = IslandScheduler.__new__(IslandScheduler)
    scheduler.process = "scheduler 0"
    scheduler.core = SimpleNamespace(handle=lambda event, now: [Exit("there was no controller for 60 s")])
    scheduler._handle(Ticked())
    assert capfd.readouterr().out == "scheduler 0 ends: there was no controller for 60 s\n"
