"""Values of a suspended session's arrays: in the memory of this process, or in the files of a directory.

A directory has one file for each array, its bytes in C order, and `suspension.json`, which is written last and has a
checksum of each file. The directory is made for one suspension, and removed with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from pathways_ray.client.array_pieces import ArrayFile
from pathways_ray.errors import SuspensionDamaged, UsageError
from pathways_ray.ir.types import ArrayType
from pathways_ray.jax_types import dtype_named
from pathways_ray.transport.shared_memory import bytes_of

INDEX = "suspension.json"

Value = np.ndarray[Any, Any] | ArrayFile
"""The value of an array. One in a file in memory goes back to hosts of this machine as it is, without a copy."""

MAX_FILES = 128
"""Files in memory that one suspension keeps open: each is a descriptor, of which a process has a thousand. Of others
the memory is kept, and copied at resumption."""


class Saved(Protocol):
    """The values of one suspension, by number."""

    def save(self, number: int, value: Value) -> None:
        """Keeps a value. Raises `UsageError` where there is no room."""

    def load(self, number: int, kind: ArrayType) -> Value:
        """A value. Raises `SuspensionDamaged` where it is not as it was."""

    def forget(self, number: int) -> None:
        """Lets go of a value. Safe in a destructor."""

    def finish(self) -> None:
        """All values are there. Raises `UsageError` where that cannot be written down."""

    def check(self, path: str | os.PathLike[str] | None) -> None:
        """Has them be read from where they lie now; None is where they were written. Raises `SuspensionDamaged`."""

    def remove(self) -> None:
        """Lets go of all."""


class InMemory:
    """Values in the memory of this process."""

    def __init__(self) -> None:
        self.values: dict[int, Value] = {}
        self._files = 0

    def save(self, number: int, value: Value) -> None:
        if isinstance(value, ArrayFile):
            self._files += 1
            if self._files > MAX_FILES:
                value = value.array()
        self.values[number] = value

    def load(self, number: int, kind: ArrayType) -> Value:
        return self.values[number]

    def forget(self, number: int) -> None:
        self.values.pop(number, None)

    def finish(self) -> None:
        pass

    def check(self, path: str | os.PathLike[str] | None) -> None:
        if path is not None:
            raise SuspensionDamaged(f"{os.fspath(path)!r} is not where the session was suspended to, which is memory")

    def remove(self) -> None:
        self.values.clear()


class _Index(msgspec.Struct):
    """The contents of a directory: the mark of its suspension, and of each file its bytes and their checksum."""

    mark: str
    files: dict[int, tuple[int, int]]


class InDirectory:
    """Values in the files of a directory, which must not be there yet, or be empty.

    Raises:
        UsageError: there is no such place, or something is there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._index = _Index(secrets.token_hex(8), {})
        try:
            self._made = not self.path.exists()
            self.path.mkdir(mode=0o700, exist_ok=True)
            found = next(self.path.iterdir(), None)
        except OSError as error:
            raise UsageError(f"path={str(self.path)!r} is no directory to suspend to: {error.strerror}") from None
        if found is not None:
            raise UsageError(
                f"path={str(self.path)!r} has {found.name!r}; a session is suspended to an empty directory"
            )

    def save(self, number: int, value: Value) -> None:
        data = bytes_of(value.array() if isinstance(value, ArrayFile) else value)
        self._index.files[number] = len(data), zlib.crc32(data)  # before: what is written in part is removed too
        try:
            with open(self._file(number), "wb") as file:
                file.write(data)
        except OSError as error:
            raise UsageError(f"array {number} cannot be written to {str(self.path)!r}: {error.strerror}") from None

    def load(self, number: int, kind: ArrayType) -> np.ndarray[Any, Any]:
        file = self._file(number)
        try:
            data = np.fromfile(file, np.uint8)
        except OSError as error:
            raise SuspensionDamaged(f"{file} cannot be read: {error.strerror}") from None
        size, checksum = self._index.files[number]
        if len(data) != size:
            raise SuspensionDamaged(f"{file} has {len(data)} bytes, and had {size} when the session was suspended")
        if zlib.crc32(data.data) != checksum:
            raise SuspensionDamaged(f"the {size} bytes of {file} are not those that were written")
        return data.view(dtype_named(kind.dtype)).reshape(kind.shape)

    def forget(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._file(number).unlink(missing_ok=True)

    def finish(self) -> None:
        try:
            (self.path / INDEX).write_bytes(msgspec.json.encode(self._index))
        except OSError as error:
            raise UsageError(f"{INDEX} cannot be written to {str(self.path)!r}: {error.strerror}") from None

    def check(self, path: str | os.PathLike[str] | None) -> None:
        where = Path(path) if path is not None else self.path
        try:
            found = msgspec.json.decode((where / INDEX).read_bytes(), type=_Index)
        except OSError as error:
            raise SuspensionDamaged(f"{where} has no suspension: {INDEX} cannot be read: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise SuspensionDamaged(f"{where / INDEX} is damaged: {error}") from None
        if found.mark != self._index.mark:
            raise SuspensionDamaged(f"{where} has another suspension than this session's, which was in {self.path}")
        self.path = where

    def remove(self) -> None:
        """Removes what was written; of the directory, nothing else."""
        for number in self._index.files:
            self.forget(number)
        with contextlib.suppress(OSError):
            (self.path / INDEX).unlink(missing_ok=True)
            if self._made:
                self.path.rmdir()

    def _file(self, number: int) -> Path:
        return self.path / f"{number}.array"


def saved_at(path: str | os.PathLike[str] | None) -> Saved:
    """The place for a suspension: a directory, or, with None, memory."""
    if path is None:
        return InMemory()
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"path= is a directory, or None for memory, not {path!r}")
    return InDirectory(path)
