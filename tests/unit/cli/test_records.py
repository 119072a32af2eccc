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

from pathways_ray.client import records

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


def leave(record: records.Record) -> Path:
    """A record as another process would have left it."""
    records.folder().mkdir(mode=0o700, exist_ok=True)
    file = records.folder() / f"{record.pid}.json"
    file.write_bytes(msgspec.json.encode(record))
    return file


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_record_is_found_until_it_is_removed() -> None:
    records.write(URL, TOKEN)
    assert records.running() == [records.Record(URL, TOKEN, os.getpid())]
    records.write(URL + "1", TOKEN)
    assert [record.url for record in records.running()] == [URL + "1"]
    records.remove()
    assert records.running() == []
    records.remove()


def test_nobody_else_can_read_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        records.write(URL, TOKEN)
    finally:
        os.umask(before)
    (file,) = records.folder().iterdir()
    assert (file.name, mode(file), mode(records.folder())) == (f"{os.getpid()}.json", 0o600, 0o700)


def test_what_a_dead_process_left_is_ignored_and_removed(dead_pid: int) -> None:
    stale = leave(records.Record(URL, TOKEN, dead_pid))
    records.write(URL + "1", TOKEN)
    assert [record.url for record in records.running()] == [URL + "1"]
    assert not stale.exists()


def test_clusters_come_in_the_order_of_their_start() -> None:
    parent = leave(records.Record(URL, TOKEN, os.getppid()))
    records.write(URL + "1", TOKEN)
    os.utime(parent, (1.0, 1.0))
    assert [record.url for record in records.running()] == [URL, URL + "1"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": 1, "token": "t", "pid": 1}', "\x00"])
def test_a_broken_record_is_ignored(text: str) -> None:
    leave(records.Record(URL, TOKEN, os.getpid())).write_text(text)
    assert records.running() == []


def test_a_folder_that_others_may_enter_is_not_used() -> None:
    leave(records.Record(URL, TOKEN, os.getpid()))
    records.folder().chmod(0o755)
    assert records.running() == []
    records.write(URL + "1", TOKEN)
    records.folder().chmod(0o700)
    assert [record.url for record in records.running()] == [URL]


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    records.folder().symlink_to(elsewhere)
    records.write(URL, TOKEN)
    assert list(elsewhere.iterdir()) == []
    assert records.running() == []


def test_a_folder_of_somebody_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = records.folder()
    leave(records.Record(URL, TOKEN, os.getpid()))
    monkeypatch.setattr(records, "folder", lambda: folder)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    records.write(URL + "1", TOKEN)
    assert [file.name for file in folder.iterdir()] == [f"{os.getpid()}.json"]
    assert records.running() == []


def test_no_record_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    records.write(URL, TOKEN)
    assert records.running() == []
    records.remove()


def test_the_record_of_a_runtime_that_stays_counts_while_somebody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stays = records.Record(
            f"grpc://127.0.0.1:{server.getsockname()[1]}", TOKEN, name="pathways", ray="10.0.0.1:6379"
        )
        records.keep(stays)
        records.write(URL, TOKEN)
        assert sorted(record.name for record in records.running()) == ["", "pathways"]
        assert records.silent() == []
    assert [record.name for record in records.running()] == [""]
    assert records.silent() == [stays]  # its controller may be on its way back


def test_one_record_for_each_name_on_each_ray_cluster() -> None:
    first = records.Record(URL, TOKEN, name="pathways", ray="10.0.0.1:6379")
    records.keep(records.Record(URL, "old", name="pathways", ray="10.0.0.1:6379"))
    records.keep(first)
    records.keep(records.Record(URL, TOKEN, name="pathways", ray="10.0.0.2:6379"))
    records.keep(records.Record(URL, TOKEN, name="other", ray="10.0.0.1:6379"))
    assert len(records.all_records()) == 3
    assert all(mode(file) == 0o600 for file in records.folder().iterdir())
    records.forget(records.Record("", "", name="pathways", ray="10.0.0.1:6379"))
    records.forget(records.Record("", "", name="pathways", ray="10.0.0.1:6379"))
    assert first not in records.all_records()
    assert len(records.all_records()) == 2


@pytest.mark.parametrize("url", ["", "grpc://", "grpc://127.0.0.1", "grpc://127.0.0.1:x", "grpc://127.0.0.1:99999"])
def test_nobody_answers_at_what_is_no_address(url: str) -> None:
    assert not records.answers(records.Record(url, TOKEN, name="pathways"))
