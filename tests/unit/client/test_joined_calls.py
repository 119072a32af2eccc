"""Calls of several threads as one batch: which calls leave together, in whose thread, and how they end."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_ray as pw
from pathways_ray.client.joined_calls import Call, CallQueue, JoinedCalls
from pathways_ray.transport.messages import Launch
from tests.unit.client.offline import Background, Offline
from tests.waiting import until

LIMIT_S = 30.0


def test_what_comes_while_batches_are_under_way_leaves_together() -> None:
    """1. Two calls leave at once, each by itself. 2. Four gather. 3. The end of a batch takes as many of one kind as
    fit; another kind waits for the next, which it is smaller than and could grow beside."""
    queue = CallQueue(max_rows=8)
    first, second = Call("f", 8, ()), Call("f", 1, ())
    assert (queue.enter(first), queue.enter(second)) == ([first], [second])
    three, four, more, other = Call("f", 3, ()), Call("f", 4, ()), Call("f", 2, ()), Call("g", 1, ())
    assert [queue.enter(call) for call in (three, four, more, other)] == [[]] * 4
    assert queue.ended([first]) == [three, four]
    assert queue.leave(more)
    assert not queue.leave(three)
    assert queue.ended([second]) == []
    assert queue.ended([three, four]) == [other]
    assert queue.ended([three, four]) == []
    assert (queue.ended([other]), queue.under_way) == ([], [])


@pytest.mark.parametrize(("threads", "expected"), [(1, [1]), (2, [1, 1]), (8, [4, 4]), (16, [8, 8])])
def test_threads_that_come_back_one_by_one_leave_together_again(threads: int, expected: list[int]) -> None:
    """Each calls again as soon as its batch is over. In the end half of them are in each of two batches."""
    queue = CallQueue(max_rows=64)
    batches = [batch for _ in range(threads) if (batch := queue.enter(Call("f", 1, ())))]
    for _ in range(50):
        over = batches.pop(0)
        batches += [batch for batch in [queue.ended(over)] if batch]
        batches += [batch for _ in over if (batch := queue.enter(Call("f", 1, ())))]
        assert batches, "it stands still"
    assert sorted(map(len, batches)) == expected


class Strange:
    """A part of a call's kind that cannot be compared, as an array among the static parts of a user's pytree."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    def __hash__(self) -> int:
        return 0


def test_calls_that_cannot_be_compared_leave_each_by_itself() -> None:
    queue = CallQueue(max_rows=8)
    calls = [Call((Strange(),), 1, ()) for _ in range(4)]
    left = [queue.enter(call) for call in calls]
    left += [queue.ended([call]) for call in calls]
    assert left == [[calls[0]], [calls[1]], [], [], [calls[2]], [calls[3]], [], []]
    assert queue.under_way == []


