"""Parts of JAX's compilation cache that have no public name. Each entry says why the project needs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

WRITES_AFTER_S = 0.1
"""After this time an entry is written: to serialize one takes as long as a short launch, and holds Python's lock."""


def compile_once_for_alike_devices() -> None:
    """Has JAX's compilation cache find what was compiled for other devices of the same kind, as many of them.

    Its keys have the numbers of the devices, except on GPUs, where JAX itself leaves them out. What is loaded from the
    cache runs on the devices that it is loaded for; code for CPUs and GPUs does not depend on them, that for TPUs does.
    """
    from jax._src import cache_key

    hashed = cache_key._hash_serialized_compile_options

    def without_numbers(hash_object: Any, options: Any, strip_device_assignment: bool = False) -> None:
        hashed(hash_object, options, strip_device_assignment=True)

    cache_key._hash_serialized_compile_options = without_numbers


def write_cache_entries_whole(writer: Callable[[str, bytes], None]) -> None:
    """Has JAX's compilation cache write files by `writer`: its own may be read half written, or left so for ever."""
    from jax._src import lru_cache

    def put(self: Any, key: str, value: bytes) -> None:
        writer(str(self.path / f"{key}-cache"), value)

    setattr(lru_cache.LRUCache, "put", put)  # noqa: B010


def write_cache_entries_behind() -> None:
    """Has JAX's compilation cache write in a thread of its own, a little later, what was compiled. JAX writes it first,
    before anybody may run it: 7 ms for 100 small functions."""
    from jax._src import compiler

    behind = WritesBehind(compiler._cache_write, compiler._cache_read)
    setattr(compiler, "_cache_write", behind.write)  # noqa: B010
    setattr(compiler, "_cache_read", behind.read)  # noqa: B010


class WritesBehind:
    """Entries that a thread writes a little later. Who reads one that is about to be written has all written at once,
    and waits for it.

    Args:
        write: writes an entry; its key comes first.
        read: reads an entry; its key is the second argument.
        after_s: an entry is written so much later, in seconds.
    """

    def __init__(self, write: Callable[..., None], read: Callable[..., Any], after_s: float = WRITES_AFTER_S) -> None:
        self._write, self._read, self._after_s = write, read, after_s
        self._writer = ThreadPoolExecutor(1, "compilation cache")
        self._lock, self._awaited = threading.Lock(), threading.Event()
        self._writing: dict[str, Future[None]] = {}

    def write(self, key: str, *given: Any) -> None:
        """Has an entry written, and does not wait for it."""
        try:
            with self._lock:
                self._writing[key] = self._writer.submit(self._written, time.monotonic() + self._after_s, key, *given)
        except RuntimeError:  # this process is about to end
            self._write(key, *given)

    def _written(self, due: float, key: str, *given: Any) -> None:
        try:
            self._awaited.wait(max(0.0, due - time.monotonic()))
            self._write(key, *given)
        finally:
            with self._lock:
                self._writing.pop(key, None)
                if not self._writing:
                    self._awaited.clear()

    def read(self, module_name: str, key: str, *given: Any) -> Any:
        """Returns the reader's answer, after the entry has been written."""
        with self._lock:
            if (writing := self._writing.get(key)) is not None:
                self._awaited.set()
        if writing is not None:
            writing.exception()
        return self._read(module_name, key, *given)
