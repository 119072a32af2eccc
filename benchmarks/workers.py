"""Processes of one benchmark or peer: each holds an object and calls its methods on request.

A request is a method with its arguments, an answer what went wrong ("" if nothing did) and the value. Peers run in
environments of their own, so this file imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

CONNECTION = "PATHWAYS_BENCHMARK_CONNECTION"
"""The variable by which a program is told the number of its open end of a pipe."""


class Worker:
    """A process that serves one object. It starts at once; `answer` waits for the object to be made.

    The process ends when this end closes or dies; a `close` method of the object is called first.

    Args:
        make: makes the object, in the process.
        arguments, named: of `make`.
        daemon: False for a process that starts processes itself; it has to be closed.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any, daemon: bool = True, **named: Any) -> None:
        self.given_up = 0
        """Answers to come that nobody waits for any more."""
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_make_and_serve, args=(theirs, make, arguments, named), daemon=daemon)
        self._process.start()
        theirs.close()  # so that a dead process is an end of file here, not a wait

    def tell(self, method: str, *arguments: Any, **named: Any) -> None:
        """Requests a call; `answer` returns its value."""
        self.pipe.send((method, arguments, named))

    def answer(self) -> Any:
        """The value of the oldest call that has not been answered.

        Raises:
            RuntimeError: the call failed, or the process ended.
        """
        while self.skips():
            pass
        failed, value = self._received()
        if failed:
            raise RuntimeError(f"a process of the benchmark failed: {failed}")
        return value

    def skips(self) -> bool:
        """Whether the next answer is one that nobody waits for, which this takes."""
        if not self.given_up:
            return False
        self.given_up -= 1
        self._received()
        return True

    def _received(self) -> tuple[str, Any]:
        try:
            said: tuple[str, Any] = self.pipe.recv()
        except EOFError:
            raise RuntimeError("a process of the benchmark ended before it answered") from None
        return said

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        self.tell(method, *arguments, **named)
        return self.answer()

    def close(self, limit_s: float | None = None) -> None:
        """Lets the process end by itself; kills it when that takes longer than the limit."""
        self.pipe.close()
        self._process.join(limit_s)
        if self._process.is_alive():
            self.kill()

    def kill(self) -> None:
        self._process.kill()  # jax.distributed catches SIGTERM
        self._process.join()


def answers(workers: Sequence[Worker], limit_s: float | None = None) -> list[Any]:
    """The answer of each worker, in order.

    The first failure to arrive is raised, since the other workers may be waiting for the one that failed. What they say
    later is no answer to the next call.

    Raises:
        RuntimeError: one failed, ended, or did not answer in time.
    """
    ends = None if limit_s is None else time.monotonic() + limit_s
    found: dict[int, Any] = {}
    waiting = dict(enumerate(workers))
    try:
        while waiting:
            left = None if ends is None else max(0.0, ends - time.monotonic())
            ready = multiprocessing.connection.wait([worker.pipe for worker in waiting.values()], left)
            if not ready:
                raise RuntimeError(f"processes {sorted(waiting)} did not answer within {limit_s:g} s")
            for rank, worker in list(waiting.items()):
                if worker.pipe in ready and not worker.skips():
                    del waiting[rank]
                    found[rank] = worker.answer()
    except RuntimeError:
        for worker in waiting.values():
            worker.given_up += 1
        raise
    return [found[rank] for rank in range(len(workers))]


def ask_all(
    workers: Sequence[Worker], method: str, *arguments: Any, limit_s: float | None = None, **named: Any
) -> list[Any]:
    """Calls the same method of all workers at once."""
    for worker in workers:
        worker.tell(method, *arguments, **named)
    return answers(workers, limit_s)


def answer_requests(serving: Any) -> None:
    """The main function of a program that was started with CONNECTION: no process below it inherits the pipe."""
    number = int(os.environ.pop(CONNECTION))
    os.set_inheritable(number, False)
    _serve(Connection(number), serving)


def _make_and_serve(
    requests: Connection, make: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]
) -> None:
    try:
        serving = make(*arguments, **named)
    except Exception as error:
        requests.send((_told(error), None))
        return
    with contextlib.suppress(ConnectionError):
        requests.send(("", None))
    _serve(requests, serving)


def _serve(requests: Connection, serving: Any) -> None:
    """Answers until the other end closes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt))
        if hasattr(serving, "close"):
            stack.callback(serving.close)
        while True:
            method, arguments, named = requests.recv()
            try:
                reply = ("", getattr(serving, method)(*arguments, **named))
            except Exception as error:
                reply = (_told(error), None)
            requests.send(reply)


def _told(error: Exception) -> str:
    """The error for the other end; where it came from goes to stderr."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"
