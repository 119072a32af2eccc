"""Files in memory: what is written comes back, and nobody who hands one over can change or shorten it later."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.client import local_reader
from pathways_ray.client.local_reader import LocalReader
from pathways_ray.errors import WireError
from pathways_ray.transport import shared_memory
from pathways_ray.transport.shared_memory import SharedFile, offsets


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small arrays are written in several pieces."""
    monkeypatch.setattr(shared_memory, "WRITE_BYTES", 64)


ARRAYS = {
    "rows": np.arange(600, dtype=np.float32).reshape(30, 20),
    "columns": np.arange(600, dtype=np.float32).reshape(30, 20)[:, 3:11],
    "transposed": np.arange(600, dtype=np.int16).reshape(30, 20).T,
    "one long row": np.arange(600, dtype=np.int64)[None, ::2],
    "scalar": np.float64(7.0),
    "empty": np.zeros((0, 4), np.int8),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_what_is_written_comes_back_in_c_order(name: str) -> None:
    array = np.asarray(ARRAYS[name])
    file = SharedFile.create(array.nbytes + 64)
    file.write(array, 64)
    found = file.bytes(array.nbytes + 64)[64:]
    assert found.tobytes() == array.tobytes()


@given(st.data(), st.booleans())
def test_boxes_of_an_array_come_to_their_places(data: st.DataObject, runs: bool) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    whole = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    box = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        box.append((start, data.draw(st.integers(start + 1, size))))
    place = tuple(slice(a, b) for a, b in box)
    expected = np.zeros_like(whole)
    expected[place] = whole[place]
    with pytest.MonkeyPatch.context() as patch:
        if runs:
            patch.setattr(shared_memory, "SHORTEST_RUN_BYTES", 0)
        file = SharedFile.create(whole.nbytes)
        file.write_box(np.ascontiguousarray(whole[place]), tuple(box), shape)
    np.testing.assert_array_equal(file.bytes(whole.nbytes).view(np.int32).reshape(shape), expected)


def test_the_bytes_outlive_the_file_and_take_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = []
    for k in range(100):
        file = SharedFile.create(4096)
        file.write(np.full(4096, k, np.uint8), 0)
        kept.append(file.bytes(4096, writable=True))
        del file
    assert len(os.listdir("/proc/self/fd")) == before
    assert [int(array[-1]) for array in kept] == list(range(100))
    kept[3][:] = 9
    assert int(kept[3].sum()) == 9 * 4096


def test_a_sealed_file_changes_no_more() -> None:
    """Whoever made it may neither write nor shorten it, by any way that it has."""
    file = SharedFile.create(4096)
    file.write(np.ones(4096, np.uint8), 0)
    other = os.dup(file.descriptor)
    file.seal()
    with pytest.raises(PermissionError):
        os.pwrite(other, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(other, 1)
    with pytest.raises(PermissionError):
        mmap.mmap(other, 4096)
    os.close(other)


def test_a_file_that_is_mapped_to_be_read_can_be_sealed_by_one_host_after_the_other() -> None:
    file = SharedFile.create(4096)
    file.write(np.ones(4096, np.uint8), 0)
    before = file.bytes(4096)
    file.seal()
    SharedFile(os.dup(file.descriptor)).seal()
    assert before.sum() == file.bytes(4096).sum() == 4096


def test_a_file_that_its_maker_has_mapped_to_write_is_refused() -> None:
    file = SharedFile.create(4096)
    with mmap.mmap(file.descriptor, 4096), pytest.raises(WireError, match="cannot be sealed"):
        file.seal()


def test_a_file_can_be_sealed_by_two_hosts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is quicker, by one system call."""
    file, call = SharedFile.create(64), fcntl.fcntl

    def later(descriptor: int, what: int, *rest: int) -> Any:
        if what == fcntl.F_ADD_SEALS:
            call(descriptor, what, *rest)
        return call(descriptor, what, *rest)

    monkeypatch.setattr(fcntl, "fcntl", later)
    file.seal()
    with pytest.raises(PermissionError):
        os.pwrite(file.descriptor, b"x", 0)


def _unsealed() -> int:
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 64)
    return descriptor


def _ordinary() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(64)
        return os.dup(file.fileno())


def _grows() -> int:
    descriptor = _unsealed()
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


@pytest.mark.parametrize("make", [_unsealed, _ordinary, _grows, lambda: os.open("/dev/zero", os.O_RDWR)])
def test_what_is_no_file_of_sealed_size_is_refused(make: Any) -> None:
    with pytest.raises(WireError, match="no file in memory of sealed size"):
        SharedFile(make()).check(64)


def test_a_file_of_another_size_is_refused() -> None:
    with pytest.raises(WireError, match="of 64 bytes came for an array of 65"):
        SharedFile.create(64).check(65)


def test_pieces_lie_where_devices_take_them_as_they_are() -> None:
    assert offsets([1, 64, 65]) == ([0, 64, 128], 256)
    assert offsets([]) == ([], 1)
    assert offsets([0]) == ([0], 1)


def test_destructors_need_no_names_of_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a process those are gone, while destructors still run; what one raises is printed."""
    kept: list[Any] = [SharedFile.create(64), LocalReader()]
    kept.append(kept[0].bytes(64))
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    for module in (shared_memory, local_reader):
        monkeypatch.setattr(module, "os", None)
    monkeypatch.setattr(shared_memory, "_C", None)
    kept.clear()
    assert not raised
