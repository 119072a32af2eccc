"""`pathways trace`: from when on it gathers, what it writes where, and what it says is missing."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pathways_ray.cli import commands
from pathways_ray.client import registry
from pathways_ray.deployment import ray_connection, tracing
from pathways_ray.errors import UsageError
from pathways_ray.observe.timeline import Clock, Ended, Records


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The ages of the times from which on records were gathered, of a runtime whose host 1 does not answer."""
    ages: list[float] = []

    def trace(actors: Any, since: float, predictions: Any) -> Records:
        ages.append(time.monotonic() - since)
        known = {"controller": Clock(), "host 0": Clock(0.5, 9.5e-6)}
        return Records(ended=[Ended(640, 2, 5, 10.0, 10.004, 3)], clocks=known, left_out_s=1.5)

    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    monkeypatch.setattr(ray_connection, "connect_ray", lambda *_: None)
    monkeypatch.setattr(tracing, "processes", lambda name: dict.fromkeys(("controller", "host 0", "host 1")))
    monkeypatch.setattr(tracing, "trace", trace)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    return ages


def test_what_is_over_is_gathered_at_once_and_what_is_missing_is_said(gathered: list[float], tmp_path: Path) -> None:
    found = CliRunner().invoke(commands, ["trace", "--last", "60", "--output", str(tmp_path / "t.json")])
    assert found.exit_code == 0
    assert gathered == [60.0]
    assert "t.json: 1 launches on 0 hosts; clocks agree within 10 us" in found.stdout
    assert found.stderr.splitlines() == [
        "the first 1.5 s are left out: a file holds no more launches",
        "left out, since they did not answer: host 1",
    ]
    assert json.loads((tmp_path / "t.json").read_text())["metadata"]["clocks"]["host 0"]["within_s"] == 9.5e-6


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_gathered(
    gathered: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike one that is only read."""
    file, predicted = tmp_path / "t.json", tmp_path / "predicted.json"
    for path in (file, predicted):
        path.write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or path not in (file, predicted))
    found = CliRunner().invoke(commands, ["trace", "--last", "1", "--output", str(file)])
    assert found.exit_code == 2
    assert f"{file} cannot be written to" in found.stderr.replace("\n", "")
    read = CliRunner().invoke(commands, ["trace", "--last", "1", "--predicted", str(predicted)])
    assert "predicted.json is no prediction" in read.stderr
    assert gathered == []


def test_a_disk_that_is_full_ends_a_trace_with_a_line(gathered: list[float]) -> None:
    found = CliRunner().invoke(commands, ["trace", "--last", "1", "--output", "/dev/full"])
    assert (found.exit_code, gathered) == (1, [1.0])
    assert found.stderr == "pathways: /dev/full cannot be written: No space left on device\n"


def test_an_hour_is_ended_by_ctrl_c_with_what_there_is(
    gathered: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        assert seconds == 3600.0
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    found = CliRunner().invoke(commands, ["trace", "--seconds", "3600", "--output", str(tmp_path / "t.json")])
    assert found.exit_code == 0
    assert (tmp_path / "t.json").exists()


def test_profiles_lie_in_one_session_with_the_timeline(
    gathered: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = tmp_path / "plugins" / "profile" / "now"
    session.mkdir(parents=True)
    monkeypatch.setattr(tracing, "profile", lambda actors, seconds, folder: (session, {"host 1": "it is too large"}))
    found = CliRunner().invoke(commands, ["trace", "--seconds", "1", "--xprof", str(tmp_path)])
    assert found.exit_code == 0
    assert (session / "trace.json").exists()
    assert "no profile of host 1: it is too large" in found.stderr


def test_a_trace_for_stdout_is_all_that_comes_there(
    gathered: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(commands, ["trace", "--last", "60", "--output", "-"])
    assert found.exit_code == 0
    assert json.loads(found.stdout)["traceEvents"]
    assert "1 launches on 0 hosts" in found.stderr
    assert not list(tmp_path.iterdir())


def test_spans_of_a_runtime_that_is_not_there_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def processes(name: str) -> None:
        raise UsageError(f"no runtime named {name!r} is on this Ray cluster")

    def sleep(seconds: float) -> None:
        raise AssertionError("it waits for one")

    monkeypatch.setattr(ray_connection, "connect_ray", lambda *_: None)
    monkeypatch.setattr(tracing, "processes", processes)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    found = CliRunner().invoke(commands, ["spans", "--name", "nope"])
    assert found.exit_code == 2
    assert "pathways: no runtime named 'nope'" in found.stderr


def test_the_cluster_of_a_process_is_named_where_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pathways status` finds it, and `pathways trace` cannot."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    none = CliRunner().invoke(commands, ["trace", "--last", "2"]).stderr
    registry.write("grpc://127.0.0.1:4711", "s3cret")
    own = CliRunner().invoke(commands, ["trace", "--last", "2"]).stderr
    assert none.endswith("start one with 'ray start --head'\n")
    assert own.endswith(
        f". What pw.init started in process {os.getpid()} is its own: pw.trace there, and it ends with it\n"
    )
