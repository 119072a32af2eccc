"""`pathways drill`: what is killed, what is not, and how it says that a host is back."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pathways_ray import os_process
from pathways_ray.cli import commands, drill
from pathways_ray.cli.output import CommandFailed
from pathways_ray.errors import ControllerLost, UsageError
from tests.waiting import until


def status(epochs: tuple[int, int, int] = (1, 1, 1), pid: int = 77, up: bool = True) -> dict[str, Any]:
    def host(number: int) -> dict[str, Any]:
        return {"host": number, "pid": pid and pid + number, "epoch": epochs[number], "up": up}

    controller = {"pid": pid and pid + 10 * epochs[0]}
    return {
        "controller": controller,
        "islands": [{"island": 0, "hosts": [host(0)]}, {"island": 1, "hosts": [host(1), host(2)]}],
    }


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(os_process, "kill", lambda pid, started: found.append(pid))
    monkeypatch.setattr(drill, "check_here", lambda victim: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return found


def test_a_host_or_an_island_is_killed_and_waited_for(killed: list[int]) -> None:
    answers = iter([status(), status(up=False), status((1, 2, 1)), status((1, 2, 2)), status((1, 2, 2))])
    found = drill.drill(lambda: next(answers), "island", 1)
    assert killed == [78, 79]
    assert found.startswith("host 1 (process 78), host 2 (process 79) killed; back after")
    assert len(list(answers)) == 1, "it waited for both"
    assert {drill.chosen(status(), "host", -1)[0].host for _ in range(100)} == {0, 1, 2}
    assert [victim.host for victim in drill.chosen(status(), "host", 2)] == [2]


def test_the_controller_is_killed_and_waited_for(killed: list[int]) -> None:
    answers: list[Any] = [status(), ControllerLost("it is gone"), status(), status((2, 1, 1)), status((2, 1, 1))]

    def ask() -> dict[str, Any]:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return dict(found)

    assert drill.drill(ask, *drill.parsed("controller")).startswith("the controller (process 87) killed; back after")
    assert (killed, len(answers)) == ([87], 1)


def test_one_that_does_not_come_back_ends_the_drill(killed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "BACK_LIMIT_S", 0.0)
    with pytest.raises(CommandFailed, match=r"host 0 .process 77. killed, and not back"):
        drill.drill(status, "host", 0)


def test_what_cannot_be_killed_is_refused() -> None:
    for target in ("host", "host:-1", "island:any", "controller:0", "host:1x"):
        with pytest.raises(UsageError, match="takes host:1, host:any, island:0 or controller"):
            drill.parsed(target)
    with pytest.raises(UsageError, match=r"no host 7 is up: there are hosts \[0, 1, 2\] on islands \[0, 1\]"):
        drill.chosen(status(), "host", 7)
    with pytest.raises(UsageError, match="no host is up"):
        drill.chosen(status(up=False), "host", -1)
    for kind, number in (("island", 1), ("controller", -1)):
        with pytest.raises(UsageError, match="the operator's token shows alone"):
            drill.chosen(status(pid=0), kind, number)
    with pytest.raises(UsageError, match=r"host 3 .process \d+. is no process of this machine"):
        drill.check_here(drill.Victim(3, os.getpid(), 1))


def test_a_process_of_somebody_else_that_has_the_number_of_a_host_lives() -> None:
    """The host is on another machine, and a process of another runtime of Ray's has its number here."""
    with subprocess.Popen(["bash", "-c", "exec -a ray::SomebodyElse sleep 60"]) as stranger:
        until(lambda: Path(f"/proc/{stranger.pid}/cmdline").read_bytes().startswith(b"ray::"))
        began = os_process.started_at(stranger.pid)
        there = status(pid=stranger.pid)
        there["islands"][0]["hosts"][0]["started"] = there["controller"]["started"] = began + 1
        there["controller"]["pid"] = stranger.pid
        for kind, number in (("host", 0), ("controller", -1)):
            with pytest.raises(UsageError, match=r".process \d+. is no process of this machine"):
                drill.drill(lambda: there, kind, number)
        drill.check_here(drill.Victim(0, stranger.pid, 1, began))
        drill.check_here(drill.Victim(0, stranger.pid, 1))
        assert stranger.poll() is None
        stranger.kill()


def test_any_host_is_one_of_this_machine(killed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def here(victim: drill.Victim) -> None:
        if victim.host != 1:
            raise UsageError("it is elsewhere")

    monkeypatch.setattr(drill, "check_here", here)
    assert {drill.chosen(status(), "host", -1)[0].host for _ in range(50)} == {1}


def test_a_kill_is_counted_and_noted_before_the_wait(killed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, Any]] = [status(), status()]
    noted: list[str] = []

    def ask(url: str, token: str, ca: str) -> dict[str, Any]:
        if not answers:
            raise KeyboardInterrupt
        return answers.pop()

    monkeypatch.setattr(drill, "ask", ask)
    monkeypatch.setattr(drill, "runtimes_at", lambda url: ["see"])
    monkeypatch.setattr(drill, "note_operator", lambda runtime, event, detail: noted.append(detail))
    found = CliRunner().invoke(
        commands, ["drill", "--kill", "host:0", "--every", "0", "--url", "grpc://h:1", "--token", "t"]
    )
    assert (found.exit_code, found.stdout) == (0, "1 times\n")
    assert (killed, noted) == ([77], ["host 0 (process 77) killed"])


def test_the_command_kills_as_often_as_it_is_told(killed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = iter(range(1, 20))
    noted: list[str] = []
    monkeypatch.setattr(drill, "ask", lambda url, token, ca: status((next(epochs), 1, 1)))
    monkeypatch.setattr(drill, "runtimes_at", lambda url: ["see"])
    monkeypatch.setattr(drill, "note_operator", lambda runtime, event, detail: noted.append(detail))
    found = CliRunner().invoke(
        commands, ["drill", "--kill", "host:0", "--every", "0", "--times", "2", "--url", "grpc://h:1", "--token", "t"]
    )
    assert found.exit_code == 0, found.output
    assert killed == [77, 77]
    assert found.output.count("back after") == 2
    assert noted == ["host 0 (process 77) killed"] * 2, "once for each: who counts kills reads them"


def test_what_cannot_be_killed_is_refused_before_the_first_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(drill, "ask", lambda url, token, ca: status())
    monkeypatch.setattr(time, "sleep", waits.append)
    found = CliRunner().invoke(commands, ["drill", "--kill", "host:7", "--url", "grpc://h:1", "--token", "t"])
    assert (found.exit_code, waits) == (2, [])
    assert "no host 7 is up: there are hosts [0, 1, 2]" in found.output
