"""A host that is lost takes nothing of the other islands with it, and a client that cheats nothing of others."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.long
@pytest.mark.timeout(180)
def test_nothing_of_a_lost_host_stays_on_the_other_island(python: Any) -> None:
    """
    1. Launches to and from a host are under way when it is stopped, with 8 MiB each on the way between the islands.
    2. The other island goes on serving, and soon has neither their memory nor their parts.
    """
    out = python.run("survivors_of_a_host", timeout=170)
    print(out)
    assert "left: 0" in out


@pytest.mark.long
@pytest.mark.timeout(180)
def test_an_upload_that_hosts_have_in_part_or_not_alike_fails_its_own_launch_only(python: Any) -> None:
    """The island is not restarted, so another client's array stays; the next right upload is taken."""
    out = python.run("survivors_partial_upload", timeout=170)
    print(out)
    assert "hold the same part of it" in out
    assert "BufferLost" in out
    assert "the victim's array is there" in out


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sessions_outlive_a_controller_that_stood_still(python: Any) -> None:
    """A controller that is stopped for 9 s, for which clients do not wait, and goes on: sessions keep their arrays."""
    assert "both sessions went on" in python.run("stopped_controller", timeout=110)
