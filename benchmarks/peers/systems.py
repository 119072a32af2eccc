"""Which systems there are, and how each is started. What each does is in its own file."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import environments
from benchmarks.peers.process import START_LIMIT_S, PeerProcess


@dataclass(frozen=True)
class SystemInfo:
    """A system to start.

    Attributes:
        environment: the name in `environments`; "" is the environment of this process.
        module: what its process runs.
    """

    environment: str
    module: tuple[str, ...]

    def problem(self) -> str | None:
        """Why it cannot be started; None when it can."""
        return environments.problem(self.environment) if self.environment else None

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
    """What is the same for the host processes of every system.

    NPROC is by the rule that this runtime has for its own hosts. Ray would give its workers, our hosts among them, a
    lower priority than the clients have (nice 15), and no other system does so with its processes.
    """
    from pathways_ray.executor.compile.cpu_backend import pool_threads

    threads = pool_threads(devices)
    return {
        "NPROC": str(threads) if threads else None,
        "RAY_worker_niceness": "0",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def start(
    system: SystemInfo, hosts: int, devices: int, limit_s: float = START_LIMIT_S
) -> tuple[PeerProcess, dict[str, Any]]:
    """Starts a system; returns its process and what it says of itself.

    Raises:
        PeerError: it did not start. Nothing of it is left.
    """
    process = PeerProcess(system.interpreter(), list(system.module), variables(devices))
    try:
        return process, process.ask("configure", limit_s, hosts=hosts, devices=devices)
    except BaseException:
        process.close()
        raise
