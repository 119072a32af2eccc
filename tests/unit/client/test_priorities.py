"""`pw.priority`: what its calls send."""

from __future__ import annotations

from typing import Any

import pytest

import pathways_ray as pw
from pathways_ray.client.priorities import PRIORITY
from pathways_ray.limits import MAX_INLINE_BYTES, MAX_SENT_INLINE_BYTES
from pathways_ray.transport.messages import Launch, Prepared, PrioritizedLaunch
from tests.unit.client.offline import Background, Offline


@pytest.mark.parametrize("level", [101, -101, 1.5, True, "high"])
def test_levels_are_whole_numbers_up_to_a_hundred(level: Any) -> None:
    with pytest.raises(pw.errors.UsageError, match="whole number from -100 to 100"), pw.priority(level):
        pass


def test_the_inner_block_counts_and_ends_with_an_error() -> None:
    with pw.priority(5):
        with pytest.raises(ZeroDivisionError), pw.priority(-1):
            _fail(PRIORITY.get())
        assert PRIORITY.get() == 5
    assert PRIORITY.get() == 0


def _fail(level: int) -> None:
    assert level == -1
    raise ZeroDivisionError


def test_calls_in_a_block_say_their_priority_and_those_of_other_threads_do_not() -> None:
    offline = Offline()

    def call() -> None:
        offline.session.launch(3, [], (offline.kind,))

    call()
    with pw.priority(7):
        call()
        Background(call).end()
    call()
    sent = [message for message in offline.controller.take() if isinstance(message, Launch)]
    assert [(type(m), getattr(m, "priority", 0)) for m in sent] == [
        (Launch, 0),
        (PrioritizedLaunch, 7),
        (Launch, 0),
        (Launch, 0),
    ]
    assert [m.launch for m in sent] == [1, 2, 3, 4]


def test_a_call_with_a_priority_carries_no_more_than_others_that_no_host_gets_at_once() -> None:
    offline = Offline()
    core = offline.session._core
    core.handle(Prepared(1, 7, 0), 0.0)
    core.early.allowed(0, True)
    assert offline.session.carries(1) == MAX_INLINE_BYTES
    with pw.priority(7):
        assert offline.session.carries(1) == MAX_SENT_INLINE_BYTES
