"""The processes that Ray starts beside its workers on this machine: those that nobody here asks are left out."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def few_processes() -> Iterator[None]:
    """Has a Ray that starts meanwhile do without the processes that scale it, print its workers' logs and serve its
    dashboard: nobody asks them, and they are a fourth of what its start costs, and 280 MB."""
    from ray._private import parameter
    from ray._private.node import Node

    whole, api_server = parameter.RayParams, Node.start_api_server
    parameter.RayParams = functools.partial(whole, no_monitor=True, include_log_monitor=False)

    def start_api_server(self: Node, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        if include_dashboard:
            api_server(self, include_dashboard=include_dashboard, raise_on_failure=raise_on_failure)
        else:
            self._webui_url = None

    Node.start_api_server = start_api_server
    try:
        yield
    finally:
        parameter.RayParams, Node.start_api_server = whole, api_server


@contextlib.contextmanager
def without_agent() -> Iterator[None]:
    """Has a Ray node that starts meanwhile do without the process that reports to a dashboard and exports metrics.

    The raylet starts that process itself, and ends with it: in its place is one that does nothing and ends with the
    raylet. The ports at which the agent would listen are noted as unused, as Ray itself does where the packages for its
    dashboard are absent; then its workers export no metrics.
    """
    from ray import _raylet
    from ray._private import ray_constants, services

    option = "--dashboard_agent_command="
    # PR_SET_PDEATHSIG; the raylet may have ended before.
    idle = "import os; p = os.getppid(); import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    idle += "p == os.getppid() and signal.pause()"
    start = services.start_ray_process

    def start_ray_process(command: list[str], process_type: str, *others: Any, **settings: Any) -> Any:
        # A Ray without this function has other ways to learn of the ports, and keeps the process.
        if process_type == ray_constants.PROCESS_TYPE_RAYLET and hasattr(_raylet, "persist_port"):
            said = dict(word.lstrip("-").split("=", 1) for word in command if "=" in word)
            for name in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN"):
                _raylet.persist_port(said["session_dir"], said["node_id"], getattr(_raylet, f"{name}_PORT_NAME"), -1)
            replaced = option + subprocess.list2cmdline([sys.executable, "-I", "-S", "-c", idle])
            command = [replaced if word.startswith(option) else word for word in command]
        return start(command, process_type, *others, **settings)

    services.start_ray_process = start_ray_process
    try:
        yield
    finally:
        services.start_ray_process = start
