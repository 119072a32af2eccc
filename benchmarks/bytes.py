"""Arrays in and out, beside what one socket between two processes carries: put, fetch, and from island to island.

Each round moves the same bytes by all ways in turn: over a raw TCP connection on loopback from another process; `put`
until the array is ready on the devices; `fetch`, `np.asarray` of it; `across`, from one island to the other by
`pw.reshard`, until it is ready there. On slices of one device and of four, sharded by rows. In a round more, with
the largest array, the most memory that the client and any host take meanwhile beyond what they had.

Trees: 20 leaves of the same bytes, resharded to the other island and another layout, beside one flat array that is; and
from every device to all.

Rows: of an array of 64 MiB the tenth that the data choose goes to the other island by `pw.route`, beside all of it by
`pw.reshard`; and there and back, by `pw.combine`.

Small ones: a call with an argument of 32 bytes that is still NumPy's, until its result is here, beside one with a
future; and 60 small results fetched leaf by leaf, by `jax.device_get`, and waited for, beside one of them.

Run it with `python -m benchmarks run bytes --json bytes.json`; it takes about two minutes. With `--large 4096` an array
of 4 GiB is put, goes to the other island and comes back, once; the machine needs memory for two and a half of it.
"""

from __future__ import annotations

import socket
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
PARTS = ("rows", "peaks", "large", "trees", "routed", "small")
PEER = """
import socket, ssl, sys
import numpy as np
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
if len(sys.argv) > 3:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*sys.argv[3:])
    peer = context.wrap_socket(peer, server_side=True)
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
    large: int = option(0, "of an array that goes to and fro once, in MiB")
    calls: int = option(300, "of each small call")


SMOKE = Settings((1,), (1,), rounds=1, trees=(1,), routed=1, large=2, calls=5)


class Raw:
    """A process that sends bytes over a TCP connection; encrypted with `tls`, a certificate and its key."""

    def __init__(self, most: int, tls: Sequence[str] = ()) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            self._process = subprocess.Popen([sys.executable, "-c", PEER, str(port), str(most), *tls])
            self._peer, _ = server.accept()
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.load_verify_locations(tls[0])
            self._peer = context.wrap_socket(self._peer)

    def receive(self, size: int) -> None:
        """Asks for `size` bytes and reads them into memory of their own."""
        room = memoryview(np.empty(size, np.uint8).data)
        self._peer.sendall(str(size).encode())
        while len(room):
            if not (count := self._peer.recv_into(room, min(len(room), MIB))):
                raise ConnectionError("the process that sends has ended")
            room = room[count:]

    def close(self) -> None:
        self._peer.close()
        self._process.wait()


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


class Ways:
    """The ways of an array, each waited for."""

    def __init__(self, here: Any, there: Any, mib: int) -> None:
        self.array = np.arange(mib * MIB // 4, dtype=np.float32).reshape(-1, 1024)
        self._here, self._there = here, there
        self.value: Any = None
        self.back: Any = None
        self.other: Any = None

    def put(self) -> None:
        import pathways_ray as pw

        self.value = pw.put(self.array, slice=self._here, spec=P("x")).block_until_ready()

    def fetch(self) -> None:
        self.back = np.asarray(self.value)

    def across(self) -> None:
        import pathways_ray as pw

        self.other = pw.reshard(self.value, self._there, P("x")).block_until_ready()

    def all(self) -> dict[str, Callable[[], None]]:
        return {"put": self.put, "fetch": self.fetch, "across": self.across}

    def check(self) -> None:
        """Raises `AssertionError` unless each brought the same bits."""
        np.testing.assert_array_equal(self.back, self.array)
        np.testing.assert_array_equal(np.asarray(self.other), self.array)


def rates(kinds: Mapping[str, Callable[[], None]], mib: int, rounds: int) -> dict[str, list[float]]:
    """MiB a second of each way in each round, in turn, after one that does not count."""
    found: dict[str, list[float]] = {way: [] for way in kinds}
    for number in range(rounds + 1):
        for way, move in kinds.items():
            took = seconds(move)
            if number:
                found[way].append(mib / took)
    return found


def moved(raw: Raw, here: Any, there: Any, mib: int, rounds: int) -> dict[str, Any]:
    """MiB a second of each way, and their ratios to the raw connection."""
    ways = Ways(here, there, mib)
    found = rates({"raw": lambda: raw.receive(ways.array.nbytes), **ways.all()}, mib, rounds)
    ways.check()
    ratios = {f"{way}_ratio": measure.paired_ratios(found[way], found["raw"]) for way in ways.all()}
    return {**{way: measure.spread(one) for way, one in found.items()}, **ratios}


def peaks(session: Any, here: Any, there: Any, mib: int) -> dict[str, Any]:
    """The most memory that client and hosts take for each way, divided by the bytes of the array."""
    from benchmarks.memory import buffers_left

    ways, found = Ways(here, there, mib), {}
    for way, move in ways.all().items():
        buffers_left(session)
        processes = measure.runtime_processes()
        peaks = measure.Peaks({n: p for n, p in processes.items() if n == "client" or n.startswith("HostExecutor")})
        move()
        grown = peaks.grown()
        for who, most in {"client": grown.pop("client"), "host": max(grown.values())}.items():
            found[f"{way}_{who}"] = most / ways.array.nbytes
    return found


def large(here: Any, there: Any, mib: int) -> dict[str, Any]:
    """Seconds that a large array takes, once. It is checked in pieces, and dropped where it is needed no more."""
    import pathways_ray as pw

    array = np.arange(mib * MIB // 4, dtype=np.uint32).reshape(-1, 1024)
    begun = time.perf_counter()
    value = pw.put(array, slice=here, spec=P("x")).block_until_ready()
    put = time.perf_counter()
    del array
    other = pw.reshard(value, there, P("x")).block_until_ready()
    across = time.perf_counter()
    del value
    back = np.asarray(other)
    fetched = time.perf_counter()
    for first in range(0, len(back), 4096):
        part = back[first : first + 4096]
        np.testing.assert_array_equal(part.ravel(), np.arange(first * 1024, first * 1024 + part.size, dtype=np.uint32))
    return {"mib": mib, "devices": here.size, "put": put - begun, "across": across - put, "fetch": fetched - across}


def trees(here: Any, there: Any, mib: int, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds to the other slice for a tree and for one array of its bytes, in turn."""
    import pathways_ray as pw

    rows = mib * MIB // 4 // TREE_LEAVES // 64 // 4 * 4
    tree = [np.full((rows, 64), k, np.float32) for k in range(TREE_LEAVES)]
    flat = np.concatenate(tree)
    found = []
    for name, spec in (("another", P(None, "x")), ("all devices", P())):
        source = pw.put({"tree": tree, "flat": flat}, slice=here, spec=P("x"))
        took, moved = dict[str, list[float]](flat=[], tree=[]), dict[str, Any]()
        for number in range(2 * rounds + 3):
            for what in measure.in_turn(("tree", "flat"), number):
                begun = time.perf_counter()
                moved[what] = pw.reshard(source[what], there, spec)
                jax.block_until_ready(moved[what])
                took[what].append(1e3 * (time.perf_counter() - begun))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(moved), {"flat": flat, "tree": tree})
        kinds = {what: measure.spread(times[3:]) for what, times in took.items()}
        ratio = measure.paired_ratios(took["tree"][3:], took["flat"][3:])
        found.append({"mib": mib, "layout": name, **kinds, "ratio": ratio})
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
    np.testing.assert_array_equal(np.asarray(pw.reshard(x, there, P("x"))), array)
    np.testing.assert_array_equal(np.asarray(part.rows)[: part.count], array[chosen])
    np.testing.assert_array_equal(np.asarray(back), np.where(chosen[:, None], array, 0))
    kinds = {what: measure.spread(times[3:]) for what, times in took.items()}
    ratio = measure.paired_ratios(took["dense"][3:], took["routed"][3:])
    return {"mib": mib, "devices": here.size, **kinds, "ratio": ratio}


