"""A process is killed if it is the one that was meant."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from pathways_ray import os_process


def test_a_process_is_killed_only_if_it_began_when_it_should_have(capfd: pytest.CaptureFixture[str]) -> None:
    """Another process may have got the pid of one that is gone. The log says why one was killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = os_process.started_at(process.pid)
        assert started >= os_process.started_at(os.getpid()) > 0
        os_process.kill(process.pid, started - 1, "it is another one")
        assert process.poll() is None
        os_process.kill(process.pid, started, "it did not answer")
        assert process.wait(timeout=10) == -9
    assert os_process.started_at(process.pid) == 0
    os_process.kill(process.pid, started)
    os_process.kill(process.pid)
    assert capfd.readouterr().err == f"process {process.pid} is killed: it did not answer\n"


def test_a_process_is_killed_also_where_that_cannot_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os_process.kill(process.pid, reason="it did not answer")
        assert process.wait(timeout=10) == -9
