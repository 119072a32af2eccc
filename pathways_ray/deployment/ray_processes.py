"""The processes that Ray starts beside its workers on this machine: those that nobody here asks are left out."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from pathways_ray import forks
from pathways_ray.deployment.fork_server import ForkServer

# PR_SET_PDEATHSIG; the raylet may have ended before.
IDLE = (
    "import os; p = os.getppid(); import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "p == os.getppid() and signal.pause()"
)
"""A program that does nothing, and ends with the raylet that starts it."""


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
def whole_or_none() -> Iterator[None]:
    """Has a Ray node whose start meanwhile fails, or is interrupted, take its processes along: Ray leaves them running
    until this process ends."""
    from ray._private.node import Node

    whole = Node.__init__

    def start(self: Node, *arguments: Any, **settings: Any) -> None:
        try:
            whole(self, *arguments, **settings)
        except BaseException:
            with contextlib.suppress(Exception):
                self.kill_all_processes(check_alive=False)
            raise

    Node.__init__ = start
    try:
        yield
    finally:
        Node.__init__ = whole


@contextlib.contextmanager
def never_started() -> Iterator[None]:
    """Keeps Ray from starting by itself while the block runs, as it does for the first call in a process that has none:
    another thread may have ended it meanwhile. Blocks of several threads may overlap."""
    from ray._private import auto_init_hook as hook

    with _changing:
        _before.append(hook.enable_auto_connect)
        hook.enable_auto_connect = False
    try:
        yield
    finally:
        with _changing:
            hook.enable_auto_connect = _before.pop()


_changing = threading.Lock()
_before: list[bool] = []
"""Whether Ray could start by itself before each of the blocks that run."""


@contextlib.contextmanager
def without_agents(server: ForkServer) -> Iterator[None]:
    """Has a Ray node that starts meanwhile do without two processes: one reports to a dashboard and exports metrics,
    the other prepares what a `runtime_env` asks for. Its workers are forks of the server.

    The raylet starts the two itself, and ends with them: in their place are programs that do nothing. The ports at
    which they would listen are noted as unused, as Ray itself does where the packages for its dashboard are absent.
    """
    from ray import _raylet
    from ray._private import ray_constants, services, utils

    start, packages = services.start_ray_process, utils.get_dashboard_dependency_error

    def start_ray_process(command: list[str], process_type: str, *others: Any, **settings: Any) -> Any:
        # A Ray without this function has other ways to learn of the ports, and keeps its processes.
        if process_type == ray_constants.PROCESS_TYPE_RAYLET and hasattr(_raylet, "persist_port"):
            said = dict(word.lstrip("-").split("=", 1) for word in command if "=" in word)
            for name in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN", "RUNTIME_ENV_AGENT"):
                _raylet.persist_port(said["session_dir"], said["node_id"], getattr(_raylet, f"{name}_PORT_NAME"), -1)
            command = [_replaced(word, server.workers) for word in command]
        started = start(command, process_type, *others, **settings)
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            server.prepare(started.process.pid)
        return started

    services.start_ray_process = start_ray_process
    # Ray imports a dashboard's packages to find an option for the first process.
    utils.get_dashboard_dependency_error = lambda: ImportError("unused")
    try:
        yield
    finally:
        services.start_ray_process, utils.get_dashboard_dependency_error = start, packages


def _replaced(word: str, path: str) -> str:
    """An option of the raylet, with other commands for its agents and workers."""
    option, _, command = word.partition("=")
    if option in ("--dashboard_agent_command", "--runtime_env_agent_command"):
        return f"{option}={subprocess.list2cmdline([sys.executable, '-I', '-S', '-c', IDLE])}"
    if option == "--python_worker_command":
        # The raylet itself leaves the second word out, except for a `runtime_env`.
        python, setup, rest = command.split(" ", 2)
        return f"{option}={python} {setup} {subprocess.list2cmdline(forks.asking(path, []))} {rest}"
    return word
