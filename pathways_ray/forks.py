"""Forks in the place of processes that import JAX and Ray: one process has imported them, and forks for each.

To import Ray alone costs a worker most of a second of CPU, JAX as much again, and a runtime of four hosts has thirteen
processes. Who starts Ray starts this file first (`deployment/fork_server.py`), as a server that imports while Ray comes
up. `ask` is in the place of each process: it hands over its arguments, environment, input and output, and waits for the
end of the fork. A raylet knows a worker by the process id that the worker itself says; until then, what it kills is the
one that asks, and the fork ends with that.

The server begins without secrets in its environment, and a fork of then serves the processes that read clients' bytes
(`worker`). The whole environment comes when the raylet runs: Ray takes its settings from there when it is imported, the
raylet's process id among them.

What a host has in its environment for JAX is said to it again (`executor/compile/backend.py`). As a file that Python
runs, this one imports nothing of its package at its top.
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
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

READERS = ("pathways_ray.executor.compile.sandbox", "pathways_ray.controller.planner")
"""Modules whose function `main` reads clients' bytes in a process of its own."""

READ_WITH = ("pathways_ray.executor.compile.allowlist",)
"""Modules that these import when they begin."""

OTHERS = (
    "pathways_ray.controller.client_service",
    "pathways_ray.executor.compile.compiler",
    "pathways_ray.executor.data.server",
    "pathways_ray.executor.run.dispatcher",
    "pathways_ray.scheduler.core",
    "google.protobuf.json_format",
    "jsonschema",
    "requests",
)
"""Modules without Ray that workers import, some of them by it."""

WITH_RAY = (
    "ray",
    "ray.util.scheduling_strategies",
    "pathways_ray.controller.actor",
    "pathways_ray.executor.actor",
    "pathways_ray.resource_manager.actor",
    "pathways_ray.scheduler.actor",
)
"""The other modules that workers import."""

FIRST_JOB = "01000000"
"""The number of the job of who starts a Ray, as Ray writes it."""

SOCKET = "PATHWAYS_FORKS"
"""The variable that names, in processes of the runtime, where those that run a reader are forked."""

ASKING_LIMIT_S = 60.0
"""For a question to arrive whole, on whatever machine."""

REFUSED = b"r"
FORKED = b"f"

_SIZE = struct.Struct("!q")
_PEER = struct.Struct("3i")
_OPEN_FILES = 3


