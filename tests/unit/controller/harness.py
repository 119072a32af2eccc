"""A harness around `Launches`: hosts, a session and its programs, and short ways to look at the messages it sends."""

from __future__ import annotations

from typing import Any

import msgspec

from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import Send, SendClient, SendIsland
from pathways_ray.controller.status import Report
from pathways_ray.errors import Failure
from pathways_ray.ir.graph import Ref
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import ArrayType
from pathways_ray.simulation.tables import check_launches
from pathways_ray.transport.messages import (
    Completed,
    Done,
    Drop,
    Free,
    HostDown,
    HostUp,
    IslandLaunchFailed,
    LateDrop,
    Launch,
    LaunchFailed,
    Message,
    Put,
    Ready,
    Stored,
    Unregister,
)
from tests.unit.helpers import VECTOR, Sketch, placed

BOOM = Failure("ExecutionError", "boom", "f", "user.py:1", 0)

# Island 0 has hosts 0 and 1, island 1 has host 2, island 2 host 3. Slice 1, 2, 3 lie on one host of islands 0, 1, 2,
# slice 4 on both hosts of island 0.
ISLAND_OF_HOST = {0: 0, 1: 0, 2: 1, 3: 2}
SLICES = [
    placed(1, ["0.0", "0.1"]),
    placed(2, ["2.0", "2.1"], island=1),
    placed(3, ["3.0"], island=2),
    placed(4, ["0.0", "1.0"]),
]


def to_island(commands: list[Send], island: int, kind: type[Message] = Message) -> list[Any]:
    """The messages of a kind to an island, as they leave."""
    found = [c.message for c in commands if isinstance(c, SendIsland) and c.island == island]
    return [Drop(m.session, m.buffers) if type(m) is LateDrop else m for m in found if isinstance(m, kind)]


def to_client(commands: list[Send], session: int = 1, kind: type[Message] = Message) -> list[Any]:
    return [
        without_story(c.message)
        for c in commands
        if isinstance(c, SendClient) and c.session == session and isinstance(c.message, kind)
    ]


def completed(*launches: int, session: int = 1, shared: bool = False) -> list[Send]:
    return [SendClient(session, Completed(launches, (0,) * len(launches), shared))]


def failure_of(commands: list[Send]) -> Failure:
    (message,) = to_client(commands)
    assert isinstance(message, LaunchFailed)
    return message.failure


def without_story(message: Message) -> Message:
    """The message, its failure without the lines of the controller's story; those have tests of their own."""
    if not isinstance(message, LaunchFailed):
        return message
    return LaunchFailed(message.launch, msgspec.structs.replace(message.failure, story=()))


