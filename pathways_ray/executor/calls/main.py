"""The process in which the host functions of a session run. It alone reads what a trusted tenant has pickled.

It serves one call after the other, until its host is gone or kills it. What functions leave in modules stays from call
to call.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from pathways_ray.transport.host_calls import (
    CALL,
    MAX_TEXT,
    Ended,
    HostAnswer,
    HostCall,
    filled,
    receive,
    receive_array,
    result_array,
    send,
    taken_apart,
)

MAX_CALL_BYTES = 1 << 30
"""Of the head of a call, with its function."""

_AROUND = (
    __file__,
    os.path.join(os.path.dirname(__file__), "colocated.py"),
    "jax/experimental/colocated_python/func.py",
    "jax/experimental/colocated_python/obj.py",
)
"""How the paths of files end whose frames are around those of a function. Users may have a calls/main.py, too."""

Loaded = tuple[Callable[..., Any], Any, Any]
"""A function, and the skeletons of its arguments and of its results."""


def main() -> None:
    """Serves calls from the pipes that the command line names."""
    numbers = [int(number) for number in sys.argv[1:3]]
    for number in numbers:
        os.set_inheritable(number, False)  # for what functions start: the host would wait for that
    calls, answers = (os.fdopen(number, mode) for number, mode in zip(numbers, ("rb", "wb"), strict=True))
    pipes, this = [_file(number) for number in numbers], os.getpid()
    known: dict[str, Loaded] = {}
    while True:
        try:
            call = CALL.decode(receive(calls, MAX_CALL_BYTES))
            inputs = [receive_array(calls, kind) for kind in call.inputs]
        except Ended:
            return
        answer, results = answered(call, inputs, known)
        if os.getpid() != this:
            os._exit(0)  # a fork that comes back out of a function: the pipes have one reader and one writer
        del inputs
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):  # a function may have closed or replaced it
                stream.flush()
        if _file(numbers[1]) != pipes[1]:
            sys.exit(f"{call.name} has closed the pipe for its results")
        if _file(numbers[0]) != pipes[0]:
            text = f"{call.name} has closed the pipe by which its process is called"
            send(answers, HostAnswer(text, ends=True), [])
            return
        send(answers, answer, results)


def _file(descriptor: int) -> tuple[int, int]:
    """The device and the number of the file that a descriptor stands for; (0, 0) for nothing."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def answered(
    call: HostCall, inputs: Sequence[np.ndarray[Any, Any]], known: dict[str, Loaded]
) -> tuple[HostAnswer, list[np.ndarray[Any, Any]]]:
    """Makes a call. Whatever a function raises is an answer."""
    try:
        if call.digest not in known:
            known[call.digest] = pickle.loads(call.function)
        function, arguments, results = known[call.digest]
        positional, named = filled(arguments, inputs)
        made = function(*positional, **named)
    except BaseException as error:
        text = f"{call.name} raised {type(error).__name__}: {_said(error)}"
        return HostAnswer(_sendable(text[:MAX_TEXT] + _line(error)), _sendable(_traceback(error))), []
    try:
        given = taken_apart(results, made)
        outputs = [result_array(given[k], kind, f"result {k}") for k, kind in enumerate(call.outputs)]
    except BaseException as error:  # what it gave may be anything
        text = f"{call.name} did not return what its result= says: {_said(error)}"
        return HostAnswer(_sendable(text[:MAX_TEXT]), ends=not _is_sound()), []
    return HostAnswer(), outputs


def _is_sound() -> bool:
    """Whether this process still makes arrays of results: a function may have changed NumPy for all that follow."""
    try:
        return bool(result_array([1.0], ("float32", (1,)), "") == 1.0)
    except BaseException:
        return False


def _said(error: BaseException) -> str:
    """The text of an exception, whose class may fail to make one."""
    try:
        return str(error)
    except BaseException as other:
        return f"(its text failed: {type(other).__name__})"


def _sendable(text: str) -> str:
    """A text in UTF-8, with marks in place of what that cannot have."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _users(found: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame of the user's on."""
    while found is not None and found.tb_frame.f_code.co_filename.endswith(_AROUND):
        found = found.tb_next
    return found


def _line(error: BaseException) -> str:
    """The innermost line of the function's own file that an exception came through."""
    found, line, file = _users(error.__traceback__), "", ""
    while found is not None:
        code = found.tb_frame.f_code
        file = file or code.co_filename
        if code.co_filename == file:
            line = f" ({os.path.basename(file)}:{found.tb_lineno})"
        found = found.tb_next
    return line


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _users(error.__traceback__)))[-MAX_TEXT:]
