"""When each computation of a host ran, one by one: for pictures of a step. `trace.py` has whole launches, at less cost.

While it records, every compiled computation of the host is wrapped, and threads wait for what goes into it and what
comes out. The host goes on when they have begun, before a later computation can take the memory: so they see the end of
what is donated too. That costs some 0.1 ms for each computation.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from pathways_ray.executor.run.prepared import PreparedProgram
from pathways_ray.executor.run.steps import ExecuteStep

WAITING = 512
"""Threads that wait at once; what is enqueued beyond them is seen late."""

SWITCH_S = 0.25
"""A thread that says it begins to wait must come to do so before the one that enqueues takes the interpreter. On
a busy machine the usual 5 ms are not enough."""

BEGIN_LIMIT_S = 1.0
"""How long a host waits for a thread to begin."""


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
    """Records from when it is made until `stop`."""

    def __init__(self, programs: Iterable[PreparedProgram]) -> None:
        self._seen: list[_Seen] = []
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._waiting = ThreadPoolExecutor(WAITING, "timeline")
        self._wrapped: list[tuple[ExecuteStep, Callable[..., Any]]] = []
        for program in programs:
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
        """When all values were there; 0: there are none, NaN: one has failed, infinity: one was taken unseen.

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

        self._waiting.submit(wait)
        begun.wait(BEGIN_LIMIT_S)
        return found

    def release(self) -> None:
        """Stops recording: the host is as it was."""
        for step, compiled in self._wrapped:
            step.compiled = compiled
        sys.setswitchinterval(self._interval)
        self._waiting.shutdown(wait=False)

    def stop(self, limit_s: float) -> list[Computed]:
        """What has run, in the order in which it was enqueued; waits up to `limit_s` for the last of it.

        What failed is left out. When a computation ended that was taken before a thread saw it is estimated from what
        stood behind it on its devices; it is left out when nothing did.
        """
        self.release()
        deadline = time.monotonic() + limit_s
        ended = []
        for one in self._seen:
            there, end = (future.result(max(0.0, deadline - time.monotonic())) for future in (one.inputs, one.outputs))
            if not math.isnan(end):
                ended.append((one, there if math.isfinite(there) else 0.0, end))
        return _in_order(ended)


class _Bound(NamedTuple):
    """The latest end of a computation, and how many share the time until then: itself and unseen ones behind it."""

    end: float
    sharing: int


def _in_order(ended: list[tuple[_Seen, float, float]]) -> list[Computed]:
    """With starts. A device runs one after the other, so nothing ends after what stands behind it: if a thread saw it
    so, it woke up late. What was taken unseen shares the time until the next end that was seen evenly with it."""
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
            continue  # nobody saw it, nor anything behind it
        start = min(bound.end, max([one.enqueued, there, *(free.get(device, 0.0) for device in one.devices)]))
        end = start + (bound.end - start) / bound.sharing if bound.sharing > 1 else bound.end
        free.update(dict.fromkeys(one.devices, end))
        computed.append(Computed(one.name, one.devices, start, end))
    return computed
