"""Profiles of a host: when each launch, or each computation, was on its devices. Off by default.

`LaunchTrace` has whole launches, at next to no cost: it is an observer of the dispatcher. Launches that were under way
when it began are left out. `Timeline` has every computation by itself, for pictures of a step: while it records, every
compiled computation of the host is wrapped, and threads wait for its inputs and for its outputs. The host goes on when
they have begun, before a later computation can take the memory: so they see the end of what is donated too. That costs
some 0.1 ms for each computation.

Times are seconds of `time.perf_counter`, which all processes of a machine share.
"""

from __future__ import annotations

import math
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pathways_ray.executor.run.prepared import PreparedProgram
from pathways_ray.executor.run.steps import ExecuteStep
from pathways_ray.transport.messages import IslandLaunch

MAX_XPROF_BYTES = 1 << 30
"""A profile that is larger is not carried to who asked for it."""

MAX_ENTRIES = 1 << 17
"""Launches that a trace keeps, some 10 MB; older ones go first."""

MAX_COMPUTED = 1 << 16
"""Computations that a timeline keeps, some 220 MB; older ones go first."""

MAX_WAITING = 512
"""Threads that wait at once; what is enqueued beyond them is seen late."""

SWITCH_S = 0.25
"""A thread that says it begins to wait must come to do so before the one that enqueues takes the interpreter. On
a busy machine the usual 5 ms are not enough."""

BEGIN_LIMIT_S = 1.0
"""How long a host waits for a thread to begin."""


class Ran(NamedTuple):
    """A launch, or the part of it before a barrier.

    `start` is when the host took it up or, if that is later, when its devices ended what stood before it; `end` is when
    the host saw that it was over, which is late by as long as the watcher waited for a core.
    """

    sequence: int
    session: int
    start: float
    end: float


class LaunchTrace:
    """The launches that ran since it was made. `started` is called from the dispatcher thread, `ran` from watchers."""

    def __init__(self) -> None:
        self.sessions: dict[int, int] = {}
        self.entries: deque[Ran] = deque(maxlen=MAX_ENTRIES)

    def started(self, launch: IslandLaunch) -> None:
        self.sessions[launch.sequence] = launch.session

    def enqueued(self, launch: IslandLaunch, program: PreparedProgram, first: int, last: int) -> None:
        """A trace has whole launches."""

    def ran(self, sequence: int, start: float, end: float, part: bool = False) -> None:
        session = self.sessions.get(sequence)
        if session is None:
            return
        self.entries.append(Ran(sequence, session, start, end))
        if not part:
            self.sessions.pop(sequence, None)


class Computed(NamedTuple):
    """One computation on one host, by the name of the user's function; seconds of `time.perf_counter`.

    `start` is when it was enqueued or, if that is later, when its inputs were there and what stood before it on its
    devices had ended.
    """

    name: str
    devices: tuple[int, ...]
    start: float
    end: float


class _Seen(NamedTuple):
    name: str
    devices: tuple[int, ...]
    enqueued: float
    inputs: Future[float]
    outputs: Future[float]


