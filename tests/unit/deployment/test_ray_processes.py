"""Ray starts fewer processes than it would by itself."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray._private import auto_init_hook, services
from ray._private.node import Node

from pathways_ray import forks
from pathways_ray.deployment.fork_server import ForkServer
from pathways_ray.deployment.ray_processes import never_started, whole_or_none, without_agents

SETUP, WORKER = "/ray/workers/setup_worker.py", "/ray/workers/default_worker.py --node-id=ab12"


class Server:
    """What `without_agents` asks of a server of forks."""

    workers = "/somewhere/workers"

    def __init__(self) -> None:
        self.raylets: list[int] = []

    def prepare(self, raylet: int) -> None:
        self.raylets.append(raylet)


def test_agents_that_nobody_asks_are_left_out_and_workers_are_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes, and those that start later, are started as Ray says; the ports of the agents count as unused."""
    started: list[tuple[list[str], str]] = []

    def start(command: list[str], kind: str, **_: Any) -> Any:
        started.append((command, kind))
        return SimpleNamespace(process=SimpleNamespace(pid=len(started)))

    monkeypatch.setattr(services, "start_ray_process", start)
    raylet = [
        "raylet",
        f"--session_dir={tmp_path}",
        "--node_id=ab12",
        "--dashboard_agent_command=agent --a=b",
        "--runtime_env_agent_command=other --a=b",
        f"--python_worker_command=python {SETUP} {WORKER}",
        "--head",
    ]
    server = Server()
    with without_agents(cast(ForkServer, server)):
        services.start_ray_process(["gcs_server", f"--session_dir={tmp_path}"], "gcs_server", fate_share=True)
        services.start_ray_process(raylet, "raylet", fate_share=True)
    services.start_ray_process(raylet, "raylet", fate_share=True)
    gcs, without, later = started
    assert server.raylets == [2]
    assert gcs == (["gcs_server", f"--session_dir={tmp_path}"], "gcs_server")
    assert later == (raylet, "raylet")
    assert [*without[0][:3], *without[0][6:]] == [*raylet[:3], *raylet[6:]]
    options = dict(word.split("=", 1) for word in without[0][3:6])
    agent, idle, worker = map(shlex.split, options.values())
    assert list(options) == ["--dashboard_agent_command", "--runtime_env_agent_command", "--python_worker_command"]
    assert worker == ["python", SETUP, "-I", "-S", forks.__file__, "ask", server.workers, *WORKER.split()]
    assert agent == idle
    ports = [file.read_text().strip() for file in tmp_path.rglob("*") if file.is_file()]
    assert ports == ["-1"] * 4
    with subprocess.Popen(idle) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
        process.kill()


def test_a_node_whose_start_is_interrupted_leaves_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []

    def interrupted(_: Node) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Node, "__init__", interrupted)
    monkeypatch.setattr(Node, "kill_all_processes", lambda _, check_alive: ended.append(check_alive))
    with whole_or_none(), pytest.raises(KeyboardInterrupt):
        cast(Any, Node)()
    assert ended == [False]
    assert Node.__init__ is interrupted


def test_ray_may_start_by_itself_again_once_all_are_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)
    first, second = never_started(), never_started()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not auto_init_hook.enable_auto_connect
    second.__exit__(None, None, None)
    assert auto_init_hook.enable_auto_connect
