"""Controllers that stood still."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pathways_ray.controller import events
from pathways_ray.controller.standstill import AFTERMATH_S, LONG_S, Standstill
from pathways_ray.controller.tenants import Tenant, TokenOwner
from pathways_ray.transport.capabilities import resume_tag
from pathways_ray.transport.message import VERSION
from pathways_ray.transport.messages import ResumeSession

PERIOD_S = 1.0
LONG = PERIOD_S + LONG_S + 0.5
SESSIONS = {7}
SECRET = "secret"
TENANT = "ann"


def made(computed: Callable[[], float] = lambda: 0.0) -> Standstill:
    found = Standstill(PERIOD_S, SECRET, computed)
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
    event = resumed(TokenOwner(Tenant(TENANT), "digest"), resume_tag(SECRET, 7, TENANT))
    assert made().explains(event, SESSIONS, 102.0 + LONG)
    assert not made().explains(event, {VERSION}, 102.0 + LONG)


def resumed(caller: events.Caller, tag: str, version: int = VERSION) -> events.Requested:
    return events.Requested(1, caller, ResumeSession(version, 7, tag, "", (), (), 1), 10, "fresh")


def test_a_client_that_says_it_comes_again_has_to_show_it() -> None:
    """Another tenant, or the bearer of another session's secret, would end the controller at will."""
    tag = resume_tag(SECRET, 7, TENANT)
    for event in (
        resumed(TokenOwner(Tenant(TENANT), "digest"), "tag"),
        resumed(TokenOwner(Tenant("ben"), "digest"), tag),
        resumed(7, tag),
        resumed(None, tag),
        resumed(TokenOwner(Tenant(TENANT), "digest"), tag, VERSION - 1),
    ):
        assert not made().explains(event, SESSIONS, 102.0 + LONG)


@pytest.mark.parametrize(("computed", "stood"), [(LONG, False), (LONG - LONG_S, False), (0.2, True)])
def test_a_controller_that_computes_does_not_stand_still(computed: float, stood: bool) -> None:
    """Its own threads answer pings meanwhile."""
    clock = [30.0]
    found = made(lambda: clock[0])
    clock[0] += computed
    assert found.explains(events.StreamEnded(7), SESSIONS, 102.0 + LONG) == stood
    assert found.explains(events.StreamEnded(7), SESSIONS, 102.0 + LONG + PERIOD_S) == stood


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
    assert not Standstill(PERIOD_S, SECRET, lambda: 30.0).explains(events.StreamEnded(7), SESSIONS, 1e6)
