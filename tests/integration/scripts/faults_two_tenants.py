"""Hosts, schedulers and the resource manager, killed and stopped at random under the load of two tenants.

Arguments: the table of tenants, their tokens, hosts of an island, strikes, seed, and "kind:signal" where all strikes
are to be of one kind. It prints what became of all launches, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import psutil
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

table, tokens = sys.argv[1], sys.argv[2].split(",")
hosts_per_island, strikes, seed = map(int, sys.argv[3:6])
choose = random.Random(seed)

KINDS = {
    ("HostExecutor", signal.SIGKILL): 40,
    ("HostExecutor", signal.SIGSTOP): 20,
    ("IslandScheduler", signal.SIGKILL): 15,
    ("IslandScheduler", signal.SIGSTOP): 10,
    ("ResourceManager", signal.SIGKILL): 8,
    ("ResourceManager", signal.SIGSTOP): 7,
}
if sys.argv[6:]:
    KINDS = {one: weight for one, weight in KINDS.items() if sys.argv[6] == f"{one[0]}:{one[1].name}"}
X = np.arange(8, dtype=np.float32)
TYPED = (pw.errors.HostLost, pw.errors.BufferLost, pw.errors.ControllerLost, pw.errors.SessionClosed)
NOT_YET = (*TYPED, pw.errors.Unschedulable)
HANG_S = 40.0
SERVING_S = 90.0


def gang(where: pw.VirtualSlice) -> Callable[..., Any]:
    def body(v: jax.Array) -> jax.Array:
        return v + jax.lax.psum(v.sum(), "x")

    mapped = jax.shard_map(body, mesh=where.mesh, in_specs=P("x"), out_specs=P("x"))
    return pw.compiled(mapped, slice=where, in_specs=P("x"), out_specs=P("x"))


class Programs(NamedTuple):
    """A function on each island, and a program over both."""

    here: Callable[..., Any]
    there: Callable[..., Any]
    both: Callable[..., Any]
    places: list[pw.VirtualSlice]

    @classmethod
    def of(cls, session: pw.Session) -> Programs:
        places = [session.virtual_slice((2 * hosts_per_island,), ("x",), island=k) for k in (0, 1)]
        here, there = map(gang, places)

        def to_and_fro(v: Any) -> Any:
            for _ in range(3):
                v = there(here(v)) / 100
            return v

        both = pw.program(to_and_fro)
        both.slice = places[0]  # it runs in this session, and not in the one that was made last
        return cls(here, there, both, places)


class Load:
    """A tenant that always has launches under way, and connects again when its session has ended.

    `took` has for each failed launch the seconds from its call, or the last strike, until its array has its error,
    which may be before this thread looks at it: a put may stand behind a host that is down. `served` is when the last
    batch began of which all was right.
    """

    struck_at = 0.0

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token
        self.right = self.wrong = self.hung = 0
        self.errors: Counter[str] = Counter()
        self.took: list[float] = []
        self.served = 0.0
        self.sessions = 0
        self.over = threading.Event()
        self.strange = ""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.over.is_set():
            try:
                self._connected()
            except NOT_YET:
                time.sleep(0.1)
            except BaseException as error:
                self.strange = f"{type(error).__name__}: {error}"
                return

    def _connected(self) -> None:
        with pw.connect(self.url, self.token) as session:
            programs = Programs.of(session)
            self.sessions += 1
            while not self.over.is_set() and not session.closed_because:
                self._batch(programs)

    def _batch(self, programs: Programs) -> None:
        begun, right = time.monotonic(), self.right
        made: list[tuple[int, float, Any]] = []
        known: dict[int, float] = {}
        for f in (programs.here, programs.there, programs.both) * 4:
            k, called = len(made) % 3, time.monotonic()
            try:
                y = f(pw.put(X, programs.places[k], P("x")) if k < 2 else X)
                made.append((k, called, y))
                y.add_done_callback(lambda y: known.setdefault(id(y), time.monotonic()))
            except TYPED as error:
                made.append((k, called, error))
            except pw.errors.GraphError:  # the session has ended, and the program is traced for the one made last
                assert programs.places[0].session.closed_because
                return
        while made:
            k, called, y = made.pop(0)
            try:
                if isinstance(y, Exception):
                    raise y
                value = np.asarray(y.block_until_ready(timeout=HANG_S))
            except pw.errors.WaitTimeout:
                self.hung += 1
            except TYPED as error:
                self.errors[type(error).__name__] += 1
                self.took.append(known.get(id(y), time.monotonic()) - max(called, Load.struck_at))
            else:
                self.right += np.array_equal(value, EXPECTED[k])
                self.wrong += not np.array_equal(value, EXPECTED[k])
        if self.right == right + 12:
            self.served = begun


def serving_since(loads: list[Load], at: float) -> None:
    """Waits until all programs of all tenants have run since then."""
    while any(load.served <= at for load in loads):
        strange = [(load.strange, load.wrong, load.hung) for load in loads if load.strange or load.wrong]
        assert not strange, strange
        assert time.monotonic() - max(at, BEGUN) < SERVING_S, [(load.errors, load.right) for load in loads]
        time.sleep(0.02)


def victims(kind: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if f"ray::{kind}" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


with pw.init(2, hosts_per_island, 2, tenants=table, policy="share") as session:
    url, token = session.url, session.token
    programs = Programs.of(session)
    EXPECTED = [np.asarray(f(X)) for f in (programs.here, programs.there, programs.both)]
    np.testing.assert_array_equal(EXPECTED[1], X + X.sum())
    BEGUN = time.monotonic()
    loads = [Load(url, token) for token in tokens]
    struck: Counter[str] = Counter()
    serving: list[float] = []
    serving_since(loads, 0.0)
    while struck.total() < strikes:
        kind, sign = choose.choices(list(KINDS), list(KINDS.values()))[0]
        time.sleep(choose.random() * 0.2)
        there = victims(kind)
        if not there:
            continue
        sessions = [load.sessions for load in loads]
        before = [len(load.took) for load in loads]
        Load.struck_at = at = time.monotonic()
        choose.choice(there).send_signal(sign)
        struck[f"{kind} {sign.name}"] += 1
        serving_since(loads, at)
        if kind == "ResourceManager":
            assert [load.sessions for load in loads] == sessions, "a session ended with the resource manager"
        serving.append(time.monotonic() - at)
        slowest = max((t for load, n in zip(loads, before, strict=True) for t in load.took[n:]), default=0.0)
        name = f"{kind} {sign.name}"
        print(f"{at - BEGUN:.0f} s: {name}: serving in {serving[-1]:.1f} s; slowest error {slowest:.1f} s", flush=True)
    for load in loads:
        load.over.set()
    for load in loads:
        load.thread.join(60)
    with pw.connect(url, token) as last:
        deadline = time.monotonic() + 20
        while ((left := last.status())["in_flight"] or left["buffers"]) and time.monotonic() < deadline:
            time.sleep(0.2)
    took = [t for load in loads for t in load.took] or [0.0]
    report = {
        "struck": struck,
        "right": sum(load.right for load in loads),
        "wrong": sum(load.wrong for load in loads),
        "hung": sum(load.hung for load in loads),
        "errors": sum((load.errors for load in loads), Counter()),
        "to_error": {"median": float(np.median(took)), "p99": float(np.percentile(took, 99)), "max": max(took)},
        "serving": {"median": float(np.median(serving)), "max": max(serving)},
        "left": left["in_flight"] + left["buffers"],
    }
    print(json.dumps(report))
