"""Snapshots in the memory of other hosts, and loops that go on after a loss, on the shared cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.cli.drill import drill
from pathways_ray.client.api import ClusterSession
from pathways_ray.errors import BufferLost, ExecutionError
from tests.integration.islands import remove

SPLIT = P("x")


@pytest.fixture
def island(session: ClusterSession) -> Iterator[int]:
    """An island that a test may lose."""
    number = session.add_island(platform="cpu", devices=2)
    yield number
    session.drain_island(number, deadline_s=0.0)
    remove(session, number)


def kill(session: ClusterSession, island: int) -> None:
    """Ends the processes of an island's hosts, as the end of their machine does."""
    for one in session.status()["islands"]:
        for host in one["hosts"] if one["island"] == island else ():
            os.kill(host["pid"], signal.SIGKILL)


@pytest.mark.timeout(240)
def test_a_loop_survives_the_loss_of_its_host_with_the_same_bits(
    session: ClusterSession, tenant: pw.Session, island: int, equal: Callable[[Any, Any], None]
) -> None:
    """
    1. A state with donated steps goes round on an island of its own; the loss is on another one.
    2. The host is killed twice, once right behind the calls, once when all is quiet.
    3. State and all losses of the loop have the bits of one that was not disturbed.
    """
    where = tenant.virtual_slice((2,), ("x",), island=island)
    other = tenant.virtual_slice((2,), ("x",), island=0)
    update = pw.compiled(
        lambda s, v: jnp.sin(s) * 2 + v, slice=where, in_specs=(SPLIT, SPLIT), out_specs=SPLIT, donate_argnums=(0,)
    )
    measure = pw.compiled(lambda s: (s**2).sum(), slice=other, in_specs=SPLIT)

    @pw.program
    def train(state: Any, batch: Any) -> Any:
        new = update(state, batch)
        return new, measure(new)

    def trained(step: Callable[..., Any], disturb: dict[int, Callable[[Any], None]]) -> Any:
        state, losses = pw.put(np.linspace(0, 1, 64, dtype=np.float32), where, SPLIT), []
        for number in range(25):
            state, loss = step(state, np.full(64, number, np.float32))
            losses.append(loss)
            disturb.get(number, lambda state: None)(state)
            if number % 4 == 3:
                float(losses[-1])
        return np.asarray(state), [np.asarray(loss) for loss in losses[-8:]]

    expected = trained(train, {})
    step = pw.elastic(train, snapshot_every=5)
    disturb = {
        7: lambda state: kill(session, island),
        18: lambda state: (state.block_until_ready(), kill(session, island)),
    }
    equal(trained(step, disturb), expected)  # type: ignore[arg-type]
    assert step.losses >= 2  # type: ignore[attr-defined]
    assert step.replayed <= 2 * 10  # type: ignore[attr-defined]


@pytest.mark.timeout(240)
def test_a_loop_survives_the_loss_of_its_host_after_it_has_moved_to_the_island_of_its_copies(
    session: ClusterSession, tenant: pw.Session, island: int, equal: Callable[[Any, Any], None]
) -> None:
    where = tenant.virtual_slice((2,), ("x",), island=0)
    update = pw.compiled(
        lambda s, v: s * 2 + v, slice=where, in_specs=(SPLIT, SPLIT), out_specs=SPLIT, donate_argnums=(0,)
    )
    step: Any = pw.elastic(update, snapshot_every=100)
    state, expected = pw.put(np.ones(64, np.float32), where, SPLIT), np.ones(64, np.float32)
    for number in range(6):
        if number == 3:
            step._snapshots[0].wait_for_all()
            step._snapshots[0]._copies[0][1].slice.move(island=island)
            where.move(island=island)
        state = step(state, np.full(64, number, np.float32))
        expected = expected * 2 + number
    assert sorted(step._snapshots) == [0, 3]
    step._snapshots[3].wait()
    step._snapshots[3].wait_for_all()
    kill(session, island)
    equal(np.asarray(state.block_until_ready()), expected)


