"""Before, after and twice; Ctrl-C while waiting; nothing left behind. Each in a process with a cluster of its own."""

from __future__ import annotations

import os
import signal
import time

import pytest

ORDER = """
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import pathways_ray as pw
    from jax.sharding import PartitionSpec as P

    V = np.arange(4, dtype=np.float32)

    def refused(kind, message, call, *args):
        try:
            call(*args)
        except kind as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"{call} was not refused")

    double = pw.compiled(lambda v: v * 2)  # may be made before there is a cluster
    program = pw.program(lambda v: double(double(v)))
    calls = [
        (double, V),
        (program, V),
        (program.lower, V),
        (pw.put, V),
        (pw.virtual_slice, (2,)),
        (pw.islands,),
        (pw.devices,),
    ]
    for call in calls:
        refused(pw.errors.NotInitialized, "call pw.init() to start one here, or pw.connect(url, token=...)", *call)
    pw.shutdown()  # nothing to stop

    refused(pw.errors.UsageError, "devices_per_host must be a whole number of at least 1, not 0", pw.init, 1, 1, 0)
    refused(pw.errors.UsageError, "dispatch must be 'parallel' or 'sequential'", lambda: pw.init(dispatch="other"))

    session = pw.init(islands=1, devices_per_host=2)
    refused(pw.errors.AlreadyInitialized, f"runs a cluster at {session.url} already; pw.shutdown() stops it", pw.init)
    assert np.asarray(program(V)).tolist() == [0, 4, 8, 12]
    held, s = program(V), pw.virtual_slice((2,))
    bound = pw.compiled(lambda v: v + 1, slice=s)
    np.asarray(bound(V))
    pw.shutdown()
    pw.shutdown()
    for call in calls:
        refused(pw.errors.NotInitialized, "call pw.init()", *call)
    for call in ((np.asarray, held), (held.block_until_ready,), (session.status,), (session.virtual_slice, (1,))):
        refused(pw.errors.SessionClosed, "it was shut down", *call)
    refused(pw.errors.UsageError, "", bound, V)
    held.delete()

    with ThreadPoolExecutor() as pool:  # what is started in a thread outlives the thread
        again = pool.submit(pw.init, 2, 1, 1).result()
    with again:
        assert again.url != session.url
        assert np.asarray(program(V)).tolist() == [0, 4, 8, 12]
        refused(pw.errors.UsageError, "another session", bound, V)
        del held
    refused(pw.errors.NotInitialized, "call pw.init()", double, V)
    print("in order")
"""


@pytest.mark.long
def test_before_init_after_shutdown_and_twice(python) -> None:
    assert "in order" in python.run(ORDER)
    python.assert_none_left()


@pytest.mark.long
def test_a_script_that_forgets_shutdown_leaves_nothing(python) -> None:
    source = """
        import numpy as np
        import pathways_ray as pw

        pw.init(islands=1, devices_per_host=2)
        y = pw.compiled(lambda v: v + 1)(np.arange(4.0))
        print(np.asarray(y).tolist())
    """
    assert "[1.0, 2.0, 3.0, 4.0]" in python.run(source)
    python.assert_none_left()


WAITING = """
    import sys
    import time
    import jax, numpy as np
    import pathways_ray as pw

    STEPS = 1_000_000_000  # of a loop that XLA does not shorten; more than a second on any machine

    def long(v):
        return jax.lax.fori_loop(0, STEPS, lambda i, x: x * 0.5 + 1.0, v)

    with pw.init(islands=1, devices_per_host=2) as session:
        slow = pw.compiled(long, slice=pw.virtual_slice((1,)))
        quick = pw.compiled(lambda v: v + 1, slice=pw.virtual_slice((1,)))
        assert float(quick(np.float32(1))) == 2
        for wait in (np.asarray, pw.Array.block_until_ready):
            y = slow(np.float32(1))
            try:
                print("waiting", flush=True)
                wait(y)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            else:
                print("not interrupted", flush=True)
            assert float(quick(np.float32(2))) == 3
        assert float(y) == 2  # what was waited for can be waited for again
        print("usable", flush=True)
        print("waiting", flush=True)
        np.asarray(slow(np.float32(1)))
"""


def test_ctrl_c_in_the_middle_of_a_wait(python) -> None:
    """As from a terminal: the signal goes to the whole process group."""
    script = python.start(WAITING)
    assert script.stdout is not None
    for _ in range(2):
        assert script.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        start = time.monotonic()
        os.killpg(script.pid, signal.SIGINT)
        assert script.stdout.readline() == "interrupted\n"
        took = time.monotonic() - start
        print(f"interrupted after {took:.2f} s")
        assert took < 5
    assert script.stdout.readline() == "usable\n"
    assert script.stdout.readline() == "waiting\n"
    time.sleep(0.3)
    os.killpg(script.pid, signal.SIGINT)
    _, err = script.communicate(timeout=60)
    assert script.returncode == -signal.SIGINT, err
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "Error" not in err, err
    python.assert_none_left()
