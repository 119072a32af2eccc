"""`deploy/make-files.sh`: what it has made is whole, and what it keeps it says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "make-files.sh"
FILES = ["cert.pem", "key.pem", "tenants.json", "token"]


def made(folder: Path, *names: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PATH=f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"])
    return subprocess.run(
        [str(SCRIPT), str(folder), *names], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_second_run_keeps_what_is_there_and_says_for_whom(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    assert made(folder, "head.example.org", "10.0.0.1").returncode == 0
    assert sorted(file.name for file in folder.iterdir()) == FILES
    assert {file.stat().st_mode & 0o077 for file in folder.iterdir()} == {0}
    before = {file.name: file.read_text() for file in folder.iterdir()}
    again = made(folder, "10.0.0.2")
    assert again.returncode == 0
    assert f"kept {folder}/cert.pem, which is for DNS:head.example.org, IP Address:10.0.0.1; to have" in again.stdout
    assert {file.name: file.read_text() for file in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("fails", "says"), [("req", "has made no certificate for 10.0.0.1"), ("rand", "made no token")]
)
def test_what_openssl_cannot_make_is_said_and_made_the_next_time(tmp_path: Path, fails: str, says: str) -> None:
    real = subprocess.run(["which", "openssl"], capture_output=True, text=True, check=True).stdout.strip()
    broken = tmp_path / "openssl"
    broken.write_text(f'#!/bin/sh\n[ "$1" != {fails} ] || {{ echo "no entropy" >&2; exit 1; }}\nexec {real} "$@"\n')
    broken.chmod(0o755)
    folder = tmp_path / "files"
    found = made(folder, "10.0.0.1", path=str(tmp_path))
    assert found.returncode == 1
    assert "no entropy" in found.stderr
    assert says in found.stderr
    assert made(folder, "10.0.0.1").returncode == 0
    assert sorted(file.name for file in folder.iterdir()) == FILES
    assert len((folder / "token").read_text()) == 33
