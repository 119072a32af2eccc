"""Slices that move on the shared cluster: by their user, and by themselves when their island is drained or lost."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from pathways_ray.errors import BufferLost, Unschedulable, UsageError

SPLIT = P("x")


def test_a_slice_moves_under_a_program_and_values_have_the_same_bits(session: ClusterSession) -> None:
    """1. A state goes round on a slice, in a program that uses another one too. 2. It moves to the other island between
    two calls, while another thread calls on. 3. Handles that were made before have their values; a donated state goes
    on; arrays of other types and layouts came along. 4. The values are those of a slice that stays."""
    where = pw.virtual_slice((2,), ("x",), island=0, name="mover")
    stays = pw.virtual_slice((2,), ("x",), island=0)
    fixed = pw.virtual_slice((1,), ("x",), island=1)

    def trained(on: pw.VirtualSlice, steps: int, move_at: int = -1) -> np.ndarray:
        step = pw.compiled(lambda s, g: jax.numpy.sin(s) * 3 + g, slice=on, in_specs=(SPLIT, SPLIT), out_specs=SPLIT)
        gain = pw.compiled(lambda s: s[:1] * 0 + 0.5, slice=fixed, in_specs=P())
        program = pw.program(lambda s: step(s, jax.numpy.broadcast_to(gain(s), (64,))))
        state = pw.put(np.linspace(0, 1, 64, dtype=np.float32), on, SPLIT)
        for number in range(steps):
            if number == move_at:
                on.move(island=1)
            state = program(state)
        return np.asarray(state)

    whole = pw.put(np.arange(12).reshape(3, 4), where, P())
    key = pw.put(jax.random.key(7), where, P())
    before = where.devices
    expected = trained(stays, 6)
    found = trained(where, 6, move_at=3)
    np.testing.assert_array_equal(found, expected)
    assert (where.island, where.devices != before) == (1, True)
    np.testing.assert_array_equal(np.asarray(whole), np.arange(12).reshape(3, 4))
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(7)))

    busy = pw.compiled(lambda v: v + 1, slice=where, in_specs=SPLIT, out_specs=SPLIT, donate_argnums=(0,))
    over, counted = threading.Event(), 0
    value = busy(pw.put(np.zeros(8), where, SPLIT))

    def call() -> None:
        nonlocal value, counted
        while not over.is_set():
            value = busy(value)
            counted += 1

    thread = threading.Thread(target=call)
    thread.start()
    where.move()
    over.set()
    thread.join()
    assert where.island == 0
    np.testing.assert_array_equal(np.asarray(value), np.full(8, counted + 1.0))
    there = {one["slice"]: one["island"] for one in session.status()["slices"]}
    assert there[where.id] == 0
    for one in (where, stays, fixed):
        one.release()


def test_what_cannot_move_stays_where_it_is_and_says_why(session: ClusterSession) -> None:
    with pw.virtual_slice((4,), ("x",), island=0) as where:
        kept = pw.put(np.arange(4.0), where, SPLIT)
        with pytest.raises(Unschedulable, match=r"no island can hold a slice of shape \(4,\) .* on island 77"):
            where.move(island=77)
        part = session.part_of(where, (1, 0), (2,), ("y",))
        with pytest.raises(UsageError, match=r"is a part of slice .* and moves with it"):
            part.move()
        assert where.island == 0
        np.testing.assert_array_equal(np.asarray(kept), np.arange(4.0))
        inside = pw.put(np.arange(2.0), part, P("y"))
        where.move()
        assert part.devices == (where.devices[1], where.devices[0])
        np.testing.assert_array_equal(np.asarray(inside), np.arange(2.0))
    with pytest.raises(UsageError, match="was released"):
        where.move()


@pytest.mark.timeout(300)
def test_a_drain_moves_slices_and_a_removed_island_loses_its_arrays_only(session: ClusterSession) -> None:
    """1. An island comes, and gets a slice with a state. 2. It is drained: the slice moves by itself, and the drain
    ends before its deadline. 3. Another one is too small for that slice: a typed error. 4. It is drained without time,
    and removed: what lay there is lost, its slice is mapped elsewhere, and the function runs there."""
    number = session.add_island(platform="cpu", devices=2)
    with pw.virtual_slice((2,), ("x",), island=number, name="tenant") as where:
        double = pw.compiled(lambda v: v * 2, slice=where, in_specs=SPLIT, out_specs=SPLIT)
        state = double(pw.put(np.arange(6.0), where, SPLIT))
        assert session.drain_island(number, deadline_s=60.0) == []
        assert where.island in (0, 1)
        np.testing.assert_array_equal(np.asarray(double(state)), np.arange(6.0) * 4)
        session.remove_island(number)
        small = session.add_island(platform="cpu", devices=1)
        with pytest.raises(Unschedulable, match=rf"no island can hold .* on island {small}"):
            where.move(island=small)
        with pw.virtual_slice((1,), ("x",), island=small) as lost:
            gone = pw.put(np.arange(3.0), lost, P())
            np.testing.assert_array_equal(np.asarray(gone), np.arange(3.0))
            more = pw.compiled(lambda v: v + 1, slice=lost, in_specs=P())
            np.testing.assert_array_equal(np.asarray(more(np.ones(2))), np.full(2, 2.0))
            session.drain_island(small, deadline_s=0.0)
            lost_at_once = lost.island == small
            session.remove_island(small)
            deadline = time.monotonic() + 60.0
            while lost.island == small and time.monotonic() < deadline:
                time.sleep(0.05)
            assert lost.island in (0, 1)
            if lost_at_once:
                with pytest.raises(BufferLost):
                    np.asarray(gone)
            np.testing.assert_array_equal(np.asarray(more(np.ones(2))), np.full(2, 2.0))
        np.testing.assert_array_equal(np.asarray(state), np.arange(6.0) * 2)


@pytest.mark.timeout(120)
def test_ctrl_c_amid_moves_and_suspensions_leaves_nothing_behind(python: Any) -> None:
    """Ctrl-C at drawn moments of `move`, `suspend` and `resume`: all arrays are there, and no slice or copy beside."""
    assert "nothing was left behind" in python.run("interrupted_moves", timeout=110)
