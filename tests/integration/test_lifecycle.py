"""Before, after and twice; Ctrl-C while waiting; nothing left behind; who does not start. All but the last in a process
with a cluster of its own."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray

import pathways_ray as pw
from pathways_ray.deployment.islands import await_started
from tests.integration.ray_logs import last_words


@pytest.mark.long
def test_before_init_after_shutdown_and_twice(python) -> None:
    assert "in order" in python.run("lifecycle_order")
    python.assert_none_left()


@pytest.mark.long
def test_a_script_that_forgets_shutdown_leaves_nothing(python) -> None:
    """And says nothing: a call of Ray after Ray's own exit handler would start it once more."""
    script = python.start("lifecycle_forgotten_shutdown")
    out, err = script.communicate(timeout=90)
    assert (script.returncode, out) == (0, "[1.0, 2.0, 3.0, 4.0]\n"), err
    assert not [line for line in err.splitlines() if "Ray" in line or "fork" in line], err
    python.assert_none_left()


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_a_wait(python) -> None:
    """As from a terminal: the signal goes to the whole process group."""
    script = python.start("lifecycle_interrupted_wait")
    assert script.stdout is not None
    for _ in range(2):
        assert script.stdout.readline() == "waiting\n"
        start = time.monotonic()
        os.killpg(script.pid, signal.SIGINT)
        assert script.stdout.readline() == "interrupted\n"
        took = time.monotonic() - start
        print(f"interrupted after {took:.2f} s")
        assert took < 5
    assert script.stdout.readline() == "usable\n"
    assert script.stdout.readline() == "waiting\n"
    os.killpg(script.pid, signal.SIGINT)
    _, err = script.communicate(timeout=60)
    assert script.returncode == -signal.SIGINT, err
    assert "\nKeyboardInterrupt\n" in err
    assert "y.cancel() cancels it" in err.splitlines()[-1]
    assert "Error" not in err, err
    python.assert_none_left()


@ray.remote(num_cpus=0)
def serves_after(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@ray.remote(num_cpus=0)
def cannot_start() -> None:
    raise pw.errors.UsageError("no such core")


def test_who_did_not_start_in_time_is_named(session) -> None:
    assert session.url
    answers = {f"host {k}": serves_after.remote(seconds) for k, seconds in enumerate((0.0, 60.0))}
    ray.get(answers["host 0"])
    with pytest.raises(pw.errors.PathwaysError, match=r"^not started in time: host 1; Ray's nodes have "):
        await_started(answers, 0.5)
    ray.cancel(answers["host 1"], force=True)
    assert await_started({"host 0": answers["host 0"]}, 0.0) == [0.0]
    with pytest.raises(pw.errors.UsageError, match="no such core"):
        await_started({"host 2": cannot_start.remote()}, 60.0)
    assert "raylet.out" in last_words()  # what a test that fails shows beside it
