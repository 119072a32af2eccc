"""The page's process: it is no part of what a terminal interrupts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import Any

import pytest

from pathways_ray.deployment import dashboard_process
from pathways_ray.deployment.dashboard_process import DashboardProcess
from pathways_ray.errors import PathwaysError


def test_an_interrupt_from_the_terminal_is_not_for_the_page() -> None:
    page = DashboardProcess("grpc://127.0.0.1:1", "t", "")
    try:
        assert os.getpgid(page.process.pid) == page.process.pid
    finally:
        page.stop()


def test_a_process_with_many_open_files_shows_a_page() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    taken = [os.dup(2) for _ in range(1100)]
    try:
        page = DashboardProcess("grpc://127.0.0.1:1", "t", "")
        page.stop()
        assert page.url.startswith("http")
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_page_that_does_not_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[str]] = []

    def silent(command: list[str], **how: Any) -> subprocess.Popen[str]:
        made.append(started([sys.executable, "-c", "import sys; sys.stdin.read()"], **how))
        return made[0]

    started = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", silent)
    monkeypatch.setattr(dashboard_process, "START_LIMIT_S", 0.2)
    with pytest.raises(PathwaysError, match="did not start within"):
        DashboardProcess("grpc://127.0.0.1:1", "t", "")
    assert made[0].returncode is not None
