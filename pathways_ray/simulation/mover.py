"""The simulated mover: the steps of `client/moving.py` and `client/suspending.py`, over messages and moments."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from random import Random
from typing import Any

from pathways_ray.client.buffer import PENDING, BufferRecord
from pathways_ray.client.ending import ONCE
from pathways_ray.client.events import Cancelling, MakeWay, MoveSlices, Placed
from pathways_ray.client.moving import (
    QUIET_LIMIT_S,
    Arrive,
    Ask,
    Copy,
    Drop,
    Exchanged,
    Hold,
    Load,
    Pause,
    Release,
    Save,
    Step,
    Suspended,
    is_quiet,
    move,
)
from pathways_ray.client.suspending import resume, suspend
from pathways_ray.client.suspension import Kept, Suspension
from pathways_ray.errors import Failure, from_failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.simulation.client_data import Fetch, Handle
from pathways_ray.simulation.client_view import Client
from pathways_ray.transport import messages as wire

LOOK_S = 0.01
"""Time between two looks at whether what a step waits for is there."""

LOST = wire.Refused(Failure("ControllerLost", "the controller is gone, and its successor is looked for"))

SUSPENDED_S = (0.0, 0.5, 3.0, 20.0)
"""A session stays suspended for one of these times, and tries again after as long where it could not be resumed."""


class SimulatedMover:
    """Moves the slices of one client, one after the other, and suspends its session. `moved` counts what it has done,
    `failed` what stayed as it was. While the client is `held` it makes no calls; it does not count on the slices
    `away`, which a suspended session has given back."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.waiting: list[tuple[int, int]] = []
        self.steps: Generator[Step, Any, None] | None = None
        self.moved = self.failed = 0
        self.holding = self.has_to_move = False
        self.away: set[int] = set()
        self.asked: Any = None
        self.calls = 0
        self.suspension: Suspension | None = None
        self.saved: dict[int, tuple[Handle, int]] = {}

    @property
    def held(self) -> bool:
        return self.holding or self.suspension is not None

    @property
    def gives_way(self) -> bool:
        """Whether the session is suspended for another one: the controller says when it comes back."""
        return self.suspension is not None and self.suspension.gives_way

    def told(self, command: MoveSlices | MakeWay) -> None:
        """Does what the controller has asked for."""
        if isinstance(command, MakeWay):
            self.make_way(command.back)
        else:
            self.vacate(command.slices)

    def vacate(self, slices: Sequence[int]) -> None:
        """Moves slices, unless it is at it."""
        self.has_to_move = True
        if self.steps is None and not self.waiting and self.suspension is None:
            self.waiting = [(number, -1) for number in slices]
            self._next()

    def make_way(self, back: bool) -> None:
        """Suspends the session for another one, or resumes it, unless it is at something."""
        if self.steps is not None or self.waiting or self.client.over or not self.client.programs:
            return  # without programs it asks for its slices still, which takes turns with this
        if back and self.gives_way:
            self._resume(self.client.world.clock.now)
        elif not back and self.suspension is None:
            self._suspend(gives_way=True)

    def _suspend(self, gives_way: bool = False) -> None:
        kept = [Kept(placed.mesh, "", placed.island, ()) for placed in self.client.slices]
        self.has_to_move = False
        self.steps = suspend(self.client.core, kept, gives_way)
        self._go_on(None)

    def move_some(self, random: Random) -> None:
        """Moves a slice because the user wants it, now and then."""
        settings = self.client.world.settings
        if settings.moves and random.random() < settings.moves:
            number = random.choice(self.client.slices).mesh.id
            self.waiting.append((number, random.choice([-1, *settings.islands])))
            if self.steps is None:
                self._next()
        if settings.suspends and self.steps is None and random.random() < settings.suspends:
            self._suspend()

    def _resume(self, since: float) -> None:
        client = self.client
        if not client.over and self.suspension is not None and self.steps is None:
            if not client.core.away:  # what it has is freed when it is back
                client.world.checker.check_kept(client.core.session, set(), max(since, client.last_drop))
            self.steps = resume(client.core, self.suspension, (), client.world.clock.now)
            self._go_on(None)

    def _next(self) -> None:
        self.steps = None
        now = self.client.world.clock.now
        if self.gives_way:
            return
        if self.suspension is not None:
            pause = self.client.world.random.choice(SUSPENDED_S)
            self.client.world.network.after(self.client.process, pause, self._resume, now)
        elif self.waiting and not self.client.over:
            number, island = self.waiting.pop(0)
            mesh = next(placed.mesh for placed in self.client.slices if placed.mesh.id == number)
            self.steps = move(self.client.core, mesh, "", (), island)
            self._go_on(None)

    def _go_on(self, reply: Any) -> None:
        """Sends the outcome of a step in, and begins the next one."""
        if self.client.over or self.steps is None:
            return
        try:
            refused = isinstance(reply, wire.Refused)
            step = self.steps.throw(from_failure(reply.failure)) if refused else self.steps.send(reply)
        except StopIteration:
            self.moved += 1
            self._next()
        except Exception as error:
            self.client.world.log.say(f"{self.client.process} moved nothing: {error}")
            self.failed += 1
            self._next()
        else:
            self._carry_out(step)

    def _carry_out(self, step: Step) -> None:
        client = self.client
        client.world.log.say(f"{client.process} moves: {type(step).__name__}")
        client.world.step_begins()
        match step:
            case Ask(request):
                if isinstance(request, wire.Suspend):
                    self.away = {placed.mesh.id for placed in client.slices}
                self._ask(request)
                return
            case Hold(gives_way):
                self.holding = True
                self._wait_until_quiet(client.world.clock.now + QUIET_LIMIT_S, gives_way)
                return
            case Copy():
                self._copy(step)
                return
            case Exchanged(slices):
                self.away -= {created.placed.mesh.id for created in slices}
                self._exchanged(slices)
            case Drop(buffers):
                for record in buffers:
                    if (message := client.core.free(record)) is not None:
                        client.end.send(message)
                client.last_drop = client.world.clock.now
            case Save():
                self._save(step)
                return
            case Load():
                self._load(step)
            case Arrive(record):
                self._loaded(record)
                return
            case Pause(seconds):
                client.world.network.after(client.process, seconds, self._go_on, None)
                return
            case Suspended(suspension):
                self.suspension = suspension
                self._renumbered()
            case Release():
                self.holding = False
                self.away = set() if self.suspension is None else {placed.mesh.id for placed in client.slices}
        self._go_on(None)

    # --- the controller -----------------------------------------------------------------------------------------------

    def _ask(self, request: Any) -> None:
        """Calls the controller. Without one, who holds the session's calls is refused, and others wait."""
        client = self.client
        self.calls += 1
        self.asked = request
        if not client.core.away:
            to, session = client.controller, client.core.session
            answered = partial(self._answered, self.calls)
            client.world.network.post(client.process, to.process, to.call, client.process, session, request, answered)
        elif self.holding:
            self._answered(self.calls, LOST)

    def _answered(self, call: int, reply: wire.Reply) -> None:
        if call == self.calls and self.asked is not None:
            self.asked = None
            self._go_on(reply)

    def controller_lost(self) -> None:
        """The controller is gone, and with it the answer that is waited for."""
        if self.asked is not None and (self.holding or isinstance(self.asked, ONCE)):
            self._answered(self.calls, LOST)

    def controller_back(self) -> None:
        """The session is open again at the successor, which is asked what had no answer."""
        if self.asked is not None:
            self._ask(self.asked)

    def _wait_until_quiet(self, deadline: float, gives_way: bool) -> None:
        client = self.client
        if client.over:
            return
        if client.core.away:
            return self._go_on(LOST)
        if is_quiet(client.core) and not client.data.fetches:
            self._go_on(None)
        elif client.world.clock.now > deadline or (gives_way and self.has_to_move):
            self._go_on(wire.Refused(Failure("WaitTimeout", "the session was not quiet in time")))
        else:
            client.world.network.after(client.process, LOOK_S, self._wait_until_quiet, deadline, gives_way)

    def _copy(self, step: Copy) -> None:
        client, checker = self.client, self.client.world.checker
        session = client.core.session
        handles = {handle.record.id: handle for handle in client.handles.values()}
        taken = [handles[record.id] for record in step.arguments if record.id in handles]
        doubtful = len(taken) < len(step.arguments) or any(handle.doubtful for handle in taken)
        for old, new in zip(step.arguments, step.results, strict=True):
            if (handle := handles.get(old.id)) is not None:
                checker.expect(session, new.id, handle.expected, handle.doubtful)
        client.end.send(step.program)
        launch = client.core.launch(step.program.program, step.arguments, step.results)
        if launch is not None:
            checker.launched(session, launch.launch, False, doubtful)
            client.end.send(launch)
        elif client.core.away:  # it entered the queue, which nobody releases before this is over
            client.handle(Cancelling(step.results[0]))
            return self._go_on(LOST)
        self._wait_for(step.results)

    def _save(self, step: Save) -> None:
        """Fetches a value, which the hosts of its slice have."""
        client = self.client
        handle = next((handle for handle in client.handles.values() if handle.record is step.record), None)
        if handle is None:
            self._go_on(wire.Refused(Failure("BufferDeleted", "its handle has gone")))
            return
        client.data.fetch(handle, self._slice(step.held.slice))
        fetch = client.data.fetches[-1] if client.data.fetches else None
        self._saved(step, handle, fetch if fetch is not None and fetch.handle is handle else None)

    def _saved(self, step: Save, handle: Handle, fetch: Fetch | None) -> None:
        client = self.client
        if client.over:
            return
        if fetch is not None and fetch in client.data.fetches:
            if client.core.away:  # its successor would say where a host is, once this is over
                return self._go_on(LOST)
            client.world.network.after(client.process, LOOK_S, self._saved, step, handle, fetch)
        elif fetch is None or fetch.waiting:
            self._go_on(wire.Refused(Failure("HostLost", "a host of the slice is down")))
        else:
            self.saved[step.number] = handle, next(iter(fetch.shards.values()))
            self._go_on(None)

    def _load(self, step: Load) -> None:
        client, held = self.client, step.held
        handle, value = self.saved[step.number]
        client.world.checker.expect(client.core.session, step.record.id, handle.expected, handle.doubtful)
        placed = self._slice(held.slice)
        message = wire.Put(step.record.id, held.slice, held.type, held.spec, client.data.epochs(placed))
        client.data.upload(step.record, message, value, placed)
        client.handle(Placed((message,)))

    def _loaded(self, record: BufferRecord) -> None:
        client = self.client
        if client.over:
            return
        if record.failure is not None:
            self._go_on(wire.Refused(record.failure))
        elif record.state is PENDING:
            client.world.network.after(client.process, LOOK_S, self._loaded, record)
        else:
            self._go_on(None)

    def _slice(self, number: int) -> PlacedSlice:
        return next(placed for placed in self.client.slices if placed.mesh.id == number)

    def _wait_for(self, records: Sequence[BufferRecord]) -> None:
        client = self.client
        if client.over:
            return
        if all(record.state is not PENDING for record in records):
            self._go_on(None)
        elif client.core.away:  # the successor says what came of it, once what is held is let go
            self._go_on(LOST)
        else:
            client.world.network.after(client.process, LOOK_S, self._wait_for, records)

    def _exchanged(self, slices: Sequence[wire.SliceCreated]) -> None:
        client = self.client
        places = {created.placed.mesh.id: created.placed for created in slices}
        client.slices = [places.get(placed.mesh.id, placed) for placed in client.slices]
        self._renumbered()

    def _renumbered(self) -> None:
        client = self.client
        client.handles = {handle.number: handle for handle in client.handles.values()}
