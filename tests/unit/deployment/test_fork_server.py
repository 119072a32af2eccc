"""The server of forks as the process that starts Ray has it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pathways_ray import forks
from pathways_ray.deployment import fork_server

READER = ["-m", "pathways_ray.controller.planner"]


def test_it_has_forks_of_readers_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATHWAYS_TOKEN", "of the operator")
    server = fork_server.ForkServer()
    process = psutil.Process(server._process.pid)
    assert "PATHWAYS_TOKEN" not in process.environ()
    folder = Path(server.readers).parent
    assert (os.stat(folder).st_mode & 0o777) == 0o700
    asks = [sys.executable, *forks.asking(server.readers, READER)]
    with subprocess.Popen(asks, stdin=subprocess.PIPE) as reader:
        deadline = time.monotonic() + 30.0
        while len(process.children(recursive=True)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        forking, fork = process.children(recursive=True)
        assert fork.ppid() == forking.pid
        server.close()
        assert reader.wait(30.0) == 0, "who asked ends with the server"
    assert not process.is_running()
    assert not folder.exists()
    server.close()


def test_a_long_folder_of_temporary_files_is_none_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    server = fork_server.ForkServer()
    assert len(server.workers) < fork_server.MOST_OF_A_PATH
    server.close()
    assert not any(folder.iterdir())


def test_preparing_one_that_has_ended_is_fine() -> None:
    server = fork_server.ForkServer()
    server._process.kill()
    server._process.wait()
    server.prepare(os.getpid())
    server.close()
    assert not Path(server.workers).parent.exists()


def test_none_is_there_for_a_ray_that_is_not_to_start_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fork_server.begin("auto", {}) is None
    assert fork_server.begin(None, {"include_dashboard": True}) is None
    assert fork_server.begin(None, {"runtime_env": {"pip": ["numpy"]}}) is None
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert fork_server.begin(None, {}) is None
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setattr(fork_server, "ForkServer", lambda: (_ for _ in ()).throw(OSError("no more processes")))
    assert fork_server.begin(None, {}) is None