class Held:
    """Batches that wait until the test lets them go."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.threads: list[int] = []
        self.go = threading.Event()
        self.error: BaseException | None = None
        self.interrupted = 0
        """The number of the batch whose thread Ctrl-C comes to."""

    def __call__(self, calls: Sequence[Call]) -> list[Any]:
        self.batches.append([call.arguments[0] for call in calls])
        number = len(self.batches)
        self.threads.append(threading.get_ident())
        if number <= 2:
            assert self.go.wait(LIMIT_S)
        if number == self.interrupted:
            raise KeyboardInterrupt
        if self.error is not None:
            raise self.error
        return [call.arguments[0] * 2 for call in calls]


@pytest.mark.parametrize("error", [None, ValueError("too hot")])
def test_each_thread_has_its_own_outcome(error: Exception | None) -> None:
    held = Held()
    joined = JoinedCalls(held, 4)
    with ThreadPoolExecutor(6) as pool:
        found = [pool.submit(joined.outcome, Call("f", 1, (number,))) for number in range(2)]
        until(lambda: len(held.batches) == 2)
        found += [pool.submit(joined.outcome, Call("f", 1, (number,))) for number in range(2, 6)]
        until(lambda: len(joined._queue.waiting) == 4)
        held.error = error
        held.go.set()
        if error is None:
            assert [one.result(LIMIT_S) for one in found] == [0, 2, 4, 6, 8, 10]
        else:
            assert [one.exception(LIMIT_S) for one in found] == [error] * 6
    assert sorted(map(len, held.batches)) == [1, 1, 4]
    assert joined._queue.under_way == []


def test_an_interrupted_thread_leaves_the_others_their_calls() -> None:
    """Ctrl-C comes to the thread that computes a batch, or is to: another one computes the rest."""
    held = Held()
    joined = JoinedCalls(held, 4)
    with ThreadPoolExecutor(6) as pool:
        found = [pool.submit(joined.outcome, Call("f", 1, (number,))) for number in range(2)]
        until(lambda: len(held.batches) == 2)
        found += [pool.submit(joined.outcome, Call("f", 1, (number,))) for number in range(2, 6)]
        until(lambda: len(joined._queue.waiting) == 4)
        held.interrupted = 3
        held.go.set()
        outcomes = [one.exception(LIMIT_S) or one.result() for one in found]
    interrupted = [k for k, outcome in enumerate(outcomes) if isinstance(outcome, KeyboardInterrupt)]
    assert len(interrupted) == 1
    assert interrupted[0] >= 2
    assert [outcome for k, outcome in enumerate(outcomes) if k not in interrupted] == [
        number * 2 for number in range(6) if number not in interrupted
    ]
    assert sorted(map(len, held.batches)) == [1, 1, 3, 4]
    assert joined._queue.under_way == []


def test_who_is_interrupted_before_it_computes_hands_its_batch_over() -> None:
    joined = JoinedCalls(Held(), 4)
    mine, other = Call("f", 1, (1,)), Call("f", 1, (2,))
    mine.batch = [mine, other]
    joined._queue.under_way = [mine.batch]
    joined._give_up(mine)
    assert (other.batch, other.woken.empty(), joined._queue.under_way) == ([other], False, [[other]])
    joined._give_up(other)
    assert joined._queue.under_way == []


def test_a_batch_is_not_handed_to_who_is_gone() -> None:
    """1. One of three leaves off to wait. 2. The one that is to compute them does so as well. 3. The third does it."""
    joined = JoinedCalls(Held(), 4)
    mine, gone, other = (Call("f", 1, (number,)) for number in range(3))
    mine.batch = [mine, gone, other]
    joined._queue.under_way = [mine.batch]
    joined._give_up(gone)
    joined._give_up(mine)
    assert (other.batch, other.woken.empty(), joined._queue.under_way) == ([other], False, [[other]])
    joined._give_up(other)
    assert joined._queue.under_way == []


def test_a_batch_that_was_not_woken_for_ctrl_c_is_woken_after_it() -> None:
    """1. The end of a batch has another leave. 2. Ctrl-C comes before that one is woken. 3. It is woken."""
    joined = JoinedCalls(Held(), 4)
    mine, other = Call("f", 1, (1,)), Call("f", 1, (2,))
    assert joined._queue.enter(mine) == [mine]
    assert joined._queue.enter(other) == [other]
    assert joined._queue.ended(mine.batch) == []
    mine.is_computed = True
    joined._give_up(mine)
    assert (other.batch, other.woken.empty(), joined._queue.under_way) == ([other], False, [[other]])


class Interrupts(queue.SimpleQueue[None]):
    """What wakes a thread; Ctrl-C comes to who wakes the first time, just before or just after."""

    def __init__(self, before: bool) -> None:
        self.before, self.left = before, 1

    def put(self, item: None, block: bool = True, timeout: float | None = None) -> None:
        comes, self.left = self.left > 0, 0
        if not (comes and self.before):
            super().put(item)
        if comes:
            raise KeyboardInterrupt


def waits(joined: JoinedCalls, count: int) -> bool:
    return len(joined._queue.waiting) == count


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("error", [None, ValueError("too hot")])
def test_who_is_interrupted_while_it_wakes_others_wakes_all_of_them(before: bool, error: Exception | None) -> None:
    """1. Two batches are under way, three calls gather. 2. They are computed by the thread of the first of them, and
    Ctrl-C comes to it between the wakes. 3. The others have what was computed, and later calls leave."""
    held = Held()
    joined = JoinedCalls(held, 4)
    calls = [Call("f", 1, (number,)) for number in range(5)]
    calls[3].woken = Interrupts(before)
    with ThreadPoolExecutor(5) as pool:
        found = [pool.submit(joined.outcome, call) for call in calls[:2]]
        until(lambda: len(held.batches) == 2)
        for waiting, call in enumerate(calls[2:], 1):
            found.append(pool.submit(joined.outcome, call))
            until(partial(waits, joined, waiting))
        held.error = error
        held.go.set()
        outcomes = [one.exception(LIMIT_S) or one.result() for one in found]
    assert isinstance(outcomes[2], KeyboardInterrupt)
    assert outcomes[3:] == ([error] * 2 if error else [6, 8])
    assert held.batches[2:] == [[2, 3, 4]]
    assert joined._queue.under_way == []


@contextlib.contextmanager
def handled(handler: Callable[[], object]) -> Iterator[None]:
    """Has a signal call a function."""
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("amid", ["leads", "waits"])
def test_a_signal_handler_may_call_while_its_thread_leads_or_waits(amid: str) -> None:
    """1. Two batches are under way, two calls gather, of which this thread's is the first. 2. A signal comes while it
    waits, or while it computes both. 3. What the handler calls does not wait for them."""
    held, found = Held(), list[int]()

    def run(calls: Sequence[Call]) -> list[Any]:
        if amid == "leads" and len(calls) == 2:
            signal.raise_signal(signal.SIGUSR1)
        return held(calls)

    joined, this = JoinedCalls(run, 4), threading.get_ident()

    def join() -> Any:
        until(partial(waits, joined, 1))
        if amid == "waits":
            signal.pthread_kill(this, signal.SIGUSR1)
            until(lambda: found)
        other = Background(lambda: joined.outcome(Call("f", 1, (3,))))
        until(partial(waits, joined, 2))
        held.go.set()
        return other.end()

    first = [Background(partial(joined.outcome, Call("f", 1, (number,)))) for number in range(2)]
    until(lambda: len(held.batches) == 2)
    with handled(lambda: found.append(joined.outcome(Call("f", 1, (9,))))):
        joining = Background(join)
        assert joined.outcome(Call("f", 1, (2,))) == 4
    assert ([one.end() for one in first], joining.end(), found) == ([0, 2], 6, [18])
    assert held.batches[2:] == [[9], [2, 3]]
    assert joined._queue.under_way == []


def test_a_destructor_may_call_while_its_thread_compares_kinds() -> None:
    """Within the lock, where a user's class of pytrees compares itself, and drops what has the destructor."""
    joined = JoinedCalls(lambda calls: [call.arguments[0] * 2 for call in calls], 4)
    found = list[int]()

    class Dropped:
        def __del__(self) -> None:
            found.append(joined.outcome(Call("f", 1, (9,))))

    class Kind:
        def __eq__(self, other: object) -> bool:
            Dropped()
            return self is other

        def __hash__(self) -> int:
            return 0

    assert Background(lambda: joined.outcome(Call(Kind(), 1, (2,)))).end() == 4
    assert found == [18]
    assert joined._queue.under_way == []


