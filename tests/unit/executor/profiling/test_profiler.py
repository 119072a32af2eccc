"""Profiles of a host: whole launches, and single computations with times that respect what each waited for."""

from __future__ import annotations

import math
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pathways_ray.executor.profiling import profiler
from pathways_ray.executor.profiling.profiler import LaunchTrace, Ran, Timeline, _in_order, _Seen
from pathways_ray.executor.run.steps import ExecuteStep
from pathways_ray.transport.messages import IslandLaunch

LIMIT_S = 60.0


def step(name: str, compiled: Any) -> ExecuteStep:
    made = ExecuteStep.__new__(ExecuteStep)
    made.label, made.compiled = name, compiled
    return made


@jax.jit
def slow(v: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.fori_loop(0, 400, lambda _, x: jnp.tanh(x @ x) * 0.1, v),)


def test_computations_follow_one_another_although_they_are_enqueued_at_once() -> None:
    take = jax.jit(lambda v: (v + 1,))
    v = jnp.ones((400, 400))
    slow(v)[0].block_until_ready()
    take(v + 0)[0].block_until_ready()
    steps = [step("slow", slow), step("take", take)]
    before = time.perf_counter()
    timeline = Timeline({1: SimpleNamespace(steps=steps)})  # type: ignore[dict-item]
    (made,) = steps[0].compiled(v)
    (taken,) = steps[1].compiled(made)
    first, second = timeline.stop(LIMIT_S)
    after = time.perf_counter()
    taken.block_until_ready()
    assert (first.name, second.name, first.devices) == ("slow", "take", (0,))
    assert before <= first.start < first.end <= second.start <= second.end <= after
    assert first.end - first.start > 0.5 * (after - before)  # the second, which is short, only waited for it


def test_a_computation_is_seen_although_each_of_its_results_is_taken_at_once() -> None:
    both = jax.jit(lambda v, w: (slow(v)[0], w + 1), donate_argnums=(0, 1))
    values = [jnp.ones((400, 400)), jnp.ones((400, 400))]
    both(*[value + 0 for value in values])[0].block_until_ready()
    one = step("both", both)
    timeline = Timeline({1: SimpleNamespace(steps=[one])})  # type: ignore[dict-item]
    for _ in range(4):
        values = list(one.compiled(*values))
    assert [computed.name for computed in timeline.stop(LIMIT_S)] == ["both"] * 4


def test_nothing_is_recorded_and_nothing_is_wrapped_afterwards() -> None:
    one = step("slow", slow)
    timeline = Timeline({1: SimpleNamespace(steps=[one])})  # type: ignore[dict-item]
    assert one.compiled is not slow
    assert timeline.stop(LIMIT_S) == []
    assert one.compiled is slow


def test_what_gives_no_arrays_is_left_out() -> None:
    one = step("failed", lambda *inputs: [np.zeros(1)])
    timeline = Timeline({1: SimpleNamespace(steps=[one])})  # type: ignore[dict-item]
    one.compiled("a failure")
    assert timeline.stop(LIMIT_S) == []


def test_a_record_that_nobody_comes_back_for_leaves_the_host_as_it_was() -> None:
    one, interval = step("slow", slow), sys.getswitchinterval()
    timeline = Timeline({1: SimpleNamespace(steps=[one])})  # type: ignore[dict-item]
    assert sys.getswitchinterval() != interval
    timeline.release()
    assert one.compiled is slow
    assert sys.getswitchinterval() == interval


def test_a_computation_that_is_enqueued_as_the_record_ends_runs_all_the_same() -> None:
    def last(v: jax.Array) -> tuple[jax.Array]:
        timeline.release()
        return (v,)

    one = step("last", last)
    timeline = Timeline({1: SimpleNamespace(steps=[one])})  # type: ignore[dict-item]
    v = jnp.ones(4)
    assert one.compiled(v) == (v,)
    assert timeline.stop(LIMIT_S) == []


def test_what_is_not_over_in_time_is_left_out() -> None:
    timeline, end = Timeline({}), Future[float]()
    end.set_result(2.0)
    timeline._seen.append(_Seen("over", (0,), 1.0, end, end))
    timeline._seen.append(_Seen("under way", (0,), 1.0, end, Future()))
    assert [one.name for one in timeline.stop(0.0)] == ["over"]


