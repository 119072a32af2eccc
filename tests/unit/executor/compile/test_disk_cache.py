"""The cache of compiled computations on disk: what one process compiled, the next one loads, and nobody else writes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from pathways_ray.executor.compile import disk_cache

HOST = """
import sys
import jax
import numpy as np
from jax import monitoring
from pathways_ray.executor.compile import disk_cache

seen = []
monitoring.register_event_listener(lambda name, **_: seen.append(name))
disk_cache.use(*sys.argv[1:])
found = jax.jit(lambda x: jax.numpy.tanh(x @ x) + 1)(np.arange(16.0).reshape(4, 4))
print(sum("cache_hits" in name for name in seen), np.asarray(found).tobytes().hex())
"""


ELSEWHERE = """
import os
import resource
import sys
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
import jax
import numpy as np
from jax import monitoring
from jax.sharding import NamedSharding, PartitionSpec as P
from pathways_ray.executor.compile import disk_cache

seen = []
monitoring.register_event_listener(lambda name, **_: seen.append(name))
disk_cache.use(alike=sys.argv[1] == "alike")
v = np.arange(8.0, dtype=np.float32)
for chosen in ([0, 1], [2, 3], [3, 0], [1], [2]):
    devices = [jax.devices()[k] for k in chosen]
    lying = NamedSharding(jax.make_mesh((len(chosen),), ("x",), devices=devices), P("x"))
    index = jax.shard_map(
        lambda v: jax.lax.psum(v, "x") + jax.lax.axis_index("x"), mesh=lying.mesh, in_specs=P("x"), out_specs=P("x")
    )
    given = jax.device_put(v, lying)
    seen.clear()
    found = jax.jit(index, in_shardings=lying, out_shardings=lying)(given)
    hits = sum("cache_hits" in name for name in seen)
    parts = v.reshape(len(chosen), -1)
    assert [shard.device for shard in found.addressable_shards] == devices
    np.testing.assert_array_equal(found, (parts.sum(0) + np.arange(len(chosen))[:, None]).ravel())
    print(hits)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(disk_cache.VARIABLE, raising=False)
    monkeypatch.delenv(disk_cache.JAX_VARIABLE, raising=False)
    return tmp_path


def host(*arguments: str) -> tuple[int, str]:
    """How much a process loads, and what it computes."""
    command = [sys.executable, "-W", "error", "-c", HOST, *arguments]
    hits, bits = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(hits), bits


@pytest.mark.slow
def test_a_second_process_compiles_nothing_and_a_damaged_entry_is_compiled_again(home: Path) -> None:
    first, second = host(), host()
    assert (first[0], second[0] > 0) == (0, True)
    assert first[1] == second[1]
    assert host("the host process of one tenant") == first
    for entry in home.glob("pathways/compiled/*-cache"):
        entry.write_bytes(entry.read_bytes()[:100])
    command = [sys.executable, "-c", HOST]
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert again.stdout.split()[1] == first[1]
    assert host() == second


def test_readers_find_all_of_an_entry_or_nothing(tmp_path: Path) -> None:
    entry, size = tmp_path / "one-cache", 1 << 22
    over = threading.Event()

    def writes() -> None:
        for k in range(40):
            disk_cache.write(str(entry), bytes([k]) * size)
        over.set()

    with ThreadPoolExecutor() as threads:
        written = [threads.submit(writes) for _ in range(2)]
        while not over.is_set():
            if entry.exists():
                found = entry.read_bytes()
                assert (len(found), len(set(found))) == (size, 1)
        assert [one.result() for one in written] == [None, None]
    assert list(tmp_path.iterdir()) == [entry]


def test_what_was_compiled_for_some_devices_runs_on_others(home: Path) -> None:
    """Values, and the devices that they are on, are checked in the process."""

    def hits(word: str) -> list[str]:
        command = [sys.executable, "-W", "error", "-c", ELSEWHERE, word]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    assert hits("as JAX has it") == ["0"] * 5
    assert hits("alike") == ["1", "1", "1", "0", "1"]  # the first devices have the numbers that stand for all


def test_the_folder_is_its_users_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = disk_cache.folder()
    assert found == home / "pathways" / "compiled"
    assert found.stat().st_mode & 0o777 == 0o700
    found.chmod(0o770)
    assert disk_cache.folder() is None
    monkeypatch.setenv(disk_cache.VARIABLE, "off")
    assert disk_cache.folder() is None
    monkeypatch.setenv(disk_cache.VARIABLE, str(home / "mine"))
    assert disk_cache.folder() == home / "mine"
    monkeypatch.setenv(disk_cache.VARIABLE, "/dev/null/none")
    assert disk_cache.folder() is None
    monkeypatch.setenv(disk_cache.JAX_VARIABLE, str(home / "of jax"))
    assert disk_cache.folder() is None


def test_who_has_no_home_starts_without_a_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "~")  # as without the variable, for a user that the machine does not know
    with pytest.raises(RuntimeError):
        Path.home()
    assert disk_cache.folder() is None
    assert host()[0] == 0
    monkeypatch.setenv(disk_cache.VARIABLE, str(home / "mine"))
    assert disk_cache.folder() == home / "mine"
    monkeypatch.delenv(disk_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    assert disk_cache.folder() == home / "pathways" / "compiled"


def test_whatever_is_wrong_with_the_cache_ends_no_start(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Path) -> None:
        raise OSError("stale file handle")

    before = jax.config.values["jax_compilation_cache_dir"]
    monkeypatch.setattr(disk_cache, "prune", fail)
    disk_cache.use(alike=False)
    assert jax.config.values["jax_compilation_cache_dir"] == before
    assert "stale file handle" in caplog.text


def test_an_entry_that_cannot_be_removed_stays(home: Path) -> None:
    """A folder of that name is among the oldest."""
    for k, name in enumerate(("old", "folder", "new")):
        path = home / f"{name}-cache"
        path.mkdir() if name == "folder" else path.write_bytes(bytes(100))
        os.utime(path, (k, k))
    disk_cache.prune(home, 100)
    assert sorted(path.name for path in home.iterdir()) == ["folder-cache", "new-cache"]


def test_the_oldest_entries_go_first(home: Path) -> None:
    for k in range(5):
        path = home / f"{k}-cache"
        path.write_bytes(bytes(100))
        os.utime(path, (k, k))
    disk_cache.prune(home, 250)
    assert sorted(path.name for path in home.iterdir()) == ["3-cache", "4-cache"]


def test_entries_of_a_host_that_runs_for_long_do_not_fill_the_disk(tmp_path: Path) -> None:
    entries, size, most = disk_cache.Entries(tmp_path, 1 << 16), 1 << 10, 1 << 16
    for k in range(500):
        entries.write(str(tmp_path / f"{k:03}-cache"), bytes(size))
        os.utime(tmp_path / f"{k:03}-cache", (k, k))
        kept = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert kept <= most + most // disk_cache.LOOKS_AGAIN_AFTER + size
    names = sorted(path.name for path in tmp_path.iterdir())
    assert (names[-1], len(names) >= 60) == ("499-cache", True)


def test_an_entry_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """As on a disk that is full: the process may write files of 100 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            disk_cache.write(str(tmp_path / "one-cache"), bytes(1000))
        found = list(tmp_path.iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found == []
