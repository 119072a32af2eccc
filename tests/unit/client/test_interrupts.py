"""Ctrl-C at each step of what a session does: nothing is left half done, and the next call finds all as it was."""

from __future__ import annotations

import itertools

import pytest

from pathways_ray.client.session import Session
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import CloseSession
from tests.unit.client.offline import Offline
from tests.unit.client.test_session import interrupted

# --- the end ----------------------------------------------------------------------------------------------------------


def test_closing_that_is_interrupted_at_any_step_ends_the_session_at_the_latest_by_the_next_call() -> None:
    for step in itertools.count():
        offline = Offline()
        offline.session._core.resume_tag = "tag"
        codes = Session.close.__code__, Session._hang_up.__code__
        cut = interrupted(codes, step, offline.session.close)
        offline.session.close()
        assert offline.controller.closed, f"step {step}"
        assert offline.hosts.failure == Failure("SessionClosed", "the session ended: it was shut down")
        if not cut:
            break
    assert step > 10


def test_who_waits_no_longer_for_the_answer_of_a_session_s_end_has_it_closed() -> None:
    offline = Offline()

    def ctrl_c(_: CloseSession) -> None:
        raise KeyboardInterrupt

    offline.controller.answers[CloseSession] = ctrl_c
    with pytest.raises(KeyboardInterrupt):
        offline.session.close()
    assert offline.controller.closed
    assert offline.session.closed_because == "it was shut down"
    offline.session.close()
    assert offline.controller.calls == [CloseSession(7)]
