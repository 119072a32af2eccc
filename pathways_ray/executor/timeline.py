"""When each computation of a host ran, one by one: for pictures of a step. `trace.py` has whole launches, at less cost.

While it records, every compiled computation of the host is wrapped, and threads wait for what goes into it and what
comes out. They begin before a later computation can take the memory, so they see the end of what is donated too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from pathways_ray.executor.runner import PreparedProgram
from pathways_ray.executor.steps import ExecuteStep

WAITING = 512
"""Threads that wait at once; what is enqueued beyond them is seen late."""


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
            there = self._waiting.submit(_ready, late)
            outputs = compiled(*inputs)
            arrays: list[Any] = [value for value in outputs if isinstance(value, jax.Array)]
            devices = {device.id for value in arrays[:1] for device in value.sharding.device_set}
            if arrays:
                done = self._waiting.submit(_ready, arrays)
                self._seen.append(_Seen(name, tuple(sorted(devices)), enqueued, there, done))
            return outputs

        return run

    def stop(self, limit_s: float) -> list[Computed]:
        """What has run, in the order in which it was enqueued; waits up to `limit_s` for the last of it."""
        for step, compiled in self._wrapped:
            step.compiled = compiled
        self._waiting.shutdown(wait=False)
        deadline = time.monotonic() + limit_s
        free: dict[int, float] = {}
        computed = []
        for one in self._seen:
            there, end = (future.result(max(0.0, deadline - time.monotonic())) for future in (one.inputs, one.outputs))
            start = min(end, max([one.enqueued, there, *(free.get(device, 0.0) for device in one.devices)]))
            free.update(dict.fromkeys(one.devices, end))
            computed.append(Computed(one.name, one.devices, start, end))
        return computed


def _ready(values: list[Any]) -> float:
    """When all values were there; 0 when there are none to wait for."""
    for value in values:
        with contextlib.suppress(Exception):  # it was taken, or has failed, which its launch reports
            value.block_until_ready()
    return time.perf_counter() if values else 0.0
