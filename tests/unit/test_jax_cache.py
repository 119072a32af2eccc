"""Entries of JAX's compilation cache that are written behind the call that compiled them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jax._src import compiler

from pathways_ray import jax_cache

LIMIT_S = 20.0


class Store:
    """What JAX's writer and reader are replaced with: a store whose writes wait until they may."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.written: list[str] = []

    def write(self, key: str, *given: Any) -> None:
        """Stores an entry."""
        assert self.may_write.wait(LIMIT_S)
        self.written.append(key)
        if key == "broken":
            raise OSError("no space")

    def read(self, module_name: str, key: str, *given: Any) -> bool:
        """Whether it has an entry."""
        return key in self.written


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(compiler, "_cache_write", made.write)
    monkeypatch.setattr(compiler, "_cache_read", made.read)
    return made


def test_a_writer_goes_on_and_a_reader_of_the_same_entry_waits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_cache, "WRITES_AFTER_S", 1000.0)
    jax_cache.write_cache_entries_behind()
    for key in ("one", "two"):
        compiler._cache_write(key)
    assert not compiler._cache_read("module", "three")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(compiler._cache_read, "module", "two")
        with pytest.raises(TimeoutError):
            reading.result(0.05)
        store.may_write.set()
        assert reading.result(LIMIT_S)
    assert store.written == ["one", "two"]
    compiler._cache_write("three")
    assert store.written == ["one", "two"], "an entry that nobody looks for is written later"
    assert compiler._cache_read("module", "three")


def test_an_entry_that_cannot_be_written_is_not_there_and_keeps_nobody(store: Store) -> None:
    store.may_write.set()
    jax_cache.write_cache_entries_behind()
    compiler._cache_write("broken")
    compiler._cache_read("module", "broken")
    compiler._cache_write("next")
    assert compiler._cache_read("module", "next")
