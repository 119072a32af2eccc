"""`pathways logs` and `pathways usage`: lines of several processes in one order, and accounts over a span."""

from __future__ import annotations

import datetime
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pathways_ray import process_log
from pathways_ray.cli import commands, log_reading, logs
from pathways_ray.client import registry
from pathways_ray.errors import UsageError
from pathways_ray.observe.usage import used
from pathways_ray.story import log_name
from pathways_ray.transport import messages

NOW = datetime.datetime(2026, 11, 21, 12, 0, tzinfo=datetime.UTC)


def line(minute: int, event: str, **fields: Any) -> str:
    at = (NOW + datetime.timedelta(minutes=minute)).isoformat()
    return json.dumps({"time": at, "process": "p", "pid": 1, "event": event, **fields}) + "\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    found = {"controller": tmp_path / "controller.jsonl", "host 1": tmp_path / "host-1.jsonl"}
    found["controller"].write_text(line(1, "session opened", session=7) + line(3, "host lost", host=1, cause="killed"))
    found["host 1"].write_text(line(2, "joined", detail="[red]\x1b[2J") + '{"half')
    entries = [{"process": process, "node": "a1", "path": str(path)} for process, path in found.items()]
    entries.append({"process": "host 2", "node": "b2", "path": "/elsewhere"})
    tenants = [{"tenant": "alice", "device_seconds": 30.0}]
    monkeypatch.setattr(logs, "ask", lambda url, token, ca: {"logs": entries, "tenants": tenants})
    monkeypatch.setattr(process_log, "path_of", lambda runtime, process: found[process])

    def answer(url: str, token: str, request: Any, ca: str) -> messages.LogPart:
        if request.process not in found:
            raise UsageError(f"neither {request.process} nor its machine answers")
        return messages.LogPart(*process_log.read("see", request.process, request.offset, request.rolled))

    monkeypatch.setattr(log_reading, "call", answer)
    return found


def invoke(*words: str) -> Any:
    return CliRunner().invoke(commands, [*words, "--url", "grpc://here:1", "--token", "t"])


def test_logs_of_all_processes_are_in_one_order(files: dict[str, Path]) -> None:
    texts = [text.split(" p: ")[1] for text in invoke("logs").stdout.splitlines()]
    assert texts == ["session opened session 7", "joined: [red]?[2J", "host lost host 1 (because killed)"]


def test_a_process_and_a_number_of_lines_can_be_chosen(files: dict[str, Path]) -> None:
    assert "joined" in invoke("logs", "--process", "host:1").output
    assert "lost" not in invoke("logs", "--process", "host:1").output
    assert len(invoke("logs", "--process", "controller", "--lines", "1").output.splitlines()) == 1
    assert (
        json.loads(invoke("logs", "--process", "controller", "--lines", "1", "--json").output)["event"] == "host lost"
    )


def test_an_audit_has_what_people_did(files: dict[str, Path]) -> None:
    assert [text.split(" p: ")[1] for text in invoke("logs", "--audit").stdout.splitlines()] == [
        "session opened session 7"
    ]


def test_a_process_that_is_none_is_refused(files: dict[str, Path]) -> None:
    found = invoke("logs", "--process", "host:9")
    assert found.exit_code == 2
    assert "no process named host 9; there are controller, host 1, host 2" in found.output


def test_a_tenant_is_told_that_logs_are_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "ask", lambda url, token, ca: {"tenants": []})
    found = invoke("logs")
    assert found.exit_code == 2
    assert "logs are the operator's" in found.output


def test_a_log_that_cannot_be_read_is_said_and_the_others_are_shown(files: dict[str, Path]) -> None:
    found = invoke("logs")
    assert found.exit_code == 0
    assert found.stderr == "host 2: neither host 2 nor its machine answers\n"
    assert "session opened" in found.stdout


def test_without_a_controller_the_logs_of_this_machine_are_shown(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ask(url: str, token: str, ca: str) -> Any:
        raise UsageError("no cluster answers")

    monkeypatch.setattr(logs, "ask", ask)
    assert invoke("logs").exit_code == 2, "it is of nobody here"
    (tmp_path / "see").mkdir()
    files["host 1"].rename(tmp_path / "see" / "host-1.jsonl")
    monkeypatch.setattr(process_log, "folder", lambda: tmp_path)
    monkeypatch.setattr(process_log, "path_of", lambda runtime, process: tmp_path / runtime / log_name(process))
    record = registry.Record("grpc://here:1", "t", name="see")
    monkeypatch.setattr(registry, "all_records", lambda: [record])
    found = invoke("logs")
    assert found.stderr == "no cluster answers; these are the logs of this machine\n"
    assert "joined" in found.stdout


def test_what_is_written_is_followed_over_a_rolled_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Half a line comes, and then its rest. 2. The file is rolled: a new one begins."""
    path = tmp_path / "a.jsonl"
    path.write_text(line(0, "before"))
    whole = line(1, "first")
    steps: list[Any] = [
        lambda: path.write_text(path.read_text() + whole[:10]),
        lambda: path.write_text(path.read_text() + whole[10:]),
        path.unlink,
        lambda: path.write_text(line(2, "2")),
    ]
    monkeypatch.setattr("time.sleep", lambda _: steps.pop(0)())
    monkeypatch.setattr(process_log, "path_of", lambda runtime, process: path)
    log = log_reading.Log("p", partial(process_log.read, "see", "p"))
    found, ends = log_reading.last([log], 0)
    following = log_reading.following([log], ends)
    assert found == []
    assert [next(following)["event"] for _ in range(2)] == ["first", "2"]


def test_usage_is_what_accounts_grew_by_over_restarts() -> None:
    """The controller restarts between the third and the fourth line: its account begins at zero."""
    noted = [(0, 10.0), (10, 15.0), (20, 40.0), (30, 5.0), (40, 6.0)]
    lines = [json.loads(line(minute, "usage", detail="alice", cause=str(seconds))) for minute, seconds in noted]
    assert used(lines, NOW) == {"alice": 46.0}
    assert used(lines, NOW + datetime.timedelta(minutes=15)) == {"alice": 31.0}
    assert used([json.loads(line(0, "host lost"))], NOW) == {}


def test_usage_of_a_span_has_the_account_of_now(files: dict[str, Path]) -> None:
    files["controller"].with_name("controller.jsonl.1").write_text(line(-60, "usage", detail="alice", cause="20.0"))
    found = json.loads(invoke("usage", "--since", NOW.isoformat(), "--json").output)
    assert found["device_seconds"] == {"alice": 10.0}
    assert "alice" in invoke("usage", "--since", "7d").output


@pytest.mark.parametrize(("text", "minutes"), [("30m", 30), ("2h", 120), ("1.5d", 2160), ("2026-11-21T11:00:00", 60)])
def test_spans(text: str, minutes: int) -> None:
    assert logs.since_of(text, NOW) == NOW - datetime.timedelta(minutes=minutes)


@pytest.mark.parametrize("text", ["", "yesterday", "-3h", "3", "999999999999d", "h"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no span such as"):
        logs.since_of(text, NOW)
