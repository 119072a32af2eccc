"""Sessions that are suspended and resumed, beside fetching and putting their arrays.

Four arrays lie on slices of two devices, on two islands in turn. Each round puts them, fetches them with `np.asarray`,
suspends their session to host memory and resumes it, and then does so with a directory. Each is timed until all arrays
are there. In the end they must have the bits that they had.

Run it with `python -m benchmarks run suspending --json suspending.json`; it takes about a minute.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows

MIB = 1 << 20
ARRAYS = 4


@dataclass(frozen=True)
class Settings:
    sizes: tuple[int, ...] = option((1, 64, 256), "of all arrays together, in MiB")
    rounds: int = option(5, "that count, after one that does not")


SMOKE = Settings((1,), rounds=1)


class Held:
    """A session with arrays."""

    def __init__(self, session: Any, mib: int) -> None:
        self.session = session
        self.slices = [session.virtual_slice((2,), ("x",), island=k % 2) for k in range(ARRAYS)]
        rows = mib * MIB // ARRAYS // 4096
        self.arrays = [np.full((rows, 1024), k, np.float32) for k in range(ARRAYS)]
        self.values: list[Any] = []

    def put(self) -> None:
        import pathways_ray as pw

        pairs = zip(self.arrays, self.slices, strict=True)
        self.values = [pw.put(array, slice=where, spec=P("x")) for array, where in pairs]
        jax.block_until_ready(self.values)

    def fetch(self) -> list[np.ndarray[Any, Any]]:
        return [np.asarray(value) for value in self.values]

    def close(self) -> None:
        """Raises `AssertionError` unless the arrays are what they were."""
        for found, array in zip(self.fetch(), self.arrays, strict=True):
            np.testing.assert_array_equal(found, array)
        self.session.close()


def measured(session: Any, mib: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each step, and what they are of a fetch and of a put."""
    held = Held(session, mib)
    took: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[[], Any]) -> None:
        begun = time.perf_counter()
        work()
        took.setdefault(what, []).append(1e3 * (time.perf_counter() - begun))

    for _ in range(rounds + 1):
        timed("put", held.put)
        timed("fetch", held.fetch)
        timed("suspend", held.session.suspend)
        timed("resume", held.session.resume)
        with tempfile.TemporaryDirectory() as folder:
            timed("to_files", lambda: held.session.suspend(f"{folder}/session"))
            timed("from_files", held.session.resume)
    held.close()
    counted = {what: times[1:] for what, times in took.items()}
    ratios = {
        f"{step}_ratio": measure.paired_ratios(counted[step], counted[beside])
        for step, beside in (("suspend", "fetch"), ("resume", "put"))
    }
    return {"mib": mib, **{what: measure.spread(times) for what, times in counted.items()}, **ratios}


def run(settings: Settings, progress: Progress) -> Result:
    """Measures with sessions of their own on one cluster."""
    import pathways_ray as pw

    rows: list[dict[str, Any]] = []
    with pw.init(islands=2, devices_per_host=2) as cluster:
        for mib in settings.sizes:
            progress.say(f"{mib} MiB")
            session = pw.connect(cluster.url, cluster.token, name=f"{mib} MiB")
            rows.append(measured(session, mib, settings.rounds))
    return {"measured": " ".join(__doc__.split("\n\n")[1].split()), "rows": rows, "figures": figures(rows)}


def figures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ratios of each size."""
    return [
        {"name": f"{step} / {beside}, {row['mib']} MiB", "unit": "x", **row[f"{step}_ratio"]}
        for row in rows
        for step, beside in (("suspend", "fetch"), ("resume", "put"))
    ]


show = shows(
    Table(
        f"{ARRAYS} arrays, ms",
        "rows",
        *("mib", "fetch:.0f", "suspend:.0f", "suspend_ratio:.2f", "put:.0f", "resume:.0f", "resume_ratio:.2f"),
        *("to_files:.0f", "from_files:.0f"),
    )
)

BENCHMARK = Benchmark("suspending", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
