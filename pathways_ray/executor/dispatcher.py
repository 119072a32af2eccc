"""The dispatcher of a host: takes the island's messages in order and enqueues; watches completions beside it.

Three threads. The *dispatcher* reads the scheduler's stream and is the only one that enqueues computations, so the
device queues see gangs in the scheduler's order. The *compiler* prepares programs in the background. The *watcher*
waits for results to be ready and reports outcomes; it is the only one that waits for devices.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import msgspec

from pathways_ray.errors import Failure, PathwaysError, to_failure
from pathways_ray.executor.chains import Chain, grouped
from pathways_ray.executor.compile import Compiler
from pathways_ray.executor.device_transfer import DeviceTransfer, failure_in
from pathways_ray.executor.runner import ActiveRun, PreparedProgram
from pathways_ray.executor.store import BufferStore
from pathways_ray.ir.plan import IslandPlan
from pathways_ray.transport.messages import (
    Done,
    Drop,
    DropProgram,
    DropSession,
    Enqueued,
    Message,
    Peers,
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


class Dispatcher:
    """Runs what the scheduler sends.

    Args:
        send: puts a message on the stream to the scheduler; safe from any thread.
        fusion: execute chains of repeated small launches as one computation.
    """

    def __init__(
        self,
        host: int,
        compiler: Compiler,
        store: BufferStore,
        transfer: DeviceTransfer,
        send: Callable[[Message], None],
        fusion: bool,
    ) -> None:
        self.fusion = fusion
        self.host = host
        self.compiler = compiler
        self.store = store
        self.transfer = transfer
        self.send = send
        self.programs: dict[int, PreparedProgram] = {}
        self.active: dict[int, tuple[PreparedProgram, ActiveRun]] = {}
        self._preparing = ThreadPoolExecutor(1, "compile")
        self._watched: queue.SimpleQueue[_Watched] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def under_way(self) -> int:
        """Launches on the device queues whose completion has not been seen."""
        return self._watched.qsize()

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
        while runs:
            size, compiled = program.chain_for(len(runs), chain.feeds, self._preparing.submit)
            if not size:
                break
            values = program.run_chain(Chain(runs[:size], chain.feeds), compiled)
            self._watched.put(
                _Watched(tuple(run.sequence for run in runs[:size]), values, program, time.perf_counter())
            )
            runs = runs[size:]
        for run in runs:
            self._run(run)

    def handle(self, message: ToHost) -> None:
        """One message of the scheduler, on the dispatcher thread."""
        match message:
            case Run():
                self._run(message)
            case Drop():
                self.store.drop(message.session, message.buffers)
            case Program():
                if message.program in self.programs:
                    self.send(Ready(self.host, message.program, self.programs[message.program].temporary_bytes))
                else:
                    self._preparing.submit(self._prepare, message)
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

    def _run(self, run: Run) -> None:
        found = self.active.get(run.sequence)
        if found is None:
            program = self.programs.get(run.program)
            if program is None:
                failure = Failure(
                    "HostLost", f"host {self.host} restarted before the launch reached it", host=self.host
                )
                self.send(RunFailed(run.sequence, failure))
                return
            found = (program, program.start(run))
        program, active = found
        complete = program.advance(active, run)
        if run.gangs:
            self.send(Enqueued(run.sequence, run.first))
        if not complete:
            self.active[run.sequence] = found
            return
        if run.gangs:
            self.active.pop(run.sequence, None)
        self._watched.put(_Watched((run.sequence,), program.finish(active, run), program, time.perf_counter()))

    # --- the watcher --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        last = 0.0
        while True:
            pending = [self._watched.get()]
            with contextlib.suppress(queue.Empty):
                while len(pending) < 256:
                    pending.append(self._watched.get_nowait())
            finished: list[int] = []
            for watched in pending:
                failure = self._await(watched.values)
                last = watched.measure(last)
                if failure is None:
                    finished += watched.sequences
                    if len(finished) < 32:
                        continue
                else:
                    for sequence in watched.sequences:
                        self.send(RunFailed(sequence, failure))
                if finished:
                    self.send(Done(tuple(finished)))
                    finished = []
            if finished:
                self.send(Done(tuple(finished)))
            # What was awaited may be the last reference to big arrays; do not keep it until the next launch comes.
            del pending, watched

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
