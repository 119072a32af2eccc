"""The simulated mover: the steps of `client/moving.py`, carried out over messages and moments."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from random import Random
from typing import Any, Protocol

from pathways_ray.client.buffer import PENDING, BufferRecord
from pathways_ray.client.core import ClientCore
from pathways_ray.client.moving import Ask, Copy, Drop, Exchanged, Hold, Release, Step, is_quiet, move
from pathways_ray.errors import Failure, from_failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.simulation.client_data import ClientData, Handle
from pathways_ray.simulation.controller import SimulatedController
from pathways_ray.simulation.environment import Environment
from pathways_ray.simulation.network import End, Process
from pathways_ray.transport import messages as wire

LOOK_S = 0.01
"""Time between two looks at whether what a step waits for is there."""

QUIET_LIMIT_S = 60.0


class Movable(Protocol):
    """The client that a mover works for."""

    process: Process
    controller: SimulatedController
    core: ClientCore
    data: ClientData
    end: End
    slices: list[PlacedSlice]
    handles: dict[int, Handle]
    over: bool
    last_drop: float

    @property
    def world(self) -> Environment: ...


class SimulatedMover:
    """Moves the slices of one client, one after the other. `moved` counts those that it has, `failed` those that
    stayed. While the client is `held` it makes no calls."""

    def __init__(self, client: Movable) -> None:
        self.client = client
        self.waiting: list[tuple[int, int]] = []
        self.steps: Generator[Step, Any, None] | None = None
        self.moved = self.failed = 0
        self.held = False

    def vacate(self, slices: Sequence[int]) -> None:
        """Moves slices, unless it is at it."""
        if self.steps is None and not self.waiting:
            self.waiting = [(number, -1) for number in slices]
            self._next()

    def move_some(self, random: Random) -> None:
        """Moves a slice because the user wants it, now and then."""
        settings = self.client.world.settings
        if settings.moves and random.random() < settings.moves:
            number = random.choice(self.client.slices).mesh.id
            self.waiting.append((number, random.choice([-1, *settings.islands])))
            if self.steps is None:
                self._next()

    def _next(self) -> None:
        self.steps = None
        if self.waiting and not self.client.over:
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
        match step:
            case Ask(request):
                call, post = client.controller.call, client.world.network.post
                target, session = client.controller.process, client.core.session
                post(client.process, target, call, client.process, session, request, self._go_on)
                return
            case Hold():
                self.held = True
                self._wait_until_quiet(client.world.clock.now + QUIET_LIMIT_S)
                return
            case Copy():
                self._copy(step)
                return
            case Exchanged(slices):
                self._exchanged(slices)
            case Drop(buffers):
                for record in buffers:
                    if (message := client.core.free(record)) is not None:
                        client.end.send(message)
                client.last_drop = client.world.clock.now
            case Release():
                self.held = False
        self._go_on(None)

    def _wait_until_quiet(self, deadline: float) -> None:
        client = self.client
        if client.over:
            return
        if is_quiet(client.core) and not client.data.fetches:
            self._go_on(None)
        elif client.world.clock.now > deadline:
            self._go_on(wire.Refused(Failure("WaitTimeout", "the session was not quiet in time")))
        else:
            client.world.network.after(client.process, LOOK_S, self._wait_until_quiet, deadline)

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
        self._wait_for(step.results)

    def _wait_for(self, records: Sequence[BufferRecord]) -> None:
        client = self.client
        if client.over:
            return
        if any(record.state is PENDING for record in records):
            client.world.network.after(client.process, LOOK_S, self._wait_for, records)
        else:
            self._go_on(None)

    def _exchanged(self, slices: Sequence[wire.SliceCreated]) -> None:
        client = self.client
        places = {created.placed.mesh.id: created.placed for created in slices}
        client.slices = [places.get(placed.mesh.id, placed) for placed in client.slices]
        client.handles = {handle.number: handle for handle in client.handles.values()}
