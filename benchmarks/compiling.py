"""First calls: a program of 100 small nodes beside `jax.jit` of the same function, again, and on other slices.

Every measurement is a fresh Python process with a runtime of its own, whose hosts keep what they compile in a folder
that is empty at the first start and full at the second. After its start it calls

    nodes        a program of 100 small compiled functions, each another one
    operations   a program of 100 ordinary operations of JAX
    one slice    a program of 8 operations, whose argument lies on the first of 4 slices of one device
    other slices the same program with its argument on the other three, the mean of the three calls

for the first time, each with its value fetched, and then a client of another process calls the first one. JAX calls
jitted functions of the same 100 operations in a process of its own, without a cache; and 100 functions that are jitted
each by itself, one after the other, whose bits the program has. `traces` counts how often the
user's function was run for a trace, `compiled` the computations that came into the folder of the hosts' caches.

Run it with `python -m benchmarks.compiling --json compiling.json`; it takes about two minutes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows
from benchmarks.workers import Worker

NODES = 100
DEVICES = 4
EACH = "nodes, each jitted"
CALLS = ("nodes", "operations", "one slice", "other slices", "another client")
STARTS = ("first start", "second start")
CACHE = "PATHWAYS_COMPILATION_CACHE"
SETTLED_S = 0.3
FEW = 8
"""Operations of the program whose argument comes from several slices."""

TOLERANCE = 1e-5
"""Of operations that are compiled as one against NumPy's, which rounds each."""

MEASURED = (
    "First calls of programs of {nodes} small nodes on one CPU device, their values fetched, in fresh processes, and "
    "of jax.jit of the same functions in a process of its own without a cache. The second start has the hosts' cache "
    "of the first. {rounds} rounds, in turn; ratios are taken round by round."
)


@dataclass(frozen=True)
class Settings:
    nodes: int = option(NODES, "of a program")
    rounds: int = option(3)


SMOKE = Settings(nodes=3, rounds=1)


def small(k: int) -> Callable[[Any], Any]:
    """The function of node k: (n,) -> (n,)."""
    return lambda v: v * (1 + k / 1000) + k


