"""What a peer and the benchmark say to each other: one JSON object a line, over the peer's stdin and stdout.

    {"configure": {"hosts": 2, "devices": 1}}
        -> {"payloads": {"allreduce": "XLA psum over gloo", ...}, "modes": {"allreduce": ["opbyop", ...], ...}, ...}
    {"run": {"mode": "opbyop", "payload": "allreduce", "count": 1024}}
        -> {"seconds": 0.41, "value": [1025.0, 1025.0]}
    either
        -> {"error": "..."}

The first is sent once. The end of stdin is the end of the peer. Peers run in environments of their own, so this file
imports nothing but the standard library; so do the names that both sides use.
"""

import contextlib
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
WORK = "work-"  # and a number of iterations: so much work on each device, then the all-reduce


def work(iterations: int) -> str:
    """The payload with so much work."""
    return f"{WORK}{iterations}"


def for_both_payloads(modes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {ALLREDUCE: modes, NOOP: modes}


class Peer(Protocol):
    """One system. A run is `prepare`, `run`, `release`; only the middle one is measured."""

    packages: tuple[str, ...]
    payloads: dict[str, str]
    """For each payload, what it is in this system: the same words mean the same operation."""
    modes: dict[str, tuple[str, ...]]

    def configure(self, hosts: int, devices: int) -> None:
        """Starts the system: so many host processes with so many devices each. Called once."""
        ...

    def prepare(self, mode: str, payload: str, count: int) -> None:
        """Sets every device's value to START, and compiles what is not yet compiled."""
        ...

    def run(self, mode: str, payload: str, count: int) -> list[float]:
        """Executes `count` computations, one after the other, and returns the value of every device."""
        ...

    def release(self, mode: str, payload: str) -> None:
        """Gives back what would disturb the others while this system waits for its next turn."""
        ...

    def close(self) -> None: ...


def serve(make: Callable[[], Peer]) -> None:
    """Answers requests until stdin ends. What libraries print goes to stderr, and no child inherits the two streams."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # so that a peer that ends leaves its last words
    peer: Peer | None = None
    try:
        for line in requests:
            try:
                ((word, arguments),) = json.loads(line).items()
                if word == "configure":
                    peer = make()
                    peer.configure(**arguments)
                    answer = described(peer)
                else:
                    answer = measured(peer, **arguments)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        if peer is not None:
            with contextlib.suppress(Exception):
                peer.close()


def described(peer: Peer) -> dict[str, Any]:
    return {"payloads": peer.payloads, "modes": peer.modes, "versions": versions(peer.packages)}


def measured(peer: Any, mode: str, payload: str, count: int, **more: int) -> dict[str, Any]:
    """Seconds from the first call to the fetched value, and the value. `more` is for peers that want it (METG)."""
    try:
        peer.prepare(mode, payload, count, **more)
        start = time.perf_counter()
        value = peer.run(mode, payload, count, **more)
        seconds = time.perf_counter() - start
    finally:
        peer.release(mode, payload)
    return {"seconds": seconds, "value": [float(each) for each in value]}


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
