"""Arrays in and out, beside what one socket between two processes carries: put, fetch, and from island to island.

Each round moves the same bytes by all ways in turn: over a raw TCP connection on loopback from another process; `put`
until the array is ready on the devices; `fetch`, `np.asarray` of it; from one island to the other, until the result of
a function that hands it on is ready there. On slices of one device and of four, sharded by rows.

Trees: 20 leaves of the same bytes, resharded to the other island and another layout, beside one flat array that is; and
from every device to all.

Rows: of an array of 64 MiB the tenth that the data choose goes to the other island by `pw.route`, beside all of it by
`pw.reshard`; and there and back, by `pw.combine`.

Small ones: a call with an argument of 32 bytes that is still NumPy's, until its result is here, beside one with a
future; and 60 small results fetched leaf by leaf, beside one of them.

Run it with `python -m benchmarks run bytes --json bytes.json`; it takes about a minute.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
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
LEAVES = 60
TREE_LEAVES = 20
PEER = """
import socket, sys
import numpy as np
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
data = np.ones(int(sys.argv[2]), np.uint8)
while size := peer.recv(64):
    peer.sendall(data[: int(size)])
"""


@dataclass(frozen=True)
class Settings:
    sizes: tuple[int, ...] = option((16, 64, 256), "of the array, in MiB")
    devices: tuple[int, ...] = option((1, 4), "of each slice")
    rounds: int = option(5, "that count, after one that does not")
    trees: tuple[int, ...] = option((1, 2, 25), "of each tree, in MiB")
    routed: int = option(64, "of the array of which rows are routed, in MiB")
    calls: int = option(300, "of each small call")


SMOKE = Settings((1,), (1,), rounds=1, trees=(1,), routed=1, calls=5)


class Raw:
    """A process that sends bytes over a TCP connection."""

    def __init__(self, most: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            self._process = subprocess.Popen([sys.executable, "-c", PEER, str(port), str(most)])
            self._peer, _ = server.accept()

    def receive(self, size: int) -> None:
        """Asks for `size` bytes and reads them into memory of their own."""
        room = memoryview(np.empty(size, np.uint8).data)
        self._peer.sendall(str(size).encode())
        while len(room):
            room = room[self._peer.recv_into(room, min(len(room), MIB)) :]

    def close(self) -> None:
        self._peer.close()
        self._process.wait()


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def moved(raw: Raw, here: Any, there: Any, mib: int, rounds: int) -> dict[str, Any]:
    """MiB a second of each way, and their ratios to the raw connection."""
    import pathways_ray as pw

    array = np.arange(mib * MIB // 4, dtype=np.float32).reshape(-1, 1024)
    hand_on = pw.compiled(lambda v: v, slice=there, in_specs=P("x"), out_specs=P("x"))
    found: dict[str, list[float]] = {"raw": [], "put": [], "fetch": [], "across": []}
    for _ in range(rounds + 1):
        took = {"raw": seconds(lambda: raw.receive(array.nbytes))}
        begun = time.perf_counter()
        value = pw.put(array, slice=here, spec=P("x")).block_until_ready()
        took["put"] = time.perf_counter() - begun
        begun = time.perf_counter()
        back = np.asarray(value)
        took["fetch"] = time.perf_counter() - begun
        begun = time.perf_counter()
        other = hand_on(value).block_until_ready()
        took["across"] = time.perf_counter() - begun
        for way, one in took.items():
            found[way].append(mib / one)
    np.testing.assert_array_equal(back, array)
    np.testing.assert_array_equal(np.asarray(other), array)
    counted = {way: rates[1:] for way, rates in found.items()}
    ratios = {
        f"{way}_ratio": measure.spread([a / b for a, b in zip(rates, counted["raw"], strict=True)])
        for way, rates in counted.items()
        if way != "raw"
    }
    return {**{way: measure.spread(rates) for way, rates in counted.items()}, **ratios}


def trees(here: Any, there: Any, mib: int, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds to the other slice for a tree and for one array of its bytes, in turn."""
    import pathways_ray as pw

    rows = mib * MIB // 4 // TREE_LEAVES // 64 // 4 * 4
    tree = [np.full((rows, 64), k, np.float32) for k in range(TREE_LEAVES)]
    flat = np.concatenate(tree)
    found = []
    for name, spec in (("another", P(None, "x")), ("all devices", P())):
        source = pw.put(tree, slice=here, spec=P("x")), pw.put(flat, slice=here, spec=P("x"))
        took: dict[str, list[float]] = {"flat": [], "tree": []}
        for _ in range(2 * rounds + 3):
            for what, value in zip(("tree", "flat"), source, strict=True):
                begun = time.perf_counter()
                moved = pw.reshard(value, there, spec)
                jax.block_until_ready(moved)
                took[what].append(1e3 * (time.perf_counter() - begun))
        np.testing.assert_array_equal(np.asarray(moved), flat)
        counted = {what: times[3:] for what, times in took.items()}
        ratios = [a / b for a, b in zip(counted["tree"], counted["flat"], strict=True)]
        kinds = {what: measure.spread(times) for what, times in counted.items()}
        found.append({"mib": mib, "layout": name, **kinds, "ratio": measure.spread(ratios)})
    return found


