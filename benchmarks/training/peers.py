"""The other systems of `benchmarks.training`: started when they are first needed; their errors are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.peers.systems import SystemInfo
from benchmarks.training.model import Sizes
from benchmarks.training.runtime import Case

LIMIT_S = 180.0
MODULES = {"jax": "benchmarks.peers.jax_training", "torch": "benchmarks.peers.torch_pipeline"}


class Peers:
    """Each system is one process, with one below it for each device.

    Attributes:
        errors: by system, why it is not measured
        versions: by system, of its packages
    """

    def __init__(self, sizes: Sizes, parameters: Path, cores: Sequence[int]) -> None:
        self.sizes, self.parameters, self.cores = sizes, parameters, list(cores)
        self.errors: dict[str, str] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self._processes: dict[str, PeerProcess] = {}

    def prepare(self, case: Case, steps: int) -> list[float] | None:
        """The first losses; None if the system is not installed, or failed."""
        if case.system not in self._processes:
            self._start(case.system)
        return self._ask(case.system, "prepare", case=case.how, microbatches=case.microbatches, steps=steps)

    def seconds(self, case: Case, steps: int) -> float:
        """The time of these steps; nan if the system failed."""
        found = self._ask(case.system, "train", case=case.how, microbatches=case.microbatches, steps=steps)
        return math.nan if found is None else found

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    def _start(self, system: str) -> None:
        if system in self.errors:
            return
        peer = SystemInfo("torch" if system == "torch" else "", (MODULES[system],))
        if problem := peer.problem():
            self.errors[system] = problem
            return
        variables = {"GLOO_SOCKET_IFNAME": "lo", "NPROC": None}
        self._processes[system] = PeerProcess(peer.interpreter(), peer.module, variables)
        sizes = asdict(self.sizes)
        versions = self._ask(system, "configure", sizes=sizes, parameters=str(self.parameters), cores=self.cores)
        if versions is not None:
            self.versions[system] = versions

    def _ask(self, system: str, word: str, **arguments: Any) -> Any:
        if system in self.errors:
            return None
        try:
            return self._processes[system].ask(word, LIMIT_S, **arguments)
        except PeerError as error:
            self.errors[system] = str(error)
            return None
