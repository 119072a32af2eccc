"""The log of a process of the runtime: one JSON line for each lifecycle event of its core.

Files lie in `<tempdir>/pathways-<uid>/logs/<runtime>/` on the machine of the process, for their user alone. Each
is rolled at `MAX_FILE_BYTES`; logs of runtimes that ended a week ago go when another one starts. Processes hold the
folder of their runtime by a lock while they run: a quiet one may write nothing for long.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import logging
import os
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from pathways_ray.story import Entry, log_name

MAX_FILE_BYTES = 8 << 20
MAX_PART_BYTES = 1 << 18
"""Bytes of a log that are read at once."""

KEPT_FILES = 2
"""Rolled files beside the current one."""

KEPT_S = 7 * 24 * 3600.0
"""Logs of runtimes that wrote nothing for this long are removed."""


class Line(msgspec.Struct, omit_defaults=True):
    """One event as it is logged. `time` is UTC, in ISO 8601 with milliseconds."""

    time: str
    process: str
    pid: int
    event: str
    detail: str = ""
    cause: str = ""
    session: int = 0
    launch: int = 0
    host: int = -1


def user_folder() -> Path:
    """The folder of this user's files on this machine: logs, notes of crashes, records of clusters."""
    return Path(tempfile.gettempdir()) / f"pathways-{os.getuid()}"


def folder() -> Path:
    """The folder of this user's logs on this machine."""
    return user_folder() / "logs"


def path_of(runtime: str, process: str) -> Path:
    """The file of a process, such as "host 3", of a runtime."""
    return folder() / runtime / log_name(process)


class ProcessLog:
    """The log of one process; use `write` as the sink of its `Story`.

    A log is a convenience: where its file cannot be written the process works on without one.
    """

    def __init__(self, runtime: str, process: str) -> None:
        self.process = process
        self._handler: RotatingFileHandler | None = None
        self._held = -1
        path = path_of(runtime, process)
        with contextlib.suppress(OSError):
            self._held = _hold(path.parent)
            _forget_old(path.parent)
            self._handler = RotatingFileHandler(path, maxBytes=MAX_FILE_BYTES, backupCount=KEPT_FILES, encoding="utf-8")
            os.chmod(path, 0o600)
            self._handler.setFormatter(logging.Formatter("%(message)s"))

    def write(self, entry: Entry) -> None:
        """Appends one event, with the wall-clock time of now."""
        if self._handler is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = Line(
            now,
            self.process,
            os.getpid(),
            entry.event,
            entry.detail,
            entry.cause,
            entry.session,
            entry.launch,
            entry.host,
        )
        text = msgspec.json.encode(line).decode()
        # Handled, not emitted: several threads write.
        self._handler.handle(logging.LogRecord("pathways", logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        if self._handler is not None:
            self._handler.close()
            self._handler = None
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def note_operator(runtime: str, event: str, detail: str = "") -> None:
    """Notes on this machine what an operator's command did to a runtime, beside the logs of its processes."""
    log = ProcessLog(runtime, "operator")
    log.write(Entry(time.monotonic(), event, detail, f"by user {os.getuid()} on {socket.gethostname()}"))
    log.close()


class Part(NamedTuple):
    """Whole lines of a log, and the place behind them: the offset in a file, and a number that the file keeps when it
    is rolled; 0 stands for the oldest one."""

    text: str
    offset: int
    file: int


def read(runtime: str, process: str, offset: int = -1, file: int = 0) -> Part:
    """Whole lines of a log on this machine, at most `MAX_PART_BYTES` of them, over files that are rolled meanwhile.

    Args:
        offset: of the first byte; -1 gives the last part. With that of the part before, all lines are read once.
        file: the one that the offset is in, as the part before named it. Of one that is gone, all that is left is
            newer.
    """
    with contextlib.ExitStack() as stack:
        files = _files(path_of(runtime, process), stack)
        if not files:
            return Part("", 0, 0)
        if offset < 0:
            return Part(*_last([opened for _, opened in files]), files[-1][0])
        at = next((k for k, (number, _) in enumerate(files) if number == file), -1)
        offset, at = (offset, at) if at >= 0 else (0, 0)
        text, end = _lines(files[at][1], offset)
        while not text and at + 1 < len(files):  # that one was read to its end
            at += 1
            text, end = _lines(files[at][1], 0)
        return Part(text, end, files[at][0])


def _last(files: Sequence[BinaryIO]) -> tuple[str, int]:
    """The last whole lines of the files of a log, and the offset behind them in the newest one. That may have been
    begun just now: what is wanted lies in older ones then."""
    text, end, left = "", 0, MAX_PART_BYTES
    for file in reversed(files):
        size = os.fstat(file.fileno()).st_size
        found, behind = _lines(file, max(0, size - left), True)
        text, end, left = found + text, end or behind, left - size
        if left <= 0:
            break
    return text, end


def _files(path: Path, stack: contextlib.ExitStack) -> list[tuple[int, BinaryIO]]:
    """The files of a log that have a line, opened, the oldest first; each with its number, which is made of its first
    line."""
    found: dict[int, BinaryIO] = {}
    # The newest first: one that is rolled meanwhile is met twice, and none is missed.
    for name in (path.name, *(f"{path.name}.{k}" for k in range(1, KEPT_FILES + 1))):
        with contextlib.suppress(OSError):
            opened = stack.enter_context(path.with_name(name).open("rb"))
            first = opened.readline(MAX_PART_BYTES)
            if first.endswith(b"\n") or len(first) == MAX_PART_BYTES:
                found.setdefault(zlib.crc32(first) or 1, opened)
    return list(found.items())[::-1]


def _lines(file: BinaryIO, begin: int, middle: bool = False) -> tuple[str, int]:
    """Whole lines from an offset on, and the offset behind them. Of a file that is shorter than that, all.

    Args:
        middle: the offset may be in the middle of a line, which is left out.
    """
    if begin > os.fstat(file.fileno()).st_size:
        begin = 0
    file.seek(begin)
    found = file.read(MAX_PART_BYTES)
    end = found.rfind(b"\n") + 1 or (len(found) if len(found) == MAX_PART_BYTES else 0)
    first = found.find(b"\n") + 1 if middle and begin else 0
    return found[first:end].decode(errors="replace"), begin + end


def _make_private(path: Path) -> None:
    """Makes the folder of a runtime's logs and those above it for this user alone.

    Raises:
        OSError: a folder is a link, or belongs to another user.
    """
    for made in (path.parent.parent, path.parent, path):
        made.mkdir(mode=0o700, exist_ok=True)
        found = made.lstat()
        if not made.is_dir() or made.is_symlink() or found.st_uid != os.getuid():
            raise OSError(f"{made} is not a folder of this user")


def _hold(path: Path) -> int:
    """Makes the folder of a runtime's logs, and shares a lock of it for as long as what this returns is open.

    Raises:
        OSError: there can be no such folder.
    """
    while True:
        _make_private(path)
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system that has no locks
            fcntl.flock(held, fcntl.LOCK_SH)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(held), path.stat()):
                return held
        os.close(held)  # another process has just removed it


def _forget_old(own: Path) -> None:
    for other in own.parent.iterdir():
        with contextlib.suppress(OSError):
            newest = max((file.stat().st_mtime for file in other.iterdir()), default=other.stat().st_mtime)
            if other != own and time.time() - newest > KEPT_S:
                _remove_unheld(other)


def _remove_unheld(path: Path) -> None:
    """Removes a folder. Raises `OSError` where a process holds it."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(opened)
