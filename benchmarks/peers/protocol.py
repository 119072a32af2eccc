"""The protocol of peers: one JSON object a line, over the peer's stdin and stdout. Each word is a method of a handler.

    {"configure": {"hosts": 2, "devices": 1}}
        -> {"payloads": {"allreduce": "XLA psum over gloo", ...}, "modes": {"allreduce": ["opbyop", ...], ...}, ...}
    {"run": {"mode": "opbyop", "payload": "allreduce", "count": 1024}}
        -> {"seconds": 0.41, "value": [1025.0, 1025.0]}
    any
        -> {"error": "..."}

`configure` is sent once. The end of stdin is the end of the peer. `trainers` has another handler, with other words.
Peers run in environments of their own, so this file imports nothing but the standard library; it also holds the names
that both sides use.
"""

import contextlib
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

CHAIN = 128  # computations per call of `chained`, `fused` and `list`, as in the paper
START = 1.0  # after `count` computations every device holds START + count, exactly: both are small integers
ALLREDUCE, NOOP = "allreduce", "noop"
WORK = "work-"  # and a number of iterations: that much work on each device, then the all-reduce


def work(iterations: int) -> str:
    """The payload with that many iterations of work."""
    return f"{WORK}{iterations}"


def for_both_payloads(modes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {ALLREDUCE: modes, NOOP: modes}


class System:
    """One system under measurement. A run is `prepare`, `run`, `release`; only `run` is measured.

    Attributes:
        payloads: for each payload, the operation in this system: the same words mean the same operation.
        modes: of each payload.
    """

    packages: tuple[str, ...] = ()
    payloads: dict[str, str]
    modes: dict[str, tuple[str, ...]]

    def configure(self, hosts: int, devices: int) -> None:
        """Starts the system, with this many host processes and devices of each. Called once."""
        raise NotImplementedError

    def release(self, mode: str, payload: str) -> None:
        """Frees whatever would disturb the others while this system waits for its next turn."""

    def close(self) -> None:
        """Ends all processes of the system."""


class Peer(System):
    """A system that runs computations, one after the other."""

    def prepare(self, mode: str, payload: str, count: int) -> None:
        """Sets every device's value to START, and compiles what is not yet compiled."""

    def run(self, mode: str, payload: str, count: int) -> list[float]:
        """Executes `count` computations, and returns the value of every device."""
        raise NotImplementedError


class Handler(Protocol):
    """An object whose methods are the words of a peer; each returns a JSON object."""

    def close(self) -> None: ...


class Measured:
    """The words of the dispatch benchmark, for one system."""

    def __init__(self, make: Callable[[], System]) -> None:
        self._make = make
        self._system: System | None = None

    def configure(self, hosts: int, devices: int) -> dict[str, Any]:
        self._system = system = self._make()
        system.configure(hosts, devices)
        return {"payloads": system.payloads, "modes": system.modes, "versions": versions(system.packages)}

    def run(self, **arguments: Any) -> dict[str, Any]:
        return measured(self._system, **arguments)

    def close(self) -> None:
        if self._system is not None:
            self._system.close()


def measured(system: Any, mode: str, payload: str, count: int, **more: int) -> dict[str, Any]:
    """Seconds from the first call to the fetched value, and the value. `more` is for task graphs (METG)."""
    try:
        system.prepare(mode, payload, count, **more)
        start = time.perf_counter()
        value = system.run(mode, payload, count, **more)
        seconds = time.perf_counter() - start
    finally:
        system.release(mode, payload)
    return {"seconds": seconds, "value": [float(each) for each in value]}


def serve(make: Callable[[], System]) -> None:
    """The main function of a peer of the dispatch benchmark."""
    answer_requests(Measured(make))


def answer_requests(handler: Handler) -> None:
    """Answers until stdin ends. What libraries print goes to stderr, and no child inherits the two streams."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that nothing is lost when the peer ends at once
    try:
        for line in requests:
            try:
                ((word, arguments),) = json.loads(line).items()
                answer = getattr(handler, word)(**arguments)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        with contextlib.suppress(Exception):
            handler.close()


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
