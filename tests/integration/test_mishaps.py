"""A tenant's mishap stays his own, and a crowded machine is nobody's death."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_what_was_donated_to_a_launch_that_fails_with_another_host_lives_on(python: Any) -> None:
    assert "lives on" in python.run("mishap_donation", timeout=140)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_what_has_not_begun_is_cancelled_and_a_loop_without_end_holds_up_nobody_else(python: Any) -> None:
    assert "cancelled" in python.run("mishap_cancel", timeout=140)


@pytest.mark.long
@pytest.mark.timeout(150)
def test_a_crowded_machine_loses_nothing(python: Any) -> None:
    """Sixty processes that never rest, for 15 s: nearly twice the silence after which a process is looked at."""
    assert "rounds" in python.run("mishap_slow", "60", "15", "0", timeout=140)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_machine_with_three_hundred_busy_processes_loses_nothing(python: Any) -> None:
    assert "rounds" in python.run("mishap_slow", "300", "300", "5", timeout=880)
