"""What a host decides: which launch goes on, up to which step, and what is dropped when.

A launch that arrives takes its arguments and posts its pulls at once, then its steps run in order. It stops at three
places: at an argument that a launch before it has yet to make, at a gate whose inputs have not arrived, and (with
sequential dispatch) at the gang it may not reach yet. Meanwhile later launches go on; what a launch *promised* to make
can be named before it is there. Nothing here waits.

Events in: `handle_batch` takes what came from the scheduler, `opened` what was waited for at a gate. What follows from
them is done through the `Shell`, in order: the threads and devices of a real host, or those of the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pathways_ray.errors import Failure
from pathways_ray.executor.profiling.order_check import KEPT, Ordering, ignoring_order
from pathways_ray.executor.run.prepared import PreparedProgram, Store
from pathways_ray.executor.run.steps import NO_LIMIT, ActiveLaunch, GateStep
from pathways_ray.transport.messages import (
    BarrierReleased,
    Drop,
    DropProgram,
    DropSession,
    Enqueued,
    IslandLaunch,
    IslandLaunchFailed,
    Message,
    Ordered,
    Peer,
    Peers,
    Program,
    Ready,
    ToHost,
)


class Shell(Protocol):
    """What `HostProgress` has done. No method waits."""

    def send(self, message: Message) -> None:
        """To the scheduler."""

    def watch(self, sequence: int, values: list[Any], program: PreparedProgram) -> None:
        """Reports a launch as done, or failed, once `values` are ready."""

    def measure(self, sequence: int, values: list[Any], program: PreparedProgram) -> None:
        """Counts what a launch has enqueued so far, up to `values`, to the time it takes."""

    def has_arrived(self, values: list[Any]) -> bool:
        """Whether all of these are there, or failed."""

    def failure_of(self, values: list[Any]) -> Failure | None:
        """The first failure among values that have arrived."""

    def wait_for_arrival(self, sequence: int, gate: int, values: list[Any], alone: bool) -> None:
        """Reports `BarrierReached` once all values have arrived; calls `opened` instead where the host opens gates `alone`."""

    def prepare(self, message: Program) -> None:
        """Compiles a program, calls `prepared` with it; reports it `Ready` with a failure when that is not to be."""

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        """Whom pulls may go to from now on."""


class HostProgress:
    """The launches of one host.

    Args:
        members: the hosts of the island. Where there are several, they meet at some gates.
    """

    def __init__(
        self,
        host: int,
        store: Store,
        shell: Shell,
        members: tuple[int, ...],
        ordering: Ordering = KEPT,
    ) -> None:
        self.host = host
        self.store = store
        self.shell = shell
        self.together = len(members) > 1
        self.members = members
        self.ordering = ordering
        self.wanted: set[int] = set()
        self.programs: dict[int, PreparedProgram] = {}
        self.active: dict[int, ActiveLaunch] = {}
        self.promised: dict[int, dict[int, ActiveLaunch]] = {}

    # --- messages -----------------------------------------------------------------------------------------------------

    def handle_batch(self, messages: list[ToHost]) -> None:
        """What came from the scheduler at once."""
        if self.ordering.ignored:
            messages = ignoring_order(messages, self.members.index(self.host))
        for message in messages:
            self.handle(message)

    def handle(self, message: ToHost) -> None:
        """One message of the scheduler."""
        match message:
            case IslandLaunch():
                self._run(message)
            case Drop():
                self._drop(message)
            case Program():
                self._program(message)
            case BarrierReleased():
                self.opened(message.sequence, message.barrier, message.failure)
            case Peers():
                self.shell.set_peers(message.peers)
            case DropSession():
                self.store.drop_session(message.session)
            case DropProgram():
                self.wanted.discard(message.program)
                self.programs.pop(message.program, None)

    # --- programs -----------------------------------------------------------------------------------------------------

    def _program(self, message: Program) -> None:
        prepared = self.programs.get(message.program)
        if prepared is not None:
            self._report_ready(message.program, prepared)
        elif message.program not in self.wanted:
            self.wanted.add(message.program)
            self.shell.prepare(message)

    def _report_ready(self, number: int, program: PreparedProgram) -> None:
        """Tells the controller, unless it waits for other hosts only: it counts."""
        if program.has_part:
            self.shell.send(Ready(self.host, number, program.temporary_bytes))

    def prepared(self, number: int, program: PreparedProgram) -> None:
        """A program is compiled: launches of it may come. May be called from the compiling thread."""
        self.programs[number] = program
        if number not in self.wanted:
            # It was dropped meanwhile; looked up afterwards, so that a drop at this moment finds it or is seen here.
            self.programs.pop(number, None)
        self._report_ready(number, program)

    # --- launches -----------------------------------------------------------------------------------------------------

    def _run(self, run: IslandLaunch) -> None:
        active = self.active.get(run.sequence)
        if active is None and run.first:
            return  # a later gang of a launch that has ended
        if active is None:
            program = self.programs.get(run.program)
            if program is None:
                text = f"host {self.host} restarted before the launch reached it"
                failure = Failure("HostLost", text, host=self.host)
                self.shell.send(IslandLaunchFailed(run.sequence, failure, self.members))
                return
            active = program.start(run, self.promised.get(run.session, {}))
            self.active[run.sequence] = active
        active.limit = run.first + run.gangs if run.gangs else NO_LIMIT
        self._advance(active)

    def _advance(self, active: ActiveLaunch) -> None:
        """Enqueues as much of a launch as can be; what waits for others is taken up when they come."""
        program, run = active.program, active.run
        if program.overwritten and active.position == 0 and not active.promised:
            self._spare_others(active)
        while not active.promised:
            before = active.position
            gate = program.advance(active)
            if self.ordering.checked:
                self._report_order(active, before)
            if gate is None:
                break
            if (values := program.enqueued_between(active, before)) is not None:
                self.shell.measure(active.sequence, values, program)
            if not self._has_arrived(active, gate):
                self._announce(active)
                if program.steps_of(active)[-1] is gate:
                    self._ended(active)
                return
        else:
            self._announce(active)
            return
        if run.gangs and active.reported < active.limit - 1:
            active.reported = active.limit - 1
            self.shell.send(Enqueued(run.sequence, active.reported))
        if program.is_complete(active):
            self._finish(active)
        else:
            self._announce(active)

    def _report_order(self, active: ActiveLaunch, before: int) -> None:
        """Tells the scheduler which gangs were enqueued since the launch was at step `before`."""
        gangs = active.program.gangs_between(active, before, self.members)
        if gangs:
            self.shell.send(Ordered(self.host, gangs))

    def _spare_others(self, active: ActiveLaunch) -> None:
        """A launch before this one may stand at a gate and need an argument that this one overwrites: take a copy.

        Where hosts share the array all of them do, also one on which the other launch is past its use.
        """
        others = [other for other in self.active.values() if other is not active]
        run = active.run
        for slot in active.program.overwritten:
            value = active.values[slot]
            if self.together:
                given = {run.arguments[number] for place, number, _ in active.program.arguments if place == slot}
                needed = any(
                    other.run.session == run.session and not given.isdisjoint(other.run.arguments) for other in others
                )
            else:
                needed = any(value is held for other in others for held in other.values)
            if needed and not isinstance(value, Failure):
                active.values[slot] = active.program.transfer.copy(value)

    def _announce(self, active: ActiveLaunch) -> None:
        """Lets later launches name the results of one that is not through before they are in the store."""
        results = active.program.plan.results
        if not active.announced and results:
            active.announced = True
            promised = self.promised.setdefault(active.run.session, {})
            promised.update((active.run.results + number, active) for _, number in results)

    def _finish(self, active: ActiveLaunch) -> None:
        program, run = active.program, active.run
        values = program.finish(active)
        del self.active[run.sequence]
        self.shell.watch(run.sequence, values, program)
        if not active.announced:
            return
        promised = self.promised[run.session]
        for _, number in program.plan.results:
            promised.pop(run.results + number, None)
        if not promised:
            del self.promised[run.session]
        ready = self._hand_over(active, program.results_of(active), lambda waiting: True)
        if active.dropped:
            self.store.drop(run.session, tuple(active.dropped))
        for waiting in ready:
            self._advance(waiting)

    def _ended(self, active: ActiveLaunch) -> None:
        """All of a launch is enqueued here, and not on all hosts: what each host may run when it likes goes on."""
        active.ended = active.program.results_of(active)
        for waiting in self._hand_over(active, active.ended, PreparedProgram.may_go_early):
            self._advance(waiting)

    def _hand_over(
        self, active: ActiveLaunch, results: dict[int, Any], may_have: Callable[[ActiveLaunch], bool]
    ) -> list[ActiveLaunch]:
        """Gives launches the results they wait for. Returns those that now have all they need."""
        ready: list[ActiveLaunch] = []
        for buffer, waiting in list(active.waiting.items()):
            active.waiting[buffer] = [one for one in waiting if not may_have(one)]
            for one in waiting:
                if may_have(one):
                    for target in one.promised.pop(buffer):
                        one.values[target] = results.get(buffer)
                    if not one.promised:
                        ready.append(one)
        return ready

    def _drop(self, message: Drop) -> None:
        """Drops buffers; those a launch has yet to store go as soon as it has."""
        promised = self.promised.get(message.session)
        if promised:
            for buffer in message.buffers:
                if buffer in promised:
                    promised[buffer].dropped.append(buffer)
        self.store.drop(message.session, message.buffers)

    # --- gates --------------------------------------------------------------------------------------------------------

    def _has_arrived(self, active: ActiveLaunch, gate: GateStep) -> bool:
        """Whether a gate opens at once; if not, this host or the scheduler hears when what it needs is there."""
        arrivals = gate.awaited(active)
        if gate.alone and self.shell.has_arrived(arrivals):
            active.opened, active.closed_by = gate.number, self.shell.failure_of(arrivals)
            return True
        self.shell.wait_for_arrival(active.sequence, gate.number, arrivals, gate.alone)
        return False

    def opened(self, sequence: int, gate: int, failure: Failure | None) -> None:
        """What a launch waits for at a gate has arrived, or failed: on all hosts of the island if they meet there."""
        active = self.active.get(sequence)
        if active is not None:
            active.opened, active.closed_by = gate, failure
            self._advance(active)
