"""The environment of tests: that of a developer does not decide what they see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.ray_logs import last_words

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = {
    "FORCE_COLOR": "1",
    "NO_COLOR": "1",
    "COLUMNS": "40",
    "LINES": "10",
    "PATHWAYS_URL": "grpc://127.0.0.1:1",
    "PATHWAYS_TOKEN": "x",
    "PATHWAYS_TOKEN_FILE": "/nowhere",
    "PATHWAYS_TENANTS": "/nowhere",
    "PATHWAYS_CA": "/nowhere",
    "RAY_ADDRESS": "127.0.0.1:1",
}


def test_settings_of_a_terminal_and_of_a_runtime_reach_no_test() -> None:
    """What CI has tests draw, and the platform that they are to have, do."""
    meant = {"PATHWAYS_TESTS_DRAW": "5", "JAX_PLATFORMS": "cpu,cuda"}
    show = "import os, tests.conftest; print([name for name in os.environ['ASKED'].split() if name in os.environ])"
    asked = {"ASKED": " ".join([*SETTINGS, *meant])}
    environment = {**os.environ, **SETTINGS, **meant, **asked, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == f"{[*meant]}\n"


@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
def test_logs_of_ray_are_looked_for_in_its_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(name, str(tmp_path))
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("its last line\n")
    assert last_words() == "--- raylet.out\nits last line"
