"""The reaper of a session's host functions: the parent of the process that runs them, which ends all that they leave.

Functions start processes, which may become daemons, and end their own process while those go on. Whatever loses its
parent becomes a child of the reaper, so that it finds all of them: when the process of the functions has ended, when
the host asks for the end (SIGTERM), and when the host is gone. It loads nothing, and runs nothing of a user's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

END_LIMIT_S = 5.0
"""Time in which all that functions have left is ended; what cannot be, since the kernel holds it, is left."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Asked(BaseException):
    """The host has asked for the end, or is gone."""


def main() -> None:
    """Starts the process whose pipes the command line names, and ends as it has ended."""
    control = ctypes.CDLL(None).prctl
    control(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    status = 0
    try:
        signal.signal(signal.SIGTERM, _asked)
        control(_PR_SET_PDEATHSIG, signal.SIGTERM)
        reaper = os.getpid()
        server = os.fork()
        if not server:
            _serve(control, reaper)
        for pipe in map(int, sys.argv[1:3]):
            os.close(pipe)
        while (ended := os.wait())[0] != server:
            pass
        status = ended[1]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # in here: the host may ask at this very moment
    except _Asked:
        pass
    end_children()
    _end_like(status)


def _serve(control: Callable[..., Any], reaper: int) -> None:
    """The process that runs functions. It does not outlive the reaper."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == reaper:
        from pathways_ray.executor.calls import main

        main.main()
    sys.exit()


def _asked(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: a second one would end this process before its children
    raise _Asked


def end_children() -> None:
    """Kills the children of this process, and those that these leave, until none is left."""
    until = time.monotonic() + END_LIMIT_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < until:
            for pid in _children():
                with contextlib.suppress(PermissionError):  # of another user: others have to end all the same
                    os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.002)


def _children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])  # a name may have brackets and spaces
            if parent == os.getpid():
                found.append(int(name))
    return found


def _end_like(status: int) -> None:
    """Ends this process with the exit status of another, or by the signal that ended that one."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
