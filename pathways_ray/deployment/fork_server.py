"""The server of forks of a Ray that starts here: a child of this process, which imports while Ray comes up."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pathways_ray import forks
from pathways_ray.worker import without_secrets

MOST_OF_A_PATH = 90
"""Characters that a socket's path may have on every system."""


def begin(address: str | None, ray_options: Mapping[str, Any]) -> ForkServer | None:
    """The server for the Ray that is to start here. None where none starts (it is at `address`, or runs already), where
    it is to have its own processes (for a dashboard or a `runtime_env`), and where the system can have none."""
    started = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    whole = ray_options.get("include_dashboard") or ray_options.get("runtime_env")
    if address is not None or started or whole or not hasattr(os, "pidfd_open"):
        return None
    with contextlib.suppress(OSError):
        return ForkServer()
    return None


class ForkServer:
    """A running server (`pathways_ray.forks`). It ends with `close`, with this process, or with the raylet that its
    forks are workers of.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as undo:
            self._folder = tempfile.mkdtemp(prefix="pathways-")
            undo.callback(self._forget)
            if len(self._folder) > MOST_OF_A_PATH:
                self._forget()
                self._folder = tempfile.mkdtemp(prefix="pathways-", dir="/tmp")
            self.workers, self.readers = (os.path.join(self._folder, name) for name in ("workers", "readers"))
            listeners = [undo.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2)]
            for listener, path in zip(listeners, (self.readers, self.workers), strict=True):
                listener.bind(path)
                listener.listen(128)
            numbers = [listener.fileno() for listener in listeners]
            words = [forks.__file__, "serve", str(Path(forks.__file__).parents[1]), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, *words, *map(str, numbers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=without_secrets(),
                pass_fds=numbers,
                # An interrupt from the terminal is for this process. A session of its own would have the scheduler of
                # Linux share cores between the two by halves (autogroups), and starve the runtime on a busy machine.
                process_group=0,
            )
            for listener in listeners:
                listener.close()
            undo.pop_all()

    def prepare(self, raylet: int) -> None:
        """Says of a raylet, by its process id, that its workers have the environment of this process. A server that has
        ended is fine: there are no forks."""
        environment = {**os.environ, "RAY_RAYLET_PID": str(raylet)}
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            stdin.write(json.dumps(environment).encode())
        with contextlib.suppress(OSError):
            stdin.close()

    def close(self) -> None:
        """Ends it. Twice is fine."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._forget()

    def _forget(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
