"""Worker processes: what a client's bytes may make slow, big or crash is done in a fork with limits, not in a server.

A `Worker` has a process that has loaded its code, and forks once for each question. The fork answers and ends; it has
limits on time and memory, no open files but its pipe, and nothing of one question is left when the next one comes. Who
serves may confine its forks further. Where forks do not do, as with XLA and its threads, the process answers by itself
(`serve_alone`), and one that ends over a question is replaced for the next.

Frames on the pipes: 8 bytes of length, then the bytes; the first byte of an answer says whether the fork gave it.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import IO, NamedTuple

from pathways_ray import forks

_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")
_ANSWERED, _ENDED, _LATE = b"\1", b"\0", b"\2"
_OUT_OF_MEMORY = 77
_ENDING_S = 1.0


class Limits(NamedTuple):
    """Limits of one question: seconds of a core, seconds that pass (for a fork that does nothing), and the bytes of
    memory beyond what the process has, and of the answer."""

    cpu_s: int
    time_s: float
    memory_bytes: int
    bytes_per_second: int = 0
    """Bytes of a question that give it a further second of a core; 0: none."""
    answer_bytes: int = 1 << 30


class NotConfined(Exception):
    """This machine does not take the confinement that a fork should have."""


Confine = Callable[[int, int, int], None]
"""Leaves the process one pipe, bytes of memory beyond what it has, and seconds of a core. Raises `NotConfined`."""


class WorkerEnded(Exception):
    """The fork ended without an answer; the text says how."""


class WorkerLate(WorkerEnded):
    """It took too long, of time that passes: on a machine with less to do it may not."""


class Worker:
    """A worker process, started with the first question and again after its death. Any thread may ask; one question is
    answered at a time.

    Args:
        command: what Python runs; it has to call `serve`.
        environment: variables beside those of this process. Secrets of this one are left out.
        reply_limit_s: the worker itself is killed when it has not replied in this time, in which it may have to start.
        reply_bytes: a worker that says more is killed as well.
        forks: whether it calls `serve`, and not `serve_alone`. It is then itself a fork of a process that has loaded
            its code, where there is one (`pathways_ray.forks`).
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str] | None = None,
        reply_limit_s: float = 300.0,
        reply_bytes: int = 1 << 30,
        forks: bool = True,
    ) -> None:
        self.command = command
        self.forks = forks
        self.environment = environment or {}
        self.reply_limit_s = reply_limit_s
        self.reply_bytes = reply_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process ahead of the first question, without waiting for it."""
        with self._lock:
            self._running()

    def ask(self, question: bytes) -> bytes:
        """The answer.

        Raises:
            WorkerEnded: what answers, a fork or the worker, crashed, or reached a limit; `WorkerLate` for a fork's of
                time that passes.
            OSError: the worker does not run, also not after a second start.
        """
        with self._lock:
            try:
                reply = self._asked(question)
            except OSError:
                reply = self._asked(question)
        if reply[:1] in (_ENDED, _LATE):
            text = reply[1:].decode(errors="replace")  # of a fork that its question may have taken over
            raise WorkerLate(text) if reply[:1] == _LATE else WorkerEnded(text)
        return reply[1:]

    def _asked(self, question: bytes) -> bytes:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        too_late = threading.Timer(self.reply_limit_s, kill)
        too_late.daemon = True
        too_late.start()
        try:
            _write(process.stdin, question)
            reply = _read_frame(process.stdout, self.reply_bytes)
            if not reply:
                raise BrokenPipeError(f"worker {' '.join(self.command)} does not run")
        except OSError:
            status = self._stop()
            if not self.forks:
                why = f"it took longer than {self.reply_limit_s:.0f} s" if late.is_set() else _crashed(status)
                raise WorkerEnded(why) from None
            raise
        except BaseException:  # no memory for the answer, perhaps, which would be taken for that of the next question
            self._stop()
            raise
        finally:
            too_late.cancel()
        return reply

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            at = os.environ.get(forks.SOCKET, "") if self.forks else ""
            self._process = subprocess.Popen(
                [sys.executable, *(forks.asking(at, self.command) if at else self.command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment_of(self.environment),
            )
        return self._process

    def _stop(self) -> int:
        """Ends the process; its status, as `subprocess` has it."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if not self.forks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_S)  # it may be about to end by itself, with a status that says more
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return process.wait()

    def close(self) -> None:
        """Ends the process, also over a question."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._stop()


def environment_of(variables: dict[str, str]) -> dict[str, str]:
    """The environment of a process beside this one: its own without secrets, where Python finds its modules, and these
    variables."""
    return without_secrets() | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | variables


def without_secrets() -> dict[str, str]:
    """The environment of this process without the variables whose names say that they are secrets."""
    return {k: v for k, v in os.environ.items() if not any(word in k.upper() for word in _SECRETS)}


def _write(file: IO[bytes], data: bytes) -> None:
    file.write(len(data).to_bytes(8, "big"))
    file.write(data)
    file.flush()


def _read_frame(file: IO[bytes], most: int | None = None) -> bytes | None:
    """The next frame; None at the end, or for one of more bytes than `most`."""
    header = file.read(8)
    size = int.from_bytes(header, "big")
    if len(header) < 8 or (most is not None and size > most):
        return None
    data = file.read(size)
    return data if len(data) == size else None


# --- the worker's process ---------------------------------------------------------------------------------------------


def confine(pipe: int, memory_bytes: int, cpu_s: int) -> None:
    """Leaves this process its pipe, and little memory and time; it can start and write nothing."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(0, 2)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, 1 << 20)
    _limit_memory(memory_bytes)
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (limit, limit))


