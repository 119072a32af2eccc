"""The process of a peer: started, asked with a limit, and ended with all processes below it.

Processes below a peer may outlive it (Ray's processes, TensorFlow's servers, workers of a peer that was killed). So the
benchmark makes itself the parent of orphans below it, where the system can do that, and ends every process below the
peer, and then every orphan.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

START_LIMIT_S = 180.0  # imports, processes, compiling; tens of seconds on a loaded machine
CLOSE_LIMIT_S = 15.0
ERROR_LINES = 15  # the last ones that the peer wrote to stderr
BECOME_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
ROOT = Path(__file__).parents[2]


class PeerError(RuntimeError):
    """The peer reported a failure, ended, or did not answer in time."""


class PeerEnded(PeerError):
    """The process of the peer has ended."""


def end_in_order() -> None:
    """Makes SIGTERM an exception, so that peers are closed. A second one is ignored: it may come twice."""

    def leave(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    """For the body of a program that measures peers and has no other children: however it ends, none is left."""
    end_in_order()
    adopt_orphans()
    try:
        yield
    finally:
        end_orphans()


def adopt_orphans() -> None:
    """Makes this process the parent of each descendant whose own parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(BECOME_SUBREAPER, 1, 0, 0, 0)


class PeerProcess:
    """One peer.

    Args:
        python: the interpreter of its environment.
        module: the module that it runs, and its arguments.
        environment: variables beside those of this process; None takes one away.
    """

    def __init__(self, python: Path | str, module: list[str], environment: dict[str, str | None]) -> None:
        # A short path: Ray's sockets lie below it, and the names of sockets are short.
        self._folder = Path(tempfile.mkdtemp(prefix="pwb"))
        self._log = (self._folder / "stderr").open("w+b")
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": str(self._folder),
            "TMPDIR": str(self._folder),
        }
        for name, value in {
            "PYTHONHOME": None,
            "RAY_ADDRESS": None,
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        }.items():
            variables.pop(name, None)
            if value is not None:
                variables[name] = value
        self._process = subprocess.Popen(
            [str(python), "-m", *module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=variables,
            cwd=self._folder,
            start_new_session=True,  # Ctrl-C is for the benchmark, which closes its peers in order
        )
        self._seen: dict[int, psutil.Process] = {}
        self._owes_answer = False

    def ask(self, word: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        """Sends a request and returns the answer.

        Raises:
            PeerEnded: it ended, or did not answer in time and was killed.
            PeerError: it reports a failure.
        """
        assert self._process.stdin is not None
        self._owes_answer = True
        try:
            self._process.stdin.write(json.dumps({word: arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise PeerEnded(f"it ended\n{self.last_output()}") from None
        line = self._line(limit_s)
        if line is None:
            self.kill()
            raise PeerEnded(f"no answer within {limit_s:g} s; it was killed\n{self.last_output()}")
        if not line:
            self.kill()
            raise PeerEnded(f"it ended with code {self._process.returncode}\n{self.last_output()}")
        self._owes_answer = False
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _line(self, limit_s: float) -> bytes | None:
        """The next line; b"" when the process ended, None when the time is over."""
        stdout = self._process.stdout
        assert stdout is not None
        ends, read = time.monotonic() + limit_s, b""
        while not read.endswith(b"\n"):
            ready, _, _ = select.select([stdout], [], [], max(ends - time.monotonic(), 0))
            if not ready:
                return None
            part = os.read(stdout.fileno(), 1 << 16)
            if not part:
                return b""
            read += part
        self._note_children()
        return read

    def _note_children(self) -> None:
        """Remembers the processes below the peer: once a process loses its parent it can no longer be found."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                self._seen[process.pid] = process

    def last_output(self) -> str:
        self._log.flush()
        text = Path(self._log.name).read_text(errors="replace") if self._folder.exists() else ""
        return "\n".join(text.strip().splitlines()[-ERROR_LINES:])

    def kill(self) -> None:
        """Ends the process and all below it; returns when they are gone.

        The peer is stopped first, or it might restart its children.
        """
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGSTOP)
        self._note_children()
        for process in self._seen.values():
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil refuses when the number belongs to another process by now
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        psutil.wait_procs(list(self._seen.values()), timeout=CLOSE_LIMIT_S)

    def close(self) -> None:
        """Lets the peer end by itself if it is idle, kills the rest of it, and removes its folder."""
        self._note_children()
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            assert self._process.stdin is not None
            self._process.stdin.close()
            if not self._owes_answer:
                self._process.wait(CLOSE_LIMIT_S)
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def end_orphans() -> None:
    """Ends every child of this process, and all below; call it when all peers are closed.

    Only for a process that has no other children, which is why peers are measured by a program of its own.
    """
    children = psutil.Process().children(recursive=True)
    for process in children:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(children, timeout=CLOSE_LIMIT_S)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