def test_who_is_within_a_joined_call_waits_for_no_batch_of_another_function() -> None:
    """Its threads could wait for this one in turn. Behind its call it joins them again."""
    held = Held()
    other = JoinedCalls(held, 4)
    joined = JoinedCalls(lambda calls: [other.outcome(Call("g", 1, call.arguments)) for call in calls], 4)
    first = [Background(partial(other.outcome, Call("g", 1, (number,)))) for number in range(2)]
    until(lambda: len(held.batches) == 2)

    def both() -> tuple[int, int]:
        return joined.outcome(Call("f", 1, (2,))), other.outcome(Call("g", 1, (3,)))

    last = Background(both)
    until(partial(waits, other, 1))
    assert held.batches[2:] == [[2]]
    held.go.set()
    assert ([one.end() for one in first], last.end()) == ([0, 2], (4, 6))
    assert other._queue.under_way == []


def test_a_server_joins_the_calls_of_its_threads(session) -> None:
    """Eight threads, whatever is joined: each has its own rows, and a batch is compiled for the sizes alone."""
    a = session.virtual_slice((2,), ("x",))
    traced: list[tuple[int, ...]] = []

    def serve(w: Any, batch: Any) -> Any:
        traced.append(batch["rows"].shape)
        return {"y": batch["rows"] @ w, "total": w.sum()}

    f = pw.padded(
        pw.compiled(serve, slice=a),
        sizes=(4, 16),
        in_axes=(None, 0),
        out_axes={"y": 0, "total": None},
        join_calls=True,
    )
    w = pw.put(np.ones((3, 2), np.float32), a)

    def call(number: int) -> None:
        rows = np.full((1 + number % 4, 3), number, np.float32)
        found = f(w, {"rows": rows})
        np.testing.assert_array_equal(found["y"], rows @ np.ones((3, 2), np.float32))
        assert float(found["total"]) == 6.0

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(40)))
    assert set(traced) <= {(4, 3), (16, 3)}
    with pytest.raises(pw.errors.UsageError, match="a batch of 17 is larger"):
        f(w, {"rows": np.ones((17, 3), np.float32)})


def test_callers_that_were_joined_have_results_of_their_own(session) -> None:
    """What one of them deletes or donates is still there for the others."""
    a = session.virtual_slice((1,), ("x",))
    both = pw.compiled(lambda v: (v * 2, v.sum() * 0 + 1), slice=a)
    f = pw.padded(both, sizes=(4,), out_axes=(0, None), join_calls=True)
    kind = (jax.tree.structure((0,)),)
    calls = [Call(kind, 1, [np.full((1, 2), k, np.float32)]) for k in range(3)]
    found = f._together(calls)
    taken = pw.compiled(lambda v: v + 1, slice=a, donate_argnums=0)
    assert float(taken(found[0][1])) == 2.0
    found[1][1].delete()
    assert found[0][1].is_deleted()
    assert float(found[2][1]) == 1.0
    for k, (rows, _) in enumerate(found):
        np.testing.assert_array_equal(rows, np.full((1, 2), 2 * k, np.float32))