class Harness:
    """Wraps `Launches`; every call checks the invariants afterwards and returns the commands."""

    def __init__(
        self,
        parallel: bool = True,
        max_in_flight: int = 100,
        sessions: tuple[int, ...] = (1,),
        cross_island: CrossIslandWindow | None = None,
    ) -> None:
        self.launches = Launches(parallel, max_in_flight, cross_island)
        self.report = Report()
        self.keys = 0
        for host, island in ISLAND_OF_HOST.items():
            self.up(host, island)
        for session in sessions:
            self.launches.open_session(session)
            for slice in SLICES:
                self.launches.add_slice(session, slice)

    def checked(self, commands: list[Send]) -> list[Send]:
        check_launches(self.launches)
        return commands

    # --- hosts and time -----------------------------------------------------------------------------------------------

    def up(self, host: int, island: int | None = None, epoch: int = 1) -> list[Send]:
        message = HostUp(host, epoch, f"transfer-{host}-{epoch}", f"data-{host}-{epoch}", 2, 100 + host)
        return self.checked(self.launches.host_up(ISLAND_OF_HOST[host] if island is None else island, message))

    def down(self, host: int, epoch: int = 1, reason: str = "killed") -> list[Send]:
        return self.checked(self.launches.host_down(HostDown(host, epoch, reason)))

    def tick(self, now: float) -> list[Send]:
        self.report.note(now, self.launches.ledger.usages.values())
        return self.checked(self.launches.tick(now))

    def tenants(self) -> list[dict[str, Any]]:
        return self.report.tenants(self.launches)

    # --- programs -----------------------------------------------------------------------------------------------------

    def register(self, program: PlannedProgram, number: int, ready: bool = True) -> PlannedProgram:
        self.checked(self.launches.register(program.session, number, program))
        if ready:
            for host in program.hosts:
                self.ready(program, host)
        return program

    def ready(self, program: PlannedProgram, host: int, failure: Failure | None = None) -> list[Send]:
        return self.checked(self.launches.ready(Ready(host, program.key, 0, failure)))

    # --- the client's side --------------------------------------------------------------------------------------------

    def launch(
        self, launch: int, arguments: tuple[int, ...] = (), results: int = 0, program: int = 1, session: int = 1
    ) -> list[Send]:
        message = Launch(launch, program, arguments, results)
        return self.checked(self.launches.admission.call(self.launches.sessions[session], message))

    def put(
        self,
        buffer: int,
        slice: int = 1,
        session: int = 1,
        *,
        arrives: bool = True,
        epochs: dict[int, int] | None = None,
    ) -> list[Send]:
        message = Put(buffer, slice, VECTOR, (), epochs or {})
        commands = self.checked(self.launches.admission.call(self.launches.sessions[session], message))
        hosts = next((placed.hosts for placed in SLICES if placed.mesh.id == slice), ()) if arrives else ()
        return commands + [command for host in hosts for command in self.stored(host, buffer, slice, session)]

    def stored(
        self,
        host: int,
        buffer: int,
        slice: int = 1,
        session: int = 1,
        kind: ArrayType = VECTOR,
        digests: dict[int, bytes] | None = None,
    ) -> list[Send]:
        return self.checked(self.launches.stored(Stored(host, session, buffer, slice, kind, (), digests or {})))

    def take(self, message: Put | Free, session: int = 1) -> list[Send]:
        return self.checked(self.launches.admission.call(self.launches.sessions[session], message))

    def free(self, *buffers: int, session: int = 1) -> list[Send]:
        return self.take(Free(buffers), session)

    def unregister(self, program: int, session: int = 1) -> list[Send]:
        return self.checked(self.launches.admission.call(self.launches.sessions[session], Unregister(program)))

    def buffers(self, session: int = 1) -> set[int]:
        return set(self.launches.sessions[session].buffers)

    # --- the islands' side --------------------------------------------------------------------------------------------

    def done(self, island: int, *sequences: int) -> list[Send]:
        return self.checked(self.launches.done(island, Done(sequences)))

    def failed(self, island: int, sequence: int, failure: Failure = BOOM) -> list[Send]:
        return self.checked(self.launches.run_failed(island, IslandLaunchFailed(sequence, failure)))


def program_over(*slices: int, key: int = 1, session: int = 1, arguments: int = 1) -> PlannedProgram:
    """One call on each slice after the other, the value handed on; the arguments lie on the first slice.

    Named after the slices. It has one result, on the last one.
    """
    sketch = sketch_with_slices("-".join(map(str, slices)))
    inputs = tuple(sketch.argument(slices[0]) for _ in range(arguments))
    value: Ref = sketch.call("f0", *inputs, slice=slices[0])
    for number, slice in enumerate(slices[1:], 1):
        value = sketch.call(f"f{number}", value, slice=slice)
    return sketch.planned(value, key=key, session=session)


def sketch_with_slices(name: str) -> Sketch:
    sketch = Sketch(name)
    sketch.placement = {slice.mesh.id: slice for slice in SLICES}
    return sketch


def release_slice(front: Harness, slice: PlacedSlice, session: int = 1) -> bool:
    return front.launches.remove_slice(session, slice.mesh.id)
