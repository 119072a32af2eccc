"""Finding the user's line: the innermost stack frame that is neither ours nor JAX's."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import jax

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_JAX = os.path.dirname(os.path.abspath(jax.__file__))

_LEFT_OUT = "--------------------\nFor simplicity, JAX has removed"


def _foreign(file: str) -> bool:
    return not (file.startswith((_OURS, _JAX, "<frozen")) or os.sep + "contextlib.py" in file)


def here() -> str:
    """`file.py:line` of the user's code that called into this package."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if _foreign(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def of_equation(equation: Any) -> str:
    """`file.py:line` where the user wrote an operation of a traced program."""
    traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if _foreign(frame.file_name):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""


def of_error(error: BaseException) -> str:
    """`file.py:line` of the user's code that an exception came through, innermost first."""
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if _foreign(file):
            found = f"{os.path.basename(file)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def text_of(error: BaseException) -> str:
    """The kind and text of an exception, without what JAX says about frames that it left out."""
    return f"{type(error).__name__}: {str(error).partition(_LEFT_OUT)[0].rstrip()}"
