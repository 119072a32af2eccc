"""Host functions that do what nobody expects: an error with the user's line, nothing left running, nobody harmed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from tests.integration import hostile_functions
from tests.integration.conftest import Slices
from tests.integration.hostile_functions import CASES, FINE, LINE, Case

V = np.arange(4, dtype=np.float32)
ENDED_WITHIN_S = 20.0


def same(v: Any) -> Any:
    return jax.ShapeDtypeStruct(v.shape, v.dtype)


def check(where: pw.VirtualSlice, name: str, case: Case) -> None:
    """Calls a function, and one that does no harm behind it.

    Raises:
        AssertionError: something else comes of a call than it should.
    """
    function = pw.host(case.function, slice=where, result=same, limit_s=case.limit_s)
    after = pw.host(lambda v: v * 2, slice=where, result=same)
    v = pw.put(V, where)
    called, behind = function(v), after(v)
    if case.said == FINE:
        np.testing.assert_array_equal(np.asarray(called), V + 1, name)
    else:
        with pytest.raises((pw.errors.HostFunctionError, pw.errors.HostFunctionTimeout), match=case.said) as error:
            called.block_until_ready(timeout=120)
        assert LINE.search(str(error.value)), error.value
        assert len(str(error.value)) < 20_000
    np.testing.assert_array_equal(np.asarray(behind), V * 2, name)
    np.testing.assert_array_equal(np.asarray(v), V, name)


def running(folder: Path) -> list[psutil.Process]:
    """The processes that have written their numbers there, and still run."""
    found = []
    for file in folder.iterdir():
        if psutil.pid_exists(int(file.name)):
            process = psutil.Process(int(file.name))
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_functions_that_do_what_nobody_expects(
    session: ClusterSession, slices: Slices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. A tenant calls one function after the other, each with a harmless one behind it; another one computes on the same
       devices all the time.
    2. The tenant goes: none of the processes that its functions have left is there any more. No host has ended.
    """
    monkeypatch.setattr(hostile_functions, "FOLDER", tmp_path)
    before = [host["pid"] for island in session.status()["islands"] for host in island["hosts"]]
    compute = pw.compiled(lambda v: v * 3, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    over, wrong = threading.Event(), []

    def goes_on() -> None:
        while not over.is_set():
            if not np.array_equal(np.asarray(compute(V)), V * 3):
                wrong.append("other bits")
            over.wait(0.02)

    other = threading.Thread(target=goes_on)
    other.start()
    try:
        with pw.connect(session.url, session.token) as tenant:
            where = tenant.virtual_slice((1,), island=0)
            # What the others have left ends with the process that the next one ends: the last one leaves something.
            for name, case in (*CASES.items(), ("leaves_a_daemon", CASES["leaves_a_daemon"])):
                try:
                    check(where, name, case)
                except (AssertionError, pw.errors.PathwaysError, pytest.fail.Exception) as error:
                    wrong.append(f"{name}: {error}")
            assert not wrong, "\n\n".join(wrong)
            until = time.monotonic() + ENDED_WITHIN_S
            while not running(tmp_path):
                assert time.monotonic() < until, "no function has left a process that runs"
                time.sleep(0.05)
    finally:
        over.set()
        other.join()
    assert not wrong
    until = time.monotonic() + ENDED_WITHIN_S
    while (left := running(tmp_path)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left
    assert [host["pid"] for island in session.status()["islands"] for host in island["hosts"]] == before
