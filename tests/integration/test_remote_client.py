"""Further clients of a running cluster: processes without Ray, side by side on the same devices, gone without leave."""

from __future__ import annotations

import gc
import signal
import time

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

V = np.arange(8, dtype=np.float32)


def test_a_client_in_another_process_needs_no_ray(session, python) -> None:
    out = python.run("remote_visitor", session.url, session.token)
    assert "[2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]" in out
    assert "gone" in out
    assert not any(s["name"] == "visitor" for s in session.status()["sessions"])


def test_clients_side_by_side_on_the_same_devices(session, slices, python, equal) -> None:
    """Three tenants, this process among them, whose collectives meet on the same devices."""
    tenants = [python.start("remote_tenant", session.url, session.token, str(k)) for k in range(2)]
    for tenant in tenants:
        assert tenant.stdout.readline() == "ready\n"
    inc = pw.compiled(lambda v: v + 1, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    total = pw.compiled(lambda v: v.sum(), slice=slices.b4, in_specs=P("x"))
    mine = pw.program(lambda v: (inc(v), total(inc(v))))
    equal(mine(V), (V + 1, np.float32(36)))
    for tenant in tenants:
        tenant.stdin.write("go\n")
        tenant.stdin.flush()
    results = [mine(V + np.float32(k)) for k in range(60)]
    for k, (one, total_of_one) in enumerate(results):
        equal((one, total_of_one), (V + k + 1, np.float32(36 + 8 * k)))
    for tenant in tenants:
        assert "right" in python.finish(tenant)


FREE_WITHIN_S = 10.0


def settled(session, held) -> int:
    """Buffers once nothing is on its way any more of what earlier tests let go."""
    gc.collect()
    now, before = held(session), -1
    while now != before:
        time.sleep(0.1)
        now, before = held(session), now
    return now


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_killed_client_leaves_nothing(session, python, held, state) -> None:
    before = settled(session, held)
    buffers = session.status()["buffers"]
    doomed = python.start("remote_doomed", session.url, session.token, state)
    assert doomed.stdout.readline() == "holding\n"
    status = session.status()
    assert status["buffers"] >= buffers + 20
    assert held(session) >= before + 40
    assert any(s["name"] == "doomed slice" for s in status["slices"])
    doomed.send_signal(signal.SIGKILL)
    start = time.monotonic()
    while time.monotonic() - start < FREE_WITHIN_S:
        status = session.status()
        gone = not any(s["name"] == "doomed" for s in status["sessions"])
        # The controller forgets a session at once; the resource manager hears of its slices a moment later.
        free = not any(s["name"] == "doomed slice" for s in status["slices"])
        if gone and free and held(session) <= before:
            break
        time.sleep(0.05)
    print(f"free after {time.monotonic() - start:.2f} s")
    assert gone
    assert status["buffers"] <= buffers
    assert held(session) <= before
    assert free
    assert not any("doomed" in label for d in pw.devices() for label in d["slices"])


def test_a_session_closed_in_the_middle_of_work(session, within) -> None:
    """Its futures fail at once, and what it had under way disturbs nobody."""
    with pw.connect(session.url, session.token, name="hasty") as hasty:
        where = hasty.virtual_slice((4,), ("x",), island=1)
        inc = pw.compiled(lambda v: v + 1, slice=where, in_specs=P("x"), out_specs=P("x"))
        arrays = [inc(V) for _ in range(50)]
    with within(2):
        for array in arrays:
            with pytest.raises(pw.errors.SessionClosed, match="it was shut down"):
                np.asarray(array)


def test_sessions_see_only_their_own(session, slices) -> None:
    """Two sessions in one process: each has its own slices, and the current one is the one made last."""
    with pw.connect(session.url, session.token, name="second") as second:
        with pw.virtual_slice((1,)) as mine:
            assert mine.session is second
        assert second.id != session.id
        names = {s["name"] for s in session.status()["sessions"]}
        assert {"init", "second"} <= names
    with pw.virtual_slice((1,)) as mine:
        assert mine.session is session
