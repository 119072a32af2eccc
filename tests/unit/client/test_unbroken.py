"""Work that Ctrl-C does not break off."""

from __future__ import annotations

import contextvars
import signal
import threading
from functools import partial
from typing import Any

import pytest

from pathways_ray.client.interrupted import new_lock
from pathways_ray.client.unbroken import unbroken
from pathways_ray.errors import UsageError
from tests.unit.client.offline import LIMIT_S


def test_ctrl_c_ends_the_wait_and_not_the_work() -> None:
    """The work is told."""
    user, done = threading.get_ident(), threading.Event()

    def work(left: threading.Event) -> None:
        signal.pthread_kill(user, signal.SIGINT)
        assert left.wait(LIMIT_S)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        unbroken(work, new_lock())
    assert done.wait(LIMIT_S)


def test_what_it_gives_or_raises_is_that_of_the_work() -> None:
    setting = contextvars.ContextVar("setting", default=0)
    setting.set(3)

    def refused(_: threading.Event) -> None:
        raise UsageError("no")

    assert unbroken(lambda left: (setting.get(), left.is_set()), new_lock()) == (3, False)
    with pytest.raises(UsageError, match="no"):
        unbroken(refused, new_lock())


def test_a_thread_that_has_the_lock_would_wait_for_itself() -> None:
    lock = new_lock()
    with lock, pytest.raises(UsageError, match="a signal handler or a destructor"):
        unbroken(lambda _: None, lock)


def test_what_a_handler_calls_amid_another_call_is_done_in_its_thread() -> None:
    """The other thread would wait for what the interrupted call has, such as the turn to read."""
    threads: list[int] = []
    handler = partial(unbroken, lambda _: threads.append(threading.get_ident()), new_lock())
    within: dict[str, Any] = {"__name__": "pathways_ray.client.somewhere"}
    exec("def call(handler): handler()", within)

    def handle() -> None:
        handler()

    within["call"](handle)
    assert threads == [threading.get_ident()]
    handle()
    assert threads[1] != threads[0]
