"""`pathways logs` and `pathways usage`: lines of several processes in one order, and accounts over a span."""

from __future__ import annotations

import datetime
import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
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
    monkeypatch.setattr(logs, "ask", lambda url, token, ca: {"logs": entries, "device_seconds": {"alice": 30.0}})
    monkeypatch.setattr(process_log, "path_of", lambda runtime, process: found[process])

    def answer(url: str, token: str, request: Any, ca: str) -> messages.LogPart:
        if request.process not in found:
            raise UsageError(f"neither {request.process} nor its machine answers")
        return messages.LogPart(*process_log.read("see", request.process, request.offset, request.file))

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


def test_an_audit_has_moves_suspensions_islands_and_this_users_own_commands(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events = ("session suspended", "slice moved", "island drained", "island removed", "host lost", "session resumed")
    files["controller"].write_text("".join(line(minute, event) for minute, event in enumerate(events)))
    files["operator"] = tmp_path / "see" / "operator.jsonl"
    files["operator"].parent.mkdir()
    files["operator"].write_text(line(9, "drill", detail="host 1 killed"))
    monkeypatch.setattr(process_log, "folder", lambda: tmp_path)
    monkeypatch.setattr(registry, "all_records", lambda: [registry.Record("grpc://here:1", "t", name="see")])
    texts = [text.split(" p: ")[1] for text in invoke("logs", "--audit").stdout.splitlines()]
    assert texts == [*(event for event in events if event != "host lost"), "drill: host 1 killed"]
    files["controller"].write_text(files["controller"].read_text() + line(9, "usage") * 5000)
    files["host 1"].write_text(line(9, "session ended"))  # as the controller says already
    texts = [text.split(" p: ")[1] for text in invoke("logs", "--audit", "--lines", "2").stdout.splitlines()]
    assert texts == ["island removed", "session resumed", "drill: host 1 killed"], "however much came since"


@pytest.mark.parametrize("character", "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
def test_a_name_hides_no_event(files: dict[str, Path], character: str) -> None:
    """Python breaks lines at more than JSON escapes."""
    refused = process_log.Line(NOW.isoformat(), "p", 1, "program refused", f"evil{character}name", session=7)
    files["controller"].write_text(msgspec.json.encode(refused).decode() + "\n", encoding="utf-8")
    for words in (("logs",), ("logs", "--audit")):
        assert "program refused session 7: evil?name" in invoke(*words).stdout


def test_a_process_that_is_none_is_refused(files: dict[str, Path]) -> None:
    found = invoke("logs", "--process", "host:9")
    assert found.exit_code == 2
    assert "no process named host 9; there are controller, host 1, host 2" in found.output


def test_a_tenant_is_told_that_logs_are_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "ask", lambda url, token, ca: {"tenants": []})
    for command in ("logs", "usage"):
        found = invoke(command)
        assert found.exit_code == 2
        assert "the operator's" in found.output


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
    """1. Half a line comes, and then its rest. 2. More comes, and the file is rolled: a new one begins, which is longer
    already than what was read of the old one. 3. A process comes that was not there before."""
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text(line(0, "before"))
    whole = line(1, "first")

    def roll() -> None:
        path.write_text(path.read_text() + line(2, "second"))
        path.rename(tmp_path / "a.jsonl.1")
        path.write_text(line(4, "fourth") * 9)
        other.write_text(line(3, "third"))

    steps: list[Any] = [
        lambda: path.write_text(path.read_text() + whole[:10]),
        lambda: path.write_text(path.read_text() + whole[10:]),
        roll,
        *[lambda: None] * log_reading.LIST_EVERY,
    ]
    monkeypatch.setattr("time.sleep", lambda _: steps.pop(0)())
    monkeypatch.setattr(process_log, "path_of", lambda runtime, process: path if process == "p" else other)
    logs = [log_reading.Log(name, partial(process_log.read, "see", name)) for name in ("p", "q")]
    found, ends = log_reading.last(logs[:1], 0)
    following = log_reading.following(lambda: logs if other.exists() else logs[:1], ends)
    assert found == []
    assert [next(following)["event"] for _ in range(12)] == ["first", "second", *["fourth"] * 9, "third"]


def test_what_cannot_be_read_while_it_is_followed_is_said_once(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The controller is away for three rounds, and then writes again; all three processes miss it."""
    away = iter([False, True, True, True, False])
    log = log_reading.Log("controller", partial(process_log.read, "see", "controller"))

    def read(offset: int, file: int) -> process_log.Part:
        if next(away):
            raise UsageError("no cluster answers")
        return log.read(offset, file)

    steps = iter(range(9))
    monkeypatch.setattr("time.sleep", lambda _: next(steps))
    logs = [log_reading.Log("controller", read)]
    more = [log_reading.Log(f"host {k}", lambda *_: process_log.Part("", 0, 0)) for k in range(9)]
    _, ends = log_reading.last(logs, 0)
    files["controller"].write_text(files["controller"].read_text() + line(5, "new"))
    assert next(log_reading.following(lambda: [*logs, *more], ends))["event"] == "new"
    assert capsys.readouterr().err == "controller: no cluster answers\n"


def test_a_controller_that_is_away_brings_no_log_of_an_earlier_runtime(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is away at the second look at which processes there are; a file of this machine is of a host that was."""
    real: Any = vars(logs)["ask"]
    looks, rounds = iter([True, True, False]), iter(range(log_reading.LIST_EVERY + 2))

    def ask(url: str, token: str, ca: str) -> Any:
        if next(looks):
            return real(url, token, ca=ca)
        raise UsageError("no cluster answers")

    def sleep(_: float) -> None:
        if next(rounds, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(logs, "ask", ask)
    monkeypatch.setattr("time.sleep", sleep)
    (tmp_path / "see").mkdir()
    files["host 9"] = tmp_path / "see" / "host-9.jsonl"
    files["host 9"].write_text(line(0, "long ago"))
    monkeypatch.setattr(process_log, "folder", lambda: tmp_path)
    monkeypatch.setattr(registry, "all_records", lambda: [registry.Record("grpc://here:1", "t", name="see")])
    found = invoke("logs", "--follow", "--lines", "0")
    assert found.stdout == ""
    assert "processes: no cluster answers" in found.stderr
    assert found.exit_code == 0


def test_many_that_cannot_be_read_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def away(offset: int, file: int) -> process_log.Part:
        raise UsageError("no cluster answers")

    log_reading.last([log_reading.Log(f"host {k}", away) for k in range(9)], 5)
    assert capsys.readouterr().err == "host 0, host 1, host 2, host 3 and 5 more: no cluster answers\n"


def test_usage_is_what_accounts_grew_by_over_restarts() -> None:
    """The controller restarts between the third and the fourth line: its account begins at zero. What is noted in the
    middle of ten minutes counts for half of it."""
    noted = [(0, 10.0), (10, 15.0), (20, 40.0), (30, 5.0), (40, 6.0)]
    lines = [json.loads(line(minute, "usage", detail="alice", cause=str(seconds))) for minute, seconds in noted]
    assert used(lines, NOW - datetime.timedelta(days=1)) == {"alice": 46.0}
    assert used(lines, NOW + datetime.timedelta(minutes=15)) == {"alice": 12.5 + 5.0 + 1.0}
    assert used(lines, NOW + datetime.timedelta(minutes=40)) == {}
    assert used([json.loads(line(0, "host lost"))], NOW) == {}


def test_the_usage_of_now_grew_since_the_last_notes() -> None:
    """Tenants were looked at two minutes ago. Alice computes all the time; Bob began since then, so he has no note."""
    computing = [(0, "alice", 60.0), (10, "alice", 660.0), (10, "carol", 1.0)]
    lines = [json.loads(line(minute, "usage", detail=who, cause=str(seconds))) for minute, who, seconds in computing]
    now = [json.loads(line(12, "usage", detail=who, cause=cause)) for who, cause in (("alice", "780"), ("bob", "60"))]
    began = [json.loads(line(-1, "controller starts"))]
    for minutes, alice, bob in ((1, 60.0, 30.0), (2, 120.0, 60.0), (7, 420.0, 60.0)):
        found = used([*began, *lines, *now], NOW + datetime.timedelta(minutes=12 - minutes))
        assert (found["alice"], found["bob"]) == (pytest.approx(alice), pytest.approx(bob))


def test_usage_of_a_successor_that_used_more_counts_whole_and_broken_lines_do_not() -> None:
    """The second life of the controller is another process."""
    lines = [json.loads(line(minute, "usage", detail="alice", cause=str(10.0 * minute))) for minute in (1, 2, 9)]
    lines[2]["pid"] = 2
    broken: list[dict[str, Any]] = [
        {"event": "usage"},
        {"event": "usage", "detail": "alice", "cause": "?", "time": "1"},
    ]
    assert used([*lines, *broken], NOW) == {"alice": 20.0 + 90.0}
    assert used([*lines, {"event": "usage", "detail": "alice", "cause": "95", "time": lines[2]["time"]}], NOW) == {
        "alice": 20.0 + 95.0
    }


def test_usage_of_a_span_has_the_account_of_now(files: dict[str, Path]) -> None:
    now = datetime.datetime.now(datetime.UTC)
    hours_ago = [(now - datetime.timedelta(hours=hours)).isoformat() for hours in (2, 1)]
    noted = json.loads(line(0, "usage", detail="alice", cause="20.0")) | {"time": hours_ago[0]}
    files["controller"].write_text(json.dumps(noted) + "\n")
    found = json.loads(invoke("usage", "--since", hours_ago[1], "--json").output)
    assert found["device_seconds"] == {"alice": 10.0}
    just_now = json.loads(invoke("usage", "--since", "0s", "--json").output)["device_seconds"]
    assert just_now.get("alice", 0.0) < 0.5, "most of the ten minutes was before"
    assert "alice" in invoke("usage", "--since", "7d").output


@pytest.mark.parametrize(("text", "minutes"), [("30m", 30), ("2h", 120), ("1.5d", 2160), ("2026-11-21T11:00:00", 60)])
def test_spans(text: str, minutes: int) -> None:
    assert logs.since_of(text, NOW) == NOW - datetime.timedelta(minutes=minutes)


@pytest.mark.parametrize("text", ["", "yesterday", "-3h", "3", "999999999999d", "h"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no span such as"):
        logs.since_of(text, NOW)
