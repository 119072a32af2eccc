"""The log of a process of the runtime: one JSON line for each lifecycle event of its core.

Files lie in `<tempdir>/pathways-<uid>/logs/<runtime>/` on the machine of the process, for their user alone. Each
is rolled at `MAX_FILE_BYTES`; logs of runtimes that ended a week ago go when another one starts.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import shutil
import socket
import tempfile
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path

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


def folder() -> Path:
    """The folder of this user's logs on this machine."""
    return Path(tempfile.gettempdir()) / f"pathways-{os.getuid()}" / "logs"


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
        path = path_of(runtime, process)
        with contextlib.suppress(OSError):
            _make_private(path.parent)
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


def note_operator(runtime: str, event: str, detail: str = "") -> None:
    """Notes on this machine what an operator's command did to a runtime, beside the logs of its processes."""
    log = ProcessLog(runtime, "operator")
    log.write(Entry(time.monotonic(), event, detail, f"by user {os.getuid()} on {socket.gethostname()}"))
    log.close()


def read(runtime: str, process: str, offset: int = -1, rolled: int = 0) -> tuple[str, int]:
    """Whole lines of a log on this machine, at most `MAX_PART_BYTES` of them, and the offset behind them.

    Args:
        offset: of the first byte; -1 is that of the last part, and one beyond the end, of a file that was rolled since,
            is the beginning.
        rolled: 0 is the file that is written, 1 the one before it. One that is not there has nothing, and ends at 0.
    """
    path = path_of(runtime, process)
    if rolled:
        path = path.with_name(f"{path.name}.{rolled}")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - MAX_PART_BYTES) if offset < 0 else offset if offset <= size else 0
            file.seek(begin)
            found = file.read(MAX_PART_BYTES)
    except OSError:
        return "", 0
    end = found.rfind(b"\n") + 1 or (len(found) if len(found) == MAX_PART_BYTES else 0)
    first = found.find(b"\n") + 1 if offset < 0 and begin else 0
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


def _forget_old(own: Path) -> None:
    for other in own.parent.iterdir():
        with contextlib.suppress(OSError):
            newest = max((file.stat().st_mtime for file in other.iterdir()), default=other.stat().st_mtime)
            if other != own and time.time() - newest > KEPT_S:
                shutil.rmtree(other)