def operations(nodes: int) -> Callable[[Any], Any]:
    """A function of so many operations."""

    def run(v: Any) -> Any:
        for k in range(nodes // 2):
            v = v * (1 + k / 1000) + k
        return v

    return run


START = np.arange(8, dtype=np.float32)


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    """The time of a call whose result is fetched, and the result."""
    begun = time.perf_counter()
    value = np.asarray(call())
    return time.perf_counter() - begun, value


def check(call: str, value: Any, nodes: int, jitted: Any) -> None:
    """Raises `AssertionError` unless a call came to the bits of the functions that are jitted each by itself, or, where
    all operations are compiled as one, near NumPy's values."""
    if call in ("nodes", "another client"):
        np.testing.assert_array_equal(value, jitted)
    else:
        np.testing.assert_allclose(value, operations(nodes if call == "operations" else FEW)(START), TOLERANCE)


class Jax:
    """`jax.jit` in this process."""

    def seconds(self, nodes: int) -> dict[str, tuple[float, Any]]:
        """The time of the first call of each function, and its value."""
        import jax

        jax.config.update("jax_enable_compilation_cache", False)
        np.asarray(jax.jit(lambda v: v - 1)(START))  # what is loaded with the first computation
        parts = [jax.jit(small(k)) for k in range(nodes)]

        def chain(v: Any) -> Any:
            for part in parts:
                v = part(v)
            return v

        def each() -> Any:
            v: Any = START
            for k in range(nodes):
                v = jax.jit(small(k))(v)
            return v

        return {
            "nodes": seconds_of(lambda: jax.jit(chain)(START)),
            EACH: seconds_of(each),
            "operations": seconds_of(lambda: jax.jit(operations(nodes))(START)),
        }


class Runtime:
    """A runtime that is started in this process."""

    def calls(self, nodes: int) -> list[dict[str, Any]]:
        """Seconds, traces, compiled computations and values of each first call."""
        import pathways_ray as pw

        self._rows: list[dict[str, Any]] = []
        self._traces = 0
        with pw.init(devices_per_host=DEVICES) as session:
            slices = [pw.virtual_slice((1,), ("x",)) for _ in range(DEVICES)]
            first = slices[0]
            np.asarray(pw.compiled(lambda v: v - 1, slice=first)(START))
            chain = chained(nodes, first)
            with self._counted("nodes") as values:
                values.append(np.asarray(pw.program(self._seen(chain))(START)))
            placed = [pw.put(START, where) for where in slices]
            np.asarray(placed[0])
            with self._counted("operations") as values:
                values.append(np.asarray(pw.program(self._seen(operations(nodes)))(placed[0])))
            winner = pw.program(self._seen(operations(FEW)))
            with self._counted("one slice") as values:
                values.append(np.asarray(winner(placed[0])))
            with self._counted("other slices", len(placed) - 1) as values:
                for one in placed[1:]:
                    values.append(np.asarray(winner(one)))
            other = Worker(Other, session.url, session.token, nodes, first.devices[0])
            try:
                other.answer()
                with self._counted("another client") as values:
                    values.append(other.ask("call"))
            finally:
                other.close(30)
        return self._rows

    def _seen(self, fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function, whose runs are counted."""

        def run(v: Any) -> Any:
            self._traces += 1
            return fun(v)

        return run

    @contextlib.contextmanager
    def _counted(self, what: str, calls: int = 1) -> Iterator[list[Any]]:
        before, self._traces = entries(), 0
        values: list[Any] = []
        begun = time.perf_counter()
        yield values
        seconds = (time.perf_counter() - begun) / calls
        traces = {} if what == CALLS[-1] else {"traces": self._traces}
        counts = {**traces, "compiled": entries() - before}
        self._rows.append({"call": what, "seconds": seconds, **counts, "values": values})


class Other:
    """Another client of a cluster, which has not traced anything before."""

    def __init__(self, url: str, token: str, nodes: int, device: Any) -> None:
        import pathways_ray as pw

        self._session = pw.connect(url, token)
        where = next(
            one for one in (pw.virtual_slice((1,), ("x",)) for _ in range(DEVICES)) if one.devices[0] == device
        )
        np.asarray(pw.compiled(lambda v: v - 1, slice=where)(START))
        self._program = pw.program(chained(nodes, where))

    def call(self) -> Any:
        """The value of the first call of the program."""
        return np.asarray(self._program(START))

    def close(self) -> None:
        self._session.close()


def chained(nodes: int, where: Any) -> Callable[[Any], Any]:
    """A function that calls so many compiled functions."""
    import pathways_ray as pw

    parts = [pw.compiled(small(k), slice=where) for k in range(nodes)]

    def chain(v: Any) -> Any:
        for part in parts:
            v = part(v)
        return v

    return chain


def entries() -> int:
    """Computations in the folder of the hosts' caches, which write them behind the call that needs them: as many as
    there are when none comes any more."""
    before = -1
    while before != (found := len(list(Path(os.environ[CACHE]).glob("*-cache")))):
        before = found
        time.sleep(SETTLED_S)
    return found


def asked(make: Callable[[], Any], method: str, *arguments: Any) -> Any:
    """The answer of an object in a process of its own, which ends with it."""
    worker = Worker(make, daemon=False)
    try:
        worker.answer()
        return worker.ask(method, *arguments)
    finally:
        worker.close()


def run(settings: Settings, progress: Progress) -> Result:
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    plain: dict[str, list[float]] = {}
    for number in range(settings.rounds):
        progress.say(f"round {number + 1} of {settings.rounds}")
        jitted = asked(Jax, "seconds", settings.nodes)
        for call, (took, _) in jitted.items():
            plain.setdefault(call, []).append(took)
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {CACHE: folder}):
            for start in STARTS:
                for row in asked(Runtime, "calls", settings.nodes):
                    for value in row.pop("values"):
                        check(row["call"], value, settings.nodes, jitted[EACH][1])
                    samples.setdefault((start, row["call"]), []).append(row)
    seconds = {case: [one["seconds"] for one in ones] for case, ones in samples.items()}
    rows = [
        {
            "start": start,
            "call": call,
            "seconds": measure.spread(seconds[start, call]),
            **{name: max(one[name] for one in ones) for name in ("traces", "compiled") if name in ones[0]},
        }
        for (start, call), ones in samples.items()
    ]
    rows += [{"start": "jax.jit", "call": call, "seconds": measure.spread(ones)} for call, ones in plain.items()]
    ratios: list[dict[str, Any]] = [
        {
            "name": f"{start}, {CALLS[0] if call == EACH else call} / jax.jit" + " of each" * (call == EACH),
            **measure.paired_ratios(seconds[start, CALLS[0] if call == EACH else call], ones),
        }
        for start in STARTS
        for call, ones in plain.items()
    ]
    first = STARTS[0]
    for other, one in (("other slices", "one slice"), ("another client", "nodes")):
        pair = measure.paired_ratios(seconds[first, other], seconds[first, one])
        ratios.append({"name": f"{other} / {one}", **pair})
    made, again = (
        max(one["compiled"] for (start, _), ones in samples.items() if start == which for one in ones)
        for which in STARTS
    )
    if not made:
        raise AssertionError(
            "nothing came into the hosts' caches at the first start: what a second finds there says nothing"
        )
    return {
        "measured": MEASURED.format(nodes=settings.nodes, rounds=settings.rounds),
        "rows": rows,
        "ratios": ratios,
        "figures": [{"name": "computations that a second start compiles", "unit": "", "median": again}],
    }


show = shows(
    Table("first calls", "rows", "start", "call", "seconds:.3f", "traces", "compiled"),
    Table("ratios, round by round", "ratios", "name", ".:.2f"),
    Table("figures", "figures", "name", "median"),
)

BENCHMARK = Benchmark("compiling", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
