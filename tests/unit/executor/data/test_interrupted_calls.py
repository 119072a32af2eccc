"""Ctrl-C at each step of what a client does beside its waits for a host of its machine: the next call finds all of it
as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from functools import partial
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pathways_ray.client.array_pieces import FetchPlan
from pathways_ray.client.buffer import Upload
from pathways_ray.client.data import DataLinks
from pathways_ray.client.data_link import DataLink
from pathways_ray.transport import pipes
from pathways_ray.transport.capabilities import slice_tag
from pathways_ray.transport.pipes import HostPipe, Pipe
from tests.unit.client.test_session import interrupted
from tests.unit.executor.data.test_server import (
    KIND,
    LARGE,
    LARGE_KIND,
    PLACED,
    SECRET,
    SESSION,
    SMALL,
    Host,
    whole,
)
from tests.waiting import until

__all__ = ["data", "host"]

from tests.unit.executor.data.test_server import data, host


def at_each_step(codes: Collection[CodeType], work: Callable[[], object], check: Callable[[str], None]) -> None:
    for step in itertools.count():
        cut = interrupted(codes, step, work)
        check(f"step {step}")
        if not cut:
            break
    assert step > 5


@pytest.mark.parametrize("readable", [False, True])
def test_an_upload_by_a_pipe_hangs_up(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """The host reads two pipes at a time, each for a minute where nobody hangs up: what is put later would wait."""
    if readable:
        monkeypatch.setattr("pathways_ray.client.data_link.MIN_READ_BYTES", 1)
    link, numbers, tag = data.link_to(0), itertools.count(1), slice_tag(SECRET, SESSION, PLACED)
    assert link.takes_files(LARGE.nbytes)
    (stream,) = host.server.streams

    def put() -> None:
        data.upload(next(numbers), LARGE, LARGE_KIND, (("x",),), PLACED, tag, lambda *_: None)

    def check(step: str) -> None:
        assert not link.pipes, step
        until(lambda: not stream.handed and not link.uploads)

    at_each_step(
        [DataLink._send_by_pipe.__code__, Pipe.write.__code__, Pipe._heard.__code__, Pipe._over.__code__], put, check
    )


def test_without_a_thread_for_what_a_host_does_not_take_an_upload_fails_and_hangs_up(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object, **_named: object) -> Any:
        raise RuntimeError("can't start new thread")

    link = data.link_to(0)
    assert link.takes_files(LARGE.nbytes)
    (stream,) = host.server.streams
    monkeypatch.setattr(HostPipe, "read_there", lambda *_: False)
    monkeypatch.setattr(Pipe, "_heard", lambda _: b"")
    monkeypatch.setattr(Pipe, "_sent", lambda _, part: part)
    monkeypatch.setattr(pipes, "threading", SimpleNamespace(Thread=no_thread))
    tag = slice_tag(SECRET, SESSION, PLACED)
    with pytest.raises(RuntimeError, match="new thread"):
        data.upload(1, LARGE, LARGE_KIND, (("x",),), PLACED, tag, lambda *_: None)
    assert not link.pipes
    until(lambda: not stream.handed)


def test_an_upload_that_was_noted_has_an_outcome(host: Host, data: DataLinks) -> None:
    """Else its session would wait for it without end: as it moves, and behind it where it has a quota."""
    numbers, tag = itertools.count(1), slice_tag(SECRET, SESSION, PLACED)
    noted: list[Upload] = []
    ended: list[Upload] = []

    def begun(upload: Upload) -> None:
        noted.append(upload)

    def done(upload: Upload, *_: object) -> None:
        ended.append(upload)

    def put() -> None:
        data.upload(next(numbers), SMALL, KIND, (("x",),), PLACED, tag, done, begun)

    def check(step: str) -> None:
        until(lambda: all(upload in ended for upload in noted))

    at_each_step([DataLinks.upload.__code__, begun.__code__], put, check)


@pytest.mark.parametrize("way", ["pipe", "file", "parts"])
def test_a_fetch_leaves_its_file_to_others_and_no_question(
    host: Host, data: DataLinks, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "file":
        monkeypatch.setattr(FetchPlan, "goes_by_pipe", False)
    for number in (1, 2):
        host.put(number, LARGE)
    link = data.link_to(0)
    assert link.takes_files(LARGE.nbytes)
    if way == "parts":
        monkeypatch.setattr(link, "takes_files", lambda size: False)
    along = {2: whole(LARGE_KIND)} if way == "parts" else None
    fetch = partial(data.fetch, 1, whole(LARGE_KIND), lambda: None, along)

    def check(step: str) -> None:
        assert (data._with_files, link.fetches, link.pipes) == (set(), {}, set()), step

    at_each_step([DataLinks._fetched.__code__, DataLinks._new.__code__, DataLinks._end.__code__], fetch, check)
    np.testing.assert_array_equal(fetch(), LARGE)


def test_a_wait_for_a_host_leaves_no_question(host: Host, data: DataLinks) -> None:
    host.put(1, SMALL)
    link = data.link_to(0)
    wait = partial(data.await_values, [1], [0], lambda: False)

    def check(step: str) -> None:
        assert (link.fetches, data.awaited) == ({}, {}), step

    at_each_step([DataLinks.await_values.__code__, DataLinks._end.__code__], wait, check)
