"""The protocol of peers: each word is a method of a handler in the peer's process, called as `workers` does it.

    configure(hosts=2, devices=1)
        -> {"payloads": {"allreduce": "psum between processes", ...}, "modes": {"allreduce": ["opbyop", ...], ...}, ...}
    run(mode="opbyop", payload="allreduce", count=1024)
        -> {"seconds": 0.41, "value": [1025.0, 1025.0]}

`configure` is sent once. `trainers` has another handler, with other words. Peers run in environments of their own, so
this file imports nothing but the standard library; it also holds the names that both sides use.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.workers import answer_requests

CHAIN = 128  # computations per call of `chained`, `fused` and `list`, as in the paper
START = 1.0  # after `count` computations every device holds START + count, exactly: both are small integers
ALLREDUCE, NOOP = "allreduce", "noop"
WORK = "work-"  # and a number of iterations: that much work on each device, then the all-reduce


def work(iterations: int) -> str:
    """The payload with that many iterations of work."""
    return f"{WORK}{iterations}"


def for_both_payloads(*modes: str) -> dict[str, tuple[str, ...]]:
    return {ALLREDUCE: modes, NOOP: modes}


class System:
    """One system under measurement. A run is `prepare`, `run`, `release`; only `run` is measured.

    `prepare` sets every device's value to START, and compiles what is not yet compiled; `run` executes `count`
    computations, one after the other, and returns the value of every device. Both take a mode, a payload and a count.

    Attributes:
        payloads: for each payload, the operation in this system: the same words mean the same operation.
        modes: of each payload.
    """

    packages: tuple[str, ...] = ()
    payloads: dict[str, str]
    modes: dict[str, tuple[str, ...]]
    prepare: Callable[..., None]
    run: Callable[..., list[float]]

    def configure(self, hosts: int, devices: int) -> None:
        """Starts the system, with this many host processes and devices of each. Called once."""
        raise NotImplementedError

    def release(self, mode: str, payload: str) -> None:
        """Frees whatever would disturb the others while this system waits for its next turn."""

    def close(self) -> None:
        """Ends all processes of the system."""


class Measured:
    """The words of the dispatch benchmark, for one system."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.close = system.close

    def configure(self, hosts: int, devices: int) -> dict[str, Any]:
        system = self._system
        system.configure(hosts, devices)
        return {"payloads": system.payloads, "modes": system.modes, "versions": versions(system.packages)}

    def run(self, mode: str, payload: str, count: int, **more: int) -> dict[str, Any]:
        """Seconds from the first call to the fetched value, and the value. `more` is for task graphs (METG)."""
        system = self._system
        try:
            system.prepare(mode, payload, count, **more)
            start = time.perf_counter()
            value = system.run(mode, payload, count, **more)
            seconds = time.perf_counter() - start
        finally:
            system.release(mode, payload)
        return {"seconds": seconds, "value": [float(each) for each in value]}


def serve(system: System) -> None:
    """The main function of a peer of the dispatch benchmark."""
    answer_requests(Measured(system))


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
