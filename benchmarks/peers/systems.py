"""All systems, and how each is started. Each has a file of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import cores
from benchmarks.peers import environments
from benchmarks.peers.process import START_LIMIT_S, PeerError, PeerProcess


@dataclass(frozen=True)
class SystemInfo:
    """A system to start.

    Attributes:
        environment: the name in `environments`; "" is the environment of this process.
        module: the module that its process runs, and its arguments.
    """

    environment: str
    module: tuple[str, ...]

    def problem(self) -> str | None:
        """The reason that it cannot be started; None if it can."""
        return environments.problem(self.environment) if self.environment else None

    def here(self) -> SystemInfo:
        """The same system in this environment, which must have its packages: always those of JAX and Ray."""
        return replace(self, environment="")

    def or_here(self, wanted: bool) -> SystemInfo:
        """The same system; in this environment if that is wanted and its own is not built."""
        return self.here() if wanted and self.problem() else self

    def interpreter(self) -> Path | str:
        return environments.interpreter(self.environment) if self.environment else sys.executable


HERE = "benchmarks.peers"
SYSTEMS = {
    "pathways": SystemInfo("", (f"{HERE}.pathways",)),
    "pathways-no-fusion": SystemInfo("", (f"{HERE}.pathways", "--no-fusion")),
    "jax-multicontroller": SystemInfo("jax", (f"{HERE}.jax_multicontroller",)),
    "ray-actors": SystemInfo("ray", (f"{HERE}.ray_actors",)),
    "ray-compiled-graphs": SystemInfo("ray", (f"{HERE}.ray_graphs",)),
    "tf1-sessions": SystemInfo("tf1", (f"{HERE}.tf1_sessions",)),
    "monarch-actors": SystemInfo("monarch", (f"{HERE}.monarch_actors",)),
}


def variables(devices: int) -> dict[str, str | None]:
    """Variables that are the same for the host processes of every system.

    NPROC is by the rule that this runtime has for its own hosts. Ray would give its workers, our hosts among them, a
    lower priority than the clients have (nice 15), and no other system does so with its processes.
    """
    return {
        "NPROC": cores.threads(devices),
        "RAY_worker_niceness": "0",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def start(
    system: SystemInfo, hosts: int, devices: int, limit_s: float = START_LIMIT_S
) -> tuple[PeerProcess, dict[str, Any]]:
    """Starts a system; returns its process and its description.

    Raises:
        PeerError: it did not start. Nothing of it is left.
    """
    problem = system.problem()
    if problem is not None:
        raise PeerError(problem)
    process = PeerProcess(system.interpreter(), list(system.module), variables(devices))
    try:
        return process, process.ask("configure", limit_s, hosts=hosts, devices=devices)
    except BaseException:
        process.close()
        raise