def routed(here: Any, there: Any, mib: int, rounds: int) -> dict[str, Any]:
    """Milliseconds to the other slice for a tenth of the rows and for all of them, in turn."""
    import pathways_ray as pw

    array = np.random.default_rng(0).standard_normal((mib * MIB // 1024, 256), np.float32)
    chosen = np.random.default_rng(1).random(len(array)) < 0.1
    x, to = pw.put(array, here, P("x")), pw.put(np.where(chosen, 0, -1).astype(np.int32), here, P("x"))
    took: dict[str, list[float]] = {"dense": [], "routed": [], "back": []}
    for _ in range(2 * rounds + 3):
        begun = time.perf_counter()
        pw.reshard(x, there, P("x")).block_until_ready()
        dense = time.perf_counter()
        (part,), handle = pw.route(x, to, [there], spec=P("x"))
        part.rows.block_until_ready()
        there_at = time.perf_counter()
        back = pw.combine([part], handle).block_until_ready()
        for what, start, end in (("dense", begun, dense), ("routed", dense, there_at), ("back", there_at, None)):
            took[what].append(1e3 * ((time.perf_counter() if end is None else end) - start))
    np.testing.assert_array_equal(np.asarray(part.rows)[: part.count], array[chosen])
    np.testing.assert_array_equal(np.asarray(back), np.where(chosen[:, None], array, 0))
    counted = {what: times[3:] for what, times in took.items()}
    ratios = [a / b for a, b in zip(counted["dense"], counted["routed"], strict=True)]
    kinds = {what: measure.spread(times) for what, times in counted.items()}
    return {"mib": mib, "devices": here.size, **kinds, "ratio": measure.spread(ratios)}


def small(where: Any, calls: int) -> dict[str, float]:
    """Microseconds of small calls, the kinds in turn."""
    import pathways_ray as pw

    step = pw.compiled(lambda v: v + 1, slice=where, in_specs=P(), out_specs=P())
    many = pw.compiled(lambda v: [v + k for k in range(LEAVES)], slice=where, in_specs=P(), out_specs=P())
    value = np.ones(8, np.float32)
    future = step(value)
    kinds: dict[str, Callable[[], Any]] = {
        "future": lambda: np.asarray(step(future)),
        "numpy": lambda: np.asarray(step(value)),
        "one_leaf": lambda: np.asarray(many(future)[0]),
        "leaves": lambda: jax.tree.map(np.asarray, many(future)),
        "device_get": lambda: jax.device_get(many(future)),
        "put": lambda: pw.put(value, slice=where, spec=P()).block_until_ready(),
    }
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for k in range(calls + 10):
        for name, call in kinds.items():
            one = seconds(call)
            if k >= 10:
                took[name].append(1e6 * one)
    return {name: statistics.median(times) for name, times in took.items()}


def run(settings: Settings, progress: Progress) -> Result:
    """Measures on a cluster of its own."""
    import pathways_ray as pw

    rows: list[dict[str, Any]] = []
    leaves: list[dict[str, Any]] = []
    chosen: list[dict[str, Any]] = []
    raw = Raw(max(settings.sizes) * MIB)
    try:
        with pw.init(islands=2, devices_per_host=max(settings.devices)):
            for devices in settings.devices:
                with (
                    pw.virtual_slice((devices,), ("x",), island=0) as here,
                    pw.virtual_slice((devices,), ("x",), island=1) as there,
                ):
                    for mib in settings.sizes:
                        progress.say(f"{mib} MiB on {devices} devices")
                        rows.append({"devices": devices, "mib": mib, **moved(raw, here, there, mib, settings.rounds)})
                    progress.say(f"rows on {devices} devices")
                    chosen.append(routed(here, there, settings.routed, settings.rounds))
                    if devices == settings.devices[-1]:
                        progress.say("trees")
                        for mib in settings.trees:
                            leaves += trees(here, there, mib, settings.rounds)
            with pw.virtual_slice((1,), ("x",), island=0) as one:
                calls = small(one, settings.calls)
    finally:
        raw.close()
    return {
        "measured": " ".join(__doc__.split("\n\n")[1].split()),
        "rows": rows,
        "trees": leaves,
        "routed": chosen,
        "small": [{**calls, "numpy_ratio": calls["numpy"] / calls["future"]}],
        "figures": figures(rows) + tree_figures(leaves) + routed_figures(chosen),
    }


def figures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ratios of the largest array on the most devices."""
    ways = {"put": "put", "fetch": "fetch", "across": "island to island"}
    return [
        {"name": f"{name}, {rows[-1]['mib']} MiB, of a raw socket", "unit": "x", **rows[-1][f"{way}_ratio"]}
        for way, name in ways.items()
    ]


def tree_figures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The time of each tree against that of one array."""
    return [
        {"name": f"tree of {TREE_LEAVES} leaves / one array, {r['mib']} MiB, {r['layout']}", "unit": "x", **r["ratio"]}
        for r in rows
    ]


def routed_figures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The time of all rows against that of the tenth that is routed."""
    return [
        {"name": f"all rows / a tenth routed, {r['mib']} MiB, {r['devices']} devices", "unit": "x", **r["ratio"]}
        for r in rows
    ]


show = shows(
    Table(
        "arrays, MiB a second, and ÷ a raw socket",
        "rows",
        *("devices", "mib", "raw:.0f", "put:.0f", "put_ratio:.2f", "fetch:.0f", "fetch_ratio:.2f"),
        *("across:.0f", "across_ratio:.2f"),
    ),
    Table(
        f"a tree of {TREE_LEAVES} leaves and one array of its bytes to another island and layout, ms",
        "trees",
        *("mib", "layout", "tree:.1f", "flat:.1f", "ratio:.2f"),
    ),
    Table(
        "all rows and a tenth routed to another island, and these back, ms",
        "routed",
        *("mib", "devices", "dense:.1f", "routed:.1f", "back:.1f", "ratio:.2f"),
    ),
    Table(
        "small calls, us",
        "small",
        *("future:.0f", "numpy:.0f", "numpy_ratio:.2f", "one_leaf:.0f", "leaves:.0f", "device_get:.0f", "put:.0f"),
    ),
)

BENCHMARK = Benchmark("bytes", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
