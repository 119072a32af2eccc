"""The search for another controller, where it ends otherwise than it should."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pathways_ray.client import resumption
from pathways_ray.client.events import Disconnected
from pathways_ray.errors import ControllerLost, SessionClosed
from tests.unit.client.offline import Offline
from tests.waiting import until


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_whatever_goes_wrong_in_the_search_ends_the_session_for_all_that_wait(error: type[BaseException]) -> None:
    offline = Offline()
    offline.controller.unexpected = error("what nobody has thought of")
    core, driver = offline.session._core, offline.session._driver
    core.resume_tag = "tag"
    driver.handle(Disconnected("the controller is gone"))
    until(lambda: core.ended is not None)
    with pytest.raises(SessionClosed, match=f"the controller is gone; {error.__name__}: what nobody has thought of"):
        driver.check_open()


def test_without_a_thread_for_the_search_the_session_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object, **_named: object) -> Any:
        raise RuntimeError("can't start new thread")

    offline = Offline()
    offline.session._core.resume_tag = "tag"
    (y,) = offline.session.launch(1, [], (offline.kind,))
    monkeypatch.setattr(resumption, "threading", SimpleNamespace(Thread=no_thread))
    offline.session._driver.disconnected("its process died")
    with pytest.raises(ControllerLost, match="its process died; no thread can look for the next one: can't start new"):
        y.block_until_ready()
    with pytest.raises(SessionClosed, match="its process died; no thread can look for the next one"):
        offline.session.check_open()
