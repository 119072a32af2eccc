"""JAX's compilation cache on disk, on by default for hosts: what a host of this user compiled here before is loaded.

Entries are named by all that an executable depends on: its module, options, kind and count of devices, the versions of
JAX and XLA. So the same function on another slice of the same layout is loaded as well, within one run too.
Who can write such a file can run code in the hosts that read it, so the folder is its user's alone, and host processes
that belong to one tenant neither read nor write it.

`PATHWAYS_COMPILATION_CACHE` names another folder, or is "off". Where JAX has a folder
(`JAX_COMPILATION_CACHE_DIR`), all of this is JAX's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from pathlib import Path

_LOG = logging.getLogger(__name__)

VARIABLE = "PATHWAYS_COMPILATION_CACHE"
JAX_VARIABLE = "JAX_COMPILATION_CACHE_DIR"

MAX_BYTES = 2 << 30
"""Entries that were written first go when a host starts and finds more than this; and again each time it has written a
part of that itself."""

LOOKS_AGAIN_AFTER = 16
"""That part is MAX_BYTES divided by this: a host may run for months, and its tenants choose what it compiles."""


def folder() -> Path | None:
    """The folder of this user on this machine, made where it is not there; None where the cache is off, or where others
    could write to it."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen == "off" or os.environ.get(JAX_VARIABLE):
        return None
    try:
        base = chosen or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        found = Path(chosen) if chosen else Path(base) / "pathways" / "compiled"
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        seen = found.stat()
    except (OSError, RuntimeError):
        return None  # a home that cannot be written to, or none at all
    is_own = seen.st_uid == os.getuid() and not seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found if is_own else None


def prune(found: Path, max_bytes: int = MAX_BYTES) -> None:
    """Removes the oldest entries until the others take no more than `max_bytes`."""
    entries = []
    for path in found.glob("*-cache"):
        with contextlib.suppress(OSError):  # another host has removed it
            seen = path.stat()
            entries.append((seen.st_mtime, seen.st_size, path))
    kept = 0
    for _, size, path in sorted(entries, reverse=True):
        kept += size
        if kept > max_bytes:
            with contextlib.suppress(OSError):  # a folder of that name, or one that may be read only
                path.unlink()


def write(name: str, data: bytes) -> None:
    """Writes an entry at once, in place of one that is damaged: other processes find all of it or nothing, also where
    this one is killed."""
    path = Path(name)
    part = path.with_name(f"{path.stem}.{os.getpid()}.{threading.get_ident()}-cache")  # one that is left is pruned
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError:  # the disk is full, perhaps, and less so without it
        with contextlib.suppress(OSError):
            part.unlink()
        raise


class Entries:
    """The entries of a folder, as this process writes them."""

    def __init__(self, found: Path, max_bytes: int = MAX_BYTES) -> None:
        self._found = found
        self._max_bytes = max_bytes
        self._written = 0

    def write(self, name: str, data: bytes) -> None:
        """Writes an entry, and removes old ones where it is time to look for them."""
        write(name, data)
        self._written += len(data)
        if self._written > self._max_bytes // LOOKS_AGAIN_AFTER:
            self._written = 0
            prune(self._found, self._max_bytes)


def use(tenant: str = "", alike: bool = True) -> None:
    """Has JAX, in this process, read and write the cache; goes on without it where that cannot be.

    Args:
        tenant: whose host process this is; empty where tenants share it.
        alike: whether code that was compiled for some devices is as good on others of their kind.
    """
    if tenant:
        import jax

        jax.config.update("jax_enable_compilation_cache", False)
        return
    try:
        _use(alike)
    except Exception:
        _LOG.exception("the cache of compiled programs is not used")


def _use(alike: bool) -> None:
    import jax

    from pathways_ray.jax_cache import (
        compile_once_for_alike_devices,
        write_cache_entries_behind,
        write_cache_entries_whole,
    )

    found = folder()
    if found is None:
        return
    if alike:
        compile_once_for_alike_devices()
    prune(found)
    write_cache_entries_whole(Entries(found).write)
    write_cache_entries_behind()
    jax.config.update("jax_compilation_cache_dir", str(found))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
