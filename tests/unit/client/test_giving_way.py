"""Calls of a session that is suspended for another one: they wait, and go on when it has come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pathways_ray.client.reading import reading
from pathways_ray.client.suspension import Suspension
from pathways_ray.errors import SessionSuspended
from tests.unit.client.local import LocalSession, opened


@pytest.fixture
def session() -> Iterator[LocalSession]:
    session = opened()
    yield session
    session.close()


def calls(session: LocalSession) -> list[Callable[[], Any]]:
    """An upload, a fetch, and what checks a session before it is used."""
    where = session.virtual_slice((1,))
    driver = session._driver

    def read() -> None:
        reading(driver, lambda: None)

    return [lambda: session.put(np.ones(2), where, ()), driver.check_active, read]


@pytest.mark.parametrize("number", range(3))
def test_calls_wait_until_the_session_has_come_back(session: LocalSession, number: int) -> None:
    driver, over = session._driver, threading.Event()
    call = calls(session)[number]
    driver.suspend(Suspension((), {}, gives_way=True), lambda number: None)
    thread = threading.Thread(target=lambda: (call(), over.set()))
    thread.start()
    assert not over.wait(0.05)
    assert driver.sending.acquire(timeout=10), "who waits does not keep what resuming needs"
    driver.sending.release()
    driver.suspend(None, lambda number: None)
    assert over.wait(10)
    thread.join()
    assert not driver.gives_way


def test_a_session_that_its_user_has_suspended_says_so(session: LocalSession) -> None:
    driver = session._driver
    driver.suspend(Suspension((), {}), lambda number: None)
    for call in calls(session):
        with pytest.raises(SessionSuspended, match="call its resume"):
            call()
    driver.suspend(None, lambda number: None)


def test_who_waits_hears_why_the_session_does_not_come_back(session: LocalSession) -> None:
    driver, told = session._driver, threading.Event()
    driver.suspend(Suspension((), {}, gives_way=True), lambda number: None)

    def waits() -> None:
        with pytest.raises(SessionSuspended, match=r"call its resume\(\).*could not come back: no island can hold it"):
            driver.check_active()
        told.set()

    thread = threading.Thread(target=waits)
    thread.start()
    assert not told.wait(0.05)
    driver.suspend(Suspension((), {}, stuck="no island can hold it"), lambda number: None)
    assert told.wait(10)
    thread.join()
    driver.suspend(None, lambda number: None)