def test_a_timeline_keeps_the_last_computations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "MAX_COMPUTED", 2)
    steps = [step(name, lambda v: (v,)) for name in "abc"]
    timeline = Timeline({1: SimpleNamespace(steps=steps)})  # type: ignore[dict-item]
    for one in steps:
        one.compiled(jnp.ones(4))
    assert [one.name for one in timeline.stop(LIMIT_S)] == ["b", "c"]


def test_a_program_that_comes_later_is_recorded_from_its_first_launch_to_the_end() -> None:
    """Also another one in its place, under the number of one that was dropped. What comes after the end is left."""
    added = lambda v: (v + 1,)  # noqa: E731
    programs: dict[int, Any] = {}
    timeline = Timeline(programs)
    made = []
    for name in ("first", "second"):
        one = step(name, added)
        programs[7] = SimpleNamespace(steps=[one])
        for sequence in (1, 2):
            timeline.started(IslandLaunch(sequence, 1, 7, (), 0))
            one.compiled(jnp.ones(4))
        made.append(one)
    timeline.started(IslandLaunch(3, 1, 8, (), 0))  # of a program that is not here
    assert [one.name for one in timeline.stop(LIMIT_S)] == ["first", "first", "second", "second"]
    made.append(step("third", added))
    programs[7] = SimpleNamespace(steps=made[-1:])
    timeline.started(IslandLaunch(4, 1, 7, (), 0))
    assert [one.compiled for one in made] == [added] * 3


def test_what_was_taken_unseen_shares_the_time_until_the_next_end_that_was_seen() -> None:
    def seen(name: str, enqueued: float, end: float, *devices: int) -> tuple[_Seen, float, float]:
        return _Seen(name, devices, enqueued, Future(), Future()), 0.0, end

    unseen = math.inf
    found = _in_order(
        [
            seen("a", 0.0, 1.0, 0),
            seen("b", 0.0, unseen, 0),
            seen("other", 0.0, 2.0, 1),
            seen("c", 0.0, unseen, 0),
            seen("d", 0.0, 4.0, 0),
            seen("nothing behind it", 0.0, unseen, 0),
        ]
    )
    assert [(one.name, one.start, one.end) for one in found] == [
        ("a", 0.0, 1.0),
        ("b", 1.0, 2.0),
        ("other", 0.0, 2.0),
        ("c", 2.0, 3.0),
        ("d", 3.0, 4.0),
    ]


# --- whole launches ---------------------------------------------------------------------------------------------------


def run(session: int, sequence: int) -> IslandLaunch:
    return IslandLaunch(sequence, session, session, (), 0)


def start(trace: LaunchTrace, *launches: IslandLaunch) -> None:
    for launch in launches:
        trace.started(launch)


def test_launches_have_their_session() -> None:
    found = LaunchTrace()
    start(found, run(7, 1), run(8, 2), run(8, 3))
    found.ran(1, 0.1, 0.2)
    found.ran(2, 0.2, 0.5)
    found.ran(3, 0.5, 0.6)
    assert list(found.entries) == [Ran(1, 7, 0.1, 0.2), Ran(2, 8, 0.2, 0.5), Ran(3, 8, 0.5, 0.6)]
    assert not found.sessions


def test_a_launch_that_stops_at_a_barrier_has_two_entries() -> None:
    found = LaunchTrace()
    start(found, run(7, 1))
    found.ran(1, 0.1, 0.2, part=True)
    found.ran(1, 0.4, 0.5)
    assert [(ran.start, ran.end) for ran in found.entries] == [(0.1, 0.2), (0.4, 0.5)]


def test_what_came_before_the_trace_is_left_out() -> None:
    found = LaunchTrace()
    found.ran(1, 0.1, 0.2)
    assert not found.entries


def test_it_keeps_the_last_entries(monkeypatch) -> None:
    monkeypatch.setattr(profiler, "MAX_ENTRIES", 2)
    found = LaunchTrace()
    start(found, *[run(7, sequence) for sequence in (1, 2, 3)])
    for sequence in (1, 2, 3):
        found.ran(sequence, 0.0, 0.0)
    assert [ran.sequence for ran in found.entries] == [2, 3]
