"""The process of a peer: started, asked with a limit, and ended with all processes below it.

Processes below a peer may outlive it (Ray's processes, TensorFlow's servers, workers of a peer that was killed). So the
benchmark makes itself the parent of orphans below it, where the system can do that, and ends every process below the
peer, and then every orphan.
"""

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.workers import CONNECTION

START_LIMIT_S = 180.0  # imports, processes, compiling; tens of seconds on a loaded machine
CLOSE_LIMIT_S = 15.0
ERROR_LINES = 15  # the last ones that the peer wrote
BECOME_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
ROOT = Path(__file__).parents[2]


class PeerError(RuntimeError):
    """The peer reported a failure, ended, or did not answer in time."""


class PeerEnded(PeerError):
    """The process of the peer has ended."""


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    """For the body of a program that measures peers and has no other children: however it ends, none is left.

    SIGTERM becomes an exception, so that peers are closed; a second one is ignored, as it may come twice. Descendants
    whose own parent ends become children of this process, and all children are ended in the end.
    """

    def leave(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(BECOME_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        kill(psutil.Process().children(recursive=True))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def kill(processes: Sequence[psutil.Process]) -> None:
    """Returns when they are gone. psutil refuses where a number belongs to another process by now."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=CLOSE_LIMIT_S)


class PeerProcess:
    """One peer.

    Args:
        python: the interpreter of its environment.
        module: the module that it runs, and its arguments.
        environment: variables beside those of this process; None takes one away.
    """

    def __init__(self, python: Path | str, module: Sequence[str], environment: Mapping[str, str | None]) -> None:
        # A short path: Ray's sockets lie below it, and the names of sockets are short.
        self._folder = Path(tempfile.mkdtemp(prefix="pwb", dir=os.environ.get("RAY_TMPDIR")))
        self._log = (self._folder / "output").open("w+b")
        self._pipe, theirs = multiprocessing.Pipe()
        usual = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHONHOME": None, CONNECTION: str(theirs.fileno())}
        ray = {"RAY_TMPDIR": str(self._folder), "RAY_ADDRESS": None, "RAY_USAGE_STATS_ENABLED": "0"}
        variables = {**os.environ, "TMPDIR": str(self._folder), **usual, **ray, **environment}
        self._process = subprocess.Popen(
            [str(python), "-m", *module],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in variables.items() if value is not None},
            cwd=self._folder,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is for the benchmark, which closes its peers in order
        )
        theirs.close()
        self._seen: dict[int, psutil.Process] = {}
        self._owes_answer = False

    def ask(self, word: str, limit_s: float, **arguments: Any) -> Any:
        """Sends a request and returns the answer.

        Raises:
            PeerEnded: it ended, or did not answer in time and was killed.
            PeerError: it reports a failure.
        """
        self._owes_answer = True
        try:
            self._pipe.send((word, (), arguments))
            if not self._pipe.poll(limit_s):
                self.kill()
                raise PeerEnded(f"no answer within {limit_s:g} s; it was killed\n{self.last_output()}")
            failed, answer = self._pipe.recv()
        except (OSError, EOFError):
            self.kill()
            raise PeerEnded(f"it ended with code {self._process.returncode}\n{self.last_output()}") from None
        self._owes_answer = False
        self._note_children()
        if failed:
            raise PeerError(failed)
        return answer

    def _note_children(self) -> None:
        """Remembers the processes below the peer: once a process loses its parent it can no longer be found."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                self._seen[process.pid] = process

    def last_output(self) -> str:
        text = Path(self._log.name).read_text(errors="replace") if self._folder.exists() else ""
        return "\n".join(text.strip().splitlines()[-ERROR_LINES:])

    def kill(self) -> None:
        """Ends the process and all below it; returns when they are gone.

        The peer is stopped first, or it might restart its children.
        """
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGSTOP)
        self._note_children()
        self._process.kill()
        kill(list(self._seen.values()))
        self._process.wait()

    def close(self) -> None:
        """Lets the peer end by itself if it is idle, kills the rest of it, and removes its folder."""
        self._note_children()
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not self._owes_answer:
                self._process.wait(CLOSE_LIMIT_S)
        self.kill()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)
