"""Reports of finished launches to the scheduler: many in one message while more of them are under way.

A single launch is reported at once, unless its client waits for the values and gets them from this host. In a stream
a message for each would cost more than small ones do, on both ends: it wakes scheduler, controller and client. So
finished launches are gathered, within two bounds. Those that are queued here must last until further ones have come, so
at most half as many as these are kept back. And none is kept back for more than `MAX_GATHERED_S`, or some more where it
was under way for long.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from pathways_ray.executor.run.early import EarlyReports
from pathways_ray.executor.run.instructions import Called
from pathways_ray.limits import ISLAND_WINDOW
from pathways_ray.transport.messages import Decided, Done, IslandLaunchFailed, Message, Served, ServedCalls
from pathways_ray.waits import get_within

MAX_GATHERED_S = 0.002
"""Time that a finished launch may stay here while more are under way."""

UNDER_WAY_PART = 1 / 3
MOST_GATHERED_S = 0.07
"""The part of the time that it was under way for which it may stay longer, and the limit of that: behind a queue nobody
notices. A launch is over when the last of its hosts has said so, and these begin to gather at different ones, so that
the queue may become shorter by twice as many as this lets one of them keep."""

MAX_GATHERED = ISLAND_WINDOW // 3
"""Finished launches that are reported without waiting for more. Of those that lie in the queues of devices half as many
as are left do (`Reports.done`), so this bounds those that run within the call that enqueues them: further ones come
for these while the host has the rest of its window."""


class Reports:
    """The finished launches, in the order in which they are added; safe from any thread.

    Args:
        send: puts a message on the stream to the scheduler.
        multi_host: whether other hosts report the same launches.
    """

    def __init__(self, send: Callable[[Message], None], multi_host: bool = False) -> None:
        self._send = send
        self._multi_host = multi_host
        self.early: EarlyReports[int | IslandLaunchFailed] = EarlyReports()
        self._with: dict[int, int] = {}
        """What others took on their devices that left as the same launch, in microseconds."""
        self.served = 0
        """Calls that were served."""
        self._calls: dict[int, Called] = {}
        self._served: dict[tuple[int, int], tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._sequences: list[int] = []
        self._device_us: list[int] = []
        self._due: float | None = None
        self._together = 0
        self._gathered_until: float | None = None
        self._looks_at = math.inf
        """When the thread of `run` looks again by itself."""
        self._gathering: queue.SimpleQueue[None] = queue.SimpleQueue()

    def left_s(self) -> float | None:
        """Seconds until the thread that says `later` has to `flush`; None while nothing waits for it."""
        due = self._due  # once: another thread may flush meanwhile
        return None if due is None else due - time.perf_counter()

    def done(self, sequence: int, device_us: int, behind: int, under_way_s: float = 0.0, later: bool = False) -> None:
        """A launch has run.

        Args:
            device_us: on the devices.
            behind: launches that will be done after it, by what is known here.
            under_way_s: since this host read of it, or began to enqueue it.
            later: nobody waits for it. The caller flushes when it is time, as `left_s` says.
        """
        if sequence < 0:
            if self._calls and self._was_served(sequence, device_us):
                return
            if not (sequence := self.early.ended(sequence, device_us)):
                return
        if self._with:
            device_us += self._with.pop(sequence, 0)
        with self._lock:
            self._sequences.append(sequence)
            self._device_us.append(device_us)
            gathered = len(self._sequences)
            if gathered >= MAX_GATHERED or (2 * gathered > behind and not later):
                self._flush()
            elif later:
                if self._due is None:
                    self._due = time.perf_counter() + MAX_GATHERED_S
            else:
                until = self._gathered_until
                if until is None:
                    until = self._gather(under_way_s, device_us)
                if self._together and not sequence % self._together:
                    self._flush()
                elif until < self._looks_at:
                    self._looks_at = until
                    self._gathering.put(None)

    def decided(self, message: Decided) -> None:
        """Values are known that somebody waits for; they are not gathered."""
        self._send(message)

    def failed(self, message: IslandLaunchFailed) -> None:
        """A launch has failed; those that finished before it are reported first."""
        if message.sequence < 0:
            if self._was_served(message.sequence):
                return
            if not (sequence := self.early.ended(message.sequence, message)):
                return
            message = msgspec.structs.replace(message, sequence=sequence)
        self._with.pop(message.sequence, None)
        with self._lock:
            self._flush()
            self._send(message)

    def sent(self, number: int, sequence: int, behind: int, others: Sequence[int] = ()) -> None:
        """An early launch was sent: it is reported, if it is over. With 0 it never will be, and is not reported. Those
        `others` that left as the same one, which it needed, are reported with it."""
        if others:
            self._with[sequence] = sum(one for one in self.early.sent_with(others) if isinstance(one, int))
        report = self.early.sent(number, sequence)
        if report is None or not sequence:
            return
        if isinstance(report, int):
            # who carries out the rest of a batch flushes behind it
            self.done(sequence, report, behind, later=behind > 0)
        else:
            self.failed(msgspec.structs.replace(report, sequence=sequence))

    def serving(self, number: int, called: Called) -> None:
        """A call is served as `number`, and is no launch: what it takes is said with that of others."""
        self._calls[number] = called

    def _was_served(self, number: int, device_us: int | None = None) -> bool:
        """Whether what is over was a call; one without a time has failed, and is charged as the launch that follows."""
        if (called := self._calls.pop(number, None)) is None:
            return False
        if device_us is not None:
            key = called.session, called.message.program
            with self._lock:
                calls, us = self._served.get(key, (0, 0))
                self._served[key] = calls + 1, us + device_us
                self.served += 1
        return True

    def sequence_of(self, number: int) -> int:
        """The number that a launch was sent under; its own while it was not, and 0 for a call, which never is."""
        return 0 if number in self._calls else self.early.sequence_of(number)

    def say_served(self, host: int) -> None:
        """Tells of the calls that were served since the last time."""
        if self._served:
            with self._lock:
                served, self._served = self._served, {}
            self._send(ServedCalls(host, tuple([Served(*key, *taken) for key, taken in served.items()])))

    def flush(self) -> None:
        """Nothing more is under way just now."""
        if self._sequences:
            with self._lock:
                self._flush()

    def run(self) -> None:
        """Reports what has been here for as long as it may; for a thread of its own."""
        while True:
            with self._lock:
                until = self._gathered_until
                self._looks_at = math.inf if until is None else until
            if until is None:
                self._gathering.get()
            elif (left := until - time.perf_counter()) <= 0:
                self.flush()
            else:
                with contextlib.suppress(queue.Empty):
                    get_within(self._gathering, left)

    def _gather(self, under_way_s: float, device_us: int) -> float:
        """Begins to gather, and returns until when.

        Where other hosts report the same launches it ends with one whose number divides by `_together`, a power of two
        that is no larger than the number of launches that are over until then. All hosts come to such a launch at the
        same time, and their scheduler wakes once for all. Where that is 1, each launch is reported at once, on a single
        host too: the next one would not be over in time.
        """
        kept_s = max(MAX_GATHERED_S, min(UNDER_WAY_PART * under_way_s, MOST_GATHERED_S))
        self._gathered_until = until = time.perf_counter() + kept_s
        over = max(1, int(1e6 * kept_s) // max(1, device_us))
        self._together = 1 << over.bit_length() - 1 if over == 1 or (self._multi_host and over <= MAX_GATHERED) else 0
        return until

    def _flush(self) -> None:
        if self._sequences:
            self._send(Done(tuple(self._sequences), tuple(self._device_us)))
            self._sequences, self._device_us, self._due, self._gathered_until = [], [], None, None