def serve(answer: Callable[[bytes], bytes], limits: Limits, niceness: int = 0, confine: Confine = confine) -> None:
    """Answers questions from standard input until its end, each in a fork with these limits."""
    # jax warns of forks by threaded processes. None of the threads here has work, or holds a lock.
    warnings.simplefilter("ignore", RuntimeWarning)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(niceness)
    replies = sys.stdout.buffer
    while (question := _read_frame(sys.stdin.buffer)) is not None:
        inside, outside = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(inside)
            size = len(question)
            more = size // limits.bytes_per_second if limits.bytes_per_second else 0
            try:
                confine(outside, limits.memory_bytes + 8 * size, limits.cpu_s + more)
                data = _ANSWERED + answer(question)
            except MemoryError:
                os._exit(_OUT_OF_MEMORY)
            except NotConfined as error:
                data = _ENDED + str(error).encode()
            rest = memoryview(len(data).to_bytes(8, "big") + data)
            while rest:
                rest = rest[os.write(outside, rest) :]
            os._exit(0)
        os.close(outside)
        del question
        said, late = _read_of(inside, limits)
        whole = _is_whole(said)
        if whole:  # before the fork is over: that takes as long as a small question
            _write(replies, said[8:])
        if said or late:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not whole:
            _write(replies, (_LATE if late else _ENDED) + _how_it_ended(status, late, len(said), limits).encode())
        del said


def serve_alone(answer: Callable[[bytes], bytes], memory_bytes: int, cpu_s: int) -> None:
    """Answers questions from standard input until its end, in this process. It ends with the process that
    asks, also over a question.

    Args:
        memory_bytes: memory that it may take beyond what it has.
        cpu_s: seconds of a core that a question may take.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory(memory_bytes)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with_input, daemon=True).start()
    with os.fdopen(os.dup(1), "wb") as replies, open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # whatever a library may print
        while (question := _read_frame(sys.stdin.buffer)) is not None:
            _limit_cpu(cpu_s)
            _write(replies, _ANSWERED + answer(question))


def _end_with_input() -> None:
    """Ends this process when nobody can ask it any more. (The signal that a parent's death may send comes when the
    thread that started the process ends, which is not the death of the parent.)"""
    poll = select.poll()
    poll.register(0, 0)  # for its end alone
    poll.poll()
    os._exit(0)


def _limit_cpu(more: int) -> None:
    used, (_, most) = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)
    limit = math.ceil(used.ru_utime + used.ru_stime) + more
    resource.setrlimit(resource.RLIMIT_CPU, (limit if most < 0 else min(limit, most), most))


def _limit_memory(more: int) -> None:
    with open("/proc/self/statm") as file:
        there = int(file.read().split()[0]) * resource.getpagesize()
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (there + more, there + more))


def _read_of(pipe: int, limits: Limits) -> tuple[bytes, bool]:
    """The bytes that a fork says, and whether it was too late with them."""
    deadline = time.monotonic() + limits.time_s
    said = bytearray()
    late = False
    poll = select.poll()  # `select.select` takes no descriptor beyond 1,023
    poll.register(pipe, select.POLLIN)
    while len(said) <= limits.answer_bytes and not _is_whole(said):
        ready = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
        late = not ready
        part = os.read(pipe, 1 << 16) if ready else b""
        if not part:
            break
        said += part
    os.close(pipe)
    return bytes(said), late


def _is_whole(said: bytes | bytearray) -> bool:
    return len(said) >= 9 and len(said) - 8 == int.from_bytes(said[:8], "big")


def _how_it_ended(status: int, late: bool, said: int, limits: Limits) -> str:
    """The reason for which a fork gave no answer; `said` are the bytes that it gave."""
    if late:
        return f"it took longer than {limits.time_s:.0f} s"
    if said:
        return f"its answer has no end, or more than {limits.answer_bytes >> 20} MiB"
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return f"it took more than {limits.cpu_s} s of a core"
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _OUT_OF_MEMORY:
        return f"it needed more than {limits.memory_bytes >> 20} MiB of memory"
    return _crashed(os.waitstatus_to_exitcode(status))


def _crashed(status: int) -> str:
    """The end of a process with a status, negative for a signal."""
    if status == -signal.SIGXCPU:
        return "it reached its limit of CPU time"
    return f"its process crashed: {signal.Signals(-status).name if status < 0 else f'exit {status}'}"
