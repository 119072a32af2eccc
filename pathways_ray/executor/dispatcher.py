"""The dispatcher of a host: takes the island's messages in order and enqueues; watches completions beside it.

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
from pathways_ray.executor.chains import Chain, grouped
from pathways_ray.executor.compile import Compiler
from pathways_ray.executor.device_transfer import DeviceTransfer, failure_in
from pathways_ray.executor.runner import NO_LIMIT, ActiveRun, PreparedProgram
from pathways_ray.executor.store import BufferStore
from pathways_ray.ir.plan import IslandPlan
from pathways_ray.transport.messages import (
    Arrived,
    Done,
    Drop,
    DropProgram,
    DropSession,
    Enqueued,
    Message,
    Peers,
    Proceed,
    Program,
    Ready,
    Run,
    RunFailed,
    ToHost,
)

_PLAN = msgspec.msgpack.Decoder(IslandPlan)


class _Watched(NamedTuple):
    """Launches on the device queues, the values that complete them, and when they were enqueued."""

    sequences: tuple[int, ...]
    values: list[Any]
    program: PreparedProgram
    enqueued: float

    def measure(self, last: float) -> float:
        """Notes how long a launch of the program takes on the devices, from completion to completion."""
        now = time.perf_counter()
        seconds = (now - max(last, self.enqueued)) / len(self.sequences)
        before = self.program.seconds
        self.program.seconds = seconds if not before else before + 0.1 * (seconds - before)
        return now


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
        together: the island has other hosts, so a gate opens when the scheduler says so, for all of them.
    """

    def __init__(
        self,
        host: int,
        compiler: Compiler,
        store: BufferStore,
        transfer: DeviceTransfer,
        send: Callable[[Message], None],
        fusion: bool,
        together: bool,
    ) -> None:
        self.fusion = fusion
        self.together = together
        self.host = host
        self.compiler = compiler
        self.store = store
        self.transfer = transfer
        self.send = send
        self.programs: dict[int, PreparedProgram] = {}
        self.active: dict[int, ActiveRun] = {}
        self.promised: dict[int, dict[int, ActiveRun]] = {}
        self.inbox: queue.SimpleQueue[list[ToHost] | Proceed] = queue.SimpleQueue()
        self._arrivals = ThreadPoolExecutor(limits.ISLAND_WINDOW, "arrival")
        self._preparing = ThreadPoolExecutor(1, "compile")
        self._watched: dict[Any, queue.SimpleQueue[_Watched]] = {}

    def under_way(self) -> int:
        """Launches on the device queues whose completion has not been seen."""
        return sum(watched.qsize() for watched in self._watched.values())

    def start(self) -> None:
        """Starts the dispatcher thread, which takes what the scheduler and the arrivals put into the inbox."""
        threading.Thread(target=_ending_with_process(self._dispatch), name="dispatch", daemon=True).start()

    def _dispatch(self) -> None:
        while True:
            item = self.inbox.get()
            if isinstance(item, Proceed):
                self._open(item.sequence, item.gang, item.failure)
            else:
                self.handle_batch(item)

    def handle_batch(self, messages: list[ToHost]) -> None:
        """What came together from the scheduler, on the dispatcher thread."""
        if not self.fusion or len(messages) < 4:
            for message in messages:
                self.handle(message)
            return
        for group in grouped(messages, self._chain_outputs):
            if isinstance(group, Chain):
                self._run_chain(group)
            else:
                self.handle(group)

    def _chain_outputs(self, program: int) -> int:
        found = self.programs.get(program)
        return found.chain_outputs if found is not None else 0

    def _run_chain(self, chain: Chain) -> None:
        """Runs a chain in the longest pieces that are compiled, the rest launch by launch."""
        program = self.programs[chain.runs[0].program]
        runs = chain.runs
        promised = self.promised.get(runs[0].session, ())
        if any(buffer in promised for buffer in runs[0].arguments):
            for run in runs:
                self._run(run)
            return
        while runs:
            size, compiled = program.chain_for(len(runs), chain.feeds, self._preparing.submit)
            if not size:
                break
            values = program.run_chain(Chain(runs[:size], chain.feeds), compiled)
            self._watch(tuple(run.sequence for run in runs[:size]), values, program)
            runs = runs[size:]
        for run in runs:
            self._run(run)

    def handle(self, message: ToHost) -> None:
        """One message of the scheduler, on the dispatcher thread."""
        match message:
            case Run():
                self._run(message)
            case Drop():
                self._drop(message)
            case Program():
                if message.program in self.programs:
                    self.send(Ready(self.host, message.program, self.programs[message.program].temporary_bytes))
                else:
                    self._preparing.submit(self._prepare, message)
            case Proceed():
                self._open(message.sequence, message.gang, message.failure)
            case Peers():
                self.transfer.set_peers(message.peers)
            case DropSession():
                self.store.drop_session(message.session)
            case DropProgram():
                self.programs.pop(message.program, None)

    def _prepare(self, message: Program) -> None:
        try:
            plan = _PLAN.decode(message.plan)
            prepared = PreparedProgram(plan, message.functions, self.compiler, self.store, self.transfer)
        except PathwaysError as error:
            self.send(Ready(self.host, message.program, 0, to_failure(error, host=self.host)))
        except Exception as error:
            failure = Failure("CompileError", f"{type(error).__name__}: {error}", host=self.host)
            self.send(Ready(self.host, message.program, 0, failure))
        else:
            self.programs[message.program] = prepared
            self.send(Ready(self.host, message.program, prepared.temporary_bytes))

    # --- launches -----------------------------------------------------------------------------------------------------

    def _run(self, run: Run) -> None:
        active = self.active.get(run.sequence)
        if active is None and run.first:
            return  # a later gang of a launch that has ended
        if active is None:
            program = self.programs.get(run.program)
            if program is None:
                text = f"host {self.host} restarted before the launch reached it"
                self.send(RunFailed(run.sequence, Failure("HostLost", text, host=self.host)))
                return
            active = program.start(run, self.promised.get(run.session, {}))
            self.active[run.sequence] = active
        active.limit = run.first + run.gangs if run.gangs else NO_LIMIT
        self._advance(active)

    def _advance(self, active: ActiveRun) -> None:
        """Enqueues as much of a launch as can be; what waits for others is taken up when they come."""
        program, run = active.program, active.run
        while not active.promised:
            gate = program.advance(active)
            if gate < 0:
                break
            if not self._has_arrived(active, gate):
                self._announce(active)
                return
        else:
            self._announce(active)
            return
        if run.gangs and active.reported < active.limit - 1:
            active.reported = active.limit - 1
            self.send(Enqueued(run.sequence, active.reported))
        if program.is_complete(active):
            self._finish(active)
        else:
            self._announce(active)

    def _announce(self, active: ActiveRun) -> None:
        """Lets later launches name the results of one that is not through before they are in the store."""
        results = active.program.results
        if not active.announced and results:
            active.announced = True
            promised = self.promised.setdefault(active.run.session, {})
            promised.update((active.run.results + number, active) for _, number in results)

    def _finish(self, active: ActiveRun) -> None:
        program, run = active.program, active.run
        values = program.finish(active)
        del self.active[run.sequence]
        self._watch((run.sequence,), values, program)
        if not active.announced:
            return
        promised = self.promised[run.session]
        for _, number in program.results:
            promised.pop(run.results + number, None)
        if not promised:
            del self.promised[run.session]
        ready: list[ActiveRun] = []
        for slot, number in program.results:
            for waiting in active.waiting.pop(run.results + number, ()):
                for target in waiting.promised.pop(run.results + number):
                    waiting.values[target] = active.values[slot]
                if not waiting.promised:
                    ready.append(waiting)
        if active.dropped:
            self.store.drop(run.session, tuple(active.dropped))
        for waiting in ready:
            self._advance(waiting)

    def _drop(self, message: Drop) -> None:
        """Drops buffers; those a launch has yet to store go as soon as it has."""
        promised = self.promised.get(message.session)
        if promised:
            for buffer in message.buffers:
                if buffer in promised:
                    promised[buffer].dropped.append(buffer)
        self.store.drop(message.session, message.buffers)

    # --- gates --------------------------------------------------------------------------------------------------------

    def _has_arrived(self, active: ActiveRun, gate: int) -> bool:
        """Whether the inputs behind a gate are there; if not, this thread or the scheduler hears when they are."""
        arrivals = active.program.awaited_at(active, gate)
        if not self.together and all(isinstance(a, Failure) or a.is_ready() for a in arrivals):
            active.opened, active.closed_by = gate, self._await(arrivals)
            return True
        self._arrivals.submit(self._wait_for_arrival, active.sequence, gate, arrivals)
        return False

    def _wait_for_arrival(self, sequence: int, gate: int, arrivals: list[Any]) -> None:
        failure = self._await(arrivals)
        if self.together:
            self.send(Arrived(self.host, sequence, gate, failure))
        else:
            self.inbox.put(Proceed(sequence, gate, failure))

    def _open(self, sequence: int, gang: int, failure: Failure | None) -> None:
        active = self.active.get(sequence)
        if active is not None:
            active.opened, active.closed_by = gang, failure
            self._advance(active)

    # --- watchers -----------------------------------------------------------------------------------------------------

    def _watch(self, sequences: tuple[int, ...], values: list[Any], program: PreparedProgram) -> None:
        """Has somebody wait for a launch. Launches on other devices must not wait behind it, so each set of devices has
        a watcher of its own; hosts that act together report in the one order in which they enqueue."""
        devices = () if self.together else program.devices
        watched = self._watched.get(devices)
        if watched is None:
            watched = self._watched[devices] = queue.SimpleQueue()
            threading.Thread(target=_ending_with_process(self._watch_all), args=(watched,), daemon=True).start()
        watched.put(_Watched(sequences, values, program, time.perf_counter()))

    def _watch_all(self, watched: queue.SimpleQueue[_Watched]) -> None:
        last = 0.0
        while True:
            pending = [watched.get()]
            with contextlib.suppress(queue.Empty):
                while len(pending) < 256:
                    pending.append(watched.get_nowait())
            finished: list[int] = []
            for one in pending:
                failure = self._await(one.values)
                last = one.measure(last)
                if failure is None:
                    finished += one.sequences
                    if len(finished) < 32:
                        continue
                else:
                    failure = one.program.blamed(failure)
                    for sequence in one.sequences:
                        self.send(RunFailed(sequence, failure))
                if finished:
                    self.send(Done(tuple(finished)))
                    finished = []
            if finished:
                self.send(Done(tuple(finished)))
            # What was awaited may be the last reference to big arrays; do not keep it until the next launch comes.
            del pending, one

    def _await(self, values: list[Any]) -> Failure | None:
        for value in values:
            if isinstance(value, Failure):
                return value
            try:
                value.block_until_ready()
            except Exception as error:
                # A later launch may have taken the memory of a value nobody looks at any more.
                if isinstance(value, jax.Array) and value.is_deleted():
                    continue
                text = str(error) or type(error).__name__
                return failure_in(text) or Failure("ExecutionError", text, host=self.host)
        return None


def heartbeat(send: Callable[[Message], None], message: Message, period: float = 1.0) -> None:
    """Sends `message` for ever; run it in a thread of its own."""
    while True:
        send(message)
        time.sleep(period)
