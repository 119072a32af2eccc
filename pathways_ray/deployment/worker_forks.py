"""Forks in the place of Ray's worker processes: one process imports Ray and the runtime, and forks for each of them.

To import Ray alone costs a worker most of a second of CPU, and a runtime of four hosts has eight of them. A raylet that
this package starts runs this file in two roles. `serve` is its agent, and ends with it: it imports, and forks on
demand. `ask` is in the place of each worker: it hands over its arguments, environment, input and output, and waits for
the end of the fork. A raylet knows a worker by the process id that the worker itself says; until then, what it kills is
the one that asks, and the fork ends with that.

JAX, too, is imported before the fork; what a host has in its environment for it is said to it again
(`executor/compile/backend.py`). As a file that Python runs, this one imports nothing of its package at its top.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

PRELOADED = (
    "ray",
    "ray.util.scheduling_strategies",
    "pathways_ray.controller.actor",
    "pathways_ray.executor.actor",
    "pathways_ray.executor.compile.compiler",
    "pathways_ray.executor.data.server",
    "pathways_ray.executor.run.dispatcher",
    "pathways_ray.resource_manager.actor",
    "pathways_ray.scheduler.actor",
)
"""Modules that each worker would import by itself."""

SERVER_LIMIT_S = 60.0
"""A worker becomes an ordinary one when nobody has listened for this long, on whatever machine."""

REFUSED = b"r"

_HEADER = struct.Struct("!q")
_PEER = struct.Struct("3i")
_OPEN_FILES = 3


def _is_ours(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end: it gets, or says, what runs with the user's rights."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(peer)[1] == os.geteuid())


# --- in the place of a worker -----------------------------------------------------------------------------------------


def ask(path: str, words: Sequence[str]) -> None:
    """Has the server at `path` fork for a worker, whose command is `words` behind Python's; returns when that ends.

    Where no server answers, or it refuses, this process becomes the worker.
    """
    with _connected(path) or contextlib.nullcontext() as connection:
        if connection is None:
            os.execv(sys.executable, [sys.executable, *words])
        question = json.dumps((list(words), dict(os.environ), os.getcwd())).encode()
        socket.send_fds(connection, [_HEADER.pack(len(question))], range(_OPEN_FILES))
        connection.sendall(question)
        if not connection.recv(1):
            return
    os.execv(sys.executable, [sys.executable, *words])


def _connected(path: str) -> socket.socket | None:
    deadline = time.monotonic() + SERVER_LIMIT_S
    while time.monotonic() < deadline:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:  # it starts at this moment as well
            connection.close()
            time.sleep(0.01)
            continue
        if _is_ours(connection):
            return connection
        connection.close()
        break
    return None


# --- the server -------------------------------------------------------------------------------------------------------


class Forks:
    """The server's forks, and the connections of those who asked for them."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.asking: dict[int, tuple[int, socket.socket]] = {}
        """By file descriptor: the fork, and the connection."""
        self.job: str | None = None

    def run(self) -> tuple[list[str], dict[str, str], str]:
        """Forks on request; returns in the forks, with the worker's command, environment and folder."""
        import select

        ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(self.listener, select.POLLIN)
        while True:
            for number, _ in poll.poll():
                if number == ended:
                    os.read(ended, 1 << 16)
                    for done in self._reaped():
                        poll.unregister(done)
                    break  # the other numbers may be of connections that are closed now, or of later ones
                elif number != self.listener.fileno():  # who asked has ended, killed by the raylet
                    poll.unregister(number)
                    child, connection = self.asking.pop(number)
                    connection.close()
                    os.kill(child, signal.SIGKILL)
                elif (question := self._accepted()) is not None:
                    words, connection, files = question
                    if not self._prepared(words[1]):
                        with contextlib.suppress(OSError):  # who asked has ended while modules were imported
                            connection.sendall(REFUSED)
                        connection.close()
                        _close(files)
                        continue
                    if child := os.fork():
                        self.asking[connection.fileno()] = child, connection
                        poll.register(connection, select.POLLIN)
                        _close(files)
                        continue
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    connection.close()
                    self._leave([ended, wake], files)
                    return words

    def _prepared(self, environment: dict[str, str]) -> bool:
        """Imports what workers need, when the first one asks, for whose job all of them are: Ray reads its settings,
        the number of the job among them, when it is imported, and never again. Returns whether a worker is for it."""
        job = environment.get("RAY_JOB_ID", "")
        if self.job is None:
            self.job = job
            os.environ.update(environment)
            for name in PRELOADED:
                importlib.import_module(name)
            gc.collect()
            gc.freeze()  # pages of what was imported stay shared
        return job == self.job

    def _accepted(self) -> tuple[Any, socket.socket, list[int]] | None:
        connection, _ = self.listener.accept()
        connection.settimeout(SERVER_LIMIT_S)
        files: list[int] = []
        try:
            if _is_ours(connection):
                header, files, _, _ = socket.recv_fds(connection, _HEADER.size, _OPEN_FILES)
                size = _HEADER.unpack(header)[0]
                question = bytearray()
                while len(question) < size and (part := connection.recv(size - len(question))):
                    question += part
                return json.loads(question), connection, files
        except (OSError, struct.error, ValueError):  # it was killed on its way
            _close(files)
        connection.close()
        return None

    def _reaped(self) -> list[int]:
        """Lets those know whose forks have ended; the file descriptors of their connections."""
        done = []
        while child := _ended_child():
            for number, (fork, connection) in list(self.asking.items()):
                if fork == child:
                    del self.asking[number]
                    connection.close()
                    done.append(number)
        return done

    def _leave(self, others: list[int], files: list[int]) -> None:
        """Lets go of the server's files in a fork, and takes those of who asked."""
        os.setpgid(0, 0)  # with the end of a worker, Ray ends its process group
        self.listener.close()
        for _, connection in self.asking.values():
            connection.close()
        for place, file in enumerate(files):
            os.dup2(file, place)
        _close([*others, *files])


def _ended_child() -> int:
    """The process id of a child that has ended, and is waited for; 0 without one."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0]
    except ChildProcessError:
        return 0


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def serve(path: str, root: str) -> None:
    """Listens at `path`, and forks for each that asks, with what workers need imported; the package is below `root`."""
    import ctypes
    import runpy

    parent = int(os.environ.get("RAY_RAYLET_PID", os.getppid()))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; the raylet may have ended before
    if parent != os.getppid():
        return
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o077)
    listener.bind(path)
    os.umask(mask)
    listener.listen(128)
    sys.path[0] = root
    words, environment, folder = Forks(listener).run()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # as Python's does by itself: otherwise all forks would draw the same numbers
    script = next(k for k, word in enumerate(words) if word.endswith(".py"))
    sys.argv = words[script:]
    sys.path[0] = os.path.dirname(words[script])
    runpy.run_path(words[script], run_name="__main__")


if __name__ == "__main__":
    {"serve": lambda: serve(*sys.argv[2:]), "ask": lambda: ask(sys.argv[2], sys.argv[3:])}[sys.argv[1]]()