def small(where: Any, calls: int) -> dict[str, Any]:
    """Microseconds of small calls, and the ratio of two, which are in turn by themselves: others leave work behind."""
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
        "waited": lambda: jax.block_until_ready(many(future)),
        "put": lambda: pw.put(value, slice=where, spec=P()).block_until_ready(),
    }
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for names in (("future", "numpy"), tuple(kinds)[2:]):
        for k in range(calls + 10):
            for name in measure.in_turn(names, k):
                took[name].append(1e6 * seconds(kinds[name]))
    took = {name: times[10:] for name, times in took.items()}
    for name, right in (("future", 3), ("numpy", 2), ("put", 1), ("leaves", [[2 + k] * 8 for k in range(LEAVES)])):
        np.testing.assert_array_equal(jax.device_get(kinds[name]()), right)
    tenths = [slice(first, first + max(calls // 10, 1)) for first in range(0, calls, max(calls // 10, 1))]
    ratios = [statistics.median(took["numpy"][k]) / statistics.median(took["future"][k]) for k in tenths]
    medians = {name: statistics.median(times) for name, times in took.items()}
    return {**medians, "numpy_ratio": measure.spread(ratios)}


def run(settings: Settings, progress: Progress) -> Result:
    """Measures on a cluster of its own; saves what there is after each slice."""
    import pathways_ray as pw

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in PARTS}
    raw = Raw(max(settings.sizes) * MIB)
    try:
        with pw.init(islands=2, devices_per_host=max(settings.devices)) as session:
            with pw.virtual_slice((1,), ("x",), island=0) as one:
                progress.say("small calls")
                found["small"].append(small(one, settings.calls))
            for devices in settings.devices:
                with (
                    pw.virtual_slice((devices,), ("x",), island=0) as here,
                    pw.virtual_slice((devices,), ("x",), island=1) as there,
                ):
                    for mib in settings.sizes:
                        progress.say(f"{mib} MiB on {devices} devices")
                        one_size = moved(raw, here, there, mib, settings.rounds)
                        found["rows"].append({"devices": devices, "mib": mib, **one_size})
                    mib = max(settings.sizes)
                    found["peaks"].append({"devices": devices, "mib": mib, **peaks(session, here, there, mib)})
                    progress.say(f"rows on {devices} devices")
                    found["routed"].append(routed(here, there, settings.routed, settings.rounds))
                    progress.save(result_of(found))
                    if devices == settings.devices[-1]:
                        progress.say("trees")
                        for mib in settings.trees:
                            found["trees"] += trees(here, there, mib, settings.rounds)
                        progress.save(result_of(found))
                        if settings.large:
                            progress.say(f"{settings.large} MiB")
                            found["large"].append(large(here, there, settings.large))
    finally:
        raw.close()
    return result_of(found)


def result_of(found: Mapping[str, list[dict[str, Any]]]) -> Result:
    """The result with these rows, and their figures."""
    made = [*figures(found["rows"]), *peak_figures(found["peaks"]), *tree_figures(found["trees"])]
    made += [*routed_figures(found["routed"]), *(one for calls in found["small"] for one in small_figures(calls))]
    return {"measured": " ".join((__doc__ or "").split("\n\n")[1].split()), **found, "figures": made}


def figures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ratios of all arrays to the raw connection."""
    ways = {"put": "put", "fetch": "fetch", "across": "island to island"}
    return [
        {"name": f"{name}, {r['mib']} MiB, {r['devices']} devices, of a raw socket", "unit": "x", **r[f"{way}_ratio"]}
        for r in rows
        for way, name in ways.items()
    ]


def peak_figures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The most that client and hosts took for any way."""
    return [
        {
            "name": f"peak memory / array, {r['mib']} MiB, {r['devices']} devices, {who}",
            "unit": "x",
            "median": max(value for name, value in r.items() if name.endswith(f"_{who}")),
        }
        for r in rows
        for who in ("client", "host")
    ]


def small_figures(calls: dict[str, Any]) -> list[dict[str, Any]]:
    """The time of a call with an argument of this process against that with a future."""
    return [{"name": "call with 32 bytes of NumPy / with a future", "unit": "x", **calls["numpy_ratio"]}]


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
        "the most memory that client and hosts took, ÷ the array",
        "peaks",
        *("devices", "mib", "put_client:.2f", "put_host:.2f", "fetch_client:.2f", "fetch_host:.2f"),
        *("across_client:.2f", "across_host:.2f"),
    ),
    Table("a large array, s", "large", "devices", "mib", "put:.2f", "across:.2f", "fetch:.2f"),
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
        *("future:.0f", "numpy:.0f", "numpy_ratio:.2f", "one_leaf:.0f", "leaves:.0f", "device_get:.0f"),
        *("waited:.0f", "put:.0f"),
    ),
)

BENCHMARK = Benchmark("bytes", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