class Timeline:
    """Records from when it is made until `stop`. It observes the dispatcher, so that programs that come meanwhile are
    recorded too.

    Args:
        programs: those of the host, by their numbers; others may be added to them.
    """

    def __init__(self, programs: Mapping[int, PreparedProgram]) -> None:
        self._seen: deque[_Seen] = deque(maxlen=MAX_COMPUTED)
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._waiting = ThreadPoolExecutor(MAX_WAITING, "timeline")
        self._programs = programs
        self._known: dict[int, PreparedProgram] = {}
        self._wrapped: list[tuple[ExecuteStep, Callable[..., Any]]] = []
        self._over = False
        self._lock = threading.Lock()
        for number in list(programs):
            self._wrap(number)

    def started(self, launch: IslandLaunch) -> None:
        """A launch has come, and nothing of it is enqueued yet."""
        if self._known.get(launch.program) is not self._programs.get(launch.program):
            self._wrap(launch.program)

    def enqueued(self, launch: IslandLaunch, program: PreparedProgram, first: int, last: int) -> None:
        """Computations say so themselves."""

    def ran(self, sequence: int, start: float, end: float, part: bool = False) -> None:
        """The same."""

    def _wrap(self, number: int) -> None:
        """Has the computations of a program recorded from now on."""
        with self._lock:
            program = self._programs.get(number)
            if self._over or program is None or program is self._known.get(number):
                return
            self._known[number] = program
            for step in program.steps:
                if isinstance(step, ExecuteStep):
                    self._wrapped.append((step, step.compiled))
                    step.compiled = self._watched(step.label, step.compiled)

    def _watched(self, name: str, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            enqueued = time.perf_counter()
            given: list[Any] = [value for value in inputs if isinstance(value, jax.Array)]
            late = [value for value in given if not value.is_ready()]
            there = self._wait_for(late)
            outputs = compiled(*inputs)
            arrays: list[Any] = [value for value in outputs if isinstance(value, jax.Array)]
            devices = {device.id for value in arrays[:1] for device in value.sharding.device_set}
            if arrays:
                done = self._wait_for(arrays[:1])  # what a computation gives is there all at once
                self._seen.append(_Seen(name, tuple(sorted(devices)), enqueued, there, done))
            return outputs

        return run

    def _wait_for(self, values: list[Any]) -> Future[float]:
        """The time at which all values were there; 0: there are no values, NaN: one has failed, infinity: one was taken
        unseen.

        The last is rare: the waiting has begun when this returns, but it begins without the interpreter's lock, and the
        machine may be busy.
        """
        found: Future[float] = Future()
        if not values:
            found.set_result(0.0)
            return found
        begun = threading.Event()

        def wait() -> None:
            begun.set()
            latest = 0.0
            for value in values:
                try:
                    value.block_until_ready()
                    latest = max(latest, time.perf_counter())
                except Exception:  # a failure is for its launch to report
                    latest = math.inf if value.is_deleted() and not math.isnan(latest) else math.nan
            found.set_result(latest)

        try:
            self._waiting.submit(wait)
        except RuntimeError:  # the record has ended since the computation was enqueued
            found.set_result(math.nan)
            return found
        begun.wait(BEGIN_LIMIT_S)
        return found

    def release(self) -> None:
        """Stops recording: the host is as it was."""
        with self._lock:
            self._over = True
            for step, compiled in self._wrapped:
                step.compiled = compiled
        sys.setswitchinterval(self._interval)
        self._waiting.shutdown(wait=False)

    def stop(self, limit_s: float) -> list[Computed]:
        """The computations that ran, in the order in which they were enqueued; waits up to `limit_s` for the last of
        them.

        What failed is left out, as is what is not over by then. When a computation ended that was taken before a thread
        saw it is estimated from what stood behind it on its devices; it is left out when nothing did.
        """
        self.release()
        deadline = time.monotonic() + limit_s
        ended = []
        for one in list(self._seen):
            there, end = (_found(future, deadline) for future in (one.inputs, one.outputs))
            if not math.isnan(end):
                ended.append((one, there if math.isfinite(there) else 0.0, end))
        return _in_order(ended)


def _found(future: Future[float], deadline: float) -> float:
    """A time that was waited for; NaN where it is not known by then."""
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        return math.nan


class _Bound(NamedTuple):
    """The latest end of a computation, and how many share the time until then: itself and unseen ones behind it."""

    end: float
    sharing: int


def _in_order(ended: list[tuple[_Seen, float, float]]) -> list[Computed]:
    """The computations with their starts. A device runs one after the other, so none ends after one behind it: a thread
    that saw it so woke up late. One that was taken unseen shares the time until the next end that was seen evenly with
    it."""
    behind: dict[int, _Bound] = {}
    bounds = []
    for one, _, end in reversed(ended):
        least = min((behind[device] for device in one.devices if device in behind), default=_Bound(math.inf, 0))
        bound = _Bound(least.end, least.sharing + 1) if end == math.inf else _Bound(min(end, least.end), 1)
        behind.update(dict.fromkeys(one.devices, bound))
        bounds.append(bound)
    free: dict[int, float] = {}
    computed = []
    for (one, there, _), bound in zip(ended, reversed(bounds), strict=True):
        if bound.end == math.inf:
            continue  # neither it nor anything behind it was seen
        start = min(bound.end, max([one.enqueued, there, *(free.get(device, 0.0) for device in one.devices)]))
        end = start + (bound.end - start) / bound.sharing if bound.sharing > 1 else bound.end
        free.update(dict.fromkeys(one.devices, end))
        computed.append(Computed(one.name, one.devices, start, end))
    return computed


def xprof(seconds: float) -> bytes | str:
    """Has JAX's profiler run for some seconds; its profile (`.xplane.pb`), or the reason for its lack."""
    with tempfile.TemporaryDirectory(prefix="pathways-xprof-") as folder:
        try:
            jax.profiler.start_trace(folder)
        except RuntimeError as error:  # another profile is being made
            return str(error)
        try:
            time.sleep(seconds)
        finally:
            jax.profiler.stop_trace()
        for file in Path(folder).rglob("*.xplane.pb"):
            if file.stat().st_size > MAX_XPROF_BYTES:
                return f"its profile has {file.stat().st_size:,} bytes, of at most {MAX_XPROF_BYTES:,}: trace for less"
            return file.read_bytes()
    return "JAX's profiler wrote nothing"
