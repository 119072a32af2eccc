"""Values of a suspended session, in memory and in a directory that may be damaged."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pathways_ray.client.array_pieces import ArrayFile
from pathways_ray.client.saved import INDEX, MAX_FILES, InDirectory, saved_at
from pathways_ray.errors import SuspensionDamaged, UsageError
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport.shared_memory import SharedFile

VALUES: list[Any] = [
    np.arange(6, dtype=np.float32).reshape(2, 3).T,
    np.array(1.5, ml_dtypes.bfloat16),
    np.zeros((0, 4), np.int8),
    np.array([True, False]),
]


def kind(value: np.ndarray[Any, Any]) -> ArrayType:
    return ArrayType(value.shape, value.dtype.name)


@pytest.mark.parametrize("where", [None, "here"])
def test_values_come_back_with_the_same_bits(where: str | None, tmp_path: Path) -> None:
    saved = saved_at(where and tmp_path / where)
    for number, value in enumerate(VALUES):
        saved.save(number, value)
    saved.finish()
    saved.check(None)
    for number, value in enumerate(VALUES):
        found = saved.load(number, kind(value))
        assert isinstance(found, np.ndarray)
        assert (found.shape, found.dtype, found.tobytes()) == (value.shape, value.dtype, value.tobytes())
    saved.remove()
    assert list(tmp_path.iterdir()) == []


def test_so_many_files_in_memory_are_kept_open_and_of_others_their_bytes() -> None:
    """A process has a thousand descriptors, and a state may have more arrays."""
    saved = saved_at(None)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(MAX_FILES + 20):
        value = np.full(4, number, np.int32)
        file = SharedFile.create(value.nbytes)
        file.write(value, 0)
        saved.save(number, ArrayFile(file, value.shape, value.dtype))
        del file
    assert len(os.listdir("/proc/self/fd")) - before <= MAX_FILES
    for number in range(MAX_FILES + 20):
        found = saved.load(number, ArrayType((4,), "int32"))
        found = found.array() if isinstance(found, ArrayFile) else found
        assert found.tolist() == [number] * 4
    saved.remove()
    del found
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("where", [None, "here"])
def test_a_value_in_a_file_in_memory_is_kept_as_it_is_or_written_down(where: str | None, tmp_path: Path) -> None:
    value = np.arange(16, dtype=np.float32).reshape(2, 8)
    file = SharedFile.create(value.nbytes)
    file.write(value, 0)
    filed, saved = ArrayFile(file, value.shape, value.dtype), saved_at(where and tmp_path / where)
    saved.save(0, filed)
    saved.finish()
    saved.check(None)
    found = saved.load(0, kind(value))
    if where is None:
        assert found is filed
    else:
        np.testing.assert_array_equal(found, value)
    saved.remove()


def in_directory(path: Path) -> InDirectory:
    saved = InDirectory(path)
    saved.save(0, VALUES[0])
    saved.finish()
    return saved


def test_a_directory_that_is_not_as_it_was_is_refused_and_read_once_it_is(tmp_path: Path) -> None:
    saved, file = in_directory(tmp_path / "one"), tmp_path / "one" / "0.array"
    before = file.read_bytes()
    for damaged, why in [(before[:-1], "has 23 bytes, and had 24"), (before[:-1] + b"x", "are not those that were")]:
        file.write_bytes(damaged)
        with pytest.raises(SuspensionDamaged, match=why):
            saved.load(0, kind(VALUES[0]))
    file.unlink()
    with pytest.raises(SuspensionDamaged, match="cannot be read: No such file"):
        saved.load(0, kind(VALUES[0]))
    file.write_bytes(before)
    found = saved.load(0, kind(VALUES[0]))
    assert isinstance(found, np.ndarray)
    assert found.tobytes() == VALUES[0].tobytes()


def test_a_directory_may_have_been_moved_and_must_be_the_same(tmp_path: Path) -> None:
    saved, other = in_directory(tmp_path / "one"), in_directory(tmp_path / "two")
    with pytest.raises(SuspensionDamaged, match="has another suspension than this session's"):
        saved.check(other.path)
    with pytest.raises(SuspensionDamaged, match="has no suspension"):
        saved.check(tmp_path)
    (tmp_path / "two" / INDEX).write_text("{")
    with pytest.raises(SuspensionDamaged, match="is damaged"):
        other.check(None)
    with pytest.raises(SuspensionDamaged, match="which is memory"):
        saved_at(None).check(tmp_path)
    (tmp_path / "one").rename(tmp_path / "three")
    saved.check(tmp_path / "three")
    found = saved.load(0, kind(VALUES[0]))
    assert isinstance(found, np.ndarray)
    assert found.tobytes() == VALUES[0].tobytes()


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may have more than 16 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_was_written_in_part_is_removed_so_that_the_directory_is_of_use_again(
    tmp_path: Path, small_files: None
) -> None:
    saved = saved_at(tmp_path)
    with pytest.raises(UsageError, match=r"array 0 cannot be written to .*: File too large"):
        saved.save(0, VALUES[0])
    assert [file.name for file in tmp_path.iterdir()] == ["0.array"]
    saved.remove()
    saved_at(tmp_path).save(3, VALUES[3])


def test_a_session_is_suspended_to_an_empty_directory_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="has 'file'; a session is suspended to an empty directory"):
        saved_at(tmp_path)
    for path in (tmp_path / "file", tmp_path / "no" / "such"):
        with pytest.raises(UsageError, match="is no directory to suspend to"):
            saved_at(path)
    with pytest.raises(UsageError, match="is a directory, or None for memory, not 3"):
        saved_at(3)  # type: ignore[arg-type]
