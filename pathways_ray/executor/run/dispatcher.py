"""The threads of a host: one takes the island's messages in order and enqueues, others compile and watch completions.

`HostProgress` decides what is done with a message; it is used by the *dispatcher* thread only.

The *dispatcher* thread takes the scheduler's messages and is the only one that enqueues computations, so the
device queues see gangs in the scheduler's order. The *compiler* prepares programs in the background. The *watcher*
waits for results to be ready and reports outcomes; it is the only one that waits for devices.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import msgspec

from pathways_ray import limits
from pathways_ray.errors import Failure, PathwaysError, to_failure
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.compile.jax_parts import CompiledParts
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.data.device_transfer import DeviceTransfer, failure_in
from pathways_ray.executor.profiling.launch_trace import Trace
from pathways_ray.executor.profiling.order_check import Ordering
from pathways_ray.executor.run.prepared import PreparedProgram, has_part
from pathways_ray.executor.run.progress import HostProgress
from pathways_ray.executor.run.reports import Reports
from pathways_ray.ir.plan import Device, IslandPlan
from pathways_ray.transport.messages import (
    BarrierReached,
    BarrierReleased,
    IslandLaunchFailed,
    Message,
    Peer,
    Program,
    Ready,
    ToHost,
)

_PLAN = msgspec.msgpack.Decoder(IslandPlan)


class _Watched(NamedTuple):
    """A launch, the values that complete it, and when the dispatcher began to enqueue it; or the `part` of it that is
    enqueued before it stops at a gate."""

    sequence: int
    values: list[Any]
    program: PreparedProgram
    begun: float
    part: bool = False


class _Watcher:
    """What a thread waits for, in order."""

    def __init__(self) -> None:
        self.queued: queue.SimpleQueue[_Watched] = queue.SimpleQueue()
        self.added = 0  # by the dispatcher thread
        self.seen = 0  # by the watcher

    def add(self, watched: _Watched) -> None:
        self.added += 1
        self.queued.put(watched)

    @property
    def is_idle(self) -> bool:
        """Whether all that was added is reported; for the thread that adds."""
        return self.added == self.seen


def _ending_with_process(run: Callable[..., None]) -> Callable[..., None]:
    """A thread's function that ends by an error of ours only. Then the process ends too, and Ray starts it anew: a host
    that serves but does not dispatch or report would be a hang for everybody."""

    def guarded(*args: Any) -> None:
        try:
            run(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    return guarded


class Dispatcher:
    """Runs what the scheduler sends.

    Args:
        send: puts a message on the stream to the scheduler; safe from any thread.
        members: the hosts of the island.
    """

    def __init__(
        self,
        host: int,
        compiler: Compiler,
        store: BufferStore,
        transfer: DeviceTransfer,
        send: Callable[[Message], None],
        members: tuple[int, ...],
        ordering: Ordering,
    ) -> None:
        self.together = len(members) > 1
        self.host = host
        self.compiler = compiler
        self.store = store
        self.transfer = transfer
        self.send = send
        self.reports = Reports(send)
        self.progress = HostProgress(host, store, self, members, ordering)
        self.programs, self.active = self.progress.programs, self.progress.active
        self.inbox: queue.SimpleQueue[list[ToHost] | BarrierReleased] = queue.SimpleQueue()
        self._arrivals = ThreadPoolExecutor(limits.ISLAND_WINDOW, "arrival")
        self._preparing = ThreadPoolExecutor(1, "compile")
        self._watchers: dict[Any, _Watcher] = {}
        self._begun = 0.0
        self._many = False
        self._busy_until: dict[Device, float] = {}
        self._spent: dict[int, float] = {}
        self.trace: Trace | None = None

    def under_way(self) -> int:
        """Launches on the device queues whose completion has not been seen."""
        watchers = list(self._watchers.values())  # threads ask while one adds
        return sum(watcher.queued.qsize() for watcher in watchers)

    def start(self) -> None:
        """Starts the dispatcher thread, which takes what the scheduler and the arrivals put into the inbox."""
        threading.Thread(target=_ending_with_process(self._dispatch), name="dispatch", daemon=True).start()
        threading.Thread(target=_ending_with_process(self.reports.run), name="reports", daemon=True).start()

    def _dispatch(self) -> None:
        while True:
            item = self.inbox.get()
            self._begun = time.perf_counter()
            if isinstance(item, BarrierReleased):
                self._many = not self.inbox.empty()
                self.progress.handle(item)
            else:
                if (trace := self.trace) is not None:
                    trace.coming(item)
                self._many = len(item) > 2 or not self.inbox.empty()
                self.progress.handle_batch(item)
            if self._many and self.inbox.empty():
                self.reports.flush()

    # --- programs -----------------------------------------------------------------------------------------------------

    def prepare(self, message: Program) -> None:
        plan = _PLAN.decode(message.plan)
        if has_part(plan, self.host):
            self._preparing.submit(self._prepare, message, plan)
        else:
            # There is nothing to compile, and the first launch may come any moment: behind what other programs have to
            # compile it would come too late.
            self._prepare(message, plan)

    def _prepare(self, message: Program, plan: IslandPlan) -> None:
        try:
            parts = CompiledParts(plan, message.functions, self.compiler)
            prepared = PreparedProgram(plan, self.host, parts, self.store, self.transfer, self.together)
        except PathwaysError as error:
            self.send(Ready(self.host, message.program, 0, to_failure(error, host=self.host)))
        except Exception as error:
            failure = Failure("CompileError", f"{type(error).__name__}: {error}", host=self.host)
            self.send(Ready(self.host, message.program, 0, failure))
        else:
            self.progress.prepared(message.program, prepared)

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        self.transfer.set_peers(peers)

    # --- gates --------------------------------------------------------------------------------------------------------

    def has_arrived(self, values: list[Any]) -> bool:
        return all(isinstance(value, Failure) or value.is_ready() for value in values)

    def wait_for_arrival(self, sequence: int, gate: int, values: list[Any], alone: bool) -> None:
        if self.has_arrived(values):
            self._arrived(sequence, gate, values, alone)
        else:
            self._arrivals.submit(self._arrived, sequence, gate, values, alone)

    def _arrived(self, sequence: int, gate: int, values: list[Any], alone: bool) -> None:
        failure = self.failure_of(values)
        if alone:
            self.inbox.put(BarrierReleased(sequence, gate, failure))
        else:
            self.send(BarrierReached(self.host, sequence, gate, failure))

    # --- watchers -----------------------------------------------------------------------------------------------------

    def watch(self, sequence: int, values: list[Any], program: PreparedProgram) -> None:
        """Reports a launch once its values are ready. Small computations run in the thread that enqueues them: those
        are over when they come here, and reported without another thread's help."""
        watcher = self._watcher(program)
        watched = _Watched(sequence, values, program, self._begun)
        self._begun = time.perf_counter()
        if watcher.is_idle and self._is_over(values):
            self.reports.done(sequence, self._taken(watched), self._many)
        else:
            watcher.add(watched)

    def measure(self, sequence: int, values: list[Any], program: PreparedProgram) -> None:
        self._watcher(program).add(_Watched(sequence, values, program, self._begun, True))
        self._begun = time.perf_counter()

    def _watcher(self, program: PreparedProgram) -> _Watcher:
        """Who waits for a program's values. Launches on other devices must not wait behind them, so each set of devices
        has a watcher of its own; hosts that act together report in the one order in which they enqueue."""
        devices = () if self.together else program.devices
        watcher = self._watchers.get(devices)
        if watcher is None:
            watcher = self._watchers[devices] = _Watcher()
            threading.Thread(target=_ending_with_process(self._watch), args=(watcher,), daemon=True).start()
        return watcher

    def _is_over(self, values: list[Any]) -> bool:
        """Whether values are ready, and none failed."""
        try:
            return all(not isinstance(v, Failure) and v.is_ready() for v in values) and self.failure_of(values) is None
        except RuntimeError:  # a later launch has taken the memory of one
            return False

    def _watch(self, watcher: _Watcher) -> None:
        while True:
            watched = watcher.queued.get()
            at, failure = self._first_failure(watched.values)
            taken = self._taken(watched)
            if failure is not None:
                failure = watched.program.blamed(failure)
                hosts = watched.program.sharing(at) if self.together else ()
                if not watched.part:
                    self.reports.failed(IslandLaunchFailed(watched.sequence, failure, hosts))
            elif not watched.part:
                self.reports.done(watched.sequence, taken, more=not watcher.queued.empty())
            # It may hold the last reference to big arrays; do not keep it until the next launch comes.
            del watched
            watcher.seen += 1

    def _taken(self, watched: _Watched) -> int:
        """Microseconds that a launch has taken on the devices, now that what is watched is complete.

        What stands first in a device queue runs from when the dispatcher began with it, since devices work while the
        rest of a launch is enqueued, and the queues may be short; what comes behind, from when that before it ended.
        """
        now, busy = time.perf_counter(), self._busy_until
        start = watched.begun
        for device in watched.program.mine:
            start = max(start, busy.get(device, 0.0))
            busy[device] = now
        seconds = now - start
        if (trace := self.trace) is not None:
            trace.over(watched.sequence, start, now, watched.part)
        if watched.part:
            self._spent[watched.sequence] = self._spent.get(watched.sequence, 0.0) + seconds
            return 0
        if self._spent:
            seconds += self._spent.pop(watched.sequence, 0.0)
        return round(seconds * 1e6)

    def failure_of(self, values: list[Any]) -> Failure | None:
        """Waits for values; returns the first failure among them."""
        return self._first_failure(values)[1]

    def _first_failure(self, values: list[Any]) -> tuple[int, Failure | None]:
        """Waits for values; returns the first failure among them and its place."""
        for k, value in enumerate(values):
            if isinstance(value, Failure):
                return k, value
            try:
                value.block_until_ready()
            except Exception as error:
                # A later launch may have taken the memory of a value nobody looks at any more.
                if isinstance(value, jax.Array) and value.is_deleted():
                    continue
                text = str(error) or type(error).__name__
                return k, failure_in(text) or Failure("ExecutionError", text, host=self.host)
        return -1, None


def heartbeat(send: Callable[[Message], None], message: Message, period: float = 1.0) -> None:
    """Sends `message` for ever; run it in a thread of its own."""
    while True:
        send(message)
        time.sleep(period)
