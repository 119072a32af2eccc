"""Parallel against sequential dispatch of a pipeline whose stages live on different hosts: Figure 7 of the paper.

A program of S stages calls a small computation S times, each time on another host of one island, or with `--islands` on
islands of their own; the result of a stage is transferred to the next. Two runtimes are alive at the same time, alike
but for `dispatch="parallel"` and `dispatch="sequential"`: the first has all hosts prepare their stages at once, the
second starts a stage's host work when the stage before is enqueued, and hands no call to its host before it is sent.
With one stage there is nothing to prepare at once: what differs there is that.

On few cores all hosts share them, so their work cannot overlap whatever the dispatch. Hence a third way: each stage
also takes what its host has prepared for it, a host function (`pw.host`) that needs no value of another stage and waits
for `--host-work-ms` without a core, as for a disk, a service or a core of the host's own. The longer it is beside what
the runtime takes of the cores that all hosts share, the more of the difference shows, so several lengths are measured.

Run it with `python -m benchmarks.pipeline --json pipeline.json --figure pipeline.png`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from benchmarks import measure
from benchmarks.harness import Benchmark, Output, Progress, Result, drawn_by, option
from benchmarks.printing import Table, shows
from benchmarks.workers import Worker

DISPATCH = ("parallel", "sequential")
MODES = ("waiting", "flowing")

MEASURED = (
    "A program of S stages, each `v + 1` on float32 ({elements},) on one CPU device of another host{where}. "
    "waiting: each call is waited for before the next. flowing: {programs} calls are issued and the last one is waited "
    "for. with host work: each call is waited for, and each stage adds what a host function gave that waited for so "
    "long without a core. {repetitions} rounds after one warm-up, both runtimes alive and measured in turn."
)


@dataclass(frozen=True)
class Settings:
    stages: tuple[int, ...] = option((1, 2, 4, 8), "numbers of them")
    programs: int = option(50, "calls of one measurement")
    repetitions: int = option(7, "rounds")
    host_work_ms: tuple[float, ...] = option((1.0, 4.0), "that the host of a stage waits for what it prepares")
    elements: int = option(256, "of the array that a stage passes to the next")
    islands: bool = option(False, "each stage on an island of its own")


SMOKE = Settings((1, 2), programs=5, repetitions=1)


class Case(NamedTuple):
    """One point of the figure."""

    dispatch: str
    mode: str
    stages: int


def working(host_work_ms: float) -> str:
    """The mode in which a stage's host waits for so long."""
    return f"with {host_work_ms:g} ms of host work"


class Runtime:
    """One runtime in a process of its own, with a program for each number of stages."""

    def __init__(
        self, dispatch: str, stages: Sequence[int], elements: int, islands: bool, host_work_ms: Sequence[float]
    ) -> None:
        import jax

        import pathways_ray as pw

        hosts = max(stages)
        count, each = (hosts, 1) if islands else (1, hosts)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(
            pw.init(islands=count, hosts_per_island=each, dispatch=dispatch, fusion=False, coalesce=False)
        )
        places = [pw.virtual_slice((1,), island=k if islands else 0) for k in range(hosts)]
        if len({place.devices for place in places}) < hosts:
            raise AssertionError(f"stages share devices: {[place.devices for place in places]}")
        steps = [pw.compiled(lambda v: v + 1, slice=place) for place in places]
        joins = [pw.compiled(lambda v, batch: v + batch, slice=place) for place in places]
        batch = jax.ShapeDtypeStruct((elements,), np.float32)
        prepared = {ms: _prepared(ms, elements) for ms in host_work_ms}
        loads = {ms: [pw.host(prepared[ms], slice=place, result=batch) for place in places] for ms in host_work_ms}

        def alone(count: int) -> Any:
            def call(v: Any) -> Any:
                for step in steps[:count]:
                    v = step(v)
                return v

            return pw.program(call, name=f"stages{count}")

        def with_host_work(count: int, ms: float) -> Any:
            def call(v: Any) -> Any:
                for join, load in zip(joins[:count], loads[ms], strict=False):
                    v = join(v, load())
                return v

            return pw.program(call, name=f"stages{count}_{ms:g}ms")

        self._programs = {(count, mode): alone(count) for count in stages for mode in MODES}
        self._programs |= {(count, working(ms)): with_host_work(count, ms) for count in stages for ms in host_work_ms}
        self._start = pw.put(np.zeros(elements, np.float32), slice=steps[0].slice)

    def seconds(self, mode: str, stages: int, calls: int) -> float:
        """The time of these calls, the last of which must have the right value."""
        program = self._programs[stages, mode]
        begun = time.perf_counter()
        for _ in range(calls):
            v = program(self._start)
            if mode != "flowing":
                v.block_until_ready()
        v.block_until_ready()
        seconds = time.perf_counter() - begun
        value = np.asarray(v)
        if not np.array_equal(value, np.full(value.shape, stages, np.float32)):
            raise AssertionError(f"after {stages} stages the value is {value}")
        return seconds

    def close(self) -> None:
        self._stack.close()


def _prepared(host_work_ms: float, elements: int) -> Any:
    """A host function that waits, and gives ones."""

    def prepare() -> Any:
        time.sleep(host_work_ms / 1000)
        return np.ones(elements, np.float32)

    return prepare


def run(settings: Settings, progress: Progress) -> Result:
    stages, programs = settings.stages, settings.programs
    with contextlib.ExitStack() as stack:
        runtimes: dict[str, Worker] = {}
        for dispatch in DISPATCH:
            # Not a daemon: it starts processes itself.
            arguments = (dispatch, stages, settings.elements, settings.islands, settings.host_work_ms)
            runtimes[dispatch] = Worker(Runtime, *arguments, daemon=False)
            stack.callback(runtimes[dispatch].close, 30)
        for dispatch, runtime in runtimes.items():
            runtime.answer()
            progress.say(f"{dispatch}: {max(stages)} hosts are there")

        def rate(case: Case) -> float:
            seconds: float = runtimes[case.dispatch].ask("seconds", case.mode, case.stages, programs)
            return programs * case.stages / seconds

        modes = (*MODES, *map(working, settings.host_work_ms))
        cases = [Case(d, m, s) for s in stages for m in modes for d in DISPATCH]
        samples = measure.interleaved(cases, rate, settings.repetitions, say=progress.say)
    rows = [{**case._asdict(), "computations_per_second": measure.spread(v)} for case, v in samples.items()]
    ratios = [
        {
            "name": f"parallel / sequential, {mode}, {count} stages",
            "mode": mode,
            "stages": count,
            **measure.paired_ratios(samples[Case("parallel", mode, count)], samples[Case("sequential", mode, count)]),
        }
        for mode in modes
        for count in stages
    ]
    shown = {name: getattr(settings, name) for name in ("elements", "programs", "repetitions")}
    return {
        "measured": MEASURED.format(**shown, where=", each an island" if settings.islands else " of one island"),
        "rows": rows,
        "ratios": ratios,
    }


show = shows(
    Table("rates", "rows", "stages", "mode", "dispatch", "computations_per_second"),
    Table("ratios, round by round", "ratios", "name", ".:.2f"),
)

BENCHMARK = Benchmark(
    "pipeline", __doc__, Settings, SMOKE, run, show, outputs=(Output("--figure", drawn_by("pipeline"), "pipeline.png"),)
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
