"""Unmodified JAX through a proxy, beside plain JAX in one process and beside this runtime's own client.

All three have one CPU device of their own, are alive at the same time and take turns, kind by kind. Then the native
client takes turns with the floor: JAX at a proxy with nothing behind it, which answers at once.

    work      calls of some milliseconds each, on the result of the one before, none waited for
    chain     the same with an addition of 1: what a call costs on the road
    blocking  an addition of 1, and its value at once
    put, get  an array of some megabytes to the device, until it is there; and back

The rate of work beside plain JAX is that of more turns of these two alone, since a few say little where others use the
machine; beside it stands the range in which its median lies with 95 % confidence.

The idle share is the CPU time of the proxy's process while its client is attached and does nothing.

Run it with `python -m benchmarks run proxy --json proxy.json`; it takes about two minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows
from benchmarks.workers import Worker, answers

KINDS = {"work": "ms", "chain": "us", "blocking": "us", "put": "ms", "get": "ms"}
"""What is measured, in units of one call."""

SIZE = 192  # of the matrices that work multiplies
STEPS = 64  # multiplications, after which `calibrated` knows how long one takes


@dataclass(frozen=True)
class Settings:
    rounds: int = option(7, "that count, after one that does not")
    work_ms: float = option(10.0, "of a call")
    works: int = option(40, "calls of work in a run")
    pairs: int = option(16, "runs of work by plain JAX and by the proxy, in turn")
    calls: int = option(2000, "small calls in a chain")
    waits: int = option(2000, "calls that are waited for: most of them later than 0.2 s, when hosts begin them early")
    megabytes: int = option(64, "of the array that is put and fetched")
    idle_s: float = option(5.0, "over which the idle proxy is watched")


SMOKE = Settings(rounds=1, work_ms=1.0, works=4, pairs=2, calls=20, waits=5, megabytes=2, idle_s=0.5)


class Jax:
    """A program of JAX in a process of its own; it knows nothing of proxies."""

    def __init__(self, megabytes: int) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np

        self.np = np
        self.bytes = np.arange(megabytes * 250_000, dtype=np.float32)
        self.one = self.placed(np.float32(0))
        self.matrix = self.placed(np.eye(SIZE, dtype=np.float32))
        self.add = self.compiled(lambda v: v + 1)

        def work(v: Any, steps: Any) -> Any:
            return jax.lax.fori_loop(0, steps, lambda _, w: jnp.dot(w, v), v)

        self.work = self.compiled(work)
        self.steps = self.placed(np.int32(STEPS))

    def placed(self, value: Any) -> Any:
        import jax

        return jax.device_put(value).block_until_ready()

    def compiled(self, function: Any) -> Any:
        import jax

        return jax.jit(function)

    def calibrated(self, milliseconds: float) -> int:
        """The multiplications that take so long."""
        took = [self._work(8) for _ in range(3)]
        return max(1, round(STEPS * milliseconds / 1e3 / min(took)))

    def expected(self, value: float) -> float:
        """The value that has to come where plain JAX has this one."""
        return value

    def set_steps(self, steps: int) -> None:
        self.steps = self.placed(self.np.int32(steps))
        self._work(2)

    def _work(self, calls: int) -> float:
        """Seconds of a call."""
        begun, value = time.perf_counter(), self.matrix
        for _ in range(calls):
            value = self.work(value, self.steps)
        value.block_until_ready()
        return (time.perf_counter() - begun) / calls

    def seconds(self, kind: str, calls: int) -> float:
        """Seconds of a call of a kind; of `blocking`, the median. Values are checked."""
        if kind == "work":
            return self._work(calls)
        if kind in ("put", "get"):
            return self._moved(kind)
        begun, value, took = time.perf_counter(), self.one, []
        for _ in range(calls):
            value = self.add(value)
            if kind == "blocking":
                found = float(value)
                took.append(time.perf_counter())
        found = float(value)
        ended = time.perf_counter()
        if found != self.expected(calls):
            raise AssertionError(f"after {calls} calls the value is {found}")
        if kind == "chain":
            return (ended - begun) / calls
        return statistics.median(after - before for before, after in zip([begun, *took], took, strict=False))

    def _moved(self, kind: str) -> float:
        begun = time.perf_counter()
        value = self.placed(self.bytes)
        put = time.perf_counter()
        back = self.np.asarray(value)
        got = time.perf_counter()
        if back[-1] != self.expected(self.bytes[-1]):
            raise AssertionError(f"the array came back with {back[-1]}")
        return put - begun if kind == "put" else got - put


class Native(Jax):
    """The same by this runtime's own client."""

    def __init__(self, url: str, token: str, megabytes: int) -> None:
        import pathways_ray as pw

        self.pw = pw
        self.where = pw.connect(url, token).virtual_slice((1,), ("x",))
        super().__init__(megabytes)

    def placed(self, value: Any) -> Any:
        return self.pw.put(value, slice=self.where).block_until_ready()

    def compiled(self, function: Any) -> Any:
        return self.pw.compiled(function, slice=self.where)


class Floor(Jax):
    """The same where nothing is computed."""

    def expected(self, value: float) -> float:
        return 0.0


