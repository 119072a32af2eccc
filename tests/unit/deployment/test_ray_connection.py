"""Joining Ray: where it is not is said at once."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from pathways_ray.deployment.ray_connection import cause_text, connect_ray
from pathways_ray.errors import UsageError


@pytest.mark.parametrize("said_by", ["address", "RAY_ADDRESS", "ray start"])
def test_a_ray_cluster_that_is_gone(said_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(there if said_by == "ray start" else "127.0.0.1:1")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", there if said_by == "RAY_ADDRESS" else "")
    start = time.monotonic()
    with pytest.raises(UsageError, match=r"no Ray cluster at .*refused.*; start one with 'ray start --head'"):
        connect_ray(there if said_by == "address" else "auto", {})
    assert time.monotonic() - start < 10


def test_the_end_of_a_process_is_told_in_a_line() -> None:
    raw = 'The actor died:\n  File "actor.py", line 89\n    ^^^^^^\nTypeError: too many positional arguments\n'
    found = cause_text(RuntimeError(raw))
    assert found.startswith("TypeError: too many positional arguments (")
    assert "line 89" not in found
    assert cause_text(RuntimeError("it was killed")) == "it was killed"
