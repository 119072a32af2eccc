"""Values that are asked for before they are there: right, wherever they lie, or a typed error in bounded time."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.session import Session

WITHIN_S = 20.0


def test_a_value_asked_for_at_once_is_right_wherever_it_lies(session, slices, equal) -> None:
    """
    1. Functions over one device, four, a mesh of two axes, and another island; whole, cut, empty arrays, scalars.
    2. Each value is asked for with its call, in turn, ten times, while launches that nobody asks for are under way.
    """
    specs = {"a1": P("x"), "a4": P("x"), "b4": P("x"), "a22": P("y", "x"), "b2": P()}
    steps = {
        name: pw.compiled(lambda v: v * 2 + 1, slice=getattr(slices, name), in_specs=spec, out_specs=spec)
        for name, spec in specs.items()
    }
    both = pw.program(lambda v: steps["b4"](steps["a4"](v)))
    for k in range(10):
        v = np.arange(32, dtype=np.float32).reshape(8, 4) + np.float32(k)
        held = [both(v) for _ in range(3)]
        for name, step in steps.items():
            equal(step(v), v * 2 + 1)
            equal(step(np.zeros((0, 4), np.int8)), np.zeros((0, 4), np.int8))
            if name == "b2":
                equal(step(np.float32(k)), np.float32(k) * 2 + 1)
        equal(both(v), (v * 2 + 1) * 2 + 1)
        del held


class Asked:
    """The value of an array, asked for in a thread of its own."""

    def __init__(self, array: pw.Array) -> None:
        self.error: pw.errors.PathwaysError | None = None
        self._array: Any = array
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            np.asarray(self._array)
        except pw.errors.PathwaysError as error:
            self.error = error
        self._array = None

    def end(self) -> pw.errors.PathwaysError | None:
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive(), "it hangs"
        return self.error


@pytest.mark.parametrize("what", ["the session", "the array"])
def test_a_question_ends_with_its_session_or_its_array(session, within, what) -> None:
    """The computation takes some seconds; meanwhile the session is closed, or the array is deleted."""
    other = Session.connect(session.url, session.token, "asks")
    where = other.virtual_slice((1,), ("x",), island=0)
    slow = pw.compiled(lambda v: jax.lax.fori_loop(0, 10**9, lambda i, x: x * 0.5 + 1, v[0]), slice=where)
    array = slow(np.zeros(2, np.float32))
    asked = Asked(array)
    asked._thread.join(0.3)
    assert asked._thread.is_alive(), "the computation is too short for this test"
    with within(2):
        if what == "the session":
            other.close()
        else:
            array.delete()
        error = asked.end()
    expected = pw.errors.SessionClosed if what == "the session" else pw.errors.BufferDeleted
    assert type(error) is expected
    other.close()


@pytest.mark.long
def test_a_host_dies_while_its_values_are_asked_for(python) -> None:
    """
    1. A value that lies on two hosts, and one on another island that is made of it, are asked for; both take seconds.
    2. One of the two hosts gets SIGKILL. Both questions end with `HostLost`; the other island goes on meanwhile.
    3. The hosts come back, and a value is asked for again.
    """
    assert "left: 0" in python.run("blocking_host_killed", timeout=110)


def test_a_long_loop_on_one_device_holds_up_no_other_device_of_its_host(session, equal) -> None:
    """
    1. A loop whose length only shows when it runs, of seconds, on one device. XLA takes it for cheap.
    2. A function on another device of that host is called and its value fetched: the loop is still running.
    """
    with pw.virtual_slice((1,), island=0) as one, pw.virtual_slice((1,), island=0) as other:
        assert one.devices != other.devices
        assert len({device.split(".")[0] for device in (*one.devices, *other.devices)}) == 1
        turns = pw.compiled(
            lambda n, x: jax.lax.fori_loop(0, n, lambda _, x: x * x + x, x), slice=one, in_specs=P(), out_specs=P()
        )
        add = pw.compiled(lambda x: x + 1, slice=other, in_specs=P(), out_specs=P())
        x = np.full(64, -0.5, np.float32)
        equal(add(x), x + 1)
        np.asarray(turns(np.int32(3), x))
        long = turns(np.int32(10**9), x)
        equal(add(x + 1), x + 2)
        add(x).block_until_ready()  # its end comes by the same way as that of `long`, which would have come first
        assert not long.is_ready()
        assert np.all(np.abs(np.asarray(long)) < 1e-3)


def test_values_go_round_the_devices_of_a_host_and_are_overwritten_on_the_way(session, equal) -> None:
    """Copies from device to device are copies: what is made of one, in its memory, leaves the others as they are."""
    with contextlib.ExitStack() as held:
        places = [held.enter_context(pw.virtual_slice((1,), island=0)) for _ in range(4)]
        steps = [
            pw.compiled(lambda v, k=k: v * 2 + k, slice=place, in_specs=P(), out_specs=P(), donate_argnums=0)
            for k, place in enumerate(places)
        ]
        looks = [pw.compiled(lambda v: v[0], slice=place, in_specs=P(), out_specs=P()) for place in places]

        @pw.program
        def around(v: Any) -> Any:
            seen = []
            for _ in range(5):
                for step, look in zip(steps, looks, strict=True):
                    seen.append(look(v))
                    v = step(v)
            return v, seen

        for start in range(3):
            v = np.arange(6.0, dtype=np.float32) + np.float32(start)
            found = around(pw.put(v, slice=places[3], spec=P()))
            seen = []
            for k in range(20):
                seen.append(v[0])
                v = v * 2 + np.float32(k % 4)
            equal(found, (v, seen))
