"""The launches that threads of a host watch, until they are over."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pathways_ray.errors import Failure
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.executor.run.prepared import PreparedProgram
from pathways_ray.ir.plan import Device
from pathways_ray.limits import MAX_DEVICE_COMPUTATIONS

LONG_S = 0.001
"""What only moves data does not wait for a launch whose program took as long the last time. To hand it to another
thread takes some 30 us of the one that enqueues, which a stream of short launches would notice."""


class Watched(NamedTuple):
    """A launch, the values that complete it, and when the dispatcher began to enqueue it; or the `part` of it that is
    enqueued before it stops at a barrier. `later` is what is done as soon as the values are there, or have failed: the
    answers to those who have asked for results."""

    sequence: int
    values: list[Any]
    program: PreparedProgram
    begun: float
    part: bool = False
    consumed: tuple[int, ...] = ()
    asked: bool = False
    later: Sequence[Callable[[], None]] = ()

    @property
    def is_complete(self) -> bool:
        """Whether devices are through with it, whatever came of it."""
        try:
            return all(isinstance(value, Failure) or value.is_ready() for value in self.values)
        except RuntimeError:  # of one that no gang made, a later launch has taken the memory
            return True


def answer(later: Sequence[Callable[[], None]]) -> None:
    """Does what had to wait for the values of a launch. What goes wrong with one answer is that one's end, and not the
    thread's."""
    for one in later:
        try:  # noqa: SIM105  # a context would take longer
            one()
        except Exception:
            pass


class UnderWay(NamedTuple):
    """Launches that wait behind those whose completion is awaited, and the computations that all of these put on the
    queue of one device, if that was the same one for all."""

    launches: int
    computations: int

    def leaves_room(self, program: PreparedProgram) -> bool:
        """Whether a thread that enqueues a launch more waits for none of these."""
        return self.computations + program.computations <= MAX_DEVICE_COMPUTATIONS


IDLE = UnderWay(0, 0)


class Watcher:
    """The launches that a thread waits for, in order. `is_shared`: they are on several sets of devices."""

    def __init__(self, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self.queued: queue.SimpleQueue[Watched] = queue.SimpleQueue()
        self.added = self.computations_added = 0  # by the dispatcher thread
        self.seen = self.computations_seen = 0  # by the watcher
        self._incomplete: deque[Watched] = deque()

    def add(self, watched: Watched) -> None:
        self.added += 1
        self.computations_added += watched.program.computations
        self._incomplete.append(watched)
        self.queued.put(watched)

    def finished(self) -> None:
        """The first of them is reported."""
        self.computations_seen += self._incomplete.popleft().program.computations
        self.seen += 1

    def snapshot(self) -> list[Watched]:
        """Those that are not reported, for any thread."""
        while True:
            try:
                return list(self._incomplete)
            except RuntimeError:  # it changed meanwhile
                continue

    @property
    def is_idle(self) -> bool:
        """Whether everything that was added is reported; for the thread that adds."""
        return self.added == self.seen

    @property
    def takes_long(self) -> bool:
        """Whether one of them is expected to have its devices for `LONG_S` or more."""
        while not self.is_idle:
            try:
                return any(watched.program.seconds >= LONG_S for watched in self._incomplete)
            except RuntimeError:  # it changed meanwhile
                continue
        return False

    @property
    def may_answer(self) -> bool:
        """Whether a launch that is added now is waited for behind none on other devices, for which fetches of its
        results would wait too."""
        return not self.is_shared or self.is_idle


def load_of(watchers: Mapping[Any, Watcher]) -> UnderWay:
    """The load that the launches of all watchers are, for any thread."""
    launches = computations = 0
    for watcher in list(watchers.values()):  # a list: others add to them
        if watcher.added != watcher.seen:
            launches += watcher.queued.qsize()
            computations += watcher.computations_added - watcher.computations_seen
    return UnderWay(launches, computations) if launches or computations else IDLE


def are_idle(watchers: Mapping[Any, Watcher]) -> bool:
    """Whether everything that was added to any of them is reported, for any thread."""
    for watcher in list(watchers.values()):  # noqa: SIM110  # asked again and again before a thread sleeps
        if watcher.added != watcher.seen:
            return False
    return True


def kept_by_earlier(sequence: int, plan: HostPlan, begun: float, watchers: Mapping[Any, Watcher]) -> set[Device]:
    """The devices that launches before this one still have on, of those that share some with it: it has passed them
    there, as what only moves data does. Within a watcher none passes another."""
    kept: set[Device] = set()
    for devices, watcher in list(watchers.items()):
        if watcher.is_idle or devices == plan.watched_with:
            continue
        if not watcher.is_shared and set(devices).isdisjoint(plan.own_devices):
            continue
        for one in watcher.snapshot():
            if one.begun >= begun:
                break
            if one.sequence != sequence and not one.is_complete:
                kept.update(one.program.plan.own_devices)
    return kept