def _is_ours(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end: it gets, or says, what runs with the user's rights."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(peer)[1] == os.geteuid())


# --- in the place of a process ----------------------------------------------------------------------------------------


def asking(path: str, words: Sequence[str]) -> list[str]:
    """The words behind Python's of a command that has the server at `path` fork for a command."""
    return ["-I", "-S", __file__, "ask", path, *words]


def ask(path: str, words: Sequence[str]) -> None:
    """Has the server at `path` fork for a process, whose command is `words` behind Python's; returns when that ends.

    Where no server listens, or it refuses, or ends before it forks, this process becomes the other.
    """
    with _connected(path) or contextlib.nullcontext() as connection:
        if connection is None:
            os.execv(sys.executable, [sys.executable, *words])
        question = json.dumps((list(words), dict(os.environ), os.getcwd())).encode()
        with contextlib.suppress(OSError):  # the server has ended before it read the question
            socket.send_fds(connection, [_SIZE.pack(len(question))], range(_OPEN_FILES))
            connection.sendall(question)
            if connection.recv(1) == FORKED:
                with contextlib.suppress(OSError):
                    connection.recv(1)  # it ends with the fork
                return
    os.execv(sys.executable, [sys.executable, *words])


def _connected(path: str) -> socket.socket | None:
    """A connection; None where nobody listens. One that has only begun listens."""
    connection = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        connection.connect(path)
        if _is_ours(connection):
            return connection
    connection.close()
    return None


# --- the server -------------------------------------------------------------------------------------------------------


class Command(NamedTuple):
    """A command for a fork: the words behind Python's, its environment and folder."""

    words: list[str]
    environment: dict[str, str]
    folder: str


class Forks:
    """The server's forks, and the connections of those who asked for them.

    Args:
        listener: where they ask.
        takes: whether a command can be a fork of this process.
        owners: file descriptors of processes, with each of which this one ends.
    """

    def __init__(self, listener: socket.socket, takes: Callable[[Command], bool], owners: Sequence[int] = ()) -> None:
        self.listener = listener
        self.takes = takes
        self.owners = [*owners]
        self.asking: dict[int, tuple[int, socket.socket]] = {}
        """By file descriptor: the fork, and the connection."""

    def run(self) -> Command:
        """Forks on request; returns in the forks, with what each is to run."""
        import select

        ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        poll = select.poll()
        for number in (ended, self.listener.fileno(), *self.owners):
            poll.register(number, select.POLLIN)
        raylet = 0
        while True:
            for number, _ in poll.poll():
                if number in self.owners:
                    _remove(self.listener.getsockname())
                    os._exit(0)
                elif number == ended:
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
                    command, connection, files = question
                    if not self.takes(command):
                        _refuse(connection, files)
                        continue
                    if not raylet and (raylet := int(command.environment.get("RAY_RAYLET_PID", 0))):
                        self.owners.append(_handle_of(raylet))
                        poll.register(self.owners[-1], select.POLLIN)
                    if (child := _forked()) < 0:
                        _refuse(connection, files)
                        continue
                    if child:
                        self.asking[connection.fileno()] = child, connection
                        poll.register(connection, select.POLLIN)
                        _close(files)
                        continue
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    with contextlib.suppress(OSError):  # who asked has ended: the server hears of that
                        connection.sendall(FORKED)
                    connection.close()
                    self._leave([ended, wake, *self.owners], files)
                    return command

    def _accepted(self) -> tuple[Command, socket.socket, list[int]] | None:
        connection, _ = self.listener.accept()
        connection.settimeout(ASKING_LIMIT_S)
        files: list[int] = []
        try:
            if _is_ours(connection):
                header, files, _, _ = socket.recv_fds(connection, _SIZE.size, _OPEN_FILES)
                size = _SIZE.unpack(header)[0]
                question = bytearray()
                while len(question) < size and (part := connection.recv(size - len(question))):
                    question += part
                return Command(*json.loads(question)), connection, files
        except (OSError, struct.error, TypeError, ValueError):  # it was killed on its way
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


def _forked() -> int:
    """The process id of a fork, in that 0; -1 where the system makes none."""
    try:
        return os.fork()
    except OSError:
        return -1


def _refuse(connection: socket.socket, files: Sequence[int]) -> None:
    """Has who asked be the process itself."""
    with contextlib.suppress(OSError):  # it has ended meanwhile
        connection.sendall(REFUSED)
    connection.close()
    _close(files)


def _ended_child() -> int:
    """The process id of a child that has ended, and is waited for; 0 without one."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0]
    except ChildProcessError:
        return 0


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def _remove(path: str) -> None:
    """Removes a socket, and its folder behind the last one."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def _handle_of(process: int) -> int:
    """A file descriptor of a process, which can be read from when that has ended. Ends this process where it has."""
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        os._exit(0)


def serve(root: str, owner: int, readers: int, workers: int) -> NoReturn:
    """Serves readers and workers of Ray, in two processes, until the process `owner` or the raylet ends.

    The environment of the workers comes from standard input, in JSON; without one, this process ends.

    Args:
        root: the folder that the package is in.
        owner: a process id.
        readers, workers: file descriptors of the sockets at which they are asked for.
    """
    owners = [_handle_of(owner)]
    sys.path[0] = root
    _import(READERS + READ_WITH)
    at_readers, at_workers = (socket.socket(fileno=number) for number in (readers, workers))
    server = os.getpid()
    if not os.fork():
        at_workers.close()
        _close(owners)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        known = [["-m", name] for name in READERS]
        _become(Forks(at_readers, lambda command: command.words in known, [_handle_of(server)]).run())
    at_readers.close()
    _import(OTHERS)
    environment = sys.stdin.read()
    if not environment:
        os._exit(0)
    os.environ.update(json.loads(environment))
    os.environ["RAY_JOB_ID"] = FIRST_JOB
    _import(WITH_RAY)
    _become(Forks(at_workers, lambda command: command.environment.get("RAY_JOB_ID") == FIRST_JOB, owners).run())


def _import(names: Sequence[str]) -> None:
    """Imports modules, and has the pages that they take stay shared."""
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _become(command: Command) -> NoReturn:
    """Runs the command of a fork, to its end."""
    import runpy

    words, environment, folder = command
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # as Python's does by itself: otherwise all forks would draw the same numbers
    if words[0] == "-m":
        sys.argv = words[1:]
        importlib.import_module(words[1]).main()
    else:
        script = next(k for k, word in enumerate(words) if word.endswith(".py"))
        sys.argv = words[script:]
        sys.path[0] = os.path.dirname(words[script])
        runpy.run_path(words[script], run_name="__main__")
    sys.exit()


def main(role: str, *words: str) -> None:
    """Runs one of the two roles of this file."""
    if role == "serve":
        root, *numbers = words
        serve(root, *map(int, numbers))
    ask(words[0], words[1:])


if __name__ == "__main__":
    main(*sys.argv[1:])
