"""The threads of a host: one takes the island's messages in order and enqueues, others compile and watch completions.

The *dispatcher* thread carries out the instructions of `HostCore`. It enqueues computations, so the device queues see
gangs in the scheduler's order; while it has nothing to do, a lone message of the scheduler, and a brief call of a
client, are handled in the thread that reads them (`inbox`). Two *compilers* prepare programs in the background.
*Arrivals* looks for data of other hosts. *Watchers* wait for results to be ready and report outcomes; they alone wait
for devices.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from pathways_ray import limits
from pathways_ray.errors import Failure
from pathways_ray.executor.calls.calls import HostCalls
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.compile.jax_parts import CompiledParts
from pathways_ray.executor.compile.queue import FairQueue
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.data.device_transfer import DeviceTransfer
from pathways_ray.executor.run.arrivals import Arrivals, are_over, failure_of, is_there
from pathways_ray.executor.run.core import HostCore
from pathways_ray.executor.run.driver import HostDriver, LaunchObserver
from pathways_ray.executor.run.following import FollowingLaunches
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.executor.run.inbox import FromScheduler, Inbox, Read, Source
from pathways_ray.executor.run.instructions import Called, Event, Handed, InputsArrived
from pathways_ray.executor.run.prepared import PreparedProgram
from pathways_ray.executor.run.ran import RanLaunches
from pathways_ray.executor.run.reports import Reports
from pathways_ray.executor.run.stops import stopped
from pathways_ray.executor.run.watchers import Watched, Watcher, answer, are_idle, kept_by_earlier, load_of
from pathways_ray.executor.threads import ending_with_process
from pathways_ray.ir.plan import Device
from pathways_ray.story import Entry
from pathways_ray.transport.busy_poll import BusyPoll
from pathways_ray.transport.messages import Decided, FromLeader, Heartbeat, Holds, Message, Peer, Running
from pathways_ray.waits import get_within

T = TypeVar("T")

NOTED_AFTER_S = 0.5
"""A launch that keeps devices for longer is in the heartbeat. Shorter ones are over before anybody would act on it."""

MANY = 1 << 10
"""Launches that are said to be behind one that was over within the call: nobody counts those of a batch."""

MAX_HANDED = 64
"""Batches that wait for the dispatcher, behind which no call of a client is put: it waits at its scheduler."""

MAX_WATCHERS = 64
"""Threads that watch. There are more device sets on a host of many devices, and a client can use them all; then some
share a thread, which may report one launch after another that ended later."""


class Dispatcher:
    """Runs what the scheduler sends.

    Args:
        send: puts a message on the stream to the scheduler; safe from any thread.
        members: the hosts of the island.
        log: takes what host functions print.
    """

    def __init__(
        self,
        host: int,
        compiler: Compiler,
        store: BufferStore,
        transfer: DeviceTransfer,
        send: Callable[[Message], None],
        members: tuple[int, ...],
        log: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        self.multi_host = len(members) > 1
        self.host = host
        self.compiler = compiler
        compiler.is_busy = lambda: any(watcher.takes_long for watcher in self._watchers.values())
        self.store = store
        self.transfer = transfer
        self.send = send
        self.rejoin: Callable[[Holds], None] = lambda holds: None
        self.refuse_early: Callable[[Handed], None] = lambda handed: None
        self.answer_call: Callable[[Called, list[Any], list[Any]], None] = lambda *_: None
        self.leave_call: Callable[[Called], None] = lambda _: None
        self.say_allowed: Callable[[str], None] = lambda tenant: None
        self.tell: Callable[[FromLeader], None] = lambda entry: None
        self.say_leads: Callable[[], None] = lambda: None
        self.on_peers: Callable[[Sequence[Peer]], None] = lambda peers: None
        self.reports = Reports(send, self.multi_host)
        self.calls = HostCalls(host, log)
        self.core = HostCore(host, members)
        self.driver = HostDriver(self.core, store, transfer, self)
        self.driver.answers = lambda program: (program.watcher or self._watcher(program)).may_answer
        self.driver.check_ahead = compiler.sandbox.check_ahead
        self.inbox = Inbox(self._carry_out)
        self.arrivals = Arrivals(self._inputs_arrived)
        self.abandon = self.arrivals.drop
        transfer.on_arrival = self.calls.on_end = self.arrivals.look
        self.following = FollowingLaunches(host, self.core.early, transfer, store.ended, self.hand)
        transfer.on_handed = self.following.take
        self._preparing = ThreadPoolExecutor(limits.COMPILE_WORKERS, "compile")
        self._to_prepare: FairQueue[Callable[[], Event]] = FairQueue()
        self._watchers: dict[Any, Watcher] = {}
        self.under_way = partial(load_of, self._watchers)
        self._queueing = threading.Lock()
        self._begun = self._read_at = 0.0
        self._behind = 0
        self._busy_until: dict[Device, float] = {}
        self._passing_until: dict[Device, float] = {}
        self._spent: dict[int, float] = {}
        self._passed: dict[int, float] = {}
        self._free_since: dict[Device, float] = {}
        self.ran = RanLaunches(self.reports.sequence_of)

    def busy_poll(self) -> BusyPoll:
        """Whether a thread that waits for calls looks again and again: while all that was enqueued is over."""
        return BusyPoll(lambda: are_idle(self._watchers))

    def observe(self, observer: LaunchObserver) -> None:
        """Has an observer see the launches that come from now on."""
        self.driver.observers = (*self.driver.observers, observer)

    def release(self, observer: LaunchObserver) -> None:
        """Takes an observer away."""
        self.driver.observers = tuple(other for other in self.driver.observers if other is not observer)

    def start(self) -> None:
        """Starts the dispatcher thread, which takes what the scheduler and the other threads put into the inbox."""
        threading.Thread(target=ending_with_process(self._dispatch), name="dispatch", daemon=True).start()
        threading.Thread(target=ending_with_process(self.reports.run), name="reports", daemon=True).start()
        threading.Thread(target=ending_with_process(self.arrivals.run), name="arrivals", daemon=True).start()

    def _dispatch(self) -> None:
        while True:
            self.inbox.handle(self._next(self.inbox))

    def take(self, batch: Sequence[Event], source: Source = FromScheduler) -> None:
        """Takes messages of the scheduler, or of the leader, from the thread that reads them."""
        if self.inbox.read(batch, source) and self.reports.left_s() is not None:
            self.inbox.put(())  # the dispatcher looks at the time

    def _carry_out(self, batch: Sequence[Event]) -> None:
        """Handles events. The caller has the turn, without which nobody touches the core or enqueues."""
        self._begun = now = time.perf_counter()
        self._read_at = batch.at if isinstance(batch, Read) else now
        left, self._behind = self._behind, MANY if len(batch) > 2 or not self.inbox.empty() else 0
        self.driver.handle_batch(batch, now)
        if (left or self._behind) and self.inbox.empty():  # this one may report nothing, and those before it have
            self._behind = 0
            self.reports.flush()

    def _next(self, source: queue.SimpleQueue[T]) -> T:
        """The next one of a queue. Meanwhile, reports that are not urgent leave when it is time for them."""
        while (left := self.reports.left_s()) is not None:
            with contextlib.suppress(queue.Empty):
                if left > 0:
                    return get_within(source, left)
            self.reports.flush()
        return source.get()

    # --- early launches -----------------------------------------------------------------------------------------------

    def hand(self, handed: Handed | Called) -> bool:
        """Takes a call that a client hands over; false where too much is to be done already. For the thread that serves
        clients, which carries out what is brief itself where the dispatcher has nothing to do: who waits for it waits
        for no other thread. Not on an island of several hosts: a collective may wait for these within its call."""
        program = self.driver.programs.get(handed.message.program)
        is_brief = not self.multi_host and (program is None or program.is_brief)
        if is_brief and self._may_run(handed, program) and self.inbox.handles_here([handed]):
            return True
        if (self.multi_host and type(handed) is Called) or self.inbox.qsize() >= MAX_HANDED:
            return False
        self.inbox.put([handed])
        return True

    def _may_run(self, handed: Handed | Called, program: PreparedProgram | None) -> bool:
        """Whether a launch that follows from a decision has room: the one that has decided is only just over."""
        is_following = type(handed) is Handed and handed.message.results < 0
        return not is_following or program is None or self.under_way().leaves_room(program)

    def serve(
        self, called: Called, number: int, program: PreparedProgram, completing: list[Any], values: list[Any]
    ) -> None:
        self.reports.serving(number, called)
        self.watch(number, completing, program, (), True, (partial(self.answer_call, called, completing, values),))

    def kind_of(self, value: Any) -> Any:
        # No question for `jax.Array`, which takes longest; what is deleted a launch has taken the memory of.
        if value is None or isinstance(value, Failure) or value.is_deleted():
            return None
        return (kind := value.aval).shape, kind.dtype, value.sharding

    def confirm(self, number: int, sequence: int, others: Sequence[int]) -> None:
        self.reports.sent(number, sequence, self._behind, others)
        self.ran.sent((*others, number), sequence)

    # --- programs -----------------------------------------------------------------------------------------------------

    def compile(self, plan: HostPlan, functions: Mapping[str, bytes], trusted: bool) -> PreparedProgram:
        parts = CompiledParts(plan.plan, functions, self.compiler, self.calls, trusted)
        return PreparedProgram(plan, parts, self.store, self.transfer)

    def in_background(self, tenant: str, work: Callable[[], Event]) -> None:
        with self._queueing:
            self._to_prepare.add(tenant, work)
        self._preparing.submit(ending_with_process(self._prepare_next))

    def _prepare_next(self) -> None:
        with self._queueing:
            work = self._to_prepare.take()
        self.inbox.put([work()])

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        self.transfer.set_peers(peers)
        self.on_peers(peers)

    def end_process(self, reason: str) -> None:
        print(f"host {self.host} ends: {reason}", flush=True)
        os._exit(1)

    # --- inputs from other hosts --------------------------------------------------------------------------------------

    def await_inputs(self, sequence: int, barrier: int, values: list[Any]) -> InputsArrived | None:
        if all(map(is_there, values)):
            return InputsArrived(sequence, barrier, failure_of(values, self.host)[1])
        self.arrivals.add(sequence, barrier, values)
        return None

    def end_calls(self, session: int) -> None:
        self.calls.end(session)

    def _inputs_arrived(self, sequence: int, barrier: int, values: list[Any]) -> None:
        """Goes on with a launch. The thread that brought what it has waited for does so, if what follows is brief: it
        may be the one that hears of all that a host sends. A collective of several hosts would keep that for as long as
        others compute."""
        arrived = [InputsArrived(sequence, barrier, failure_of(values, self.host)[1])]
        running = None if self.multi_host else self.driver.running.get(sequence)  # in whatever thread
        is_brief = running is not None and running[0].is_brief and self.under_way().leaves_room(running[0])
        if not (is_brief and self.inbox.handles_here(arrived)):
            self.inbox.put(arrived)
        elif self.reports.left_s() is not None:
            self.inbox.put(())  # the dispatcher looks at the time

    # --- watchers -----------------------------------------------------------------------------------------------------

    def watch(
        self,
        sequence: int,
        values: list[Any],
        program: PreparedProgram,
        consumed: tuple[int, ...],
        asked: bool = False,
        later: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Reports a launch once its values are ready. Small computations run in the thread that enqueues them: those
        are over when they come here, and are reported without another thread's help."""
        watcher, begun = program.watcher or self._watcher(program), self._begun
        self._begun = over = time.perf_counter()
        if watcher.is_idle and are_over(values):
            if later:
                answer(later)
            if program.plan.decides:
                self._decide(sequence, values, program)
            taken = self._taken(sequence, program, begun, over)
            self.reports.done(sequence, taken, self._behind, over - self._read_at, later=asked)
        else:
            watcher.add(Watched(sequence, values, program, begun, False, consumed, asked, later))

    def measure(self, sequence: int, values: list[Any], program: PreparedProgram) -> None:
        self._watcher(program).add(Watched(sequence, values, program, self._begun, True))
        self._begun = time.perf_counter()

    def _watcher(self, program: PreparedProgram) -> Watcher:
        """The watcher of a program's values, which stays the same."""
        devices = program.plan.watched_with
        watcher = self._watchers.get(devices)
        if watcher is None and len(self._watchers) < MAX_WATCHERS:
            watcher = self._watchers[devices] = Watcher(is_shared=not devices)
            threading.Thread(target=ending_with_process(self._watch), args=(watcher,), daemon=True).start()
        elif watcher is None:
            watcher = list(self._watchers.values())[hash(devices) % MAX_WATCHERS]
            watcher.is_shared = True
        program.watcher = watcher
        return watcher

    def _watch(self, watcher: Watcher) -> None:
        while True:
            watched = self._next(watcher.queued)
            at, failure = failure_of(watched.values, self.host)
            over = time.perf_counter()
            answer(watched.later)  # first: somebody waits for it
            taken = self._taken(watched.sequence, watched.program, watched.begun, over, watched.part)
            if watched.part:
                pass  # the rest of the launch reports it
            elif failure is not None:
                self.core.early.undecided(watched.sequence)
                plan = watched.program.plan
                self.reports.failed(plan.failed(watched.sequence, failure, at, watched.consumed))
            else:
                if watched.program.plan.decides:
                    self._decide(watched.sequence, watched.values, watched.program)
                self.reports.done(watched.sequence, taken, watcher.queued.qsize(), over - watched.begun, watched.asked)
            del watched  # or it would be kept until the next launch comes
            watcher.finished()

    def _decide(self, sequence: int, values: list[Any], program: PreparedProgram) -> None:
        """Says the scalars by which a program decides, now that they are there."""
        decisive = values[-len(program.plan.decides) :]
        found = [int(np.asarray(value.addressable_data(0)).item()) for value in decisive]
        self.following.decided(sequence, found[0])
        self.reports.decided(Decided(sequence, tuple(found)))

    def _taken(self, sequence: int, program: PreparedProgram, begun: float, now: float, part: bool = False) -> int:
        """The microseconds that a launch, or a part of it, has taken on the devices, where it was complete at `now`.

        The first launch in a device queue runs from when the dispatcher began with it, since devices work while the
        rest is enqueued, and queues may be short; one behind it, from when that before it ended. One that passes what
        keeps a device releases nothing; such launches take turns among themselves.
        """
        start, plan, until = begun, program.plan, self._busy_until
        devices = plan.own_devices
        if len(self._watchers) > 1 and (kept := kept_by_earlier(sequence, plan, begun, self._watchers)):
            for device in kept.intersection(devices):
                start = max(start, self._passing_until.get(device, 0.0))
                self._passing_until[device] = now
            devices = tuple([device for device in devices if device not in kept])
        for device in devices:
            if (ended := until.get(device, 0.0)) > start:
                start = ended
            until[device] = now
        self.ran.ended(sequence, start, now)
        for observer in self.driver.observers:
            observer.ran(sequence, start, now, part)
        seconds = now - start if now > start else 0.0
        seconds += self._spent.pop(sequence, 0.0) if self._spent else 0.0
        if part:
            self._spent[sequence] = seconds
            return 0
        program.took(seconds)
        return round(seconds * 1e6)

    def heartbeat(self, slowness: float = 1.0) -> Heartbeat:
        """The launches that are first on all their devices here, and have been for `NOTED_AFTER_S`, and those behind
        them.

        A launch is on its devices if no watcher has an earlier one there; the dispatcher may be held up by one that it
        enqueues. For any thread.
        """
        if (self.reports.left_s() or 0.0) < 0.0:
            self.reports.flush()  # whose thread is at a computation that takes long
        now = time.perf_counter()
        under_way = [one for watcher in list(self._watchers.values()) for one in watcher.snapshot()]
        under_way.sort(key=lambda one: one.begun)
        if (enqueued := self.driver.enqueued) is not None:
            sequence, program = enqueued
            under_way.append(Watched(sequence, [], program, self._begun))
        self._passed = {s: at for s, at in self._passed.items() if any(s == one.sequence for one in under_way)}
        running: dict[int, Running] = {}
        queued: dict[int, None] = {}
        taken: set[Device] = set()
        for one in under_way:
            devices = one.program.plan.own_devices
            sequence = self.reports.early.sequence_of(one.sequence)
            if one.values and one.is_complete:
                # It waits to be reported, behind one on other devices; what follows on its own may run since now. One
                # that only moved data may be over before what has its device, and then that has it on.
                if one.sequence not in self._passed:
                    self._passed[one.sequence] = now
                    self._free_since.update(dict.fromkeys(set(devices) - taken, now))
                continue
            since = max(one.begun, *(self._busy_until.get(d, 0.0) for d in devices), 0.0)
            since = max(since, *(self._free_since.get(d, 0.0) for d in devices), 0.0)
            if not taken.isdisjoint(devices):
                queued[sequence] = None
            elif devices and now - since > NOTED_AFTER_S:
                unsent = one.program.number if sequence < 0 else 0
                running[sequence] = Running(sequence, round(1000 * (now - since)), unsent)
            taken.update(devices)
        behind = tuple(sequence for sequence in queued if sequence not in running) if running else ()
        return Heartbeat(
            self.host, slowness, tuple(running.values()), behind, stopped(self.core), leads=self.core.leads
        )
