"""The file of the table of tenants, read again whenever it changes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pathways_ray.controller.tenants import TenantBook, decode
from pathways_ray.errors import UsageError

MAX_FILE_BYTES = 16 << 20
"""Bytes of a table; what is longer is not read, since it may be longer than memory."""


class TenantsFile:
    """The table of tenants as its file has it; a file that is broken later leaves the last good table in force.

    Args:
        path: "" for no file, and no tenants.
        strict: raise for a file that is broken at the start. After a restart it is better to serve the operator alone.

    Raises:
        UsageError: with `strict`, the file is broken or cannot be read.
    """

    def __init__(self, path: str, strict: bool) -> None:
        self.path = path
        self.book = TenantBook()
        self.problem = ""
        self._seen: tuple[int, ...] = ()
        self.refresh()
        if strict and self.problem:
            raise UsageError(self.problem)

    def refresh(self) -> bool:
        """Reads the file if it is another one than before; True when the table, or its problem, changed."""
        if not self.path:
            return False
        before = self.book, self.problem
        try:
            found = os.stat(self.path)
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen == self._seen:
                return False
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise UsageError("it is read again and again, and a pipe or a device has its text once, or never")
            with Path(self.path).open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise UsageError(f"it has more than {MAX_FILE_BYTES} bytes, and a table of tenants may not")
            self.book = decode(data)
            self._seen, self.problem = seen, ""
        except OSError as error:
            self._seen, self.problem = (), f"the tenants file {self.path} cannot be read: {error.strerror}"
        except UsageError as error:
            self._seen, self.problem = seen, f"{self.path}: {error}"
        return (self.book, self.problem) != before
