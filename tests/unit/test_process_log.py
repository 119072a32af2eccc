"""The structured log of a process: what its lines say, who may read them, when they go."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pathways_ray import process_log
from pathways_ray.process_log import ProcessLog, path_of
from pathways_ray.story import Entry, Story


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    monkeypatch.undo()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_lifecycle_event_is_one_line_of_json(place: Path) -> None:
    log = ProcessLog("test", "host 3")
    story = Story("host 3", log.write)
    story.note(Entry(1.0, "host lost", "it did not answer for 8 s", "no heartbeat", session=2, launch=9, host=3))
    story.note_launch(Entry(2.0, "enqueued", launch=10))
    log.close()
    (line,) = lines(path_of("test", "host 3"))
    assert str(line.pop("time")).endswith("+00:00")
    assert line == {
        "process": "host 3",
        "pid": os.getpid(),
        "event": "host lost",
        "detail": "it did not answer for 8 s",
        "cause": "no heartbeat",
        "session": 2,
        "launch": 9,
        "host": 3,
    }


def test_a_name_that_a_client_chose_makes_no_second_line(place: Path) -> None:
    log = ProcessLog("test", "controller")
    log.write(Entry(0.0, "session opened", 'eve\n{"event": "session closed"}\x1b[2J'))
    log.close()
    (line,) = lines(path_of("test", "controller"))
    assert line["detail"] == 'eve\n{"event": "session closed"}\x1b[2J'
    assert b"\x1b" not in path_of("test", "controller").read_bytes()


def test_only_the_user_may_read_it(place: Path) -> None:
    ProcessLog("test", "controller").close()
    for path in (path_of("test", "controller"), process_log.folder(), process_log.folder().parent):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_a_process_works_on_where_no_log_can_be_written(place: Path) -> None:
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (place / f"pathways-{os.getuid()}").symlink_to(elsewhere)
    log = ProcessLog("test", "controller")
    log.write(Entry(0.0, "session opened"))
    log.close()
    assert list(elsewhere.iterdir()) == []


def test_a_file_is_rolled_and_old_runtimes_go(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_log, "MAX_FILE_BYTES", 1000)
    ProcessLog("old", "controller").close()
    os.utime(path_of("old", "controller"), (0, 0))
    log = ProcessLog("new", "controller")
    for number in range(100):
        log.write(Entry(0.0, f"event {number}"))
    log.close()
    files = sorted(path.name for path in path_of("new", "controller").parent.iterdir())
    assert files == ["controller.jsonl", "controller.jsonl.1", "controller.jsonl.2"]
    assert all(path.stat().st_size <= 1000 for path in path_of("new", "controller").parent.iterdir())
    assert lines(path_of("new", "controller"))[-1]["event"] == "event 99"
    assert not path_of("old", "controller").parent.exists()


def test_logs_of_a_runtime_that_lives_stay_however_quiet_it_is(place: Path) -> None:
    log, other = ProcessLog("quiet", "controller"), ProcessLog("quiet", "host 0")
    log.write(Entry(0.0, "session opened"))

    def another_starts() -> bool:
        for file in path_of("quiet", "controller").parent.iterdir():
            os.utime(file, (0, 0))
        ProcessLog("new", "controller").close()
        return path_of("quiet", "controller").parent.exists()

    assert another_starts()
    other.close()
    assert another_starts(), "the controller is there"
    log.write(Entry(0.0, "session closed"))
    assert [line["event"] for line in lines(path_of("quiet", "controller"))] == ["session opened", "session closed"]
    log.close()
    assert not another_starts()


def file_of(first: bytes) -> int:
    """The number of a file whose first line this is."""
    return zlib.crc32(first)


def test_a_log_is_read_in_parts_of_whole_lines(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_log, "MAX_PART_BYTES", 10)
    path = path_of("test", "host 3")
    path.parent.mkdir(parents=True)
    path.write_text("one\ntwo\nthree\nhal")
    here = file_of(b"one\n")
    assert process_log.read("test", "host 3", 0) == ("one\ntwo\n", 8, here)
    assert process_log.read("test", "host 3", 8, here) == ("three\n", 14, here)
    assert process_log.read("test", "host 3", 14, here) == ("", 14, here), "half a line has yet to come whole"
    assert process_log.read("test", "host 3", 99, here) == ("one\ntwo\n", 8, here), "it was cut"
    assert process_log.read("test", "host 3") == ("three\n", 14, here), "the last part begins with a whole line"
    assert process_log.read("test", "host 4") == ("", 0, 0)


def test_all_lines_are_read_once_while_files_are_rolled(place: Path) -> None:
    """1. A file is read to its end, and goes on. 2. It is rolled, and its successor is longer already than what was
    read. 3. Another one follows, without a line so far. 4. Files are rolled until the one that was read last is gone:
    all that is left is newer."""
    path = path_of("test", "host 3")
    path.parent.mkdir(parents=True)
    path.write_text("one\n")
    _, *at = process_log.read("test", "host 3")
    path.write_text("one\ntwo\n")
    path.rename(path.with_name(f"{path.name}.1"))
    path.write_text("three\nfour\nfive\n")
    found = []
    for _ in range(3):
        text, *at = process_log.read("test", "host 3", *at)
        found.append(text)
    assert found == ["two\n", "three\nfour\nfive\n", ""]
    path.with_name(f"{path.name}.1").rename(path.with_name(f"{path.name}.2"))
    path.rename(path.with_name(f"{path.name}.1"))
    path.write_text("")
    assert process_log.read("test", "host 3", *at) == ("", *at)
    assert process_log.read("test", "host 3", 0) == ("one\ntwo\n", 8, file_of(b"one\n")), "0 is the oldest one"
    path.write_text("six\n")
    path.with_name(f"{path.name}.1").write_text("later\n")
    path.with_name(f"{path.name}.2").unlink()
    text, *at = process_log.read("test", "host 3", *at)
    assert (text, process_log.read("test", "host 3", *at)[0]) == ("later\n", "six\n")


def test_a_line_without_end_does_not_stop_the_reader(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_log, "MAX_PART_BYTES", 4)
    path = path_of("test", "host 3")
    path.parent.mkdir(parents=True)
    path.write_text("toolong\n")
    here = file_of(b"tool")
    assert process_log.read("test", "host 3", 0) == ("tool", 4, here)
    assert process_log.read("test", "host 3", 4, here) == ("ong\n", 8, here)


def test_the_last_part_goes_on_in_a_file_that_was_just_rolled(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = path_of("test", "host 3")
    path.parent.mkdir(parents=True)
    path.with_name(f"{path.name}.2").write_text("zero\n")
    path.with_name(f"{path.name}.1").write_text("one\ntwo\nthree\n")
    path.write_text("four\n")
    here = file_of(b"four\n")
    assert process_log.read("test", "host 3") == ("zero\none\ntwo\nthree\nfour\n", 5, here)
    monkeypatch.setattr(process_log, "MAX_PART_BYTES", 13)
    assert process_log.read("test", "host 3") == ("three\nfour\n", 5, here), "no more than is read at once"
    path.write_text("four\n" * 4)
    assert process_log.read("test", "host 3") == ("four\n" * 2, 20, here)
