"""The threads of a host: one takes the island's messages in order and enqueues, others compile and watch completions.

`HostProgress` decides what is done with a message; it is used by the *dispatcher* thread only.

The *dispatcher* thread takes the scheduler's messages and is the only one that enqueues computations, so the
device queues see gangs in the scheduler's order. The *compiler* prepares programs in the background. The *watcher*
waits for results to be ready and reports outcomes; it is the only one that waits for devices.
"""

from __future__ import annotations

import contextlib
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
from pathways_ray.executor.compile import Compiler
from pathways_ray.executor.device_transfer import DeviceTransfer, failure_in
from pathways_ray.executor.ordering import Ordering
from pathways_ray.executor.parts import CompiledParts
from pathways_ray.executor.progress import HostProgress
from pathways_ray.executor.runner import PreparedProgram, has_part
from pathways_ray.executor.store import BufferStore
from pathways_ray.executor.trace import Trace
from pathways_ray.ir.plan import Device, IslandPlan
from pathways_ray.transport.messages import Arrived, Done, Message, Peer, Proceed, Program, Ready, RunFailed, ToHost

_PLAN = msgspec.msgpack.Decoder(IslandPlan)


class _Watched(NamedTuple):
    """What was enqueued together, the values that complete it, and when it was enqueued: whole launches, or (`part_of`)
    what one has enqueued before it stopped at a gate."""

    sequences: tuple[int, ...]
    values: list[Any]
    program: PreparedProgram
    enqueued: float
    part_of: int = 0


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
        fusion: execute chains of repeated small launches as one computation.
        members: the hosts of the island.
    """

    def __init__(
        self,
        host: int,
        compiler: Compiler,
        store: BufferStore,
        transfer: DeviceTransfer,
        send: Callable[[Message], None],
        fusion: bool,
        members: tuple[int, ...],
        ordering: Ordering,
    ) -> None:
        self.together = len(members) > 1
        self.host = host
        self.compiler = compiler
        self.store = store
        self.transfer = transfer
        self.send = send
        self.progress = HostProgress(host, store, self, fusion, members, ordering)
        self.programs, self.active = self.progress.programs, self.progress.active
        self.inbox: queue.SimpleQueue[list[ToHost] | Proceed] = queue.SimpleQueue()
        self._arrivals = ThreadPoolExecutor(limits.ISLAND_WINDOW, "arrival")
        self._preparing = ThreadPoolExecutor(1, "compile")
        self._watched: dict[Any, queue.SimpleQueue[_Watched]] = {}
        self._busy_until: dict[Device, float] = {}
        self._spent: dict[int, float] = {}
        self.trace: Trace | None = None

    def under_way(self) -> int:
        """Launches on the device queues whose completion has not been seen."""
        return sum(watched.qsize() for watched in list(self._watched.values()))  # threads ask while one adds

    def start(self) -> None:
        """Starts the dispatcher thread, which takes what the scheduler and the arrivals put into the inbox."""
        threading.Thread(target=_ending_with_process(self._dispatch), name="dispatch", daemon=True).start()

    def _dispatch(self) -> None:
        while True:
            item = self.inbox.get()
            if isinstance(item, Proceed):
                self.progress.handle(item)
            else:
                if (trace := self.trace) is not None:
                    trace.coming(item)
                self.progress.handle_batch(item)

    # --- programs -----------------------------------------------------------------------------------------------------

    def prepare(self, message: Program) -> None:
        plan = _PLAN.decode(message.plan)
        if has_part(plan, self.host):
            self._preparing.submit(self._prepare, message, plan)
        else:
            # There is nothing to compile, and the first launch may come any moment: behind what other programs have to
            # compile it would come too late.
            self._prepare(message, plan)

    def compile_later(self, work: Callable[[], None]) -> None:
        self._preparing.submit(work)

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
            self.inbox.put(Proceed(sequence, gate, failure))
        else:
            self.send(Arrived(self.host, sequence, gate, failure))

    # --- watchers -----------------------------------------------------------------------------------------------------

    def watch(self, sequences: tuple[int, ...], values: list[Any], program: PreparedProgram) -> None:
        self._watch(_Watched(sequences, values, program, time.perf_counter()))

    def measure(self, sequence: int, values: list[Any], program: PreparedProgram) -> None:
        self._watch(_Watched((), values, program, time.perf_counter(), sequence))

    def _watch(self, watched: _Watched) -> None:
        """Has somebody wait for values. Launches on other devices must not wait behind them, so each set of devices has
        a watcher of its own; hosts that act together report in the one order in which they enqueue."""
        devices = () if self.together else watched.program.devices
        queued = self._watched.get(devices)
        if queued is None:
            queued = self._watched[devices] = queue.SimpleQueue()
            threading.Thread(target=_ending_with_process(self._watch_all), args=(queued,), daemon=True).start()
        queued.put(watched)

    def _watch_all(self, watched: queue.SimpleQueue[_Watched]) -> None:
        while True:
            pending = [watched.get()]
            with contextlib.suppress(queue.Empty):
                while len(pending) < 256:
                    pending.append(watched.get_nowait())
            finished: list[int] = []
            micros: list[int] = []
            for one in pending:
                at, failure = self._first_failure(one.values)
                taken = self._taken(one)
                if failure is None:
                    finished += one.sequences
                    micros += [taken] * len(one.sequences)
                    if len(finished) < 32:
                        continue
                else:
                    failure = one.program.blamed(failure)
                    hosts = one.program.sharing(at) if self.together else ()
                    for sequence in one.sequences:
                        self.send(RunFailed(sequence, failure, hosts))
                if finished:
                    self.send(Done(tuple(finished), tuple(micros)))
                    finished, micros = [], []
            if finished:
                self.send(Done(tuple(finished), tuple(micros)))
            # What was awaited may be the last reference to big arrays; do not keep it until the next launch comes.
            del pending, one

    def _taken(self, watched: _Watched) -> int:
        """Microseconds that a launch has taken on the devices, now that what is watched is complete.

        What stands first in a device queue runs from when it was enqueued, the rest from when that before it ended.
        """
        now, busy = time.perf_counter(), self._busy_until
        start = watched.enqueued
        for device in watched.program.mine:
            start = max(start, busy.get(device, 0.0))
            busy[device] = now
        seconds = now - start
        if (trace := self.trace) is not None:
            trace.over(watched.sequences or (watched.part_of,), start, now, bool(watched.part_of))
        if watched.part_of:
            self._spent[watched.part_of] = self._spent.get(watched.part_of, 0.0) + seconds
            return 0
        if self._spent:
            seconds += sum(self._spent.pop(sequence, 0.0) for sequence in watched.sequences)
        program = watched.program
        seconds /= len(watched.sequences)
        program.seconds = seconds if not program.seconds else program.seconds + 0.1 * (seconds - program.seconds)
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
