"""A mover whose controller is lost while it keeps the session's calls from leaving."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pathways_ray.client.events import Disconnected
from pathways_ray.client.moving import Ask, Copy, Hold, Release, Step
from pathways_ray.errors import ControllerLost
from pathways_ray.transport.messages import ListHeld, Register
from tests.unit.client.offline import Background, Offline


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
