"""Requests a second of one model that several threads or processes call, beside `jax.jit` in one process.

The model is three dense layers with weights that were placed once. A request is a NumPy batch of 1 to 32 rows, padded
to the next of six sizes (`pw.padded`; for JAX the same padding); its caller waits for the result as NumPy, looks at it,
and makes the next. Callers are threads of one client, or clients in processes of their own, each with one thread;
`joined` are threads of a client that has calls computed together which come while others are under way
(`join_calls=True`). All clients are of one tenant, as the processes of one service are: each session with the
operator's token would be a tenant of its own. JAX has as many threads, in one process.

`bare` is the floor of what any server in another process can do: a thread for each connection, which reads a batch from
a socket, calls `jax.jit`, and writes the result.

Run it with `python -m benchmarks.serving --json serving.json`; it takes about two minutes. With `--host-threads 1` the
host has the setting that the guide has for callers that keep its cores busy; JAX keeps its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows
from benchmarks.workers import Worker, answers, ask_all

SIZES = (1, 2, 4, 8, 16, 32)
JOINED_SIZES = (*SIZES, 64, 128)
SYSTEMS = ("pathways", "joined", "bare", "jax")
BATCHES = 64
TOLERANCE = 1e-3
"""Of a value against NumPy's, which adds in another order."""

LIMIT_S = 180.0

COUNT = struct.Struct("!I")

RATIOS = {"pathways": "{}", "joined": "{}, joined", "bare": "bare server: {}"}
"""The names of ratios, by system."""

TOKEN = "the-token-of-the-service"
TENANTS = {"tenants": [{"name": "service", "token": TOKEN}]}

MEASURED = (
    "Batches of 1 to 32 rows, padded to the next of {sizes}, through dense layers of {layers} on one device of one "
    "host; each caller waits for a result before its next request; all are of one tenant. {seconds:g} s each, {rounds} "
    "rounds after one to warm up, all systems alive and measured in turn; ratios are taken round by round.{host}"
)


@dataclass(frozen=True)
class Settings:
    threads: tuple[int, ...] = option((1, 8), "callers in one client")
    processes: tuple[int, ...] = option((4,), "callers that are clients of their own")
    layers: tuple[int, ...] = option((256, 512, 256, 10), "widths of the model")
    seconds: float = option(1.5, "of one measurement")
    rounds: int = option(5)
    host_threads: int = option(0, "NPROC of the host, as the guide says for callers that keep its cores busy; 0: unset")


SMOKE = Settings(threads=(2,), processes=(2,), seconds=0.1, rounds=1)

Predict = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


