"""Controllers that stood still."""

from __future__ import annotations

import pytest

from pathways_ray.controller import events
from pathways_ray.controller.standstill import AFTERMATH_S, LONG_S, Standstill
from pathways_ray.transport.message import VERSION
from pathways_ray.transport.messages import ResumeSession

PERIOD_S = 1.0
LONG = PERIOD_S + LONG_S + 0.5
SESSIONS = {7}


def made() -> Standstill:
    found = Standstill(PERIOD_S)
    for now in (100.0, 101.0, 102.0):
        found.ran(now)
    return found


@pytest.mark.parametrize("kind", [events.StreamEnded, events.LinkEnded])
@pytest.mark.parametrize("has_run", [False, True])
def test_the_end_of_a_stream_behind_a_standstill_is_explained(kind: type, has_run: bool) -> None:
    found, now = made(), 102.0 + LONG
    if has_run:  # the clock's step comes first, or the news
        found.ran(now)
    assert found.explains(kind(7), SESSIONS, now)
    assert found.explains(kind(7), SESSIONS, now + AFTERMATH_S - 0.1)


def test_so_is_a_client_that_comes_again() -> None:
    request = ResumeSession(VERSION, 7, "tag", "", (), (), 1)
    event = events.Requested(1, None, request, 10, "secret")
    assert made().explains(event, SESSIONS, 102.0 + LONG)
    assert not made().explains(event, {VERSION}, 102.0 + LONG)


def test_that_of_one_that_ran_is_not() -> None:
    found = made()
    assert not found.explains(events.StreamEnded(7), SESSIONS, 102.0 + PERIOD_S + LONG_S - 0.1)


def test_nor_that_of_a_session_that_is_closed_nor_another_event() -> None:
    found, now = made(), 102.0 + LONG
    assert not found.explains(events.StreamEnded(8), SESSIONS, now)
    assert not found.explains(events.StreamOpened(7), SESSIONS, now)


def test_nor_that_of_one_that_comes_later() -> None:
    found, now = made(), 102.0 + LONG
    found.ran(now)
    for second in range(12):
        found.ran(now + second)
    assert not found.explains(events.StreamEnded(7), SESSIONS, now + AFTERMATH_S + 1.5)


def test_the_first_step_follows_no_standstill() -> None:
    assert not Standstill(PERIOD_S).explains(events.StreamEnded(7), SESSIONS, 1e6)
