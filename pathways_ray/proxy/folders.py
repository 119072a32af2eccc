"""Folders in shared memory in which clients of a proxy's machine leave big arrays.

jaxlib's client writes a file for each array, whose name follows from the client's own name for it, and reads the
folder's name from a variable once in its process. So each process makes a folder for itself, and tells the proxy where
it is when it attaches. It holds a lock on its folder while it lives; who gets the lock after that removes the folder:
the proxy, or, where it was killed as well, the next process that makes one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import mmap
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

from pathways_ray.proxy.arrays import Code, Refused

SHARED_MEMORY = Path("/dev/shm")
"""Where folders are, where the machine has it."""

PREFIX = "pathways-jax-"

REMOVE_WITHIN_S = 5.0
"""The folder of a process that has hung up is removed if it has ended by then; else by itself."""

OLD_S = 60.0
"""A folder that nobody has locked may be one that its process is about to lock; not when it is as old as this."""

_LOOK_S = 0.1

_own: dict[int, str] = {}
"""The folder of this process, by the process's number: a fork has none."""


def own_folder() -> str:
    """The folder of this process, made when it is first asked for; only this user may enter it."""
    found = _own.get(os.getpid())
    if found is None:
        _remove_old()
        made = tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # open while the process lives
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        atexit.register(_remove_own, os.getpid())
        found = _own[os.getpid()] = made
    return found


def _remove_old() -> None:
    """Removes folders of this user's processes that were killed together with their proxies."""
    for path in SHARED_MEMORY.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is gone
            found = path.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > OLD_S:
                remove_left(path, 0)


def _remove_own(process: int) -> None:
    """Removes the folder of this process at its end; a fork, which ends with the same calls, leaves it alone."""
    if process == os.getpid():
        shutil.rmtree(_own.pop(process), ignore_errors=True)


def folder_of(said: str) -> Path | None:
    """The folder that a client names; None where it names none.

    Raises:
        Refused: it is not the client's to share, or not on this machine.
    """
    if not said:
        return None
    path = Path(said)
    try:
        found = path.lstat()
    except (OSError, ValueError) as error:
        raise Refused(Code.INVALID_ARGUMENT, f"there is no folder {said!r} to share: {error}") from None
    if (
        not (path.is_absolute() and path.name.startswith(PREFIX) and stat.S_ISDIR(found.st_mode))
        or found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) & 0o077
    ):
        text = f"{said!r} is not a folder that a client of this user has made for itself alone ({PREFIX}…)"
        raise Refused(Code.INVALID_ARGUMENT, text)
    return path


def taken(folder: Path, handle: int, size: int) -> Any:
    """The bytes that a client has left for one of its names; the file is gone then.

    Raises:
        OSError, ValueError: it is missing, or has another size.
    """
    path = folder / f"lt_{(handle + (1 << 31)) % (1 << 32) - (1 << 31)}"  # the client counts with 32 bits there
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # nor waits at a FIFO
    try:
        path.unlink()
        found = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    if len(found) != size:
        raise ValueError(f"it has {len(found)} bytes, and {size} were announced")
    return found


def remove_left(folder: Path, limit_s: float = REMOVE_WITHIN_S) -> None:
    """Removes the folder of a process that has ended, or ends within the limit."""
    until = time.monotonic() + limit_s
    with contextlib.suppress(OSError):  # it is gone
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > until:
                        return
                    time.sleep(_LOOK_S)
                    continue
                shutil.rmtree(folder, ignore_errors=True)
                return
        finally:
            os.close(descriptor)
