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

VISITOR = """
    import sys
    import numpy as np
    import pathways_ray as pw
    from jax.sharding import PartitionSpec as P

    with pw.connect(sys.argv[1], sys.argv[2], name="visitor") as session:
        with pw.virtual_slice((4,), ("x",), island=0) as here, pw.virtual_slice((2,), ("x",), island=1) as there:
            inc = pw.compiled(lambda v: v + 1, slice=here, in_specs=P("x"), out_specs=P("x"))
            double = pw.compiled(lambda v: v * 2, slice=there, in_specs=P("x"), out_specs=P("x"))
            x = pw.put(np.arange(8.0), slice=here, spec=P("x"))
            print(np.asarray(pw.program(lambda v: double(inc(v)))(x)).tolist())
            assert len(pw.devices()) == 8 and len(pw.islands()) == 2
    assert "ray" not in sys.modules, "a client loads no Ray"
    try:
        pw.islands()
    except pw.errors.NotInitialized:
        print("gone")
"""


def test_a_client_in_another_process_needs_no_ray(session, python) -> None:
    out = python.run(VISITOR, session.url, session.token)
    assert "[2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]" in out
    assert "gone" in out
    assert not any(s["name"] == "visitor" for s in session.status()["sessions"])


TENANT = """
    import sys
    import jax, numpy as np
    import pathways_ray as pw
    from jax.sharding import PartitionSpec as P

    number = int(sys.argv[3])
    with pw.connect(sys.argv[1], sys.argv[2], name=f"tenant {number}") as session:
        slices = [pw.virtual_slice((4,), ("x",), island=island) for island in (0, 1)]

        def compiled(where):
            @pw.compiled(slice=where, in_specs=P("x"), out_specs=P("x"))
            def step(v):  # one collective: all devices of the island meet
                total = jax.shard_map(lambda s: jax.lax.psum(s, "x"), mesh=where.mesh, in_specs=P("x"), out_specs=P())
                return v * 0.5 + total(v).sum() * (number + 1)

            return step

        here, there = map(compiled, slices)
        program = pw.program(lambda v: there(here(there(v))))
        v, expected = np.arange(4, dtype=np.float32), np.arange(4, dtype=np.float32)
        np.asarray(program(v))  # compiled
        print("ready", flush=True)
        sys.stdin.readline()
        results = []
        x = v
        for k in range(60):
            x = program(x) if k % 6 else program(v)
            results.append(x)
        for k, result in enumerate(results):
            if k % 6 == 0:
                expected = v
            for _ in range(3):
                expected = np.float32(expected * 0.5 + expected.sum(dtype=np.float32) * (number + 1))
            np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-4)
        print("right", flush=True)
"""


def test_clients_side_by_side_on_the_same_devices(session, slices, python, equal) -> None:
    """Three tenants, this process among them, whose collectives meet on the same devices."""
    tenants = [python.start(TENANT, session.url, session.token, str(k)) for k in range(2)]
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


DOOMED = """
    import sys
    import time
    import jax, numpy as np
    import pathways_ray as pw

    session = pw.connect(sys.argv[1], sys.argv[2], name="doomed")
    where = pw.virtual_slice((2,), ("x",), island=0, name="doomed slice")
    inc = pw.compiled(lambda v: v + 1, slice=where)
    held = [pw.put(np.ones((64, 1024), np.float32), slice=where) for _ in range(10)]
    held += [inc(x) for x in held]
    for x in held:
        x.block_until_ready()
    if sys.argv[3] == "busy":
        slow = pw.compiled(lambda v: jax.lax.fori_loop(0, 2 * 10**8, lambda i, x: x * 0.5 + 1, v[0, 0]), slice=where)
        held += [slow(held[0]) for _ in range(2)]
    print("holding", flush=True)
    time.sleep(600)
"""

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
    doomed = python.start(DOOMED, session.url, session.token, state)
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
