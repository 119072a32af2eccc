"""The process of a session's host functions, as its host has it: started at the first call, killed after a limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np

from pathways_ray.errors import Failure
from pathways_ray.executor.calls.limit import Limit
from pathways_ray.executor.calls.printed import Printed
from pathways_ray.executor.calls.reaper import END_LIMIT_S
from pathways_ray.transport.host_calls import ANSWER, Ended, HostCall, Local, receive, receive_array, send
from pathways_ray.worker import environment_of

START_LIMIT_S = 60.0
"""A call has this much longer where its process has to start first, on a machine that may be busy."""

OWN_END_LIMIT_S = 1.0
"""A process that has closed its pipes has so long to end by itself, and so say why."""

SESSION_ENDED = Failure("SessionClosed", "the session has ended")

MAX_ANSWER_BYTES = 1 << 20
MAX_READ = 1 << 16
"""Bytes of what is printed that are read at once."""

COMMAND = ("-m", "pathways_ray.executor.calls.reaper")

_OF_HOSTS = ("XLA_FLAGS", "JAX_ENABLE_X64")
"""Variables that hosts set for themselves."""


class CallFailed(Exception):
    """A call gave nothing; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class FunctionProcess:
    """A process that makes one call at a time. For one thread, but for `kill`.

    Args:
        printed: gets each line that functions print; called from another thread.
    """

    def __init__(self, printed: Callable[[str], None]) -> None:
        self._printed = printed
        self._process: subprocess.Popen[bytes] | None = None
        self._calls: IO[bytes] | None = None
        self._answers: IO[bytes] | None = None
        self._known: set[str] = set()
        self._limit = Limit(self.kill)
        self._over = threading.Event()

    @property
    def pid(self) -> int:
        """Its number; 0 where it does not run."""
        return self._process.pid if self._process is not None else 0

    def call(
        self,
        name: str,
        digest: str,
        function: bytes,
        inputs: Sequence[np.ndarray[Any, Any]],
        outputs: Sequence[Local],
        limit_s: float,
    ) -> list[np.ndarray[Any, Any]]:
        """The results of a function on arrays.

        Raises:
            CallFailed: it raised, gave something else than `outputs` say, ended its process, or took longer than
                `limit_s`; then its process is killed, and the next call starts another one.
        """
        if self._over.is_set():
            raise CallFailed(SESSION_ENDED)
        if self._process is not None and self._process.poll() is not None:
            self.close()  # what an earlier call has left in it has ended it
        starts = self._process is None
        with self._limit.of(limit_s + (START_LIMIT_S if starts else 0.0)):
            try:
                if starts:
                    self._start()
                if self._over.is_set():  # since before there was a process to kill, perhaps
                    self.kill()
                    raise Ended(SESSION_ENDED.message)
                assert self._calls is not None
                assert self._answers is not None
                kinds = tuple((array.dtype.name, array.shape) for array in inputs)
                code = b"" if digest in self._known else function
                try:
                    send(self._calls, HostCall(name, digest, code, kinds, tuple(outputs)), inputs)
                except BrokenPipeError:
                    if starts or self._limit.is_over:
                        raise
                    self.close()  # it has ended just now; what it has not got whole, it has not begun
                    return self.call(name, digest, function, inputs, outputs, limit_s)
                answer = ANSWER.decode(receive(self._answers, MAX_ANSWER_BYTES))
                if answer.ends:
                    self.close()
                if answer.error:
                    story = tuple(answer.traceback.splitlines())
                    raise CallFailed(Failure("HostFunctionError", answer.error, story=story))
                self._known.add(digest)
                return [receive_array(self._answers, kind) for kind in outputs]
            except CallFailed:
                raise
            except (Ended, OSError, ValueError) as error:
                raise CallFailed(self._ended(name, limit_s if self._limit.is_over else 0.0, error)) from None
            except BaseException:  # no memory for a result, perhaps, which would be taken for that of the next call
                self.close()
                raise

    def _ended(self, name: str, limit_s: float, error: Exception) -> Failure:
        """The reason for which a call has no answer, after which the process is gone."""
        process = self._process
        if process is not None and not limit_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(OWN_END_LIMIT_S)
        self.close()
        if limit_s:
            return Failure("HostFunctionTimeout", f"{name} did not return within {limit_s:g} s; its process was killed")
        status = process.returncode if process is not None else None
        how = "" if status is None else f" ({_shown(status)})"
        return Failure("HostFunctionError", f"the process of {name} ended{how} before it returned: {error}")

    def _start(self) -> None:
        environment = environment_of({"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"})
        for variable in _OF_HOSTS:
            environment.pop(variable, None)
        inside, self_writes = os.pipe()
        self_reads, outside = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *COMMAND, str(inside), str(outside)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(inside, outside),
                start_new_session=True,  # so that what a function starts ends with it
                env=environment,
            )
        finally:
            os.close(inside)
            os.close(outside)
            self._calls, self._answers = os.fdopen(self_writes, "wb"), os.fdopen(self_reads, "rb")
        threading.Thread(target=self._log, args=(self._process.stdout,), name="printed", daemon=True).start()

    def _log(self, output: IO[bytes]) -> None:
        printed = Printed()
        with output:
            while data := os.read(output.fileno(), MAX_READ):
                for line in printed.lines(data, time.monotonic()):
                    self._printed(line)
            for line in printed.lines(b"", time.monotonic()):
                self._printed(line)

    def end(self) -> None:
        """Kills the process, and has no other one start. For any thread."""
        self._over.set()
        self.kill()

    def kill(self) -> None:
        """Kills the process and what it has started. For any thread."""
        process = self._process
        if process is not None:
            process.terminate()  # its reaper, which ends all
            process.send_signal(signal.SIGCONT)  # a function may have stopped it, and would go on without a limit

    def close(self) -> None:
        """Kills the process and what it has started, and waits until they are gone."""
        self.kill()
        process, self._process = self._process, None
        self._known.clear()
        if process is not None:
            try:
                process.wait(END_LIMIT_S + 5.0)
            except subprocess.TimeoutExpired:  # a function has stopped its reaper
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for pipe in (self._calls, self._answers):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._calls = self._answers = None
        self._limit.close()


def _shown(status: int) -> str:
    """An exit status in words."""
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
