"""All systems, and how each is started. Each has a file of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks import cores
from benchmarks.peers import environments
from benchmarks.peers.process import START_LIMIT_S, PeerEnded, PeerError, PeerProcess
from benchmarks.peers.protocol import START


@dataclass(frozen=True)
class SystemInfo:
    """A system to start.

    Attributes:
        environment: the name in `environments`; "" is the environment of this process.
        module: the module that its process runs, and its arguments.
    """

    environment: str
    module: tuple[str, ...]

    @property
    def is_jax(self) -> bool:
        """Whether it needs no other package than JAX, which this environment has."""
        return self.environment == "jax"

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
JAX = "jax-multicontroller"
FLOOR = "jax-behind-relays"
"""Plain JAX, and what it costs to have it told by a process that does no work: the floor of a single controller."""
SYSTEMS = {
    "pathways": SystemInfo("", (f"{HERE}.pathways",)),
    "pathways-no-fusion": SystemInfo("", (f"{HERE}.pathways", "--no-fusion")),
    JAX: SystemInfo("jax", (f"{HERE}.jax_multicontroller",)),
    FLOOR: SystemInfo("jax", (f"{HERE}.jax_behind_relays",)),
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


class WrongValue(PeerError, AssertionError):
    """The values after a run are not what they must be."""


class Asked(Protocol):
    """A process that is asked, as `PeerProcess`."""

    def ask(self, word: str, limit_s: float, **arguments: Any) -> Any: ...

    def close(self) -> None: ...


@dataclass
class Running:
    """A started system.

    Attributes:
        process: None once it has ended.
        described: what it says about itself: `payloads`, `modes`, `versions`.
        devices: of all hosts together.
    """

    process: Asked | None
    described: dict[str, Any]
    devices: int

    def seconds(
        self, limit_s: float, mode: str, payload: str, count: int, expected: list[float] | None = None, **more: int
    ) -> float:
        """Seconds of a run.

        Args:
            expected: the values after it; by default START + count on every device.

        Raises:
            PeerError: it failed, or its values are wrong.
        """
        if self.process is None:
            raise PeerEnded("its system is no longer running")
        answer = self.process.ask("run", limit_s, mode=mode, payload=payload, count=count, **more)
        expected = expected or [START + count] * self.devices
        if answer["value"] != expected:
            raise WrongValue(f"{mode}: after {count} computations the value is {answer['value']}, not {expected}")
        return float(answer["seconds"])

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None


def start(system: SystemInfo, hosts: int, devices: int, limit_s: float = START_LIMIT_S) -> Running:
    """Starts a system.

    Raises:
        PeerError: it did not start. Nothing of it is left.
    """
    if problem := system.problem():
        raise PeerError(problem)
    process = PeerProcess(system.interpreter(), system.module, variables(devices))
    try:
        return Running(process, process.ask("configure", limit_s, hosts=hosts, devices=devices), hosts * devices)
    except BaseException:
        process.close()
        raise
