"""The load of tenants on two islands, for scripts that have something happen to the cluster meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

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
    def of(cls, session: pw.Session, devices: int) -> Programs:
        places = [session.virtual_slice((devices,), ("x",), island=k) for k in (0, 1)]
        here, there = map(gang, places)

        def to_and_fro(v: Any) -> Any:
            for _ in range(3):
                v = there(here(v)) / 100
            return v

        both = pw.program(to_and_fro)
        both.slice = places[0]  # it runs in this session, and not in the one that was made last
        return cls(here, there, both, places)

    def values(self) -> list[Any]:
        """What each of them makes of `X`."""
        return [np.asarray(f(X)) for f in (self.here, self.there, self.both)]


class Load:
    """A tenant that always has launches under way, and connects again when its session has ended.

    `took` has for each failed launch the seconds from its call, or the last strike, until its array has its error,
    which may be before this thread looks at it: a put may stand behind a host that is down. `served` is when the last
    batch began of which all was right.

    Args:
        devices: of each slice.
        expected: `Programs.values`.
    """

    struck_at = 0.0
    programs: Programs

    def __init__(self, url: str, token: str, devices: int, expected: Sequence[Any]) -> None:
        self.url, self.token, self.devices, self.expected = url, token, devices, expected
        self.began = time.monotonic()
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
            programs = self.programs = Programs.of(session, self.devices)
            self.sessions += 1
            while not self.over.is_set() and not session.closed_because:
                self.batch(programs)

    def batch(self, programs: Programs) -> None:
        """Makes twelve calls at once, then looks at all that came of them."""
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
                self.right += np.array_equal(value, self.expected[k])
                self.wrong += not np.array_equal(value, self.expected[k])
        if self.right == right + 12:
            self.served = begun


def written(table: str, tokens: Sequence[str]) -> None:
    """Writes a table of tenants with these tokens."""
    tenants = [{"name": f"tenant-{k}", "token": token} for k, token in enumerate(tokens)]
    Path(table).write_text(json.dumps({"tenants": tenants}))
    Path(table).chmod(0o600)


def left(url: str, token: str) -> int:
    """Launches and buffers that stay when all tenants have gone, after a moment."""
    with pw.connect(url, token) as last:
        deadline = time.monotonic() + 20
        while ((found := last.status())["in_flight"] or found["buffers"]) and time.monotonic() < deadline:
            time.sleep(0.2)
    return int(found["in_flight"] + found["buffers"])


def serving_since(loads: Sequence[Load], at: float) -> None:
    """Waits until all programs of all tenants have run since then."""
    while any(load.served <= at for load in loads):
        strange = [(load.strange, load.wrong, load.hung) for load in loads if load.strange or load.wrong]
        assert not strange, strange
        assert time.monotonic() - max(at, *(load.began for load in loads)) < SERVING_S, [
            (load.errors, load.right) for load in loads
        ]
        time.sleep(0.02)
