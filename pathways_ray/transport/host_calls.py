"""Calls of host functions, from a host to the process beside it that runs them, and the trees that they take and give.

A call is a frame with a `HostCall`, then one frame for each argument, as raw bytes; the answer is a frame with a
`HostAnswer`, and one for each result where nothing failed. A function travels as bytes that only that process reads.

In a *skeleton*, a tree of tuples, lists and dicts, whole numbers stand for arrays: that of the arguments says how a
function is called, that of the results what it has to give. The process needs no JAX for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any, TypeAlias

import ml_dtypes
import msgspec
import numpy as np

from pathways_ray.transport.message import encode

Local: TypeAlias = tuple[str, tuple[int, ...]]
"""The dtype and the shape of a host's part of an array."""

MAX_TEXT = 16_384
"""Characters of a traceback that come back: its end."""


class HostCall(msgspec.Struct, array_like=True):
    """A call of the function with this digest; `function` has it where the process does not know it yet."""

    name: str
    digest: str
    function: bytes
    inputs: tuple[Local, ...]
    outputs: tuple[Local, ...]


class HostAnswer(msgspec.Struct, array_like=True):
    """The end of a call: what was raised and the traceback, or "" where the results follow. With `ends` it is the last
    of its process."""

    error: str = ""
    traceback: str = ""
    ends: bool = False


CALL = msgspec.msgpack.Decoder(HostCall)
ANSWER = msgspec.msgpack.Decoder(HostAnswer)


class Ended(Exception):
    """The other end of the pipe is gone."""


def send(pipe: IO[bytes], message: HostCall | HostAnswer, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    """Writes a message and its arrays."""
    _write(pipe, encode(message))
    for array in arrays:
        _write(pipe, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    pipe.flush()


def _write(pipe: IO[bytes], data: bytes | memoryview) -> None:
    pipe.write(len(data).to_bytes(8, "big"))
    pipe.write(data)


def receive(pipe: IO[bytes], most: int) -> bytes:
    """The next frame. Raises `Ended` at the end of the pipe, or for a frame of more than `most` bytes."""
    size = int.from_bytes(_exactly(pipe, 8), "big")
    if size > most:
        raise Ended(f"a frame of {size} bytes; {most} are the limit")
    return _exactly(pipe, size)


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise Ended("the end of the pipe")
    return data


def receive_array(pipe: IO[bytes], kind: Local) -> np.ndarray[Any, Any]:
    """The next frame as an array of this type, which may be written to."""
    dtype, shape = dtype_of(kind[0]), kind[1]
    room = np.empty(shape, dtype)
    data = receive(pipe, room.nbytes)
    if len(data) != room.nbytes:
        raise Ended(f"{len(data)} bytes came for an array of {room.nbytes}")
    room.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    return room


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name, those of `ml_dtypes` included."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


# --- trees ------------------------------------------------------------------------------------------------------------


def filled(skeleton: Any, values: Sequence[Any]) -> Any:
    """A skeleton with values in the places of their numbers.

    Raises:
        TypeError: it has something else than tuples, lists, dicts, None and numbers.
    """
    if skeleton is None:
        return None
    if type(skeleton) is int:
        return values[skeleton]
    if isinstance(skeleton, tuple):
        items = [filled(item, values) for item in skeleton]
        return type(skeleton)(*items) if hasattr(skeleton, "_fields") else tuple(items)
    if type(skeleton) is list:
        return [filled(item, values) for item in skeleton]
    if type(skeleton) is dict:
        return {key: filled(item, values) for key, item in skeleton.items()}
    raise TypeError(f"{type(skeleton).__name__} is no tuple, list or dict")


def taken_apart(skeleton: Any, value: Any, at: str = "the result") -> dict[int, Any]:
    """The values in the places of a skeleton's numbers.

    Raises:
        TypeError: `value` is another tree; the text names the place.
    """
    if type(skeleton) is int:
        return {skeleton: value}
    found: dict[int, Any] = {}
    if skeleton is None:
        if value is not None:
            raise TypeError(f"{at} is {_shown(value)}, and should be None")
    elif isinstance(skeleton, dict):
        if not isinstance(value, dict) or value.keys() != skeleton.keys():
            raise TypeError(f"{at} is {_shown(value)}, and should be a dict of {sorted(map(str, skeleton))}")
        for key, item in skeleton.items():
            found |= taken_apart(item, value[key], f"{at}[{key!r}]")
    else:
        if not isinstance(value, tuple | list) or len(value) != len(skeleton):
            raise TypeError(f"{at} is {_shown(value)}, and should be a {type(skeleton).__name__} of {len(skeleton)}")
        for k, item in enumerate(skeleton):
            found |= taken_apart(item, value[k], f"{at}[{k}]")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {sorted(map(str, value))[:8]}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def result_array(value: Any, kind: Local, at: str) -> np.ndarray[Any, Any]:
    """A leaf of a result as an array of its type; a number of the same kind is converted.

    Raises:
        TypeError: it has another shape, or a type or whole numbers that do not fit, or hidden values behind a mask.
    """
    if np.ma.is_masked(value):
        raise TypeError(f"{at} is a masked array with hidden values, which JAX has not; fill it, or give data and mask")
    array, dtype = np.asarray(value), dtype_of(kind[0])
    if array.dtype.kind in "OSU":  # None, texts, rows of different lengths
        raise TypeError(f"{at} is {_shown(value)}, and should be an array {dtype}{list(kind[1])} on this host")
    if array.shape != tuple(kind[1]):
        raise TypeError(f"{at} has shape {array.shape}, and should have {tuple(kind[1])} on this host")
    if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(f"{at} has dtype {array.dtype}, which does not become {dtype}")
    if array.dtype != dtype and array.dtype.kind in "iu" and dtype.kind in "iu" and array.size:
        fitting = np.iinfo(dtype)
        if int(array.min()) < fitting.min or int(array.max()) > fitting.max:
            raise TypeError(f"{at} has numbers of {array.dtype} that do not fit into {dtype}")
    return array.astype(dtype, copy=False)
