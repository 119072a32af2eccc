"""A simulated client: a driver of `client/core.py`, and a user who launches, fetches, drops and leaves.

The user works in bursts: several launches at once, many of which take results that are still to come. It waits for no
outcome before it has made its last launch; an impatient one does not even wait then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any, Protocol

from pathways_ray import limits
from pathways_ray.client import events
from pathways_ray.client.buffer import INLINE, BufferRecord, BufferState
from pathways_ray.client.coalesce import Coalescer
from pathways_ray.client.core import ClientCore
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import Layout
from pathways_ray.resource_manager.slice_requests import SliceRequest
from pathways_ray.simulation.asking import ask_some
from pathways_ray.simulation.client_data import ClientData, DataEnvironment, Handle, carried, early_delays, may_carry
from pathways_ray.simulation.controller import SimulatedController
from pathways_ray.simulation.loops import WaitingLoop, go_round
from pathways_ray.simulation.misuse import name_what_is_not_mine, upload_amiss
from pathways_ray.simulation.mover import SimulatedMover
from pathways_ray.simulation.network import End
from pathways_ray.simulation.programs import ARRAY, Drawn
from pathways_ray.simulation.registering import register_all, replace_some
from pathways_ray.simulation.settings import COALESCED_LENGTHS, EAGER_LAUNCHES, WAITED_S
from pathways_ray.simulation.snapshots import SimulatedSnapshots
from pathways_ray.simulation.values import Outcome, made_alone, mixed
from pathways_ray.simulation.way_back import Kind, WayBack
from pathways_ray.transport import messages as wire


class ClientEnvironment(DataEnvironment, Protocol):
    """The environment of a client; its processes may have ended."""

    controller: SimulatedController
    islands: dict[int, list[int]]
    clients: list[SimulatedClient]

    def is_whole(self) -> bool:
        """Whether all processes serve and know each other."""


class SimulatedClient:
    """One user with one session. A `late` one opens it when there is a controller, whatever else there is."""

    def __init__(self, world: ClientEnvironment, number: int, late: bool = False) -> None:
        self.world = world
        self.number = number
        self.late = late
        self.random = Random(world.random.getrandbits(60))
        self.process = world.network.process(f"client{number}", f"client{number}")
        self.core = ClientCore(0, limits.MAX_LAUNCHES_IN_FLIGHT)
        self.ended = ""
        self.over = False
        self.left = self.random.randint(*world.settings.launches)
        self.slices: list[PlacedSlice] = []
        self.programs: list[Drawn] = []
        self.loop: Drawn | None = None
        self.loops: list[WaitingLoop] = []
        self.impatient = self.random.random() < world.settings.impatient
        self.handles: dict[int, Handle] = {}
        self.donated: dict[int, Handle] = {}
        self.refused: set[int] = set()
        self.cancelled: Counter[str] = Counter()
        self.data = ClientData(world, self.process, 0, self.handle)
        self.mover = SimulatedMover(self)
        self.snapshots = SimulatedSnapshots(self)
        self.last_drop = self.last_freeing = 0.0
        self.tenant = Tenant(f"tenant{number % 2}", 1.0 + number % 3, number % 3, trusted=True)
        self.way_back = WayBack(self)
        world.network.after(self.process, 0.5 * self.random.random(), self._open)

    @property
    def session(self) -> int:
        return self.core.session

    # --- opening ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        controller = self.world.controller
        if not (controller.process.alive if self.late else self.world.is_whole()):
            return self.world.network.after(self.process, 0.5, self._open)
        network = self.world.network
        network.post(self.process, controller.process, controller.open, self.process, self.tenant, self._opened)
        network.after(self.process, 30.0, self._give_up)

    def _give_up(self) -> None:
        """The controller died with the call that was to open the session, or to make its slices."""
        if not self.programs and not self.over:
            self._disconnected("the controller did not answer")
            if self.session:
                self.end.close()  # or the controller would keep the session, whose stream is as alive as this process

    def _opened(self, opened: wire.SessionOpened, controller: SimulatedController) -> None:
        session = opened.session
        self.core = core = ClientCore(session, limits.MAX_LAUNCHES_IN_FLIGHT)
        core.resume_tag = opened.resume_tag
        self.data = ClientData(self.world, self.process, session, self.handle)
        self.data.came = core.early.came
        if self.world.settings.eager:
            core.early.most, core.early.goes_by_values = EAGER_LAUNCHES, False
        core.early.hosts.update(host for members in self.world.islands.values() for host in members)
        fusion = self.world.settings.fusion
        core.coalescer = Coalescer(core.new_program, min_occurrences=1, lengths=COALESCED_LENGTHS, fusion=fusion)
        if not self.connect(controller):
            self._disconnected("the controller is gone")
            return
        for address in opened.hosts:
            self.data.addresses[address.host] = (address.epoch, address.address)
        self._next_slice()

    def connect(self, controller: SimulatedController) -> bool:
        """Opens the stream to a controller; false when it is gone."""
        ended = partial(self._disconnected, "the controller's stream ended")
        self.end = End(self.world.network, self.process, self._received, ended, self.core.composed)
        self.controller = controller
        return controller.process.alive and controller.client_connects(self.session, self.end)

    def _next_slice(self) -> None:
        if len(self.slices) == (settings := self.world.settings).slices:
            return self._register()
        island = sorted(settings.islands)[(self.number + len(self.slices)) % len(settings.islands)]
        most = len(settings.islands[island]) * settings.devices
        if self.late and settings.changes:
            island, most = -1, 1
        sizes = [size for size in (1, 2, 4, 8) if size <= most]
        request = SliceRequest((self.random.choice(sizes),), ("x",), island)
        post, ask = self.world.network.post, self.controller.create_slice
        post(self.process, self.controller.process, ask, self.process, self.session, request, self._sliced)

    def _sliced(self, reply: wire.SliceCreated | wire.Refused) -> None:
        if isinstance(reply, wire.Refused):
            self.end.close()  # as a program that ends with it does
            return self._disconnected("no slice")
        self.slices.append(reply.placed)
        self._next_slice()

    def _register(self) -> None:
        register_all(self)
        if self.world.settings.eager:  # what is not compiled does not begin early
            return self.world.network.after(self.process, 1.0, self._work)
        self._work()

    # --- the user -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self.mover.held and not self.over:
            return self.world.network.after(self.process, 0.01, self._work)
        if self.over:
            return
        random = self.random
        for _ in range(min(self.left, random.choice([1, 2, 3, 5, 8]))):
            self.left -= 1
            self.launch(random.choice(self.programs))
        if self.loop is not None and random.random() < 0.5:
            go_round(self, self.loop)
        if random.random() < 0.05:
            name_what_is_not_mine(self)
        if random.random() < 0.05 and not self.core.away:
            upload_amiss(self)
        if self.world.settings.cancels:
            self._cancel_some()
        if (replaces := self.world.settings.replaces) and random.random() < replaces:
            replace_some(self)
        if (serves := self.world.settings.serves) and random.random() < serves:
            ask_some(self)
        self.snapshots.go_on(random)
        self.mover.move_some(random)  # behind all calls of this turn: from here on they may be held
        self._drop_some()
        self._fetch_some()
        if self.left:
            pause = random.choice([0.0, 0.0005, 0.003, 0.02, 0.2, 1.0])
            self.world.network.after(self.process, pause, self._work)
        else:
            self.world.network.after(self.process, 0.001 if self.impatient else 0.2, self._leave_when_done)

    def launch(self, program: Drawn, given: list[Handle] | None = None) -> tuple[Handle, ...]:
        checker = self.world.checker
        arguments = given if given is not None else self._chosen(program)
        made, whole = made_alone(program.graph, [handle.expected for handle in arguments])
        fails = whole is not None or any(isinstance(outcome, Failure) for outcome in made)
        doubtful = fails or any(handle.doubtful or isinstance(handle.expected, Failure) for handle in arguments)
        records = self.core.new_buffers(len(program.results), [*map(self.kind_of, program.results)])
        results = tuple(
            self._handle_to(record, layout, outcome, doubtful)
            for record, layout, outcome in zip(records, program.results, made, strict=True)
        )
        donated = [arguments[index] for index in sorted(program.donated)]
        taken, given_up = [handle.record for handle in arguments], [handle.record for handle in donated]
        how = "it was donated", self.world.settings.priority(self.random), carried(arguments)
        message = self.core.launch(program.number, taken, records, given_up, *how)
        launch = next(reversed(self.core.pending), 0)
        if self.core.pending.get(launch) is records:  # otherwise the core knew already that an argument failed
            checker.launched(self.session, launch, fails, doubtful)
        for handle in donated:
            if handle.record.donated is None:
                self.drop(handle)  # the launch failed at once
            else:
                self.donated[handle.number] = self.handles.pop(handle.number)
                handle.record.dropped = handle.number % 3 == 0  # as in x = f(x)
                self.last_drop = self.world.clock.now
        self.do((message or events.ReleaseQueue(),))
        return results

    def _take_back(self) -> None:
        """Donated arrays whose launch failed before it took them live again, and have their values."""
        for handle in list(self.donated.values()):
            record = handle.record
            if record.donated is None:
                del self.donated[handle.number]
                if record.state is not BufferState.DELETED and not record.dropped:
                    handle.revived = True
                    self.handles[handle.number] = handle

    def _chosen(self, program: Drawn) -> list[Handle]:
        """Arguments for a call: late results more often than early ones, so that launches chain up."""
        chosen: list[Handle] = []
        for index, layout in enumerate(program.arguments):
            known = [
                handle
                for handle in self.handles.values()
                if handle.layout == layout
                and handle.record.failure is None
                and handle not in chosen
                and not (index in program.donated and handle.fetches)
            ]
            inline = self.world.settings.inline
            if known and self.random.random() < 0.9:
                chosen.append(known[-1] if self.random.random() < 0.7 else self.random.choice(known))
            elif inline and self.random.random() < inline and may_carry(program, index):
                chosen.append(Handle(INLINE, layout, mixed(self.session, self.random.getrandbits(40))))
            else:
                chosen.append(self.put(layout))
        return chosen

    def _handle_to(self, record: BufferRecord, layout: Layout, made: Outcome, doubtful: bool = False) -> Handle:
        """Args: made: what hosts make of it, which is what others get that take it before its launch has failed."""
        handle = self.handles[record.id] = Handle(record, layout, made, doubtful)
        self.world.checker.expect(self.session, record.id, made, doubtful)
        return handle

    def _drop_some(self) -> None:
        """Most handles go soon after their use, as they do in a loop that keeps its last value only."""
        for handle in list(self.handles.values())[:-2]:
            if not handle.fetches and self.random.random() < 0.6:
                self.drop(handle)

    def _cancel_some(self) -> None:
        for handle in list(self.handles.values()):
            if handle.record.state is BufferState.PENDING and self.random.random() < self.world.settings.cancels:
                before = list(self.core.pending)
                self.handle(events.Cancelling(handle.record))
                self._take_back()
                self._report(before, Failure("Cancelled", "by its user"))

    def drop(self, handle: Handle) -> None:
        if self.handles.pop(handle.number, None) is not None:
            message = self.core.free(handle.record)
            self.do((message,) if message is not None else ())
            self.last_drop = self.world.clock.now

    # --- arrays -------------------------------------------------------------------------------------------------------

    def put(self, layout: Layout) -> Handle:
        (record,) = self.core.new_buffers(1, (self.kind_of(layout),))
        value, placed = mixed(self.session, record.id), self.slice_of(layout)
        handle = self._handle_to(record, layout, value)
        message = wire.Put(record.id, layout.slice, ARRAY, layout.spec, self.data.epochs(placed))
        self.data.upload(record, message, value, placed)
        self.handle(events.Placed((message,)))
        return handle

    def kind_of(self, layout: Layout) -> Kind:
        return Kind(self.slice_of(layout).mesh, layout.spec)

    def slice_of(self, layout: Layout) -> PlacedSlice:
        return next(placed for placed in self.slices if placed.mesh.id == layout.slice)

    def _fetch_some(self) -> None:
        for handle in list(self.handles.values()):
            upload = handle.record.upload
            if handle.record.failure is None and self.random.random() < 0.2 and (upload is None or upload.done):
                self.data.fetch(handle, self.slice_of(handle.layout))

    # --- the core -----------------------------------------------------------------------------------------------------

    def handle(self, event: Any) -> None:
        self.do(self.core.handle(event, self.world.clock.now))

    def do(self, commands: Sequence[events.Command]) -> None:
        for command in commands:
            match command:
                case wire.EarlyLaunch():
                    late, linger = early_delays(self.random) if self.world.settings.eager else (0.0, 0.0)
                    early = self.core.early.message(command)
                    self.world.network.after(self.process, late, self.data.launch_early, self.tenant.name, *early)
                    self.end.send(command, linger)
                case wire.Launch() | wire.Put() | wire.Register() | wire.Free() | wire.Cancel() | wire.Unregister():
                    self.end.send(command)
                case events.ReleaseQueue():
                    self._release_queue()
                case events.MoveSlices() | events.MakeWay():
                    self.mover.told(command)
                case events.MoveHost():
                    self.data.host_moved(command.address)
                case events.Resume():
                    self.way_back.begin()
                case events.CloseData():
                    self._session_over(command.failure)
        self.data.end_failed_fetches()

    def _release_queue(self) -> None:
        before = list(self.core.pending)
        while (commands := self.core.head(self.world.clock.now)) is not None:
            self.do(commands)
            self.core.remove_head()
        self._take_back()
        self._report(before, Failure("HostLost", "an upload failed"), by_client=True)

    def _received(self, batch: list[Any]) -> None:
        for message in batch:
            named: tuple[int, ...] = ()
            if isinstance(message, wire.Completed):
                named = message.launches
            elif isinstance(message, wire.LaunchFailed) and message.launch in self.refused:
                self.refused.remove(message.launch)  # it has its outcome
            elif isinstance(message, wire.LaunchFailed):
                named = (message.launch,)
            elif isinstance(message, wire.CancelRefused) and message.launch in self.core.pending:
                named = (message.launch,)
                self.refused.add(message.launch)
                self.cancelled["late"] += 1
            covered = [launch for launch in self.core.pending if launch not in named] if named else []
            self.handle(message)
            self._take_back()
            self._report([*named, *covered], getattr(message, "failure", None))

    def _report(self, launches: Sequence[int], failure: Failure | None, by_client: bool = False) -> None:
        """Tells the checker of those launches that are not pending any more."""
        for launch in launches:
            if launch not in self.core.pending:
                self.world.checker.outcome(self.session, launch, failure, by_client)
                if failure is not None or self.world.clock.now - self.last_drop > WAITED_S:
                    self.last_freeing = self.world.clock.now
                self.cancelled["all"] += failure is not None and failure.kind == "Cancelled"

    # --- the end ------------------------------------------------------------------------------------------------------

    def _leave_when_done(self) -> None:
        if self.over:
            return
        if not self.mover.held:
            self.snapshots.look()
        core = self.core
        under_way = core.pending, core.queue, core.freed, self.data.fetches, self.mover.steps, self.loops
        if any(under_way) and not self.impatient:
            return self.world.network.after(self.process, 0.2, self._leave_when_done)
        if not self.impatient and self.world.clock.now - self.last_drop < 1.5 and self.random.random() < 0.7:
            return self.world.network.after(self.process, 0.5, self._leave_when_done)
        # What was freed behind a launch that waited goes with the end of that one, or behind a program with its plan.
        if self.session not in self.world.controller.core.clients.turns.inboxes:
            self.world.checker.check_kept(self.session, set(self.handles), max(self.last_drop, self.last_freeing))
        self.world.network.post(self.process, self.controller.process, self.controller.close, self.session)
        self._end(events.Closing())
        self._disconnected("it left")
        self.end.close()

    def _disconnected(self, reason: str) -> None:
        if not self.over:
            self._end(events.Disconnected(reason))

    def _end(self, event: events.Closing | events.Disconnected) -> None:
        before = list(self.core.pending)
        self.handle(event)
        self.left_behind(before, self.core.ended or Failure("SessionClosed", "it left"))

    def left_behind(self, before: Sequence[int], failure: Failure | None, by_client: bool = True) -> None:
        """Launches have their outcome that were under way."""
        self._take_back()
        self._report(before, failure, by_client)

    def _session_over(self, failure: Failure) -> None:
        self.over, self.ended = True, failure.message
        self.world.checker.session_ended(self.session)
        self.world.log.say(f"{self.process} is over: {self.ended or 'it left'}")
