"""Decisions of a program: from a predicate on a device to the branch that it chooses, and loops over two slices.

Two islands of one host of one device. *Decision*: a predicate lies on one island, the branch on the other; the time
from the end of the predicate's computation until the first computation of the branch starts, read off the hosts' record
of what ran. It is divided by a blocking round trip of the same cluster: a call of a function of one node, until its
value is at the client, in turn with it. *Loop*: a `pw.while_loop` whose body goes from one slice to the other and back,
each way a computation of some milliseconds, beside the same rounds written one after the other: rounds in a second,
divided by those.

Run it with `python -m benchmarks run decisions --json decisions.json`; it takes about a minute.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows


@dataclass(frozen=True)
class Settings:
    decisions: int = option(200, "decisions, and round trips, of a round")
    lengths_ms: tuple[float, ...] = option((1.0, 5.0), "of one computation of the loop")
    turns: int = option(20, "rounds of the loop")
    rounds: int = option(5, "of everything")


SMOKE = Settings(decisions=5, lengths_ms=(1.0,), turns=3, rounds=1)


def run(settings: Settings, progress: Progress) -> Result:
    """Measures on a cluster of its own."""
    import pathways_ray as pw

    with pw.init(islands=2, devices_per_host=1):
        a, b = (pw.virtual_slice((1,), ("x",), island=island) for island in (0, 1))
        progress.say("decisions")
        rows: list[dict[str, Any]] = [decisions(a, b, settings)]
        for length_ms in settings.lengths_ms:
            progress.say(f"loops, {length_ms} ms a computation")
            rows.append(loops(a, b, length_ms, settings))
    return {
        "rows": rows,
        "figures": [{"name": row["what"], "unit": "x", **row["ratio"]} for row in rows],
    }


def decisions(a: Any, b: Any, settings: Settings) -> dict[str, Any]:
    """Microseconds of decisions and of blocking round trips, in turn."""
    import jax.numpy as jnp

    import pathways_ray as pw

    @pw.compiled(slice=a)
    def is_large(v: Any) -> Any:
        return v.sum() > 3

    @pw.compiled(slice=b)
    def there(v: Any) -> Any:
        return v + 1

    back, step = (pw.compiled(functools.partial(jnp.add, by), slice=a) for by in (-1, 1))
    decide = pw.program(lambda v, w: pw.cond(is_large(v), lambda w: there(w), lambda w: there(back(w)), w))
    v, w = pw.put(np.full(4, 2, np.float32), a), pw.put(np.zeros(4, np.float32), b)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(decide(v, w)), np.ones(4))
        np.asarray(step(v))
    decided, trips = [], []
    for _ in range(settings.rounds):
        with pw.recording() as computed:
            for _ in range(settings.decisions):
                decide(v, w).block_until_ready()
        decided.append(gaps(computed))
        took = []
        for _ in range(settings.decisions):
            began = time.perf_counter()
            np.asarray(step(v))
            took.append(1e6 * (time.perf_counter() - began))
        trips.append(took)
    medians = [[statistics.median(one) for one in rounds] for rounds in (decided, trips)]
    return {
        "what": "decision / blocking round trip",
        "mine": measure.spread(medians[0]),
        "other": measure.spread(medians[1]),
        "unit": "us",
        "ratio": measure.spread([one / other for one, other in zip(*medians, strict=True)]),
    }


def gaps(computed: Mapping[int, Sequence[Any]]) -> list[float]:
    """Microseconds from the end of each predicate to the start of the branch."""
    ran = sorted((one for of_host in computed.values() for one in of_host), key=lambda one: one.start)
    ends = [one.end for one in ran if "is_large" in one.name]
    starts = [one.start for one in ran if "there" in one.name]
    return [1e6 * (start - end) for end, start in zip(ends, starts, strict=True)]


def loops(a: Any, b: Any, length_ms: float, settings: Settings) -> dict[str, Any]:
    """Rounds in a second of a loop that decides, and of the same without."""
    import jax

    import pathways_ray as pw

    count = work_for(length_ms)

    def work(v: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda i, u: u * 0.999 + 0.001, v)

    there, back = pw.compiled(work, slice=b), pw.compiled(work, slice=a)
    turns = settings.turns
    go_on = pw.compiled(lambda k: k < turns, slice=a)
    start = pw.put(np.ones(1024, np.float32), a)
    looping = pw.program(
        lambda v: pw.while_loop(lambda c: go_on(c[0]), lambda c: (c[0] + 1, back(there(c[1]))), (np.int32(0), v))[1]
    )

    def unrolled_(v: Any) -> Any:
        for _ in range(turns):
            v = back(there(v))
        return v

    unrolled = pw.program(unrolled_)
    wanted = np.asarray(unrolled(start))
    np.testing.assert_array_equal(np.asarray(looping(start)), wanted)
    rates: dict[str, list[float]] = {"loop": [], "unrolled": []}
    for _ in range(settings.rounds):
        for name, program in (("loop", looping), ("unrolled", unrolled)):
            began = time.perf_counter()
            program(start).block_until_ready()
            rates[name].append(turns / (time.perf_counter() - began))
    return {
        "what": f"while_loop over two slices / unrolled, {length_ms:g} ms",
        "mine": measure.spread(rates["loop"]),
        "other": measure.spread(rates["unrolled"]),
        "unit": "rounds/s",
        "ratio": measure.spread([one / other for one, other in zip(*rates.values(), strict=True)]),
    }


def work_for(length_ms: float) -> int:
    """Rounds of a loop on 1,024 numbers that take so long on this machine."""
    import jax
    import jax.numpy as jnp

    def work(v: jax.Array, count: int) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda i, u: u * 0.999 + 0.001, v)

    timed = jax.jit(work)
    v, count = jnp.ones(1024), 10_000
    timed(v, count).block_until_ready()
    began = time.perf_counter()
    timed(v, count).block_until_ready()
    return max(1, round(count * length_ms * 1e-3 / (time.perf_counter() - began)))


show = shows(Table("decisions, and what they are compared with", "rows", "what", "mine", "other", "unit", "ratio:.2f"))

BENCHMARK = Benchmark("decisions", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
