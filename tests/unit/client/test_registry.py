"""The records of running clusters: whole, private, and gone when their cluster is."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from pathways_ray import os_process
from pathways_ray.cli import status
from pathways_ray.client import registry
from pathways_ray.errors import UsageError

URL, TOKEN = "grpc://127.0.0.1:4711", "s3cret"


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def leave(record: registry.Record) -> Path:
    """A record as another process would have left it."""
    registry.folder().mkdir(mode=0o700, exist_ok=True)
    file = registry.folder() / f"{record.pid}.json"
    file.write_bytes(msgspec.json.encode(record))
    return file


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_record_is_found_until_it_is_removed() -> None:
    registry.write(URL, TOKEN)
    mine = registry.Record(URL, TOKEN, os.getpid(), started=os_process.started_at(os.getpid()))
    assert registry.running() == [mine]
    registry.write(URL + "1", TOKEN)
    assert [record.url for record in registry.running()] == [URL + "1"]
    registry.remove()
    assert registry.running() == []
    registry.remove()


def test_a_private_cluster_is_shown_and_not_shared() -> None:
    registry.write(URL, TOKEN, private=True)
    assert ([record.url for record in registry.running()], registry.shared()) == ([URL], [])
    assert status.cluster_meant(None, None, None)[:2] == status.cluster_meant(URL, None, None, shared=True)[:2]
    with pytest.raises(UsageError, match="no cluster of yours"):
        status.cluster_meant(None, None, None, shared=True)


def test_nobody_else_can_read_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        registry.write(URL, TOKEN)
    finally:
        os.umask(before)
    (file,) = registry.folder().iterdir()
    assert (file.name, mode(file), mode(registry.folder())) == (f"{os.getpid()}.json", 0o600, 0o700)


def test_what_a_dead_process_left_is_ignored_and_removed(dead_pid: int) -> None:
    stale = leave(registry.Record(URL, TOKEN, dead_pid))
    registry.write(URL + "1", TOKEN)
    assert [record.url for record in registry.running()] == [URL + "1"]
    assert not stale.exists()


def test_what_another_process_has_the_number_of_is_removed() -> None:
    """One that does not say when its process began, of an older version, counts."""
    parent = os.getppid()
    for started, lives in ((0, True), (os_process.started_at(parent), True), (1 << 40, False)):
        left = leave(registry.Record(URL, TOKEN, parent, started=started))
        assert [record.pid for record in registry.running()] == [parent] * lives
        assert left.exists() is lives


def test_clusters_come_in_the_order_of_their_start() -> None:
    parent = leave(registry.Record(URL, TOKEN, os.getppid()))
    registry.write(URL + "1", TOKEN)
    os.utime(parent, (1.0, 1.0))
    assert [record.url for record in registry.running()] == [URL, URL + "1"]


@pytest.mark.parametrize("pid", [99_999_999_999, 1 << 62])
def test_a_record_with_a_number_that_no_process_has_is_one_of_a_dead_process(pid: int) -> None:
    stale = leave(registry.Record(URL, TOKEN, pid))
    assert registry.running() == []
    assert not stale.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": 1, "token": "t", "pid": 1}', "\x00"])
def test_a_broken_record_is_ignored(text: str) -> None:
    leave(registry.Record(URL, TOKEN, os.getpid())).write_text(text)
    assert registry.running() == []


def test_a_folder_that_others_may_enter_is_not_used() -> None:
    leave(registry.Record(URL, TOKEN, os.getpid()))
    registry.folder().chmod(0o755)
    assert registry.running() == []
    registry.write(URL + "1", TOKEN)
    registry.folder().chmod(0o700)
    assert [record.url for record in registry.running()] == [URL]


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    registry.folder().symlink_to(elsewhere)
    registry.write(URL, TOKEN)
    assert list(elsewhere.iterdir()) == []
    assert registry.running() == []


def test_a_folder_of_somebody_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = registry.folder()
    leave(registry.Record(URL, TOKEN, os.getpid()))
    monkeypatch.setattr(registry, "folder", lambda: folder)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    registry.write(URL + "1", TOKEN)
    assert [file.name for file in folder.iterdir()] == [f"{os.getpid()}.json"]
    assert registry.running() == []


def test_no_record_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    registry.write(URL, TOKEN)
    assert registry.running() == []
    registry.remove()


def test_the_record_of_a_runtime_that_stays_counts_while_somebody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stays = registry.Record(
            f"grpc://127.0.0.1:{server.getsockname()[1]}", TOKEN, name="pathways", ray="10.0.0.1:6379"
        )
        registry.keep(stays)
        registry.write(URL, TOKEN)
        assert sorted(record.name for record in registry.running()) == ["", "pathways"]
        assert registry.silent() == []
    assert [record.name for record in registry.running()] == [""]
    assert registry.silent() == [stays]  # its controller may be on its way back


def test_one_record_for_each_name_on_each_ray_cluster() -> None:
    first = registry.Record(URL, TOKEN, name="pathways", ray="10.0.0.1:6379")
    registry.keep(registry.Record(URL, "old", name="pathways", ray="10.0.0.1:6379"))
    registry.keep(first)
    registry.keep(registry.Record(URL, TOKEN, name="pathways", ray="10.0.0.2:6379"))
    registry.keep(registry.Record(URL, TOKEN, name="other", ray="10.0.0.1:6379"))
    assert len(registry.all_records()) == 3
    assert all(mode(file) == 0o600 for file in registry.folder().iterdir())
    registry.forget(registry.Record("", "", name="pathways", ray="10.0.0.1:6379"))
    registry.forget(registry.Record("", "", name="pathways", ray="10.0.0.1:6379"))
    assert first not in registry.all_records()
    assert len(registry.all_records()) == 2


@pytest.mark.parametrize("url", ["", "grpc://", "grpc://127.0.0.1", "grpc://127.0.0.1:x", "grpc://127.0.0.1:99999"])
def test_nobody_answers_at_what_is_no_address(url: str) -> None:
    assert not registry.answers(registry.Record(url, TOKEN, name="pathways"))


def test_a_port_that_is_too_large_is_not_another_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert registry.answers(registry.Record(f"grpc://127.0.0.1:{port}", TOKEN))
        assert not registry.answers(registry.Record(f"grpc://127.0.0.1:{port + (1 << 16)}", TOKEN))
