"""How `benchmarks.training` holds the systems it compares with: one process that it asks, and one for each device.

    {"configure": {"sizes": {...}, "parameters": "parameters.npz", "cores": [0, 1]}}
        -> {"versions": {...}}
    {"prepare": {"case": "1f1b", "microbatches": 8, "steps": 3}}        the first losses, from the given parameters on
        -> {"losses": [5.6, 5.5, 5.4]}
    {"train": {"case": "1f1b", "microbatches": 8, "steps": 4}}          goes on from there
        -> {"seconds": 0.8, "loss": 5.3}
    any
        -> {"error": "..."}

One JSON object a line, over stdin and stdout. The process that is asked only hands the words on to the processes of the
devices, which all do the same, and waits for them. Peers run in environments of their own, so this file imports nothing
but the standard library.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from benchmarks.peers.jax_host import free_address
from benchmarks.peers.protocol import versions

ANSWER_LIMIT_S = 170.0
"""For all processes to do as told; below the limit of who asks, so that it hears what happened."""


class Trainer(Protocol):
    """What runs in the process of one device."""

    def prepare(self, case: str, microbatches: int, steps: int) -> list[float]:
        """Starts a case anew and takes the first steps; their losses, or none where this process does not know them."""

    def train(self, case: str, microbatches: int, steps: int) -> list[float]:
        """Takes steps, all of them done when it returns; the last one's loss, or none."""


Make = Callable[[int, int, str, dict[str, Any], str], Trainer]
"""From the number of the process, how many there are, where they meet, the sizes, and the file of parameters."""


def rank_process(make: Make, rank: int, ranks: int, address: str, told: dict[str, Any], orders: Connection) -> None:
    """Body of the process of one device. It runs on one core, all of it."""
    cores = told["cores"]
    if hasattr(os, "sched_setaffinity") and cores:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    try:
        here = make(rank, ranks, address, told["sizes"], told["parameters"])
        orders.send(("ready", []))
        while True:
            word, arguments = orders.recv()
            orders.send(("done", getattr(here, word)(**arguments)))
    except EOFError:
        return
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            orders.send(("error", f"process {rank}: {type(error).__name__}: {error}"))


class Ranks:
    """The processes of the devices, told all the same."""

    def __init__(self, make: Make, ranks: int, told: dict[str, Any]) -> None:
        spawn = multiprocessing.get_context("spawn")
        address = free_address()
        self._orders: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=rank_process, args=(make, rank, ranks, address, told, theirs), daemon=True)
            process.start()
            theirs.close()
            self._orders.append(ours)
            self._processes.append(process)
        self._collect()

    def tell(self, word: str, **arguments: Any) -> list[float]:
        """What the processes know, one after the other.

        Raises:
            RuntimeError: one failed, ended, or did not answer in time.
        """
        for orders in self._orders:
            orders.send((word, arguments))
        return self._collect()

    def _collect(self) -> list[float]:
        ends = time.monotonic() + ANSWER_LIMIT_S
        found: list[float] = []
        waiting = dict(enumerate(self._orders))
        while waiting:
            # The first that fails is the one to hear of: the others may wait for it.
            ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, ends - time.monotonic()))
            if not ready:
                raise RuntimeError(f"processes {sorted(waiting)} did not answer within {ANSWER_LIMIT_S:g} s")
            for rank, orders in list(waiting.items()):
                if orders in ready:
                    try:
                        how, values = orders.recv()
                    except EOFError:
                        raise RuntimeError(f"process {rank} ended") from None
                    if how == "error":
                        raise RuntimeError(values)
                    found.extend(values)
                    del waiting[rank]
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()  # jax.distributed catches SIGTERM
        for process in self._processes:
            process.join(10)


def serve(make: Make, packages: tuple[str, ...], ranks: int = 2) -> None:
    """Answers requests until stdin ends. What libraries print goes to stderr."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    held: Ranks | None = None
    try:
        for line in requests:
            try:
                ((word, arguments),) = json.loads(line).items()
                if word == "configure":
                    held = Ranks(make, ranks, arguments)
                    answer: dict[str, Any] = {"versions": versions(packages)}
                elif held is None:
                    raise RuntimeError("it was not configured")
                else:
                    answer = answered(held, word, arguments)
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        if held is not None:
            held.close()


def answered(held: Ranks, word: str, arguments: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    losses = held.tell(word, **arguments)
    seconds = time.perf_counter() - start
    return {"losses": losses} if word == "prepare" else {"seconds": seconds, "loss": losses[-1]}