def test_copies_stay_apart_from_their_arrays_when_their_island_is_drained(
    session: ClusterSession, tenant: pw.Session, island: int, equal: Callable[[Any, Any], None]
) -> None:
    """Other slices lie on the island that is left for them, so they would go to that of the arrays. No call is made."""
    where = tenant.virtual_slice((2,), ("x",), island=0)
    update = pw.compiled(lambda s, v: s * 2 + v, slice=where, in_specs=(SPLIT, SPLIT), out_specs=SPLIT)
    step: Any = pw.elastic(update, snapshot_every=100)
    state = step(pw.put(np.ones(64, np.float32), where, SPLIT), np.ones(64, np.float32))
    (taken,) = step._snapshots.values()
    taken.wait_for_all()
    shadow = taken._copies[0][1].slice
    shadow.move(island=island)
    load = [tenant.virtual_slice((2,), ("x",), island=1) for _ in range(6)]
    assert session.drain_island(island) == []
    assert (where.island, shadow.island) == (0, 1)
    assert not taken.is_exposed()
    equal(np.asarray(taken.restore()), np.ones(64, np.float32))
    equal(np.asarray(state), np.full(64, 3, np.float32))
    for one in load:
        one.release()


def test_slices_and_programs_of_copies_go_with_the_slices_of_what_was_copied(
    session: ClusterSession, tenant: pw.Session, equal: Callable[[Any, Any], None]
) -> None:
    """
    1. Slices come and go, with snapshots of what lies there: the session has no more programs than before.
    2. One is released while the session is suspended, and one before the snapshot, which is good all the same.
    """
    value = np.arange(8, dtype=np.float32)

    def taken(release: Callable[[pw.VirtualSlice], None], before: bool = False) -> int:
        where = tenant.virtual_slice((2,), ("x",), island=0, name="to go")
        array = pw.put(value, where, SPLIT)
        if before:
            release(where)
        safe = pw.snapshot(array)
        equal(np.asarray(safe.restore()), value)
        if not before:
            release(where)
        assert [one for one in session.status()["slices"] if one["name"] in ("to go", "copies of to go")] == []
        equal(safe.values(), value)
        return len(tenant._core.renewals.programs)

    def suspended(where: pw.VirtualSlice) -> None:
        tenant.suspend()
        where.release()
        tenant.resume()

    counts = [taken(lambda where: where.release()) for _ in range(4)]
    assert counts[1:] == [counts[1]] * 3
    taken(suspended)
    taken(lambda where: where.release(), before=True)


def test_a_snapshot_gives_back_what_an_island_took_along(
    session: ClusterSession, tenant: pw.Session, island: int, equal: Callable[[Any, Any], None]
) -> None:
    where = tenant.virtual_slice((2,), ("x",), island=island)
    tree = {
        "split": pw.put(np.arange(12, dtype=np.float32), where, SPLIT),
        "whole": pw.put(np.arange(9).reshape(3, 3), where),
        "half": pw.put(jnp.arange(4, dtype=jnp.bfloat16), where, SPLIT),
        "key": pw.put(jax.random.key(3), where),
        "host": np.ones(2),
    }
    key = jax.random.key_data(jax.random.key(3))
    values = {name: np.asarray(one) for name, one in tree.items() if name != "key"}
    safe = pw.snapshot(tree)
    safe.wait(timeout=60)
    assert "killed; back after" in drill(session.status, "island", island)
    with pytest.raises(ExecutionError):
        np.asarray(tree["split"] + 0)
    back = safe.restore()
    assert (back["split"].slice, back["split"].sharding.spec) == (where, SPLIT)
    equal(jax.random.key_data(back.pop("key")), np.asarray(key))
    equal({name: np.asarray(one) for name, one in back.items()}, values)
    with pytest.raises(BufferLost):
        np.asarray(tree["split"])