def held_up(serve: Callable[[Any], Any]) -> tuple[Any, threading.Event]:
    """`serve` with joined calls, of which two wait until the event."""
    go, calls = threading.Event(), list[int]()

    def held(v: Any) -> Any:
        calls.append(len(v))
        if len(calls) <= 2:
            assert go.wait(LIMIT_S)
        return serve(v)

    return pw.padded(held, sizes=(1, 4), join_calls=True), go


def ends_in_a_fork(call: Callable[[], bool]) -> int:
    """The exit status of a child that makes a call: 0 for True, negative where it hangs."""
    if not (child := os.fork()):
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(LIMIT_S))
            os._exit(0 if call() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_fork_waits_for_no_thread_of_its_parent(is_locked: bool) -> None:
    """Two batches of the parent are under way and a call waits, or a thread of it has the lock."""
    f, go = held_up(lambda v: v + 1)
    row = np.ones(1, np.float32)
    calls = [Background(lambda: f(row)) for _ in range(3)]
    until(lambda: len(f._joined._queue.under_way) == 2 and len(f._joined._queue.waiting) == 1)
    with f._joined._lock if is_locked else contextlib.nullcontext():
        assert ends_in_a_fork(lambda: f(row).tolist() == [2.0] and not f._joined._queue.under_way) == 0
    go.set()
    assert [one.end().tolist() for one in calls] == [[2.0]] * 3


def test_a_fork_amid_a_batch_hands_it_to_nobody() -> None:
    """A function forks, and its child raises, while it computes the calls of two threads."""
    joined = JoinedCalls(Held(), 4)
    mine, other = Call("f", 1, (1,)), Call("f", 1, (2,))
    mine.batch = [mine, other]
    joined._queue.under_way = [mine.batch]

    def raises() -> bool:
        joined._give_up(mine)
        return joined._queue.under_way == []

    assert ends_in_a_fork(raises) == 0
    joined._give_up(mine)
    assert joined._queue.under_way == [[other]]


def called_in_turn(f: Any, go: threading.Event, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The outcomes of calls of a function of `held_up`: two are under way, the others gather behind each other."""

    def gathered(count: int) -> bool:
        return len(f._joined._queue.waiting) == count

    with ThreadPoolExecutor(len(calls)) as pool:
        found = [pool.submit(call) for call in calls[:2]]
        until(lambda: len(f._joined._queue.under_way) == 2)
        for waiting, call in enumerate(calls[2:], 1):
            found.append(pool.submit(call))
            until(partial(gathered, waiting))
        go.set()
        return [one.result(LIMIT_S) for one in found]


def test_calls_under_other_settings_of_jax_are_not_joined() -> None:
    """A thread that computes with 64 bits has them, whichever thread's call comes before its own."""
    f, go = held_up(lambda v: jnp.asarray(v) / 3)
    row = np.ones(1, np.float64)

    def call(x64: bool) -> Any:
        with jax.enable_x64(x64):
            return f(row)

    calls = [partial(call, x64) for x64 in (False, False, False, True, False, True)]
    dtypes = [one.dtype.name for one in called_in_turn(f, go, calls)]
    assert dtypes == ["float32", "float32", "float32", "float64", "float32", "float64"]


def test_calls_of_other_priorities_are_not_joined() -> None:
    """Each is sent with its own, and those that gather with one are sent together."""
    offline = Offline()

    def serve(v: Any) -> Any:
        offline.session.launch(3, [], (offline.kind,))
        return v * 2

    f, go = held_up(serve)

    def call(level: int, number: int) -> Any:
        with pw.priority(level):
            return f(np.full(1, number))

    calls = [partial(call, level, number) for number, level in enumerate((0, 0, 0, 7, 7, 0))]
    assert [int(one[0]) for one in called_in_turn(f, go, calls)] == [0, 2, 4, 6, 8, 10]
    sent = [getattr(m, "priority", 0) for m in offline.controller.take() if isinstance(m, Launch)]
    assert sorted(sent) == [0, 0, 0, 0, 7]


def test_a_batch_on_a_slice_is_neither_fetched_nor_joined(session) -> None:
    a = session.virtual_slice((2,), ("x",))
    f = pw.padded(pw.compiled(lambda v: v + 1, slice=a), sizes=(1, 4), join_calls=True)
    rows = np.ones((4, 2), np.float32)
    np.testing.assert_array_equal(f(pw.put(rows, a)), rows + 1)
    with pytest.raises(pw.errors.UsageError, match="lies on a slice, where each size would be compiled"):
        f(pw.put(rows[:3], a))
