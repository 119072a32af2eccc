"""Joining Ray: where it is not is said at once."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from pathways_ray.compat import ray_dials
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


def test_a_ray_that_listens_on_loopback_alone_is_not_there_for_others() -> None:
    """Ray dials the machine's own address in its place, and would try that for minutes."""
    if ray_dials("127.0.0.1") == "127.0.0.1":
        pytest.skip("this machine has no other address")
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UsageError, match=r"no Ray cluster at .*refused"):
            connect_ray(there, {})


def test_the_end_of_a_process_is_told_in_a_line() -> None:
    raw = 'The actor died:\n  File "actor.py", line 89\n    ^^^^^^\nTypeError: too many positional arguments\n'
    found = cause_text(RuntimeError(raw))
    assert found.startswith("TypeError: too many positional arguments (")
    assert "line 89" not in found
    assert cause_text(RuntimeError("it was killed")) == "it was killed"


def test_an_interrupted_join_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next `pw.init` would take it for one of the user's own."""
    said: list[dict[str, Any]] = []
    left: list[bool] = []

    def init(**options: Any) -> None:
        said.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: left.append(True))
    with pytest.raises(KeyboardInterrupt):
        connect_ray("ray-cluster", {"log_to_driver": True})
    assert left == [True]
    assert said == [{"address": "ray-cluster", "log_to_driver": True, "logging_level": "ERROR"}]


def test_an_interrupted_end_of_ray_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends its processes last, and would leave them to the end of this one."""
    calls: list[str] = []

    def shutdown() -> None:
        calls.append("shutdown")
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", shutdown)
    leave = connect_ray(None, {})
    assert leave is not None
    with pytest.raises(KeyboardInterrupt):
        leave()
    assert len(calls) == 2
