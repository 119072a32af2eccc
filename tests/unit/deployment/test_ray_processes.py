"""Ray starts fewer processes than it would by itself."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from ray._private import services

from pathways_ray.deployment.ray_processes import without_agent


def test_in_place_of_the_agent_of_a_dashboard_that_is_not_there_is_a_process_that_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes, and those that start later, are started as Ray says; the ports of the agent count as unused."""
    started: list[tuple[list[str], str]] = []
    monkeypatch.setattr(services, "start_ray_process", lambda command, kind, **_: started.append((command, kind)))
    raylet = [
        "raylet",
        f"--session_dir={tmp_path}",
        "--node_id=ab12",
        "--dashboard_agent_command=agent --a=b",
        "--head",
    ]
    with without_agent():
        services.start_ray_process(["gcs_server", f"--session_dir={tmp_path}"], "gcs_server", fate_share=True)
        services.start_ray_process(raylet, "raylet", fate_share=True)
    services.start_ray_process(raylet, "raylet", fate_share=True)
    gcs, without, later = started
    assert gcs == (["gcs_server", f"--session_dir={tmp_path}"], "gcs_server")
    assert later == (raylet, "raylet")
    assert [*without[0][:3], *without[0][4:]] == [*raylet[:3], *raylet[4:]]
    option, _, command = without[0][3].partition("=")
    assert option == "--dashboard_agent_command"
    ports = [file.read_text().strip() for file in tmp_path.rglob("*") if file.is_file()]
    assert ports == ["-1", "-1", "-1"]
    with subprocess.Popen(shlex.split(command)) as idle:
        with pytest.raises(subprocess.TimeoutExpired):
            idle.wait(timeout=0.3)
        idle.kill()
