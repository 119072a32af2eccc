"""Finding the user's line: the innermost stack frame that is neither ours nor JAX's."""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from typing import Any

import jax
import numpy as np

from pathways_ray.errors import PathwaysError

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_JAX = os.path.dirname(os.path.abspath(jax.__file__))
_NUMPY = os.path.dirname(os.path.abspath(np.__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_SCRIPTS = os.path.join(sysconfig.get_path("scripts"), "")
"""The folder of the scripts that call what is installed."""

_LEFT_OUT = "--------------------\nFor simplicity, JAX has removed"

_WHILE_TRACING = "\nThe error occurred while tracing the function"


def _foreign(file: str) -> bool:
    return not (file.startswith((_OURS, _JAX, "<frozen")) or os.sep + "contextlib.py" in file)


def _rank(file: str) -> int:
    """The likelihood that a file is the user's: 0 of ours and JAX's, 1 of Python's own and NumPy's, 2 of what is
    installed, a library or the user's own package, 3 of others."""
    if not _foreign(file):
        return 0
    if file.startswith(_NUMPY):
        return 1
    if file.startswith(_SCRIPTS) or any(name in file for name in _INSTALLED):  # these may be in Python's folder
        return 2
    return 1 if file.startswith(_PYTHON) else 3


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
    """`file.py:line` of the user's code that an exception came through, innermost first; where it came through none
    that is surely the user's, of what is installed before Python's own."""
    best, found = 1, ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if (rank := _rank(file)) >= best:
            best, found = rank, f"{os.path.basename(file)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def stacklevel() -> int:
    """The `stacklevel` by which a warning of the caller points at the user's line, however many of our functions are
    between them; where the call is from none that is surely the user's, at what is installed before Python's own."""
    frame: types.FrameType | None = sys._getframe(1)
    best, level, found = 0, 1, 1
    while frame is not None:
        if (rank := _rank(frame.f_code.co_filename)) > best:
            best, found = rank, level
        frame, level = frame.f_back, level + 1
    return found


def text_of(error: BaseException) -> str:
    """The kind and text of an exception, without what JAX says about frames that it left out, and about the function
    that it traced, which is one of ours."""
    if isinstance(error, KeyError) and isinstance(error.args[0], np.dtype):
        return f"values of dtype {error.args[0]} cannot be exported by JAX; use a wider dtype"
    text = str(error).partition(_LEFT_OUT)[0].partition(_WHILE_TRACING)[0].rstrip()
    return f"{type(error).__name__}: {text}"


def hint_for(error: BaseException) -> str:
    """A remedy for an exception that JAX raised while a function is traced, mostly for a value that is not known."""
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return "use jnp.where, pw.cond or jax.lax.cond where a value decides, or a static argument"
    if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
        return "values are not known while a function is traced: use jnp, or a static argument, or fetch outside of it"
    if "does not match the device assignment" in str(error) or "match the mesh passed to shard_map" in str(error):
        return (
            "a jax.shard_map or a sharding in it is over a mesh of devices of this process, of another size or other "
            "axes than the slice: write slice.mesh"
        )
    return ""


def noted(error: PathwaysError, note: str) -> PathwaysError:
    """An error with a note, which Python prints below its text; "" adds none."""
    if note:
        error.add_note(note)
    return error


def trimmed(error: PathwaysError) -> PathwaysError:
    """An error with its hints, and without the frames and remarks of ours and of JAX, unless JAX is set to show all
    frames (`JAX_TRACEBACK_FILTERING=off`)."""
    if jax.config.jax_traceback_filtering == "off":  # type: ignore[attr-defined]
        return error
    one: BaseException | None = error
    while one is not None:
        if hasattr(one, "__notes__"):
            one.__notes__ = [note for note in one.__notes__ if not note.startswith(_LEFT_OUT)]
        one.__traceback__ = _users(one.__traceback__)
        one = one.__cause__
    return error


def _users(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The part of a traceback that is the user's."""
    frames = []
    while traceback is not None:
        if _foreign(traceback.tb_frame.f_code.co_filename):
            frames.append(traceback)
        traceback = traceback.tb_next
    made = None
    for one in reversed(frames):
        made = types.TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made
