"""Proxies that do not end as they should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pathways_ray.client import proxy_process
from pathways_ray.client.proxy_process import ProxyProcess

HANGS = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid, flush=True)
time.sleep(100)
"""


def started(program: str) -> ProxyProcess:
    """A proxy's process that runs another program."""
    made = ProxyProcess.__new__(ProxyProcess)
    made.account = {}
    command = [sys.executable, "-c", program]
    made._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return made


def test_what_a_proxy_says_at_its_end_hides_no_error_of_its_user() -> None:
    proxy = started("print('no account')")
    with pytest.raises(KeyError, match="of the user"), proxy:
        raise KeyError("of the user")
    assert proxy.account == {}
    proxy.stop()


def test_a_proxy_that_is_killed_is_not_waited_for_where_a_child_has_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy_process, "STOP_LIMIT_S", 0.1)
    proxy = started(HANGS)
    assert proxy._process.stdout is not None
    child = int(proxy._process.stdout.readline())
    try:
        proxy.stop()
        os.kill(child, 0)  # it is still there
    finally:
        os.kill(child, signal.SIGKILL)
    assert proxy._process.returncode == -signal.SIGKILL
    assert proxy.account == {}
    proxy.stop()
