"""When each computation of a host ran, one by one: for pictures of a step. `trace.py` has whole launches, at less cost.

While it records, every compiled computation of the host is wrapped, and threads wait for what goes into it and what
comes out. The host goes on when they have begun, before a later computation can take the memory: so they see the end of
what is donated too. That costs some 0.1 ms for each computation.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from pathways_ray.executor.runner import PreparedProgram
from pathways_ray.executor.steps import ExecuteStep

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
        """When all values were there; 0 when there are none, NaN when none was seen. The waiting has begun when this
        returns."""
        found: Future[float] = Future()
        if not values:
            found.set_result(0.0)
            return found
        begun = threading.Event()

        def wait() -> None:
            begun.set()
            latest = math.nan
            for value in values:
                with contextlib.suppress(Exception):  # it was taken too early, or has failed, which its launch reports
                    value.block_until_ready()
                    latest = time.perf_counter()
            found.set_result(latest)

        self._waiting.submit(wait)
        begun.wait(BEGIN_LIMIT_S)
        return found

    def stop(self, limit_s: float) -> list[Computed]:
        """What has run, in the order in which it was enqueued; waits up to `limit_s` for the last of it.

        What failed is left out, and so is what was taken before a thread could wait for it.
        """
        for step, compiled in self._wrapped:
            step.compiled = compiled
        sys.setswitchinterval(self._interval)
        self._waiting.shutdown(wait=False)
        deadline = time.monotonic() + limit_s
        ended = []
        for one in self._seen:
            there, end = (future.result(max(0.0, deadline - time.monotonic())) for future in (one.inputs, one.outputs))
            if not math.isnan(end):
                ended.append((one, 0.0 if math.isnan(there) else there, end))
        return _in_order(ended)


def _in_order(ended: list[tuple[_Seen, float, float]]) -> list[Computed]:
    """With starts. A device runs one after the other, so nothing ends after what stands behind it: if a thread saw it
    so, it woke up late."""
    latest: dict[int, float] = {}
    ends = []
    for one, _, end in reversed(ended):
        end = min([end, *(latest.get(device, end) for device in one.devices)])
        latest.update(dict.fromkeys(one.devices, end))
        ends.append(end)
    free: dict[int, float] = {}
    computed = []
    for (one, there, _), end in zip(ended, reversed(ends), strict=True):
        start = min(end, max([one.enqueued, there, *(free.get(device, 0.0) for device in one.devices)]))
        free.update(dict.fromkeys(one.devices, end))
        computed.append(Computed(one.name, one.devices, start, end))
    return computed
