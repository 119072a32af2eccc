"""Folders for the sockets of proxies: each proxy has one of its own, which its owner alone may enter.

A proxy removes its folder as it ends. The folder of one that was killed is removed by the next proxy of its user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pathways_ray.proxy.folders import OLD_S

PREFIX = "pathways-proxy-"

SOCKET = "s"
"""The name of the socket in the folder."""

SHORT_TEMPORARY = "/tmp"
"""Where sockets go when the user's own folder for temporary files does not do: JAX writes targets in small letters, and
names of sockets have 107 characters at most."""


@contextlib.contextmanager
def socket_path() -> Iterator[Path]:
    """A path at which a proxy may listen, in a folder of its own that is removed afterwards."""
    here = tempfile.gettempdir()
    where = Path(here if here == here.lower() and len(here) < 64 else SHORT_TEMPORARY)
    _remove_left(where)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
    try:
        yield folder / SOCKET
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left(where: Path) -> None:
    """Removes folders of this user's proxies that were killed."""
    for folder in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is gone, or has other files
            found = folder.lstat()
            old = time.time() - found.st_mtime > OLD_S  # a younger one may be about to have its socket
            if found.st_uid == os.getuid() and old and not _listens(folder / SOCKET):
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISSOCK((folder / SOCKET).lstat().st_mode):
                        (folder / SOCKET).unlink()
                folder.rmdir()  # only if it is empty: it may be anybody's, who chose that name


def _listens(path: Path) -> bool:
    """Whether somebody listens at a socket, or may: an error that does not say so is no proof."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)  # a proxy that is stopped takes nobody
        try:
            asking.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            pass
    return True
