"""The search for another controller, where it ends otherwise than it should."""

from __future__ import annotations

import pytest

from pathways_ray.client.events import Disconnected
from pathways_ray.errors import SessionClosed
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
