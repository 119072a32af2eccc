"""`pathways doctor`: each check says what it found; one that fails says what to do, and does not end the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pathways_ray.cli import commands, doctor
from pathways_ray.cli.doctor import Check


def test_this_machine_is_looked_at() -> None:
    found = CliRunner().invoke(commands, ["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(found.output)}
    assert checks["python"]["ok"]
    assert checks["packages"]["ok"]
    assert "device(s)" in checks["jax"]["found"]
    assert checks["transfers"]["ok"]
    assert checks["gloo"]["ok"]
    assert found.exit_code == int(any(not check["ok"] and check["error"] for check in checks.values()))


@pytest.mark.parametrize(
    ("check", "status", "word"),
    [
        (Check("a", True, "fine"), 0, "ok"),
        (Check("a", False, "little", "get more", error=False), 0, "advice"),
        (Check("a", False, "none", "get some"), 1, "error"),
    ],
)
def test_errors_end_with_1_and_advice_does_not(
    check: Check, status: int, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda: check,))
    found = CliRunner().invoke(commands, ["doctor"])
    assert found.exit_code == status
    assert word in found.output
    assert (check.do in found.output) is not check.ok or not check.do


def test_memory_is_what_processes_can_have(tmp_path: Path) -> None:
    """What files have in memory is not free, and is dropped for who needs it."""
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemFree: 10 kB\nMemAvailable:     600 kB\n")
    assert doctor.available_memory(str(tmp_path / "meminfo")) == 600 << 10


def test_a_check_that_cannot_be_made_has_failed_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def _broken() -> Any:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "CHECKS", (_broken, lambda: Check("a", True, "fine")))
    assert [(check.name, check.ok) for check in doctor.checks()] == [("broken", False), ("a", True)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.shell_completion.BashComplete._check_version", lambda *_: None)
    text = CliRunner().invoke(commands, ["completion", shell]).output
    assert "_PATHWAYS_COMPLETE" in text
    assert "pathways" in text


def test_commands_are_completed() -> None:
    environment = {**os.environ, "_PATHWAYS_COMPLETE": "bash_complete", "COMP_WORDS": "pathways st", "COMP_CWORD": "1"}
    program = "from pathways_ray.cli import commands; commands(prog_name='pathways')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "plain,status\n"
