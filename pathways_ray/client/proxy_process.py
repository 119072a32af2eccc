"""`session.proxy()`: a process by which unmodified JAX programs use the cluster.

It is a process of its own, since a proxy serves requests of other processes while this one computes; and what it is
started with is the command line `pathways proxy`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from typing import Any, Self

from pathways_ray.errors import ControllerLost
from pathways_ray.waits import get_within

START_LIMIT_S = 90.0
"""Time for a proxy to load JAX, open its session and listen."""

STOP_LIMIT_S = 10.0


class ProxyProcess:
    """A running proxy; a context manager that stops it.

    Attributes:
        target: what `JAX_BACKEND_TARGET` is to be.
        env: the variables that a program needs, to be added to its environment.
        account: once it has stopped: how many big arrays its clients have put by pipes whose ends went on to hosts
            (`passed_on`), and how many of such the proxy had to read itself (`read_here`).
    """

    def __init__(self, url: str, token: str, ca: str, devices: int, name: str) -> None:
        command = [sys.executable, "-m", "pathways_ray.cli", "proxy", "--json", "--until-eof", "--name", name]
        command += ["--devices", str(devices)]
        given = {"PATHWAYS_URL": url, "PATHWAYS_TOKEN": token} | ({"PATHWAYS_CA": ca} if ca else {})
        # Not by the command line, which everybody on the machine can read.
        self.account: dict[str, int] = {}
        self._process = subprocess.Popen(
            command, env=os.environ | given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        said = self._first_line()
        self.target: str = said["target"]
        self.env: dict[str, str] = said["env"]

    def _first_line(self) -> Any:
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        out = self._process.stdout
        assert out is not None
        threading.Thread(target=lambda: lines.put(out.readline()), daemon=True).start()
        try:
            line = get_within(lines, START_LIMIT_S)
        except queue.Empty:
            line = ""
        if not line:
            self.stop()
            raise ControllerLost(f"the proxy did not start; it ended with status {self._process.poll()}, see above")
        return json.loads(line)

    def stop(self) -> None:
        """Ends the proxy, and the sessions of its clients. One that does not end in time is killed, and leaves no
        account."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        out = self._process.stdout
        assert out is not None
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            out.close()  # unread: a child that lives on may have the other end
        if not out.closed:
            with out, contextlib.suppress(ValueError):  # it may have ended in the midst of a line
                self.account = json.loads(out.read())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"ProxyProcess({self.target})"
