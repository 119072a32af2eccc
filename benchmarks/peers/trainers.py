"""The words of the peers of `benchmarks.training`: one process that is asked, and one for each device.

    configure(sizes={...}, parameters="parameters.npz", cores=[0, 1])  -> {"python": "3.11.7", ...}, the versions
    prepare(case="1f1b", microbatches=8, steps=3)   -> [5.6, 5.5, 5.4], the first losses, from the given parameters on
    train(case="1f1b", microbatches=8, steps=4)     -> 0.8, the seconds of further steps

The process that is asked only passes the words on to the processes of the devices, which all do the same, and waits for
them. Imports nothing but the standard library, as all peers use it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.peers.jax_host import free_address
from benchmarks.peers.protocol import versions
from benchmarks.workers import Worker, answer_requests, answers, ask_all

ANSWER_LIMIT_S = 170.0
"""For all processes to answer; below the limit of the benchmark, which then receives the reason."""


class Trainer(Protocol):
    """The object in the process of one device."""

    def prepare(self, case: str, microbatches: int, steps: int) -> list[float]:
        """Restarts a case and takes the first steps; returns their losses, or [] if this process does not have them."""

    def train(self, case: str, microbatches: int, steps: int) -> None:
        """Takes steps and waits for all of them."""


Make = Callable[[int, int, str, dict[str, Any], str], Trainer]
"""From the rank of the process, the number of ranks, the address of rank 0, the sizes, and the file of parameters."""

RANKS = 2
"""Processes of a system."""


def on_one_core(make: Make, cores: list[int], rank: int, *arguments: Any) -> Trainer:
    """Makes the trainer of a process that runs on one core, with all its threads."""
    if hasattr(os, "sched_setaffinity") and cores:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return make(rank, *arguments)


class Trainers:
    """All processes of a system; they receive the same words."""

    def __init__(self, make: Make, packages: tuple[str, ...]) -> None:
        self._make, self._packages = make, packages
        self._workers: list[Worker] = []

    def configure(self, sizes: dict[str, Any], parameters: str, cores: list[int]) -> dict[str, str]:
        where = (RANKS, free_address(), sizes, parameters)
        self._workers = [Worker(on_one_core, self._make, cores, rank, *where) for rank in range(RANKS)]
        answers(self._workers, ANSWER_LIMIT_S)
        return versions(self._packages)

    def prepare(self, **arguments: Any) -> list[float]:
        found = ask_all(self._workers, "prepare", limit_s=ANSWER_LIMIT_S, **arguments)
        return [loss for losses in found for loss in losses]

    def train(self, **arguments: Any) -> float:
        start = time.perf_counter()
        ask_all(self._workers, "train", limit_s=ANSWER_LIMIT_S, **arguments)
        return time.perf_counter() - start

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()


def serve(make: Make, packages: tuple[str, ...]) -> None:
    """The main function of a peer of `benchmarks.training`."""
    answer_requests(Trainers(make, packages))
