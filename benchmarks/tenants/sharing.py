"""A cluster with many clients on the same devices, and the measurements of the tenants benchmark on it."""

from __future__ import annotations

import contextlib
import json
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

import pathways_ray as pw
from benchmarks import measure
from benchmarks.tenants import interleaving
from benchmarks.tenants.clients import Client, Task, in_flight
from benchmarks.tenants.interleaving import Gang
from benchmarks.workers import Worker, answers, ask_all

WEIGHTS = (1, 2, 4, 8)
LEAD_S = 0.05  # between telling processes to begin and the beginning: all of them have read it by then
RAMP_S = 0.2  # between the beginning and the span that counts: device queues fill, as they do once in a long life
WARM_UP_S = 1.0  # before shares are measured: estimates of run times and the accounts of device time settle
PICTURE_MS = 60.0


def equal(client: int) -> str:
    """The tenant of weight 1 of a client."""
    return f"client {client}"


def weighted(client: int) -> str:
    """A further tenant of the same process, with the weight that is looked at."""
    return f"weight {WEIGHTS[client]}"


OTHER = "other"  # a further tenant of weight 1 of the first client, to switch between


@dataclass(frozen=True)
class Load:
    """The computations of `length` seconds that one tenant keeps running while shares are measured."""

    tenant: str
    weight: float
    length: float


class Bench:
    """A cluster, its clients, and JAX alone beside them.

    Args:
        steps: of the computation of each length.
    """

    def __init__(self, session: Any, clients: list[Worker], jax: Worker, steps: Mapping[float, int]) -> None:
        self.session, self.clients, self.jax, self.steps = session, clients, jax, steps
        self.tenants: dict[int, str] = {}
        for client in clients:
            self.tenants |= {number: name for name, number in client.ask("numbers").items()}

    # --- throughput ---------------------------------------------------------------------------------------------------

    def rate(self, length: float, clients: int, seconds: float) -> float:
        """Computations a second of all clients together, over this time; 0 clients is JAX alone."""
        workers = self.clients[:clients] or [self.jax]
        return self._rate(workers, [(equal(k),) for k in range(len(workers))], length, seconds, len(workers))

    def switching_rate(self, length: float, tenants: int, seconds: float) -> float:
        """Computations a second of one client process, which issues them for one tenant, or for two in turn."""
        return self._rate(self.clients[:1], [(equal(0), OTHER)[:tenants]], length, seconds, tenants)

    def _rate(
        self, workers: Sequence[Worker], series: Sequence[tuple[str, ...]], length: float, seconds: float, sharing: int
    ) -> float:
        """Computations a second that were over in a span in which all processes were at work."""
        start, at = time.perf_counter() + LEAD_S, interleaving.count_at
        begin(workers, [self._task(names, length, start, RAMP_S + seconds, sharing) for names in series])
        since, until = start + RAMP_S, start + RAMP_S + seconds
        return sum(at(one.seen, until) - at(one.seen, since) for one in answers(workers)) / seconds

    def _task(self, series: tuple[str, ...], length: float, start: float, seconds: float, sharing: int = 1) -> Task:
        return Task(series, self.steps[length], start, seconds, in_flight(length, sharing))

    # --- traces -------------------------------------------------------------------------------------------------------

    def timeline(self, length: float, clients: int, seconds: float) -> dict[str, Any]:
        """The interleaving of the clients' gangs, from a trace of this many seconds."""
        margin = 0.3
        start = time.perf_counter() + LEAD_S
        names = [equal(client) for client in range(clients)]
        workers, issued = self.clients[:clients], seconds + 2 * margin
        begin(workers, [self._task((name,), length, start, issued, clients) for name in names])
        time.sleep(max(0.0, start + margin - time.perf_counter()))
        gangs = self._traced(self._trace(seconds))
        answers(workers)
        described = interleaving.describe(gangs)
        return {"clients": clients, "length_ms": 1e3 * length, **described, **pictured(gangs, names)}

    def shares(self, loads: Sequence[Load], seconds: float, alone: Mapping[float, float]) -> dict[str, Any]:
        """The share of the devices that each tenant gets while all of them want more: client k has load k.

        Measured in three ways: the device time that the runtime charges; the time on the devices in the host's trace;
        the computations that clients see done, times the time of one by JAX alone.

        Args:
            alone: seconds of a computation of each length by JAX alone.
        """
        start = time.perf_counter() + LEAD_S
        workers, issued = self.clients[: len(loads)], WARM_UP_S + seconds + 0.3
        begin(workers, [self._task((load.tenant,), load.length, start, issued) for load in loads])
        time.sleep(max(0.0, start + WARM_UP_S - time.perf_counter()))
        trace = self._trace(seconds)
        began, before = time.perf_counter(), self._device_seconds()
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
        ended, after = time.perf_counter(), self._device_seconds()
        gangs = self._traced(trace)
        outcomes = answers(workers)
        weights = {load.tenant: load.weight for load in loads}
        charged = {name: after[name] - before[name] for name in weights}
        done = {
            load.tenant: interleaving.count_at(one.seen, ended) - interleaving.count_at(one.seen, began)
            for load, one in zip(loads, outcomes, strict=True)
        }
        work = {load.tenant: done[load.tenant] * alone[load.length] for load in loads}
        traced = interleaving.by_tenant(gangs)
        return {
            "weights": weights,
            "length_ms": {load.tenant: 1e3 * load.length for load in loads},
            "seconds": ended - began,
            "device_seconds": interleaving.shares(charged, weights),
            "traced_seconds": interleaving.shares(traced, weights),
            "computations": {**interleaving.shares(work, weights), "done": done},
            "seconds_one_by_one": one_by_one(gangs, weights, round(seconds)),
            "interleaving": interleaving.describe(gangs),
            **pictured(gangs, list(weights)),
        }

    def _device_seconds(self) -> dict[str, float]:
        """The device time that each tenant was charged; needs the operator's session."""
        return {tenant["tenant"]: tenant["device_seconds"] for tenant in self.session.status()["tenants"]}

    def _trace(self, seconds: float) -> Any:
        """A future of what the host runs from now on."""
        (host,) = self.session.cluster.hosts.values()
        return host.trace.remote(seconds)

    def _traced(self, future: Any) -> list[Gang]:
        ran = ray.get(future)
        return [Gang(self.tenants[r.session], r.start, r.end) for r in ran if r.session in self.tenants]


