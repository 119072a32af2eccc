"""What functions keep for a session: it goes with the session, and with slices that nothing lies on any more."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import context, utilization
from pathways_ray.client.known_programs import KnownPrograms
from pathways_ray.errors import NotInitialized
from pathways_ray.transport.messages import Completed
from tests.unit.client.offline import Background, Offline

V = np.arange(2, dtype=np.float32)
BIG = np.zeros(1 << 14, np.float32)

doubled = pw.program(lambda v: v * 2)
shifted = pw.program(lambda v: v + jnp.sum(BIG))
halved = jax.jit(lambda v: v / 2)

CALLS: dict[str, Callable[[Any], Any]] = {
    "program": doubled,
    "program with constants": shifted,
    "operator": lambda v: v * 3,
    "jnp": jnp.sum,
    "jax.jit": halved,
}


@pytest.fixture
def offline() -> Any:
    found = Offline(max_launches=1024)
    context.enter(found.session)
    yield found
    found.session.close()


def called_on_a_new_slice(offline: Offline, call: Callable[[Any], Any]) -> tuple[weakref.ref[pw.VirtualSlice], Any]:
    where = offline.session.virtual_slice((2,), ("x",))
    x = pw.put(V, slice=where, spec=P("x"))
    for buffer in list(offline.hosts.uploads):
        offline.hosts.acknowledge(buffer)
    made = call(x)
    for buffer in list(offline.hosts.uploads):
        offline.hosts.acknowledge(buffer)
    offline.say(Completed(tuple(offline.session._core.pending)))
    where.release()
    return weakref.ref(where), (x, made)


@pytest.mark.parametrize("name", CALLS)
def test_programs_go_with_slices_that_were_released(offline, name) -> None:
    """Functions that outlive their slices were called for each of them, and keep nothing of those that are over."""
    gone = []
    for _ in range(5):
        where, arrays = called_on_a_new_slice(offline, CALLS[name])
        offline.controller.sent.clear()
        del arrays
        gone.append(where)
    called_on_a_new_slice(offline, CALLS[name])
    gc.collect()
    assert [where() for where in gone] == [None] * 5


def test_what_a_program_has_placed_for_itself_is_freed(offline) -> None:
    """Of constants that a program captures, the devices of each slice have a copy."""
    for _ in range(5):
        called_on_a_new_slice(offline, shifted)
    gc.collect()
    buffers = offline.session._core.buffers
    called_on_a_new_slice(offline, doubled)
    gc.collect()
    assert not buffers


def test_programs_stay_while_an_array_lies_on_a_released_slice(offline) -> None:
    """Who has an array there goes on calling what was called with it: it is not traced for that again."""
    traced = []

    def tripled(v: Any) -> Any:
        traced.append(v.shape)
        return v * 3

    call = pw.program(tripled)
    where, (x, made) = called_on_a_new_slice(offline, call)
    called_on_a_new_slice(offline, doubled)
    call(x)
    assert len(traced) == 1
    assert where() is not None
    assert made.slice is where()


def test_programs_are_made_in_one_thread_while_another_looks_which_are_over(offline) -> None:
    _, held = called_on_a_new_slice(offline, doubled)  # an array lies there, so one looks each time
    over, kept = threading.Event(), [KnownPrograms() for _ in range(2000)]

    def make() -> None:
        while not over.is_set():
            for one in kept:
                offline.session.known_by(one)
            offline.session._knowing.clear()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    making = Background(make)
    try:
        for _ in range(3000):
            offline.session._forget_unused()
    finally:
        sys.setswitchinterval(before)
        over.set()
    making.end()
    assert held


def test_a_compiled_function_goes_with_its_user(offline) -> None:
    """JAX keeps the parameters of the operations that it traced last: among them is each call of such a function."""
    gone: list[weakref.ref[Any]] = []
    for _ in range(3):
        for as_program in (False, True):
            function = pw.compiled(lambda v: v + BIG[:2], slice=offline.where)
            call = pw.program(lambda v, function=function: function(v) * 2) if as_program else function
            call(V)
            gone += weakref.ref(function), weakref.ref(call)
    del function, call
    gc.collect()
    assert [one() for one in gone] == [None] * 12


def test_programs_go_with_their_session() -> None:
    gone = []
    for _ in range(3):
        one = Offline(max_launches=1024)
        context.enter(one.session)
        for call in CALLS.values():
            called_on_a_new_slice(one, call)
        compiled = pw.compiled(lambda v: v + 1, slice=one.where)
        compiled(V)
        doubled.lower(V)
        one.session.close()
        context.sessions.remove(one.session)
        gone.append(weakref.ref(one.session))
        del one, call, compiled
    gc.collect()
    assert [session() for session in gone] == [None] * 3


def test_programs_of_calls_that_say_no_session_go_with_theirs(offline) -> None:
    """Here it is that of the slice which the function names, and another was opened last."""
    one = Offline(max_launches=1024)
    context.enter(one.session)
    context.enter(offline.session)
    away = pw.compiled(lambda v: v + 1, slice=one.where)
    call = pw.program(lambda v: away(v))
    lowered: Any = weakref.ref(call.prepared((V,)))
    gc.collect()
    assert lowered().session is one.session
    one.session.close()
    gc.collect()
    assert lowered() is None
    assert not call._known.owners


def test_a_closed_session_keeps_no_functions(offline) -> None:
    """Who has a slice has its session; and JAX keeps the calls of some functions that are over, with their slices."""
    called_on_a_new_slice(offline, shifted)
    renewals = offline.session._core.renewals
    assert renewals.functions
    offline.session.close()
    assert not renewals.functions


def test_a_closed_session_is_none_of_this_process_any_more() -> None:
    """Who uses sessions by their slices alone never asks for the current one."""
    before = [one for one in context.sessions if not one.closed]
    for _ in range(3):
        one = Offline().session
        context.enter(one)
        assert context.sessions == [*before, one]
        assert context.current_session() is one
        one.close()
    with contextlib.suppress(NotInitialized):
        context.current_session()
    assert context.sessions == before


def test_what_utilization_remembers_goes_with_the_session(monkeypatch) -> None:
    """Sessions of two clusters may have one number: what one has seen is not the other's, and goes with it."""

    class One:
        id = 1
        busy = 5.0

        def status(self) -> dict[str, Any]:
            return {"busy": {"0": self.busy}, "islands": [{"island": 0, "hosts": [{"devices": [0]}]}]}

    before = len(utilization._last)
    for _ in range(2):
        session = One()
        monkeypatch.setattr(context, "current_session", lambda session=session: session)
        assert pw.utilization() == {0: 0.0}
        session.busy = 50.0
        assert pw.utilization() == {0: 1.0}
        monkeypatch.undo()
        del session
        gc.collect()
    assert len(utilization._last) == before
