"""Entries of JAX's compilation cache that are written behind the call that compiled them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pathways_ray.jax_cache import WritesBehind

LIMIT_S = 20.0


class Store:
    """Entries, written when they may be."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.written: list[str] = []

    def write(self, key: str) -> None:
        """Stores an entry, but for a broken one."""
        assert self.may_write.wait(LIMIT_S)
        if key == "broken":
            raise OSError("no space")
        self.written.append(key)

    def read(self, module_name: str, key: str) -> bool:
        """Whether it has an entry."""
        return key in self.written


def test_a_writer_goes_on_and_a_reader_of_the_same_entry_waits() -> None:
    store = Store()
    behind = WritesBehind(store.write, store.read, after_s=1000.0)
    for key in ("one", "two"):
        behind.write(key)
    assert not behind.read("module", "three")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(behind.read, "module", "two")
        with pytest.raises(TimeoutError):
            reading.result(0.05)
        store.may_write.set()
        assert reading.result(LIMIT_S)
    assert store.written == ["one", "two"]
    behind.write("three")
    assert behind.read("module", "three")


def test_an_entry_that_nobody_looks_for_is_written_too() -> None:
    store = Store()
    store.may_write.set()
    behind = WritesBehind(store.write, store.read, after_s=0.01)
    behind.write("one")
    behind._writer.shutdown()
    assert store.written == ["one"]
    behind.write("of a process that ends")
    assert store.written == ["one", "of a process that ends"]


def test_an_entry_that_cannot_be_written_keeps_nobody() -> None:
    store = Store()
    store.may_write.set()
    behind = WritesBehind(store.write, store.read, after_s=1000.0)
    behind.write("broken")
    assert not behind.read("module", "broken")
    behind.write("next")
    assert behind.read("module", "next")
