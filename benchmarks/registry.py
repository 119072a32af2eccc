"""All benchmarks, in the order in which they run and in which the report shows them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from benchmarks.harness import Benchmark


@dataclass(frozen=True)
class Entry:
    """One line of the list.

    Attributes:
        module: below `benchmarks`; it holds the benchmark as `BENCHMARK`.
        title: of its section in the report.
        usual: whether `python -m benchmarks` runs it.
    """

    module: str
    title: str
    usual: bool = False


BENCHMARKS = {
    "startup": Entry("startup", "From nothing to the first result", usual=True),
    "compiling": Entry("compiling", "First calls, and the same again"),
    "serving": Entry("serving", "One model, called by many threads and processes"),
    "loops": Entry("loops", "Loops of several programs"),
    "waits": Entry("waits", "Everyday programs that wait for each value"),
    "dispatch": Entry("dispatch", "Dispatch of small computations (Figure 5 of the paper)", usual=True),
    "memory": Entry("memory", "What a launch leaves behind", usual=True),
    "hotpath": Entry("hotpath", "Where the time of a launch goes"),
    "accelerator": Entry("accelerator", "One device, beside plain JAX on it"),
    "observing": Entry("observing", "The cost of being seen"),
    "bytes": Entry("bytes", "Arrays in and out"),
    "network": Entry("network", "Arrays in and out between machines"),
    "suspending": Entry("suspending", "Sessions suspended and resumed"),
    "proxy": Entry("proxy", "Unmodified JAX through a proxy"),
    "peers": Entry("peers.benchmark", "Dispatch against peers (Figure 5 of the paper)"),
    "parity": Entry("parity", "Smallest computation at parity with JAX (Figure 6)"),
    "gradients": Entry("gradients", "Derivatives over two slices"),
    "pipeline": Entry("pipeline", "Parallel and sequential dispatch (Figure 7)"),
    "decisions": Entry("decisions", "Decisions of programs"),
    "metg": Entry("metg", "Smallest task at half the efficiency (Task Bench)"),
    "tenants": Entry("tenants.benchmark", "Tenants on the same devices (Figures 8, 9 and 11)", usual=True),
    "scale": Entry("scale.benchmark", "Controller and schedulers beyond this machine", usual=True),
    "training": Entry(
        "training.benchmark", "Training: SPMD, pipelines, islands (Tables 1 and 2, Figures 10 and 12)", usual=True
    ),
    "recovery": Entry("recovery", "Training that goes on after losses"),
    "snapshots": Entry("snapshots", "The price of snapshots"),
    "experts": Entry("experts", "Experts dispatched and dense"),
    "rl": Entry("rl", "Reinforcement learning over two islands"),
    "planner_here": Entry("planner_here", "Predictions beside this machine"),
    "paper_tables": Entry("paper_tables.benchmark", "Predictions beside the papers' tables"),
}

RESULTS = {"profile": "hotpath"}
"""Results whose `benchmark` differs from the name of the benchmark."""


def entry_of(result: str) -> Entry | None:
    """The benchmark that a result says it is of; None where there is no such benchmark."""
    return BENCHMARKS.get(RESULTS.get(result, result))


def load(entry: Entry) -> Benchmark[Any]:
    """Imports a benchmark, which may need more packages than the others."""
    found: Benchmark[Any] = import_module(f"benchmarks.{entry.module}").BENCHMARK
    return found
