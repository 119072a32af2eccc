"""The cost of being seen: dispatch with the records of launches, and with a page that is read, against neither.

Three clusters are alive at a time, each a host with four devices, and take turns: one whose processes keep no records
and that nobody looks at, one as users have it, with records, and one whose page is open in a browser beside it. Each
round is a stream of launches, none waited for but the last. Once with runs of small launches as one computation
(`coalesced`), and once with each launch a message of its own (`alone`: `fusion=False, coalesce=False`). And the
controller's CPU time for a look at everything, of 512 hosts in 64 islands with 100 sessions that are simulated: a page
makes one a second, however many browsers have it open.

Run it with `python -m benchmarks.observing --json observing.json`; it takes about three minutes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.cores import devices_apart
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows
from benchmarks.workers import Worker

DEVICES = 4

OFF, RECORDS, SEEN = "nothing", "records", "records and an open page"

COALESCED, ALONE = "coalesced", "alone"

LIMIT_S = 120.0


@dataclass(frozen=True)
class Settings:
    launches: int = option(40_000, "of a stream that are coalesced")
    alone: int = option(8_000, "of a stream in which each is a message")
    rounds: int = option(9, "of each stream")
    streams: tuple[str, ...] = option((COALESCED, ALONE), "that are measured", choices=(COALESCED, ALONE))
    looks: int = option(30, "at 512 hosts that are simulated")


SMOKE = Settings(launches=200, alone=200, rounds=1, looks=1)


class Watched:
    """A cluster that is or is not looked at; made in a process of its own."""

    def __init__(self, seen: str, fusion: bool) -> None:
        if seen == OFF:
            folder = str(Path(__file__).with_name("without_records"))
            os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        import numpy as np
        from jax.sharding import PartitionSpec as P

        import pathways_ray as pw

        self.session = pw.init(devices_per_host=DEVICES, fusion=fusion, coalesce=fusion, dashboard=seen == SEEN)
        where = pw.virtual_slice((DEVICES,), ("x",))
        self.step = pw.compiled(lambda v: v + 1, slice=where, in_specs=P("x"), out_specs=P("x"))
        self.start = pw.put(np.zeros(DEVICES, np.float32), slice=where, spec=P("x"))
        self.read = 0
        if seen == SEEN:
            threading.Thread(target=self._browse, daemon=True).start()

    def stream(self, count: int) -> tuple[float, float]:
        """Seconds of a stream of launches, each with the result of the one before; and those of all processors, for
        client, controller, scheduler and host together."""
        import numpy as np

        processes = list(measure.runtime_processes().values())
        used, began = _cpu_s(processes), time.perf_counter()
        value = self.start
        for _ in range(count):
            value = self.step(value)
        found = np.asarray(value)
        if found.tolist() != [float(count)] * DEVICES:
            raise AssertionError(f"after {count} launches the value is {found}")
        return time.perf_counter() - began, _cpu_s(processes) - used

    def bytes_read(self) -> int:
        """Bytes that the browser has got."""
        return self.read

    def close(self) -> None:
        self.session.close()

    def _browse(self) -> None:
        base, _, token = self.session.dashboard_url.partition("/?token=")
        request = urllib.request.Request(f"{base}/events", headers={"Authorization": f"Bearer {token}"})
        with contextlib.suppress(OSError), urllib.request.urlopen(request) as page:
            while line := page.readline():
                self.read += len(line)


def _cpu_s(processes: Sequence[Any]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def run(settings: Settings, progress: Progress) -> Result:
    """Measures on clusters of its own; what is known is saved after each round."""
    result: Result = {"rows": [], "ratios": [], "figures": [_of_looks(settings.looks)]}
    with devices_apart() as apart:
        result["devices_apart"] = apart
        for how in settings.streams:
            progress.say(how)
            count = settings.launches if how == COALESCED else settings.alone
            for found in _turns(how == COALESCED, count, settings.rounds):
                _note(result, how, count, found)
                progress.save(result)
    return result


def _of_looks(count: int) -> dict[str, Any]:
    from benchmarks import looks

    return {"name": "look at 512 hosts, 100 sessions", "unit": "ms", **measure.spread(looks.measured(count))}


def _note(result: Result, how: str, count: int, found: dict[str, list[tuple[float, float]]]) -> None:
    """Puts the rounds so far of one kind of stream in place of those before."""
    rows, ratios = [], []
    for seen, rounds in found.items():
        seconds, cpu = ([one[k] for one in rounds] for k in (0, 1))
        us, cpu_us = (measure.spread([1e6 * s / count for s in values]) for values in (seconds, cpu))
        rows.append({"launches": how, "seen": seen, "us": us, "cpu_us": cpu_us})
        if seen != OFF:
            for k, what in enumerate((f"{seen} / nothing", f"CPU time, nothing / {seen}")):
                against = measure.paired_ratios([one[k] for one in found[OFF]], [one[k] for one in rounds])
                ratios.append({"name": f"{what}, {how}", **against})  # of rates, and of times: less than 1 costs
    result["rows"] = [row for row in result["rows"] if row["launches"] != how] + rows
    result["ratios"] = [one for one in result["ratios"] if not one["name"].endswith(how)] + ratios


def _turns(fusion: bool, count: int, rounds: int) -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Seconds of the rounds so far on each of three clusters, which take turns in an order that changes."""
    names = (OFF, RECORDS, SEEN)
    workers: dict[str, Worker] = {}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    try:
        for name in names:
            workers[name] = Worker(Watched, name, fusion, daemon=False)
            workers[name].answer()  # one after the other: they share the cores
            workers[name].ask("stream", min(count, 2000))
        for number in range(rounds):
            for k in range(len(names)):
                name = names[(number + k) % len(names)]
                found[name].append(workers[name].ask("stream", count))
            yield found
        if not workers[SEEN].ask("bytes_read"):
            raise RuntimeError("nobody has read the page")
    finally:
        for worker in workers.values():
            worker.close(LIMIT_S)


show = shows(
    Table("streams of launches, us a launch", "rows", "launches", "seen", "us:.2f", "cpu_us:.2f"),
    Table("CPU of the controller", "figures", "name", "median:.1f", "min:.1f", "max:.1f", "unit"),
    Table("speed, to that without records and looks", "ratios", "name", "median:.3f", "min:.3f", "max:.3f"),
)

BENCHMARK = Benchmark("observing", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
