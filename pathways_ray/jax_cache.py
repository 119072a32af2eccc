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
    before anybody may run it: 7 ms for 100 small functions. Who looks for an entry that is about to be written has all
    written at once, and waits for it."""
    from jax._src import compiler

    written, read = compiler._cache_write, compiler._cache_read
    writer = ThreadPoolExecutor(1, "compilation cache")
    writing: dict[str, Future[None]] = {}
    lock, awaited = threading.Lock(), threading.Event()

    def write(due: float, key: str, *given: Any) -> None:
        try:
            awaited.wait(max(0.0, due - time.monotonic()))
            written(key, *given)
        finally:
            with lock:
                writing.pop(key, None)
                if not writing:
                    awaited.clear()

    def write_behind(key: str, *given: Any) -> None:
        try:
            with lock:
                writing[key] = writer.submit(write, time.monotonic() + WRITES_AFTER_S, key, *given)
        except RuntimeError:  # this process is about to end
            written(key, *given)

    def read_after(module_name: str, key: str, *given: Any) -> Any:
        with lock:
            before = writing.get(key)
            if before is not None:
                awaited.set()
        if before is not None:
            before.exception()
        return read(module_name, key, *given)

    setattr(compiler, "_cache_write", write_behind)  # noqa: B010
    setattr(compiler, "_cache_read", read_after)  # noqa: B010
