"""A simulated client: what `client/session.py` and `client/data.py` do, and a user who calls, looks, drops and leaves.

The user works in bursts: several launches at once, many of which take results that are still to come. It waits for no
outcome before it has made its last launch; an impatient one does not even wait then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

from pathways_ray.client.coalesce import Runs
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import Layout
from pathways_ray.resource_manager.allocation import SliceRequest
from pathways_ray.simulation.network import End
from pathways_ray.simulation.programs import ARRAY, Drawn, drawn, drawn_loop
from pathways_ray.simulation.values import Outcome, mixed, run_alone
from pathways_ray.transport.messages import (
    BuffersLost,
    Completed,
    Free,
    HostAddress,
    Launch,
    LaunchFailed,
    Prepared,
    Put,
    Refused,
    SliceCreated,
)

if TYPE_CHECKING:
    from pathways_ray.simulation.controller import SimulatedController
    from pathways_ray.simulation.world import World


RUNS = 1000
"""From here on programs are numbered that stand for runs of launches."""


@dataclass(eq=False)
class Upload:
    """An array on its way to some hosts."""

    hosts: set[int]
    done: bool = False
    failed: bool = False


@dataclass(eq=False)
class Held:
    """A handle of the user: where it lies, what it should hold, whether it is known to have failed.

    It is `doubtful` when its launch fails, but not the calls that it comes from: who takes it fails with the launch, or
    was through before.
    """

    number: int
    layout: Layout
    expected: Outcome
    upload: Upload | None = None
    failed: bool = False
    doubtful: bool = False
    launch: int = 0
    looked_at: int = 0


@dataclass(eq=False)
class Look:
    """A fetch: hosts that have yet to answer."""

    held: Held
    waiting: set[int]
    shards: dict[tuple[int, int], int] = field(default_factory=dict)


class SimulatedClient:
    """One user with one session."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.random = Random(world.random.getrandbits(60))
        self.process = world.network.process(f"client{number}", f"client{number}")
        self.session = 0
        self.ended = ""
        self.over = False
        self.left = self.random.randint(*world.settings.launches)
        self.slices: list[PlacedSlice] = []
        self.programs: list[Drawn] = []
        self.loop: Drawn | None = None
        self.runs = Runs(count(RUNS).__next__, sightings=1, lengths=(16, 8, 4))
        self.impatient = self.random.random() < world.settings.impatient
        self.held: dict[int, Held] = {}
        self.pending: dict[int, tuple[Held, ...]] = {}
        self.looks: list[Look] = []
        self.addresses: dict[int, tuple[int, str]] = {}
        self.queue: deque[tuple[Any, list[Upload], tuple[Held, ...]]] = deque()
        self.launches = self.buffers = 0
        self.last_drop = 0.0
        world.network.after(self.process, 0.5 * self.random.random(), self._open)

    # --- opening ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        controller = self.world.controller
        if controller is None or not self.world.is_whole():
            self.world.network.after(self.process, 0.5, self._open)
            return
        tenant = Tenant(f"tenant{self.number % 2}", weight=1.0 + self.number % 3, priority=self.number % 3)
        network = self.world.network
        network.post(self.process, controller.process, controller.open, self.process, tenant, self._opened)
        network.after(self.process, 30.0, self._give_up)

    def _give_up(self) -> None:
        """The controller died with the call that was to open the session, or to make its slices."""
        if not self.programs:
            self._session_over("the controller did not answer")

    def _opened(self, session: int, addresses: list[HostAddress], controller: SimulatedController) -> None:
        self.session = session
        self.world.checker.session_opened(self)
        self.end = End(self.world.network, self.process, self._received, self._stream_ended, self.runs.composed)
        if not controller.process.alive or not controller.client_connects(session, self.end):
            self._session_over("the controller is gone")
            return
        self.controller = controller
        for address in addresses:
            self.addresses[address.host] = (address.epoch, address.address)
        self._next_slice()

    def _next_slice(self) -> None:
        if len(self.slices) == self.world.settings.slices:
            self._register()
            return
        islands = sorted(self.world.settings.islands)
        island = islands[(self.number + len(self.slices)) % len(islands)]
        most = len(self.world.settings.islands[island]) * self.world.settings.devices
        sizes = [size for size in (1, 2, 4, 8) if size <= most]
        if not self.world.settings.anywhere and len(self.world.settings.islands[island]) > 1:
            sizes = [most]
        size = self.random.choice(sizes)
        wish = SliceRequest((size,), ("x",), island)
        target = self.controller.process
        self.world.network.post(
            self.process, target, self.controller.create_slice, self.process, self.session, wish, self._sliced
        )

    def _sliced(self, reply: SliceCreated | Refused) -> None:
        if isinstance(reply, SliceCreated):
            self.slices.append(reply.placed)
            self._next_slice()
        else:
            self._session_over("no slice")

    def _register(self) -> None:
        settings = self.world.settings
        for number in range(1, settings.programs + 1):
            poisoned = self.random.random() < settings.poison
            made = drawn(
                self.random, number, f"c{self.number}p{number}", self.slices, poisoned, self.world.settings.apart
            )
            self.programs.append(made)
            self.runs.add(number, made.graph)
            self._enqueue((number, made.graph, made.functions))
        if self.random.random() < settings.loops:
            self.loop = drawn_loop(self.random, settings.programs + 1, f"c{self.number}", self.slices)
            self.runs.add(self.loop.number, self.loop.graph)
            self._enqueue((self.loop.number, self.loop.graph, self.loop.functions))
        self._work()

    # --- the user -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self.over:
            return
        random = self.random
        for _ in range(min(self.left, random.choice([1, 2, 3, 5, 8]))):
            self.left -= 1
            self._launch(random.choice(self.programs))
        if self.loop is not None and random.random() < 0.5:
            self._go_round(self.loop)
        if random.random() < 0.05:
            self._name_what_is_not_mine()
        self._drop_some()
        self._look_at_some()
        if self.left:
            pause = random.choice([0.0, 0.0005, 0.003, 0.02, 0.2, 1.0])
            self.world.network.after(self.process, pause, self._work)
        else:
            self.world.network.after(self.process, 0.001 if self.impatient else 0.2, self._leave_when_done)

    def _go_round(self, program: Drawn) -> None:
        """y = f(y), again and again, of which only some values are kept."""
        held = self._put(program.arguments[0])
        for _ in range(self.random.choice([4, 9, 33])):
            (result,) = self._launch(program, [held])
            if self.random.random() < 0.95:
                self._drop(held)
            held = result

    def _launch(self, program: Drawn, given: list[Held] | None = None) -> tuple[Held, ...]:
        random = self.random
        arguments: list[Held] = given or []
        for index, layout in enumerate(program.arguments if given is None else ()):
            known = [h for h in self.held.values() if h.layout == layout and not h.failed and h not in arguments]
            if index in program.donated:
                known = [h for h in known if not h.looked_at]
            # Late results more often than early ones, so that launches chain up.
            if known and random.random() < 0.9:
                arguments.append(known[-1] if random.random() < 0.7 else random.choice(known))
            else:
                arguments.append(self._put(layout))
        expected = run_alone(program.graph, [held.expected for held in arguments])
        fails = any(isinstance(outcome, Failure) for outcome in expected)
        doubtful = fails or any(held.doubtful or isinstance(held.expected, Failure) for held in arguments)
        base = self.buffers + 1
        results = tuple(
            self._hold(layout, outcome, doubtful) for layout, outcome in zip(program.results, expected, strict=True)
        )
        self.launches += 1
        launch = self.launches
        self.pending[launch] = results
        self.world.checker.launched(self, launch, fails, doubtful)
        message = Launch(launch, program.number, tuple(held.number for held in arguments), base)
        uploads = [held.upload for held in arguments if held.upload is not None and not held.upload.done]
        self._enqueue(message, uploads, tuple(arguments))
        for held in results:
            held.launch = launch
        for index in sorted(program.donated):
            self.world.checker.donated(self, arguments[index].launch)
            self._drop(arguments[index])
        return results

    def _hold(self, layout: Layout, expected: Outcome, doubtful: bool = False) -> Held:
        self.buffers += 1
        held = self.held[self.buffers] = Held(self.buffers, layout, expected, doubtful=doubtful)
        self.world.checker.expect(self.session, held.number, expected, doubtful)
        return held

    def _put(self, layout: Layout) -> Held:
        placed = next(s for s in self.slices if s.mesh.id == layout.slice)
        value = mixed(self.session, self.buffers + 1)
        held = self._hold(layout, value)
        upload = held.upload = Upload(set(placed.hosts))
        for host in placed.hosts:
            process = self._process_of(host)
            if process is None:
                self._uploaded(upload, host, failed=True)
                break
            shell = self.world.hosts[host]
            answer = partial(self.world.network.post, process, self.process, self._uploaded, upload, host)
            self.world.network.post(self.process, process, shell.put, self.session, held.number, value, placed, answer)
        self._enqueue(Put(held.number, layout.slice, ARRAY, layout.spec))
        return held

    def _process_of(self, host: int) -> Any:
        """The process that serves a host's data, None while it is down."""
        epoch, address = self.addresses.get(host, (0, ""))
        shell = self.world.hosts.get(host)
        if not address or shell is None or shell.epoch != epoch or not shell.process.alive:
            return None
        return shell.process

    def _uploaded(self, upload: Upload, host: int, failed: bool = False) -> None:
        upload.hosts.discard(host)
        upload.failed = upload.failed or failed
        if upload.failed or not upload.hosts:
            upload.done = True
        self._flush()

    def _drop_some(self) -> None:
        """Most handles go soon after their use, as they do in a loop that keeps its last value only."""
        for held in list(self.held.values())[:-2]:
            if not held.looked_at and self.random.random() < 0.6:
                self._drop(held)

    def _drop(self, held: Held) -> None:
        if self.held.pop(held.number, None) is not None:
            uploads = [held.upload] if held.upload is not None and not held.upload.done else []
            self._enqueue(Free((held.number,)), uploads)
            self.last_drop = self.world.clock.now

    def _name_what_is_not_mine(self) -> None:
        """A launch with a buffer that this session does not have: another one may have a buffer of that number."""
        program = self.random.choice(self.programs)
        self.launches += 1
        self.pending[self.launches] = ()
        self.world.checker.trespassed(self, self.launches)
        strange = tuple(self.buffers + 1000 + k for k in range(len(program.arguments)))
        other = next((c for c in self.world.clients if c is not self and c.held), None)
        if other is not None and self.random.random() < 0.5:
            found = [n for n in other.held if n > self.buffers or n not in self.held]
            strange = tuple(found[:1] * len(program.arguments)) or strange
            if any(number in self.held or number <= self.buffers for number in strange):
                strange = tuple(self.buffers + 1000 + k for k in range(len(program.arguments)))
        self._enqueue(Launch(self.launches, program.number, strange, self.buffers + 5000))

    # --- looking at values --------------------------------------------------------------------------------------------

    def _look_at_some(self) -> None:
        for held in list(self.held.values()):
            if not held.failed and self.random.random() < 0.2 and (held.upload is None or held.upload.done):
                self._look(held)

    def _look(self, held: Held) -> None:
        placed = next(s for s in self.slices if s.mesh.id == held.layout.slice)
        look = Look(held, set(placed.hosts))
        processes = {host: self._process_of(host) for host in placed.hosts}
        if None in processes.values():
            return
        held.looked_at += 1
        self.looks.append(look)
        for host, process in processes.items():
            answer = partial(self.world.network.post, process, self.process, self._seen, look, host)
            self.world.network.post(
                self.process, process, self.world.hosts[host].fetch, self.session, held.number, answer
            )

    def _seen(self, look: Look, host: int, found: dict[int, int] | Failure) -> None:
        if look not in self.looks:
            return
        if isinstance(found, Failure):
            self.world.checker.look_failed(self, look.held.number, found)
            self._end_look(look)
            return
        look.waiting.discard(host)
        look.shards.update({(host, device): value for device, value in found.items()})
        if not look.waiting:
            self.world.checker.looked(self, look.held.number, look.held.expected, look.shards)
            self._end_look(look)

    def _end_look(self, look: Look) -> None:
        self.looks.remove(look)
        look.held.looked_at -= 1

    # --- the stream ---------------------------------------------------------------------------------------------------

    def _enqueue(self, message: Any, uploads: list[Upload] | None = None, keep: tuple[Held, ...] = ()) -> None:
        self.queue.append((message, uploads or [], keep))
        self._flush()

    def _flush(self) -> None:
        """Sends everything up to the first launch whose uploads are under way."""
        while self.queue:
            message, uploads, arguments = self.queue[0]
            if not all(upload.done for upload in uploads):
                break
            self.queue.popleft()
            lost = any(h.failed or (h.upload is not None and h.upload.failed) for h in arguments)
            if lost and isinstance(message, Launch):
                failure = Failure("HostLost", "an upload failed", host=0)
                self.world.checker.outcome(self, message.launch, failure, by_client=True)
                self._ended(message.launch, failed=True)
            else:
                self.end.send(message)

    def _received(self, batch: list[Any]) -> None:
        for message in batch:
            match message:
                case Completed():
                    self.runs.ended(message.launches, message.device_us, message.contended)
                    for launch in message.launches:
                        self._outcome(launch, None)
                case LaunchFailed():
                    self._outcome(message.launch, message.failure)
                case Prepared():
                    self.runs.prepared(message)
                case BuffersLost():
                    for number in message.buffers:
                        if number in self.held:
                            self._mark_failed(self.held[number])
                case HostAddress():
                    self._host_changed(message)

    def _outcome(self, launch: int, failure: Failure | None) -> None:
        for ended in (*self.runs.covered(launch), launch):
            self.world.checker.outcome(self, ended, failure)
            self._ended(ended, failed=failure is not None)

    def _ended(self, launch: int, failed: bool) -> None:
        for held in self.pending.pop(launch, ()):
            if failed:
                self._mark_failed(held)

    def _mark_failed(self, held: Held) -> None:
        held.failed = True
        for look in [look for look in self.looks if look.held is held]:
            self._end_look(look)

    def _host_changed(self, message: HostAddress) -> None:
        epoch, _ = self.addresses.get(message.host, (0, ""))
        self.addresses[message.host] = (message.epoch, message.address)
        if not message.address or epoch != message.epoch:
            self.link_broke(message.host)

    def link_broke(self, host: int) -> None:
        """The data stream to a host is gone: what was under way there fails."""
        for held in list(self.held.values()):
            if held.upload is not None and host in held.upload.hosts:
                self._uploaded(held.upload, host, failed=True)
        for _, uploads, _ in list(self.queue):
            for upload in uploads:
                if host in upload.hosts:
                    self._uploaded(upload, host, failed=True)
        for look in [look for look in self.looks if host in look.waiting]:
            self._end_look(look)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _stream_ended(self) -> None:
        self._session_over("the controller's stream ended")

    def _leave_when_done(self) -> None:
        if self.over:
            return
        if (self.pending or self.queue or self.looks) and not self.impatient:
            self.world.network.after(self.process, 0.2, self._leave_when_done)
            return
        if not self.impatient and self.world.clock.now - self.last_drop < 1.5 and self.random.random() < 0.7:
            self.world.network.after(self.process, 0.5, self._leave_when_done)
            return
        self.world.checker.check_kept(self)
        self.world.checker.session_ended(self, "left")
        self.world.network.post(self.process, self.controller.process, self.controller.close, self.session)
        self.over = True
        self.end.close()
        self.world.client_over(self)

    def _session_over(self, why: str) -> None:
        """The session is no more, and all that waits fails."""
        if self.over:
            return
        self.over, self.ended = True, why
        for launch in list(self.pending):
            failure = Failure("ControllerLost", f"the session ended: {why}")
            self.world.checker.outcome(self, launch, failure, by_client=True)
        self.pending.clear()
        self.queue.clear()
        self.world.checker.session_ended(self, why)
        self.world.client_over(self)
