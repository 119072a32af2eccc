"""The driver of a host's core: carries out its instructions, in order, over the values of its launches.

A real host and the simulated one differ in `HostIO` alone. The driver itself holds the arrays, and decides nothing.

Options plug in as observers (the order check, the profiler); by default, a host has no observer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from pathways_ray.errors import Failure, PathwaysError, to_failure
from pathways_ray.executor.run import instructions as do
from pathways_ray.executor.run.checks_ahead import ChecksAhead
from pathways_ray.executor.run.core import HostCore
from pathways_ray.executor.run.host_plan import HostPlan, has_part
from pathways_ray.executor.run.parts import Store, Transfer
from pathways_ray.executor.run.prepared import PreparedProgram
from pathways_ray.executor.run.steps import Slots
from pathways_ray.executor.run.watchers import LONG_S, UnderWay
from pathways_ray.ir.graph import functions_in
from pathways_ray.ir.plan import IslandPlan
from pathways_ray.ir.verify_plan import verify_plan
from pathways_ray.transport.messages import (
    Compiling,
    FromLeader,
    Holds,
    IslandLaunch,
    Message,
    Peer,
    Program,
)

MAX_LONG_AT_ONCE = 8
"""Launches and calls on the device queues behind which none is served of a program that takes `LONG_S` or more."""

_PLAN = msgspec.msgpack.Decoder(IslandPlan)


class HostIO(Protocol):
    """The threads, devices and connections of a host. No method but `compile` waits."""

    def send(self, message: Message) -> None:
        """Sends to the scheduler. May be called from the threads of `in_background`."""

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        """Pulls from these hosts from now on."""

    def rejoin(self, holds: Holds) -> None:
        """Joins the successor of the scheduler, where one was found: what is sent from now on goes there; or says the
        same to the scheduler that there is, for another controller."""

    def end_process(self, reason: str) -> None:
        """Ends this process."""

    def compile(self, plan: HostPlan, functions: Mapping[str, bytes], trusted: bool) -> PreparedProgram:
        """Makes a program ready, whose functions are checked for less when it is `trusted`. Raises `PathwaysError`. May
        be called from the threads of `in_background`."""

    def in_background(self, tenant: str, work: Callable[[], do.Event]) -> None:
        """Does work in another thread, one tenant's after the other's, and has the driver handle its event."""

    def await_inputs(self, sequence: int, barrier: int, values: list[Any]) -> do.InputsArrived | None:
        """Waits for values. Returns the event if all are there, or None: it will be handled later."""

    def end_calls(self, session: int) -> None:
        """Ends the processes in which host functions of a session run."""

    def abandon(self, sequence: int) -> None:
        """Waits no longer for the values of `await_inputs`, if it still does."""

    def measure(self, sequence: int, values: list[Any], program: PreparedProgram) -> None:
        """Counts the time until values are ready to that of their launch."""

    def watch(
        self,
        sequence: int,
        values: list[Any],
        program: PreparedProgram,
        consumed: tuple[int, ...],
        asked: bool,
        later: Sequence[Callable[[], None]],
    ) -> None:
        """Reports a launch as done, or failed (with what it has consumed), once values are ready.

        Args:
            asked: whether its client gets all results from here, so that the report is not urgent.
            later: is done before, whatever came of the values.
        """

    def kind_of(self, value: Any) -> Any:
        """The kind of a value: equal for those that the same computation takes. None for what is no array, or not
        any more."""

    def under_way(self) -> UnderWay:
        """The load of the device queues."""

    def confirm(self, number: int, sequence: int, others: Sequence[int]) -> None:
        """Reports the launch that was watched as `number` as `sequence`, or, with 0, not at all; and the `others` with
        it."""

    def serve(
        self, called: do.Called, number: int, program: PreparedProgram, completing: list[Any], values: list[Any]
    ) -> None:
        """Answers a call with its values once those are ready that complete it, and keeps neither."""

    def leave_call(self, called: do.Called) -> None:
        """Tells a client that its call has to be launched."""

    def refuse_early(self, handed: do.Handed) -> None:
        """Tells a client that its call was left to the scheduler."""

    def say_allowed(self, tenant: str) -> None:
        """Tells clients whether they may hand over calls."""

    def tell(self, entry: FromLeader) -> None:
        """Writes an entry into the log of this host, which leads its island. Does not wait for those that read it."""

    def say_leads(self) -> None:
        """Tells the scheduler now whether this host leads its island."""


class LaunchObserver(Protocol):
    """Sees launches without taking part in them."""

    def started(self, launch: IslandLaunch) -> None:
        """A launch has come."""

    def enqueued(self, launch: IslandLaunch, program: PreparedProgram, first: int, last: int) -> None:
        """The steps from `first` up to `last` of its route are on the device queues."""

    def ran(self, sequence: int, start: float, end: float, part: bool) -> None:
        """Its devices were busy with it from `start` to `end`, in seconds of `time.perf_counter`; with `part`, up to a
        barrier. Called from the threads that wait for devices."""


class HostDriver:
    """Carries out the instructions of `core`. For one thread at a time; nobody else enqueues.

    Args:
        decode: reads the plan of a `Program`.
    """

    def __init__(
        self,
        core: HostCore,
        store: Store,
        transfer: Transfer,
        io: HostIO,
        decode: Callable[[bytes], IslandPlan] = _PLAN.decode,
    ) -> None:
        self.core = core
        self.store = store
        self.transfer = transfer
        self.io = io
        self.decode = decode
        self.programs: dict[int, PreparedProgram] = {}
        self.functions: dict[str, bytes] = {}
        self.named: dict[int, frozenset[str]] = {}
        self.naming: Counter[str] = Counter()
        """The functions that each program names, and how many name each; one that none names any more is let go of."""
        self.running: dict[int, tuple[PreparedProgram, Slots]] = {}
        self.observers: tuple[LaunchObserver, ...] = ()
        self.answers: Callable[[PreparedProgram], bool] = lambda program: False
        """Whether the thread that waits for a launch of a program answers fetches of its results."""
        self.check_ahead: Callable[[Mapping[str, bytes], bool], None] = lambda functions, trusted: None
        """Has functions of a client, trusted or not, checked before their program comes."""
        self.ahead = ChecksAhead()
        self.enqueued: tuple[int, PreparedProgram] | None = None
        """The launch whose steps are on their way to the device queues."""
        self._carry_out: dict[type, Callable[[Any], do.Event | None]] = {
            do.Run: self._run,
            do.Start: self._start,
            do.Copy: self._copy,
            do.Enqueue: self._enqueue,
            do.Measure: self._measure,
            do.AwaitInputs: self._await_inputs,
            do.Abandon: self._abandon,
            do.Forward: self._forward,
            do.Complete: self._complete,
            do.Serve: self._serve,
            do.LeaveCall: lambda leave: io.leave_call(leave.called),
            do.RefuseEarly: lambda refusal: io.refuse_early(refusal.handed),
            do.Confirm: lambda sent: io.confirm(sent.number, sent.sequence, sent.others),
            do.SayAllowed: lambda allowed: io.say_allowed(allowed.tenant),
            do.Free: self._free,
            do.FreeSession: self._free_session,
            do.Prepare: self._prepare,
            do.Check: self._check,
            do.Ask: self._ask,
            do.Forget: self._forget,
            do.SetPeers: lambda change: io.set_peers(change.peers),
            do.Rejoin: self._rejoin,
            do.Tell: lambda tell: io.tell(tell.entry),
            do.GoOn: lambda following: following.rest,
            do.End: lambda end: io.end_process(end.reason),
            do.Send: lambda send: io.send(send.message),
        }

    def handle_batch(self, events: Sequence[do.Event], now: float) -> None:
        """Handles events, one after the other, and everything that follows from each at once."""
        if self.core.leader is not None:
            for instruction in self.core.announce(events):
                self._carry_out[type(instruction)](instruction)
        for event in events:
            self.handle(event, now)

    def handle(self, event: do.Event, now: float) -> None:
        """Has the core handle an event, and what comes of its instructions, and carries these out, in order."""
        carry_out, handle = self._carry_out, self.core.handle
        made = handle(self._look_at(event) if type(event) is do.Handed else event, now)
        for instruction in made:  # grows meanwhile
            came = carry_out[type(instruction)](instruction)
            if came is not None:
                made += handle(came, now)

    # --- programs -----------------------------------------------------------------------------------------------------

    def _prepare(self, prepare: do.Prepare) -> do.Event | None:
        message = prepare.message
        plan = self.decode(message.plan)
        functions = self._functions_of(message, plan)
        if not has_part(plan, self.core.host):
            # There is nothing to compile, and the first launch may come any moment: behind what other programs have to
            # compile it would come too late.
            return self._prepared(message, plan, functions)
        self.io.in_background(message.tenant, lambda: self._compiled(message, plan, functions))
        return None

    def _functions_of(self, message: Program, plan: IslandPlan) -> dict[str, bytes]:
        """The functions of a program: those that came with it, and those that came with programs before it."""
        self.functions |= message.functions
        parts = (part for executable in plan.executables for part in functions_in(executable.recipe.parts))
        named = frozenset(part.digest for part in parts)
        if message.program not in self.named:  # otherwise it comes again, since it could not be compiled
            self.named[message.program] = named
            self.naming.update(named)
        return {digest: self.functions[digest] for digest in named if digest in self.functions}

    def _compiled(self, message: Program, plan: IslandPlan, functions: Mapping[str, bytes]) -> do.Event:
        """Compiles a program in the background. The scheduler hears of it first: it may be the end of this process."""
        host = self.core.host
        if message.program not in self.core.wanted:
            text = f"program {message.name!r} was dropped before host {host} compiled it"
            return do.PreparationFailed(message.program, Failure("CompileError", text, host=host))
        self.io.send(Compiling(host, message.program))
        return self._prepared(message, plan, functions)

    def _prepared(self, message: Program, plan: IslandPlan, functions: Mapping[str, bytes]) -> do.Event:
        host = self.core.host
        try:
            host_plan = HostPlan(verify_plan(plan), host, self.core.multi_host)
            prepared = self.io.compile(host_plan, functions, message.trusted)
        except PathwaysError as error:
            return do.PreparationFailed(message.program, to_failure(error, host=host))
        except Exception as error:
            failure = Failure("CompileError", f"{type(error).__name__}: {error}", host=host)
            return do.PreparationFailed(message.program, failure)
        prepared.number, prepared.computations = message.program, message.computations
        self.programs[message.program] = prepared
        return do.Prepared(message.program, host_plan, prepared.temporary_bytes, message.tenant, prepared.queues)

    def _check(self, check: do.Check) -> None:
        tenant = check.message.tenant  # all that its work keeps: the message may make room for others
        if self.ahead.add(check.message):
            self.io.in_background(tenant, lambda: self.ahead.checked(tenant, self.check_ahead))

    def _ask(self, ask: do.Ask) -> None:
        look, number, text = ask.message.look, ask.message.program, ask.message.text
        program = self.programs[number]
        self.io.in_background(ask.message.tenant, lambda: do.Examined(look, number, program.report(number, text)))

    # --- the values of launches ---------------------------------------------------------------------------------------

    def _run(self, run: do.Run) -> None:
        program, slots = self._started(run.launch, ())
        self._enqueued(program, slots, 0, len(program.steps))
        self._completed(program, slots)

    def _start(self, start: do.Start) -> None:
        self.running[start.launch.sequence] = self._started(start.launch, start.unresolved)

    def _started(self, launch: IslandLaunch, unresolved: Sequence[int]) -> tuple[PreparedProgram, Slots]:
        program = self.programs[launch.program]
        slots = program.start(launch, unresolved)
        if program.kinds is None and program.may_be_early:
            program.learn_kinds(slots, self.io.kind_of)
        for observer in self.observers:
            observer.started(launch)
        return program, slots

    def _look_at(self, handed: do.Handed) -> do.LookedAt:
        message, load = handed.message, self.io.under_way()
        program = self.programs.get(message.program)
        if program is None or (load.computations and not load.leaves_room(program)):
            return do.LookedAt(handed, False, load.launches)
        return do.LookedAt(handed, program.fits(handed.session, message, self.io.kind_of), load.launches)

    def _serve(self, serve: do.Serve) -> None:
        called, message = serve.called, serve.called.message
        program, load = self.programs[message.program], self.io.under_way()
        fits = load.leaves_room(program) and (program.seconds < LONG_S or load.launches <= MAX_LONG_AT_ONCE)
        if not fits or not program.serves(called.session, message, self.io.kind_of):
            self.io.leave_call(called)
            return
        inline = message.inline
        launch = IslandLaunch(serve.number, called.session, message.program, message.arguments, 0, inline=inline)
        _, slots = self._started(launch, ())
        self._enqueued(program, slots, 0, len(program.steps))
        values = [slots.values[slot] for slot, _ in program.plan.results]
        self.io.serve(called, serve.number, program, program.completing(slots), values)

    def _copy(self, copy: do.Copy) -> None:
        values = self.running[copy.sequence][1].values
        others = [slots.values for number, (_, slots) in self.running.items() if number != copy.sequence]
        for slot in copy.slots:
            value = values[slot]
            shared = not copy.if_shared or any(value is kept for other in others for kept in other)
            if shared and not isinstance(value, Failure):
                values[slot] = self.transfer.copy(value)

    def _enqueue(self, enqueue: do.Enqueue) -> None:
        program, slots = self.running[enqueue.sequence]
        if enqueue.failure is not None:
            program.fail_inputs(slots, enqueue.first - 1, enqueue.failure)
        self._enqueued(program, slots, enqueue.first, enqueue.last)

    def _enqueued(self, program: PreparedProgram, slots: Slots, first: int, last: int) -> None:
        self.enqueued = slots.launch.sequence, program
        program.run(slots, first, last)
        self.enqueued = None
        for observer in self.observers:
            observer.enqueued(slots.launch, program, first, last)

    def _measure(self, measure: do.Measure) -> None:
        program, slots = self.running[measure.sequence]
        values = program.outputs(slots, measure.first, measure.last)
        if values:
            self.io.measure(measure.sequence, values, program)

    def _await_inputs(self, wait: do.AwaitInputs) -> do.InputsArrived | None:
        if wait.failure is not None:
            return do.InputsArrived(wait.sequence, wait.barrier, wait.failure)
        program, slots = self.running[wait.sequence]
        return self.io.await_inputs(wait.sequence, wait.barrier, program.awaited(slots, wait.position))

    def _abandon(self, abandon: do.Abandon) -> None:
        self.io.abandon(abandon.sequence)
        if abandon.sequence in self.running:
            self.running[abandon.sequence][1].abort(abandon.failure)
        program = self.programs.get(abandon.program)
        if program is not None:
            program.take_back(abandon.sequence, abandon.failure)

    def _forward(self, forward: do.Forward) -> None:
        program, slots = self.running[forward.source]
        value = program.result(slots, forward.buffer)
        values = self.running[forward.target][1].values
        for slot in forward.slots:
            values[slot] = value

    def _complete(self, complete: do.Complete) -> None:
        self._completed(*self.running.pop(complete.sequence))

    def _completed(self, program: PreparedProgram, slots: Slots) -> None:
        # Where it is no gang alone, a result may be there long before the launch is over.
        slots.later = [] if program.is_one_gang and self.answers(program) else None
        values = program.finish(slots)
        if (leader := self.core.leader) is not None:
            waited = slots.launch.sequence < 0 or (slots.asked and program.plan.may_be_early)
            if leader.completed(waited):
                self.io.say_leads()
        consumed = program.consumed(slots) if slots.consumed else ()
        self.io.watch(slots.launch.sequence, values, program, consumed, slots.asked, slots.later or ())

    def _rejoin(self, rejoin: do.Rejoin) -> None:
        held = self.store.held()
        for session, coming in rejoin.coming.items():
            held[session] = tuple(dict.fromkeys((*held.get(session, ()), *coming)))
        self.io.rejoin(Holds(held, rejoin.programs, (), rejoin.sequence, rejoin.heard, rejoin.since, rejoin.offered))

    def _free(self, free: do.Free) -> None:
        self.store.drop(free.session, free.buffers)

    def _free_session(self, free: do.FreeSession) -> None:
        self.store.drop_session(free.session)
        self.io.end_calls(free.session)

    def _forget(self, forget: do.Forget) -> None:
        self.programs.pop(forget.program, None)
        for digest in self.named.pop(forget.program, frozenset()):
            self.naming[digest] -= 1
            if not self.naming[digest]:
                del self.naming[digest]
                self.functions.pop(digest, None)
