"""A plan made ready for one host: its steps with everything compiled. Pure.

What is compiled, and what touches devices or peers, comes through `Parts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pathways_ray.errors import Failure
from pathways_ray.executor.run.barriers import InputBarrier, input_barrier_of, results_barrier_of
from pathways_ray.executor.run.call_steps import CallStep, ReturnStep
from pathways_ray.executor.run.carried import Carried
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.executor.run.layout_steps import RegroupStep, ReshardStep
from pathways_ray.executor.run.local_copies import CopyStep, with_copies_joined
from pathways_ray.executor.run.numbered import row_of, shifter, taker
from pathways_ray.executor.run.parts import Keeps, Parts, Store
from pathways_ray.executor.run.steps import AgreedStep, ExecuteStep, ReceiveStep, SendStep, Slots
from pathways_ray.ir.plan import Call, Execute, Receive, Regroup, Reshard, Return, Send, Step
from pathways_ray.limits import MAX_DEVICE_COMPUTATIONS, MAX_EARLY_TEMPORARY_BYTES
from pathways_ray.observe import computations
from pathways_ray.observe.computations import REPORT
from pathways_ray.transport.messages import IslandLaunch, LaunchEarly, ServeCall

RunnableStep = ExecuteStep | CallStep | ReturnStep | SendStep | ReceiveStep | ReshardStep | RegroupStep | CopyStep

BRIEF_S = 0.0007
"""A launch that takes less is computed by the thread that reads its call, if that can be. While it does, it serves no
other client; to have another thread compute takes some 50 us."""

LONGER, SHORTER = 1.1, 1.5
"""By so much one launch changes what is usual, if it took longer, or shorter. So it comes near the time that a fifth of
all stay below, where both balance: on a busy machine more than half of them wait for a core, which says nothing of the
next."""

LONG_WAIT_S = 0.02
"""Nobody waits longer than this for a core, unless something is wrong: a launch that took longer is long, whatever was
usual. Of two that ran beside each other the second may have been counted as brief."""

MAX_SESSIONS = 64
"""Sessions whose last arguments of served calls are remembered."""


class PreparedProgram:
    """The steps of a host's plan, compiled.

    `steps` and `steps_by_gang` run parallel to those of the plan's routes, with None in the place of a barrier.
    `joined` has the steps of a launch that nothing can stop, with copies joined (`local_copies`); else it is empty.
    `number` is that of the program, `computations` are the most that it puts on the queue of one device, `seconds` are
    those that its last launch took on the devices. Where launches `may_be_early`, `kinds` are those of the arguments
    that one takes here, of all that are `given`, as the controller has compared them.
    """

    def __init__(self, plan: HostPlan, parts: Parts, store: Store, transfer: Any) -> None:
        self.plan = plan
        self.parts = parts
        self.store = store
        self.transfer = transfer
        self.temporary_bytes, self.queues, self.keeps = parts.temporary_bytes, parts.queues, parts.keeps
        self.slots = len(plan.plan.slots)
        self.watcher: Any = None
        """Who waits for its launches to be over, once there has been one."""
        self.is_one_gang = [type(step) for step in plan.whole.steps] == [Execute]
        self.number = self.given = 0
        self.computations = 1
        self.seconds = self._usual = 0.0
        self.kinds: list[Any] | None = None
        self.may_be_early = plan.may_be_early and self.temporary_bytes <= MAX_EARLY_TEMPORARY_BYTES
        self._taken, self._row = taker([number for _, number in plan.taken]), row_of([slot for slot, _ in plan.taken])
        self._made = shifter([number for _, number in plan.plan.results])
        self._numbers = shifter([number for _, number in plan.results])
        self._values = taker([slot for slot, _ in plan.results])
        self._as_they_are = not plan.handed_on and not plan.repeated
        """Whether each result has memory of its own as it is made."""
        self._served: dict[int, tuple[int, ...]] = {}
        self.carried = Carried(plan, parts)
        made = {step: self._prepare(step) for step in plan.whole.steps if not isinstance(step, InputBarrier)}
        self.steps = [None if isinstance(step, InputBarrier) else made[step] for step in plan.whole.steps]
        self.steps_by_gang = [None if isinstance(step, InputBarrier) else made[step] for step in plan.by_gang.steps]
        self.joined: list[RunnableStep] = []
        copied: frozenset[int] = frozenset()
        if plan.is_unobstructed:
            self.joined, copied = with_copies_joined(
                plan.whole.steps, self.steps, parts.copies, self._donated, plan.host
            )
        receives = (step for step in made.values() if isinstance(step, ReceiveStep))
        self.incoming = [step.incoming for step in receives if step.incoming.number not in copied]
        self.outgoing = [step.outgoing for step in made.values() if isinstance(step, SendStep)]

    def _prepare(self, step: Step) -> RunnableStep:
        plan, host, parts = self.plan.plan, self.plan.host, self.parts
        match step:
            case Execute():
                compiled = parts.executable(step.executable)
                assert compiled is not None
                donated = plan.executables[step.executable].donated
                made = step, compiled, donated, self.transfer, plan.labels[step.node], host
                at = parts.agreed(step.executable)
                return ExecuteStep(*made) if at is None else AgreedStep(at, *made)
            case Call():
                return CallStep(step, parts.host_function(step.executable), plan.labels[step.node])
            case Return():
                return ReturnStep(step)
            case Send():
                return SendStep(step, parts.outgoing(step.bundle), self.transfer)
            case Receive():
                return ReceiveStep(step, parts.incoming(step.bundle))
            case Reshard():
                return ReshardStep(step, parts.reshard(step.bundle), host)
            case Regroup():
                return RegroupStep(step, parts.regroup(step), host)

    def _donated(self, step: Execute) -> tuple[int, ...]:
        """The slots whose memory a computation takes."""
        return tuple(step.inputs[k] for k in self.plan.plan.executables[step.executable].donated)

    def took(self, seconds: float) -> None:
        """The last launch took so long on the devices."""
        self.seconds = seconds
        usual = self._usual
        if not usual or seconds > LONG_WAIT_S:
            self._usual = seconds
        else:
            self._usual = usual * LONGER if seconds > usual else usual / SHORTER

    @property
    def is_brief(self) -> bool:
        """Whether a thread that computes within its calls is usually kept for no longer than `BRIEF_S`, and waits for
        no room on idle devices."""
        usually = self.keeps is Keeps.BRIEFLY or (self.keeps is Keeps.ALIKE and 0.0 < self._usual < BRIEF_S)
        return usually and self.computations <= MAX_DEVICE_COMPUTATIONS

    def report(self, number: int, text: bool) -> bytes:
        """The computations of program `number`, which this is: an `observe.computations.Report` as JSON."""
        plan = self.plan.plan
        runs = Counter(step.executable for step in plan.steps if isinstance(step, Execute))
        return REPORT.encode(computations.Report(number, plan.island, self.parts.analyses(runs, text)))

    # --- early launches -----------------------------------------------------------------------------------------------

    def learn_kinds(self, slots: Slots, kind_of: Callable[[Any], Any]) -> None:
        """Notes what a launch that came from the scheduler was given, unless some of it has failed."""
        kinds = [kind_of(slots.values[slot]) for slot, _ in self.plan.taken]
        if all(kind is not None for kind in kinds):
            self.kinds, self.given = kinds, len(slots.launch.arguments)

    def fits(self, session: int, message: LaunchEarly, kind_of: Callable[[Any], Any]) -> bool:
        """Whether the arguments of an early launch are here, of the same kinds, and its results are not. On an island
        of several hosts all of them have the arguments: the results of launches, and uploads that one has taken."""
        buffers = self.store.of_session(session)
        if self.plan.multi_host and not self.store.new_uploads(session).isdisjoint(message.arguments):
            return False
        if not buffers.keys().isdisjoint(self._made(message.results)):
            return False
        return self._takes(session, buffers, message, kind_of)

    def serves(self, session: int, call: ServeCall, kind_of: Callable[[Any], Any]) -> bool:
        """Whether a call can be served: its arguments are here, and it asks for each result."""
        if not len(self.plan.results) == len(call.requests) == len(call.devices):
            return False
        # A buffer stays of its kind as long as it is here. Clients use no number twice; one that does computes nonsense
        # of its own bytes, or has its call left: XLA looks at the size and the device of each argument.
        buffers = self.store.of_session(session)
        if self._served.get(session) == call.arguments:
            for number in call.arguments:
                if number and number not in buffers:
                    return False
            return self.carried.fits(call)
        if not self._takes(session, buffers, call, kind_of):
            return False
        if len(self._served) >= MAX_SESSIONS:
            self._served.clear()
        self._served[session] = call.arguments
        return True

    def _takes(
        self,
        session: int,
        buffers: Mapping[int, Any],
        message: LaunchEarly | ServeCall,
        kind_of: Callable[[Any], Any],
    ) -> bool:
        """Whether all arguments are among the buffers of a session or come along, of the kinds that the controller has
        compared."""
        arguments = message.arguments
        if self.kinds is None or len(arguments) != self.given or self.store.ended(session):
            return False
        taken = self._taken(arguments)
        kinds = list(map(kind_of, map(buffers.get, taken)))
        if kinds != self.kinds:
            for buffer, kind, known in zip(taken, kinds, self.kinds, strict=True):
                if buffer and kind != known:
                    return False
        return self.carried.fits(message)

    # --- launches -----------------------------------------------------------------------------------------------------

    def start(self, launch: IslandLaunch, unresolved: Sequence[int]) -> Slots:
        """Takes the arguments of a launch from the store, but for these slots, and posts its pulls."""
        slots = Slots(launch, self.slots)
        buffers, arguments, row = self.store.of_session(launch.session), launch.arguments, self._row
        whole = row is not None and not unresolved and launch.cancelled is None
        if whole and buffers.keys() >= {*(named := self._taken(arguments))}:
            slots.values[row] = map(buffers.get, named)  # type: ignore[index]
        else:
            self._take_each(slots, buffers, unresolved)
        if self.plan.multi_host and launch.sequence > 0:
            self.store.launched(launch.session, arguments)
        for incoming in self.incoming:
            slots.pulled[incoming.number] = incoming.post(launch.sequence, self.transfer)
        return slots

    def _take_each(self, slots: Slots, buffers: Mapping[int, Any], unresolved: Sequence[int]) -> None:
        """Takes the arguments one by one, where some of them come along or are nowhere, or the launch is cancelled."""
        launch, values = slots.launch, slots.values
        for slot, number in self.plan.taken:
            if slot not in unresolved:
                value = launch.cancelled or buffers.get(launch.arguments[number])
                values[slot] = value if value is not None else self.carried.take(launch, number)

    def steps_of(self, launch: IslandLaunch) -> list[RunnableStep | None]:
        return self.steps_by_gang if launch.gangs else self.steps

    def run(self, slots: Slots, first: int, last: int) -> None:
        """Enqueues the steps from `first` up to `last`; there is no barrier among them."""
        if self.joined and not slots.launch.gangs:
            assert last - first == len(self.steps), "without a barrier they are enqueued at once"
            for step in self.joined:
                step.run(slots)
            return
        for ready in self.steps_of(slots.launch)[first:last]:
            ready.run(slots)  # type: ignore[union-attr]

    def outputs(self, slots: Slots, first: int, last: int) -> list[Any]:
        """Values that are ready once everything is that the steps from `first` up to `last` enqueued; empty when they
        enqueued nothing."""
        for step in reversed(self.steps_of(slots.launch)[first:last]):
            if isinstance(step, ExecuteStep):
                return [slots.ends[step.outputs[0]]]
        return []

    def awaited(self, slots: Slots, position: int) -> list[Any]:
        """The pieces that have to arrive on this host before the launch may pass the barrier at a position: arrays, or
        failures in their place."""
        barrier = self.plan.barrier_at(slots.launch, position)
        pieces = [
            piece
            for bundle in barrier.bundles
            for pieces in slots.pulled.get(bundle, {}).values()
            for piece in ([pieces] if isinstance(pieces, Failure) else pieces)
        ]
        return pieces + [slots.calls[node] for node in barrier.calls]

    def fail_inputs(self, slots: Slots, position: int, failure: Failure) -> None:
        """Has the gang behind the barrier at a position receive a failure in place of its inputs."""
        barrier = self.plan.barrier_at(slots.launch, position)
        if barrier.number in (input_barrier_of(barrier.gang), results_barrier_of(barrier.gang, self.plan.plan)):
            slots.failed_inputs[barrier.gang] = failure

    def take_back(self, launch: int, failure: Failure) -> None:
        """Offers `failure` in place of all that a launch offers, or would, to other hosts."""
        for outgoing in self.outgoing:
            outgoing.take_back(launch, failure, self.transfer)

    def result(self, slots: Slots, buffer: int) -> Any:
        """The value of a result buffer of a launch that is all enqueued; None for one on other hosts."""
        return self._results(slots).get(buffer - slots.launch.results)

    def _results(self, slots: Slots) -> dict[int, Any]:
        """The results of a launch that is all enqueued, by their numbers: made once, each with memory of its own."""
        if slots.results is None:
            if self.plan.handed_on:
                self._hand_on(slots)
            values = slots.values
            slots.results = found = {number: values[slot] for slot, number in self.plan.results}
            for number in self.plan.repeated:
                if not isinstance(found[number], Failure):
                    found[number] = self.transfer.copy(found[number])
        return slots.results

    def consumed(self, slots: Slots) -> tuple[int, ...]:
        """The arguments whose memory the launch has taken, by their numbers."""
        if not slots.consumed:
            return ()
        arguments = slots.launch.arguments
        return tuple(arguments[number] for slot, number in self.plan.taken if slot in slots.consumed)

    def _hand_on(self, slots: Slots) -> None:
        """Copies results that are arguments, since clients take each array for memory of its own: one may be donated,
        and the other has to stay. What lay between parts of a launch is gone behind it, and needs no copy. One may be
        gone that the launch was given twice, and has taken the memory of."""
        kept: set[int] = set()
        for slot, number in self.plan.handed_on.items():
            value, buffer = slots.values[slot], slots.launch.arguments[number]
            if slots.consumed and not isinstance(value, Failure) and self.transfer.is_consumed(value):
                text = f"buffer {buffer} was to be a result, and the launch has taken its memory"
                slots.values[slot] = Failure("ExecutionError", text, "a result", "", self.plan.host)
            elif (buffer >= 0 or buffer in kept) and not isinstance(value, Failure):
                slots.values[slot] = self.transfer.copy(value)
            kept.add(buffer)

    def finish(self, slots: Slots) -> list[Any]:
        """Stores the results; returns the values whose readiness completes the launch here, and behind them those by
        which the controller decides."""
        launch, values = slots.launch, slots.values
        made = self._values(values) if self._as_they_are else self._results(slots).values()
        slots.asked = self.store.put_all(launch.session, self._numbers(launch.results), made, slots.later)
        awaited = self.completing(slots)
        return awaited + [values[slot] for slot in self.plan.decides] if self.plan.decides else awaited

    def completing(self, slots: Slots) -> list[Any]:
        """The values whose readiness completes a launch that is all enqueued."""
        ends, values, found = slots.ends, slots.values, []
        for slot in self.plan.awaited:
            found.append(ends.get(slot, values[slot]))
        return found