class Case(NamedTuple):
    system: str
    kind: str


SYSTEMS = ("plain", "proxy", "native")


@contextlib.contextmanager
def floor(megabytes: int) -> Iterator[Worker]:
    """JAX at a proxy with nothing behind it."""
    with tempfile.TemporaryDirectory(prefix="floor-", dir="/tmp") as folder:
        command = [sys.executable, "-m", "benchmarks.proxy_floor", f"{folder}/s"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            with patch.dict(os.environ, json.loads(server.stdout.readline())):
                worker = Worker(Floor, megabytes)
            try:
                answers([worker])
                yield worker
            finally:
                worker.close(10)
                server.stdin.close()


@contextlib.contextmanager
def systems(megabytes: int) -> Iterator[tuple[dict[str, Worker], psutil.Process]]:
    """The systems, and the process of the proxy."""
    import pathways_ray as pw

    plain = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    with pw.init(devices_per_host=1) as session, contextlib.ExitStack() as stack:
        before = {process.pid for process in psutil.Process().children()}
        proxy = stack.enter_context(session.proxy(devices=1))
        (server,) = (one for one in psutil.Process().children() if one.pid not in before and "proxy" in one.cmdline())
        found = {}
        for name, make, arguments, variables in (
            ("plain", Jax, (), plain),
            ("proxy", Jax, (), proxy.env),
            ("native", Native, (session.url, session.token), plain),
        ):
            with patch.dict(os.environ, variables):
                found[name] = Worker(make, *arguments, megabytes)
            stack.callback(found[name].close, 10)
        answers(list(found.values()))
        yield found, server


def run(settings: Settings, progress: Progress) -> Result:
    """Measures on a cluster of its own."""
    counts = {"work": settings.works, "chain": settings.calls, "blocking": settings.waits, "put": 1, "get": 1}
    with systems(settings.megabytes) as (found, server):
        steps = found["plain"].ask("calibrated", settings.work_ms)
        for worker in found.values():
            worker.ask("set_steps", steps)

        def seconds(case: Case) -> float:
            taken: float = found[case.system].ask("seconds", case.kind, counts[case.kind])
            return taken

        cases = [Case(system, kind) for kind in KINDS for system in SYSTEMS]
        progress.say("measuring")
        samples = measure.interleaved(cases, seconds, settings.rounds)
        pairs = measure.interleaved([Case(system, "work") for system in ("plain", "proxy")], seconds, settings.pairs)
        server.cpu_percent(None)
        time.sleep(settings.idle_s)
        idle = server.cpu_percent(None) / 100
        with floor(settings.megabytes) as found["floor"]:
            of_floor = [Case(system, kind) for kind in KINDS if kind != "work" for system in ("floor", "native")]
            beside = measure.interleaved(of_floor, seconds, settings.rounds)
    scale = {"ms": 1e3, "us": 1e6}
    samples |= {case: found for case, found in beside.items() if case.system == "floor"}
    rows = [
        dict[str, Any](kind=kind, unit=unit)
        | {
            system: measure.spread([scale[unit] * one for one in samples[Case(system, kind)]])
            for system in (*SYSTEMS, "floor")
            if Case(system, kind) in samples
        }
        for kind, unit in KINDS.items()
    ]
    chain = next(row for row in rows if row["kind"] == "chain")

    def of(over: str, under: str, kind: str, rounds: Any = samples) -> tuple[Sequence[float], Sequence[float]]:
        return rounds[Case(over, kind)], rounds[Case(under, kind)]

    return {
        "measured": " ".join(" ".join(__doc__.split("\n\n")[1:5]).split()),
        "rows": rows,
        "ratios": [
            ratio("proxy / plain JAX, rate, work", *(work := of("plain", "proxy", "work", pairs))),
            median_of("the median of these, within", *work),
            ratio("proxy / native client, time, blocking", *of("proxy", "native", "blocking")),
            ratio("floor / native client, time, blocking", *of("floor", "native", "blocking", beside)),
            *(ratio(f"proxy / native client, rate, {kind}", *of("native", "proxy", kind)) for kind in ("put", "get")),
        ],
        "figures": [
            {"name": "proxy, a small call on the road", "unit": "us", **chain["proxy"]},
            {"name": "floor, a small call on the road", "unit": "us", **chain["floor"]},
            {"name": "proxy, share of a core while idle", "unit": "cores", "median": idle},
        ],
    }


def ratio(name: str, over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    return {"name": name, **measure.paired_ratios(over, under)}


def median_of(name: str, over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """The median of ratios, and the range in which it lies with 95 % confidence."""
    ratios = [n / d for n, d in zip(over, under, strict=True)]
    low, high = measure.median_within(ratios)
    return {"name": name, "min": low, "median": statistics.median(ratios), "max": high}


show = shows(
    Table("time of a call", "rows", "kind", "unit", *(f"{system}:.2f" for system in (*SYSTEMS, "floor"))),
    Table("ratios, round by round", "ratios", "name", ".:.2f"),
    Table("figures", "figures", "name", "unit", ".:.3g"),
)

BENCHMARK = Benchmark("proxy", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
