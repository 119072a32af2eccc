"""Where the clusters of this user on this machine are, so that `pathways status` finds them without being told.

While its cluster runs, a process keeps one small file, `<tempdir>/pathways-<uid>/<pid>.json`. It holds the cluster's
token, so the folder is the user's alone: one that belongs to somebody else, is a link, or lets others in, is not used.
A record is a convenience: a cluster starts and stops the same where none can be written.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import msgspec


class Record(msgspec.Struct, frozen=True):
    """A running cluster: its address, what lets clients in, and the process that started it."""

    url: str
    token: str
    pid: int


def folder() -> Path:
    """The folder of this user's records."""
    return Path(tempfile.gettempdir()) / f"pathways-{os.getuid()}"


def write(url: str, token: str) -> None:
    """Leaves the record of this process's cluster, in place of an earlier one."""
    with contextlib.suppress(OSError):
        folder().mkdir(mode=0o700, exist_ok=True)
        if not _is_private(folder()):
            return
        # A reader sees a whole record or none; `mkstemp` makes a file that only its owner can read.
        handle, unfinished = tempfile.mkstemp(dir=folder())
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(Record(url, token, os.getpid())))
        os.replace(unfinished, _file(os.getpid()))


def remove() -> None:
    """Takes back the record of this process's cluster, if there is one."""
    with contextlib.suppress(OSError):
        _file(os.getpid()).unlink(missing_ok=True)


def running() -> list[Record]:
    """The clusters whose process lives, in the order of their start; what dead processes left behind is removed."""
    found: list[tuple[float, Record]] = []
    if not _is_private(folder()):
        return []
    for file in folder().glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            record = msgspec.json.decode(file.read_bytes(), type=Record)
            if _lives(record.pid):
                found.append((file.stat().st_mtime, record))
            else:
                file.unlink(missing_ok=True)
    return [record for _, record in sorted(found, key=lambda entry: entry[0])]


def _file(pid: int) -> Path:
    return folder() / f"{pid}.json"


def _is_private(path: Path) -> bool:
    """Whether this is a folder, not a link to one, that its owner alone may enter, and the owner is this user."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _lives(pid: int) -> bool:
    """Whether a process of this user has this number."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False  # gone, or a later process of somebody else
    return True
