"""Records of this user's clusters on this machine, so that `pathways status` finds them without an address.

While its cluster runs, a process keeps one small file, `<tempdir>/pathways-<uid>/<pid>.json`. `pathways up`, which does
not stay, leaves `up-<name>-<digest of Ray's address>.json` until `pathways down`. A record holds the cluster's token,
so the folder is the user's alone: one that belongs to another user, is a link, or lets others in, is not used. A
record is a convenience: a cluster starts and stops the same where none can be written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import tempfile
from pathlib import Path

import msgspec

from pathways_ray.os_process import started_at
from pathways_ray.process_log import user_folder

PROBE_LIMIT_S = 1.0


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A running cluster: its address, what lets clients in, and the process that started it and has to live.

    That process began when `started` says, by the kernel (`os_process`); 0 is not known, as in an older record. A
    cluster that `pathways up` started has no such process (`pid` 0), but a name, and the address of its Ray cluster.
    `ca` is the file with the certificates that vouch for a cluster with TLS. One that a command started for itself, and
    that ends with it, is `private`: status shows it, and programs work on it only where they name it.
    """

    url: str
    token: str
    pid: int = 0
    name: str = ""
    ray: str = ""
    ca: str = ""
    private: bool = False
    started: int = 0

    @property
    def label(self) -> str:
        return f"runtime {self.name!r}" if self.name else f"process {self.pid}"


folder = user_folder
"""The folder of this user's records."""


def write(url: str, token: str, ca: str = "", private: bool = False) -> None:
    """Leaves the record of this process's cluster, in place of an earlier one."""
    pid = os.getpid()
    keep(Record(url, token, pid, ca=ca, private=private, started=started_at(pid)))


def remove() -> None:
    """Takes back the record of this process's cluster, if there is one."""
    forget(Record("", "", os.getpid()))


def keep(record: Record) -> None:
    """Leaves a record, in place of an earlier one of the same process, or of the same name and Ray cluster."""
    with contextlib.suppress(OSError):
        folder().mkdir(mode=0o700, exist_ok=True)
        if not _is_private(folder()):
            return
        # A reader sees a whole record or none; `mkstemp` makes a file that only its owner can read.
        handle, unfinished = tempfile.mkstemp(dir=folder())
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(record))
        os.replace(unfinished, _file(record))


def forget(record: Record) -> None:
    """Takes a record back, if it is there."""
    with contextlib.suppress(OSError):
        _file(record).unlink(missing_ok=True)


def running() -> list[Record]:
    """The running clusters, in the order of their start: their process lives, or their address answers."""
    return [record for record in all_records() if record.pid or answers(record)]


def shared() -> list[Record]:
    """The running clusters that programs of this user may work on that name none."""
    return [record for record in running() if not record.private]


def silent() -> list[Record]:
    """The clusters of `pathways up` that do not answer: restarting, or gone with their Ray cluster."""
    return [record for record in all_records() if not record.pid and not answers(record)]


def all_records() -> list[Record]:
    """All records in the order of their start; what dead processes left behind is removed."""
    found: list[tuple[float, Record]] = []
    if not _is_private(folder()):
        return []
    for file in folder().glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            record = msgspec.json.decode(file.read_bytes(), type=Record)
            if not record.pid or _lives(record):
                found.append((file.stat().st_mtime, record))
            else:
                file.unlink(missing_ok=True)
    return [record for _, record in sorted(found, key=lambda entry: entry[0])]


def answers(record: Record) -> bool:
    """Whether a process listens at the address of a record."""
    host, _, port = record.url.rpartition("/")[2].rpartition(":")
    try:
        if int(port) >= 1 << 16:
            return False  # the C library takes its last 16 bits
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_LIMIT_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _file(record: Record) -> Path:
    if record.pid:
        return folder() / f"{record.pid}.json"
    return folder() / f"up-{record.name}-{hashlib.sha256(record.ray.encode()).hexdigest()[:8]}.json"


def _is_private(path: Path) -> bool:
    """Whether this is a folder, not a link to one, that its owner alone may enter, and the owner is this user."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _lives(record: Record) -> bool:
    """Whether the process of a record is there; of one that does not say when it began, whether any of this user's has
    its number."""
    try:
        os.kill(record.pid, 0)
    except (OSError, OverflowError):
        return False  # gone, or a later process of another user, or no number of a process
    return not record.started or started_at(record.pid) == record.started