def begin(workers: Sequence[Worker], tasks: Sequence[Task]) -> None:
    """Lets the k-th process run the k-th task, all at once; `answers` waits for their outcomes."""
    for worker, task in zip(workers, tasks, strict=True):
        worker.tell("run", task)


def pictured(gangs: Sequence[Gang], names: Sequence[str]) -> dict[str, Any]:
    """A part of a trace, for a picture."""
    return {"tenants": names, "picture_ms": PICTURE_MS, "picture": interleaving.sample(gangs, PICTURE_MS)}


def one_by_one(gangs: Sequence[Gang], weights: Mapping[str, float], spans: int) -> dict[str, float] | None:
    """Spread of the error of shares, each over one of `spans` equal parts of the trace."""
    if spans < 2 or len(gangs) < 2:
        return None
    start, length = gangs[0].start, (gangs[-1].end - gangs[0].start) / spans
    errors = []
    for k in range(spans):
        used = interleaving.by_tenant([g for g in gangs if k <= (g.end - start) / length < k + 1])
        errors.append(interleaving.shares(used, weights)["error"])
    return measure.spread(errors)


@contextlib.contextmanager
def start(devices: int, clients: int, jax: Worker, steps: Mapping[float, int], fusion: bool) -> Iterator[Bench]:
    """A cluster under the policy "share", with its clients, which have registered their computations.

    Args:
        devices: of the one host.
        clients: processes, at least as many as there are WEIGHTS.
    """
    weights = {equal(k): 1 for k in range(clients)} | {weighted(k): w for k, w in enumerate(WEIGHTS)} | {OTHER: 1}
    tokens = {name: secrets.token_hex(16) for name in weights}
    table = [{"name": name, "token": tokens[name], "weight": weight} for name, weight in weights.items()]
    with contextlib.ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tenants.json"
        file.write_text(json.dumps({"tenants": table}))
        session = stack.enter_context(
            pw.init(devices_per_host=devices, policy="share", tenants=str(file), fusion=fusion, coalesce=fusion)
        )
        processes = []
        for k in range(clients):
            names = [equal(k), *([weighted(k)] if k < len(WEIGHTS) else []), *([OTHER] if k == 0 else [])]
            mine = {name: tokens[name] for name in names}
            processes.append(Worker(Client, url=session.url, tokens=mine, devices=devices))
            stack.callback(processes[-1].close)
        answers(processes)
        ask_all(processes, "prepare", list(steps.values()))
        yield Bench(session, processes, jax, steps)
