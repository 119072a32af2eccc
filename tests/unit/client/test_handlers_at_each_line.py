"""A signal handler that uses the session, which comes at each line of what a call does beside its waits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest

from pathways_ray.client import array_pieces, data, upload_turns
from pathways_ray.client.array_pieces import FetchedArray
from pathways_ray.client.data import DataLinks
from pathways_ray.client.local_reader import Sleeper
from pathways_ray.client.upload_turns import MAX_COMING_BYTES, MAX_PIPES, UploadTurns
from pathways_ray.transport import thread_links
from pathways_ray.transport.messages import FetchPart, FetchShards, Free
from pathways_ray.transport.thread_links import Outbox, is_writing
from tests.unit.client.offline import Background
from tests.unit.client.test_data import plan_of


def lines_of(module: ModuleType, work: Callable[[], object], handler: Callable[[], object]) -> int:
    """Does something once for each line of a module that it comes to, and has the handler called before that line, in
    the same thread; returns how many there were."""

    def interrupted(line: int) -> bool:
        left = line

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename == module.__file__ and event == "line":
                left -= 1
                if left == 0:
                    handler()
            return trace

        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(None)
        return left <= 0

    count = 0
    while Background(partial(interrupted, count + 1)).end():
        count += 1
    return count


@pytest.mark.parametrize("size", [8, 128], ids=["small", "big"])  # the shards of the bigger one are joined as they come
@pytest.mark.parametrize("spec", [(("x",), ()), ((), ("x",))], ids=["rows", "columns"])
def test_a_part_of_an_array_that_comes_again_in_a_handler_is_taken_once(spec: Any, size: int) -> None:
    array = np.arange(size * size, dtype=np.float32).reshape(size, size)
    plan = plan_of(array, spec, 2)
    parts = []
    for device, (box, _) in enumerate(plan.shards):
        shard = np.ascontiguousarray(array[tuple(slice(*edge) for edge in box)]).tobytes()
        parts.append(FetchPart(1, device, 0, len(shard), shard))
    fetching = FetchedArray(plan)

    def work() -> None:
        nonlocal fetching
        fetching = FetchedArray(plan)
        for part in parts:
            fetching.by_host[0].add(part)
        assert fetching.is_there
        np.testing.assert_array_equal(fetching.value(), array)

    def again() -> None:
        if fetching.by_host:
            for part in parts:
                fetching.by_host[0].add(part)

    assert lines_of(array_pieces, work, again) > 20
    together = FetchShards(1, b"".join(part.data for part in parts))

    def work_together() -> None:
        nonlocal fetching
        fetching = FetchedArray(plan)
        fetching.by_host[0].add_all(together)
        np.testing.assert_array_equal(fetching.value(), array)

    def again_together() -> None:
        if fetching.by_host:
            fetching.by_host[0].add_all(together)

    assert lines_of(array_pieces, work_together, again_together) > 15


def test_a_thread_that_ends_turns_waits_for_none_that_was_interrupted_as_it_took_one() -> None:
    """All turns are taken but one. The handler waits for the thread that reads, as it does where it wants a value."""
    turns = UploadTurns(lambda: False)
    for request in range(1, MAX_PIPES):
        turns.hand(request, behind_parts=False)
    turns.come({100: MAX_COMING_BYTES - 1}, waits=True)

    def work() -> None:
        turns.hand(200, behind_parts=False)
        turns.come({300: 1}, waits=True)
        for request in (200, 300):
            turns.end(request)

    def handler() -> None:
        Background(lambda: turns.end(400)).end()

    assert lines_of(upload_turns, work, handler) > 20
    assert not turns.are_taken
    assert [request in turns for request in (1, 100, 200, 300)] == [True, True, False, False]


def test_turns_are_waited_for_and_come_in_bytes_and_numbers() -> None:
    """
    1. As many arrays as may be are on their way by pipes; a further one waits until one of them has come.
    2. The same for bytes in parts; who may not wait does not, and what is larger than all may be goes alone.
    3. What comes behind parts waits for those that were before it, and for no later ones.
    """
    over = False
    turns = UploadTurns(lambda: over)
    for request in range(MAX_PIPES):
        turns.hand(request, behind_parts=False)
    waiting = Background(lambda: turns.hand(50, behind_parts=False))
    assert waiting.waits
    turns.end(3)
    waiting.end()
    assert turns.are_taken

    turns.come({100: 2 * MAX_COMING_BYTES}, waits=True)
    waiting = Background(lambda: turns.come({101: 1}, waits=True))
    turns.come({102: 1}, waits=False)
    assert waiting.waits
    turns.end(100)
    waiting.end()

    turns.end(50)
    waiting = Background(lambda: turns.hand(51, behind_parts=True))
    turns.come({103: 1}, waits=True)
    turns.end(101)
    assert waiting.waits
    turns.end(102)
    waiting.end()

    waiting = Background(lambda: turns.hand(52, behind_parts=False))
    over = True
    turns.wake()
    waiting.end()


def test_a_thread_that_has_the_right_to_write_says_that_it_writes_before_it_has_written() -> None:
    outbox, written = Outbox(), list[bytes]()

    def write(data: bytes, _wait: bool) -> bool:
        if data:
            written.append(data)
        return True

    outbox.attach(write, direct=True)

    def work() -> None:
        written.clear()
        outbox.send(Free((1,)))
        assert written
        assert not is_writing()

    def handler() -> None:
        assert is_writing() or written or not outbox._writing.locked()

    assert lines_of(thread_links, work, handler) > 10


def test_a_handler_gets_a_file_in_the_midst_of_a_call_that_gets_one() -> None:
    links, here, there = DataLinks(1, "", ()), Sleeper(), Sleeper()
    got: list[object] = []

    def work() -> None:
        assert links._new(here, object) is not None
        links._with_files.discard(here)

    def handler() -> None:
        got.append(links._new(there, object))
        links._with_files.discard(there)

    assert lines_of(data, work, handler) > 3
    assert None not in got
    assert not links._with_files