def weights(layers: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """The same for all systems: (inputs, outputs) of each layer, float32."""
    random = np.random.default_rng(0)
    pairs = itertools.pairwise(layers)
    return [(random.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32) for shape in pairs]


def batches(width: int) -> list[np.ndarray[Any, Any]]:
    """Batches of 1 to 32 rows, the same for all systems."""
    random = np.random.default_rng(1)
    return [
        random.standard_normal((int(random.integers(1, max(SIZES) + 1)), width)).astype(np.float32)
        for _ in range(BATCHES)
    ]


def padded(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A batch with zeros behind it, up to the next of the sizes."""
    filled = np.zeros((next(size for size in SIZES if size >= len(rows)), rows.shape[1]), rows.dtype)
    filled[: len(rows)] = rows
    return filled


def model(layers: Any, rows: Any) -> Any:
    """(batch, inputs) -> (batch, outputs); for JAX and for NumPy."""
    *hidden, last = layers
    for layer in hidden:
        rows = rows @ layer
        rows = rows * (rows > 0)
    return rows @ last


class Load:
    """Callers of a model, in threads of this process."""

    def __init__(self, predict: Predict, layers: Sequence[int]) -> None:
        self._predict = predict
        self._batches = batches(layers[0])
        self._expected = [model(weights(layers), rows) for rows in self._batches]

    def latencies(self, threads: int, seconds: float) -> list[float]:
        """Seconds of each request that these threads made in this time."""
        found: list[list[float]] = [[] for _ in range(threads)]
        errors: list[BaseException] = []
        ready = threading.Barrier(threads)

        def call(number: int) -> None:
            try:
                ready.wait(LIMIT_S)
                end = time.perf_counter() + seconds
                for turn in itertools.count(number * BATCHES // threads):
                    begun = time.perf_counter()
                    if begun > end:
                        return
                    value = self._predict(self._batches[turn % BATCHES])
                    found[number].append(time.perf_counter() - begun)
                    if not np.allclose(value, self._expected[turn % BATCHES], TOLERANCE, TOLERANCE):
                        raise AssertionError(f"batch {turn % BATCHES} came to {value}")
            except BaseException as error:
                errors.append(error)

        callers = [threading.Thread(target=call, args=(number,)) for number in range(threads)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        if errors:
            raise errors[0]
        return [one for ones in found for one in ones]


class Client:
    """A client of the cluster, with a load of its own."""

    def __init__(self, url: str, token: str, layers: Sequence[int]) -> None:
        import pathways_ray as pw

        self._session = pw.connect(url, token)
        where = self._session.virtual_slice((1,), ("x",))
        placed = pw.put(weights(layers), where)
        compiled = pw.compiled(model, slice=where)
        self._loads = {}
        for join_calls, sizes in ((False, SIZES), (True, JOINED_SIZES)):
            serve = pw.padded(compiled, sizes=sizes, in_axes=(None, 0), join_calls=join_calls)
            pw.warmup(serve, (placed, np.zeros((1, layers[0]), np.float32)))
            self._loads[join_calls] = Load(functools.partial(serve, placed), layers)

    def latencies(self, threads: int, seconds: float, join_calls: bool = False) -> list[float]:
        """See `Load.latencies`."""
        return self._loads[join_calls].latencies(threads, seconds)

    def close(self) -> None:
        self._session.close()


class Jax:
    """`jax.jit` on one device of this process, with the same load."""

    def __init__(self, layers: Sequence[int]) -> None:
        import jax

        placed = jax.device_put(weights(layers))
        jitted = jax.jit(model)

        def predict(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return np.asarray(jitted(placed, padded(rows)))[: len(rows)]

        self.latencies = Load(predict, layers).latencies


class BareServer:
    """`jax.jit` of the model behind sockets. A request is the number of rows, then the rows; the answer its result."""

    def __init__(self, layers: Sequence[int]) -> None:
        import jax

        self._placed, self._jitted, self._width = jax.device_put(weights(layers)), jax.jit(model), layers[0]
        for size in SIZES:
            self._answer(np.zeros((size, self._width), np.float32))
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _answer(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.asarray(self._jitted(self._placed, rows))

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while header := connection.recv(COUNT.size, socket.MSG_WAITALL):
            rows = np.empty((COUNT.unpack(header)[0], self._width), np.float32)
            connection.recv_into(rows.data, 0, socket.MSG_WAITALL)
            connection.sendall(self._answer(rows).data)


class BareClient:
    """Callers of a bare server, each with a connection of its own."""

    def __init__(self, port: int, layers: Sequence[int]) -> None:
        connections = threading.local()

        def predict(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            if not hasattr(connections, "own"):
                connections.own = socket.create_connection(("127.0.0.1", port))
                connections.own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            filled = padded(rows)
            connections.own.sendmsg([COUNT.pack(len(filled)), filled.data])
            result = np.empty((len(filled), layers[-1]), np.float32)
            connections.own.recv_into(result.data, 0, socket.MSG_WAITALL)
            return result[: len(rows)]

        self.latencies = Load(predict, layers).latencies


def run(settings: Settings, progress: Progress) -> Result:
    """Measures on a cluster of its own."""
    import pathways_ray as pw

    cases = [("threads", n) for n in settings.threads] + [("processes", n) for n in settings.processes]
    with contextlib.ExitStack() as stack:
        table = Path(stack.enter_context(tempfile.TemporaryDirectory()), "tenants.json")
        table.write_text(json.dumps(TENANTS))
        with _nproc(settings.host_threads):
            session = stack.enter_context(pw.init(devices_per_host=1, tenants=str(table)))
        several = max(settings.processes, default=1)
        clients = [Worker(Client, session.url, TOKEN, settings.layers) for _ in range(max(several, 1))]
        jax, server = Worker(Jax, settings.layers), Worker(BareServer, settings.layers)
        for worker in (*clients, jax, server):
            stack.callback(worker.close, 30)
        progress.say(f"{len(clients)} clients, JAX and a bare server: starting")
        answers([*clients, jax, server], LIMIT_S)
        bare = [Worker(BareClient, server.ask("port"), settings.layers) for _ in clients]
        for worker in bare:
            stack.callback(worker.close, 30)
        answers(bare, LIMIT_S)

        def latencies(case: tuple[str, str, int]) -> list[float]:
            system, callers, count = case
            workers = {"jax": [jax], "bare": bare}.get(system, clients)
            if callers == "processes" and system != "jax":
                each = ask_all(workers[:count], "latencies", 1, settings.seconds, limit_s=LIMIT_S)
                return [one for ones in each for one in ones]
            joins = (True,) if system == "joined" else ()
            return list(workers[0].ask("latencies", count, settings.seconds, *joins))

        every = [
            (system, *case) for case in cases for system in SYSTEMS if (system, case[0]) != ("joined", "processes")
        ]
        samples = measure.interleaved(every, latencies, settings.rounds)
    return _result(settings, samples)


@contextlib.contextmanager
def _nproc(threads: int) -> Iterator[None]:
    """Starts hosts whose XLA computes with so many threads. Processes that start later have what they had before."""
    before = os.environ.get("NPROC")
    if threads:
        os.environ["NPROC"] = str(threads)
    try:
        yield
    finally:
        os.environ.pop("NPROC", None)
        if before is not None:
            os.environ["NPROC"] = before


def _result(settings: Settings, samples: dict[tuple[str, str, int], list[list[float]]]) -> Result:
    rates = {case: [len(one) / settings.seconds for one in ones] for case, ones in samples.items()}
    last = {case: [1e3 * measure.p99(one) for one in ones] for case, ones in samples.items()}
    return {
        "measured": MEASURED.format(
            sizes=SIZES,
            layers=settings.layers,
            seconds=settings.seconds,
            rounds=settings.rounds,
            host=f" NPROC={settings.host_threads} for the host alone." if settings.host_threads else "",
        ),
        "rows": [
            {
                "system": case[0],
                "callers": f"{case[2]} {case[1]}",
                "requests_per_second": measure.spread(rates[case]),
                "p50_ms": measure.spread([1e3 * statistics.median(one) for one in ones]),
                "p99_ms": measure.spread(last[case]),
            }
            for case, ones in samples.items()
        ],
        "ratios": [
            {"name": RATIOS[system].format(f"{what} / jax.jit in one process, {count} {callers}")}
            | measure.paired_ratios(ones, of["jax", callers, count])
            for what, of in (("requests a second", rates), ("p99 of a request", last))
            for (system, callers, count), ones in of.items()
            if system != "jax"
        ],
    }


show = shows(
    Table("requests", "rows", "system", "callers", "requests_per_second", "p50_ms:.2f", "p99_ms:.2f"),
    Table("ratios, round by round", "ratios", "name", ".:.2f"),
)

BENCHMARK = Benchmark("serving", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
