"""A mover whose controller is lost while it keeps the session's calls from leaving."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

import pytest

from pathways_ray.client.events import Disconnected
from pathways_ray.client.moving import Ask, Copy, Hold, Release, Step
from pathways_ray.errors import ControllerLost, WaitTimeout
from pathways_ray.transport.messages import CreateSlice, Held, ListHeld, Register
from tests.unit.client.offline import LIMIT_S, Background, Offline


@pytest.fixture
def offline() -> Offline:
    offline = Offline()
    offline.session._core.resume_tag = "tag"
    offline.session._driver.resume = lambda: None
    return offline


def carry_out(offline: Offline, steps: Generator[Step, Any, None]) -> None:
    offline.session._mover._carry_out(steps, "it was not moved", {})


def test_who_holds_the_session_does_not_wait_for_another_controller(offline: Offline) -> None:
    """The session could not come back meanwhile, and would be given up."""

    def steps() -> Generator[Step, Any, None]:
        yield Ask(ListHeld(7, ()))
        yield Hold()
        yield Ask(ListHeld(7, ()))
        yield Release()
        yield Ask(ListHeld(7, ()))

    carry_out(offline, steps())
    assert offline.controller.patient == [True, False, True]


def test_a_copy_does_not_wait_in_the_queue_of_a_session_that_is_held(offline: Offline) -> None:
    """
    1. The controller is lost before a copy leaves. It would wait for the successor, and that for the end of the move.
    2. The copy fails, and the calls of the session go on.
    """
    core, driver = offline.session._core, offline.session._driver
    made = core.new_buffers(1)

    def steps() -> Generator[Step, Any, None]:
        yield Hold()
        driver.handle(Disconnected("the controller is gone"))
        try:
            yield Copy(Register(1, b"", {}), [], made)
        except ControllerLost:
            yield Release()
            raise

    with pytest.raises(ControllerLost, match="the controller is gone"):
        Background(lambda: carry_out(offline, steps())).end()
    assert not core.pending
    assert driver.sending.acquire(timeout=1)
    driver.sending.release()


def test_a_session_that_asks_for_a_slice_is_suspended_with_it(offline: Offline) -> None:
    """Else the slice would come to a session that is suspended, and the controller would take it for resumed."""
    asked, there = threading.Event(), threading.Event()

    def made(_: CreateSlice) -> None:
        asked.set()
        assert there.wait(LIMIT_S)

    offline.controller.answers = {CreateSlice: made, ListHeld: Held(())}
    session = offline.session
    asking = Background(lambda: session.virtual_slice((2,), ("x",)))
    assert asked.wait(LIMIT_S)
    giving_way = Background(lambda: session._mover.suspend(None, gives_way=True))
    assert giving_way.waits
    assert [type(one) for one in offline.controller.calls] == [CreateSlice]
    there.set()
    asking.end()
    giving_way.end()
    assert session._driver.suspension is not None
    assert [one.mesh.id for one in session._driver.suspension.slices] == [asking.result.id]


def test_a_session_that_gives_way_lets_its_calls_go_on_where_it_has_to_move(offline: Offline) -> None:
    """They may wait for the move."""
    session = offline.session
    session._core.pending[1] = session._core.new_buffers(1)
    giving_way = Background(lambda: session._mover.suspend(None, gives_way=True))
    assert giving_way.waits
    session._mover.vacate([])
    with pytest.raises(WaitTimeout, match="the session was not suspended: a slice of it has to move first"):
        giving_way.end()
    assert session._driver.suspension is None
    assert session._driver.sending.acquire(timeout=LIMIT_S)
