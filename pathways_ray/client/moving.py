"""Moving a slice to other devices: the steps of its client, in order. Pure: a driver carries them out, and those of
`suspending` too.

1. A slice of the same mesh is made elsewhere, with the parts that the old one has.
2. The session's calls are held, until nothing of it is under way.
3. Programs of transfers alone take all arrays from the old slice to the new one, from device to device.
4. The controller exchanges the two slices: each gets the devices and the arrays of the other.
5. The client's handles name the copies, and its programs are registered again when they are next called.
6. What is the old slice's now is freed, and given back.

Until the exchange nothing has changed for anybody, so a step that fails leaves all as it was.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from pathways_ray.client.buffer import READY, BufferRecord
from pathways_ray.client.core import ClientCore
from pathways_ray.client.suspension import Part, Suspension
from pathways_ray.client.wanted import ANY, Wanted
from pathways_ray.errors import WaitTimeout, from_failure
from pathways_ray.ir.graph import Argument, Graph, Node, Ref, Result, Transfer
from pathways_ray.ir.types import ArrayType, Layout, SliceType, Spec
from pathways_ray.transport import messages as wire

COPIES = 64
"""Arrays of one launch that copies."""

LOOKS = 100
"""Questions for what the session holds, until no array is missing."""

QUIET_LIMIT_S = 120.0
"""A move waits this long for what the session has under way; then the slice stays where it is."""

LOOK_S = 0.1
"""The pause between two of them: what was sent before may take its time on a busy machine."""


@dataclass(frozen=True)
class Ask:
    """A call to the controller; its reply is sent in, the error of a refusal thrown."""

    request: wire.CreateSlice | wire.ListHeld | wire.ExchangeSlices | wire.Suspend | wire.ReleaseSlice


@dataclass(frozen=True)
class Hold:
    """Hold the session's calls from now on, and go on when nothing of it is under way, or fail after a while. Where it
    `gives_way`, fail as soon as a slice has to move: calls may wait for that."""

    gives_way: bool = False


@dataclass(frozen=True)
class Copy:
    """Register a program, and launch it with these arguments; go on when it has its outcome."""

    program: wire.Register
    arguments: Sequence[BufferRecord]
    results: Sequence[BufferRecord]


@dataclass(frozen=True)
class Exchanged:
    """The slices have these devices now."""

    slices: tuple[wire.SliceCreated, ...]


@dataclass(frozen=True)
class Release:
    """Let the session's calls go on, or be refused where it is suspended."""


@dataclass(frozen=True)
class Drop:
    """Free these buffers."""

    buffers: Sequence[BufferRecord]


@dataclass(frozen=True)
class Save:
    """Take a copy of an array's value, under a number of its own."""

    number: int
    record: BufferRecord
    held: wire.HeldBuffer


@dataclass(frozen=True)
class Finish:
    """All arrays are saved: write down what there is."""


@dataclass(frozen=True)
class Load:
    """Begin to upload the value of that number."""

    number: int
    record: BufferRecord
    held: wire.HeldBuffer


@dataclass(frozen=True)
class Arrive:
    """Go on when all hosts of its slice have an upload."""

    record: BufferRecord


@dataclass(frozen=True)
class Pause:
    """Go on after some seconds."""

    seconds: float


@dataclass(frozen=True)
class Suspended:
    """The session is suspended from now on, or, with None, it is not any more."""

    suspension: Suspension | None


Step = Ask | Hold | Copy | Exchanged | Release | Drop | Save | Finish | Load | Arrive | Pause | Suspended


def move(
    core: ClientCore, mesh: SliceType, name: str, parts: Sequence[Part], island: int, wanted: Wanted = ANY
) -> Generator[Step, Any, None]:
    """The steps that move a slice.

    Args:
        island: -1 stands for any but the one where it is.
        wanted: the devices that it is to have.

    Raises:
        Unschedulable: no island, or not this one, can hold it.
        PathwaysError: it could not be moved; it is where it was.
    """
    session = core.session
    asked = wire.CreateSlice(session, mesh.shape, mesh.axes, island, "", name, 0, (), mesh.id)
    made = yield Ask(wanted.added_to(asked))
    new: SliceType = made.placed.mesh
    targets = {mesh.id: new}
    copied: list[tuple[BufferRecord, BufferRecord]] = []
    try:
        for part in parts:
            same = part.mesh
            made = yield Ask(wire.CreateSlice(session, same.shape, same.axes, -1, "", "", new.id, part.places))
            targets[same.id] = made.placed.mesh
        yield Hold()
        held = [one for one in (yield from listed(core)) if one.slice in targets]
        meshes = {mesh.id: mesh} | {part.mesh.id: part.mesh for part in parts}
        found = living(core, held)
        while found:
            group, found = found[:COPIES], found[COPIES:]
            made_here = core.new_buffers(len(group))
            old = [record for record, _ in group]
            copied += zip(old, made_here, strict=True)
            program = wire.Register(
                core.new_program(), wire.encode(_copies([h for _, h in group], meshes, targets)), {}
            )
            yield Copy(program, old, made_here)
            failure = next((record.failure for record in made_here if record.failure is not None), None)
            if failure is None:
                continue
            there = [(record, one) for record, one in group if core.buffers.get(record.id) is record]
            if len(there) == len(group):
                raise from_failure(failure)
            del copied[-len(group) :]  # a last handle went meanwhile, and the launch failed without that array
            yield Drop(made_here)
            found = there + found
        pairs = tuple((number, target.id) for number, target in targets.items())
        exchanged = yield Ask(wire.ExchangeSlices(session, pairs))
    except Exception:
        yield Drop([record for _, record in copied])
        yield Release()
        yield Ask(wire.ReleaseSlice(session, new.id))
        raise
    dropped = renumbered(core, copied, targets)
    yield Exchanged(exchanged.slices)
    yield Drop([*(record for _, record in copied), *dropped])
    yield Release()
    yield Ask(wire.ReleaseSlice(session, new.id))


def listed(core: ClientCore) -> Generator[Step, Any, Sequence[wire.HeldBuffer]]:
    """The steps that ask for all arrays of a session.

    Raises:
        WaitTimeout: some are missing: their `Put`, which questions overtake, or the news of their loss is on its way.
    """
    missing: list[int] = []
    for _ in range(LOOKS):
        held = yield Ask(wire.ListHeld(core.session, ()))
        found: list[wire.HeldBuffer] = [*held.buffers]
        while held.more:
            held = yield Ask(wire.ListHeld(core.session, (), held.more))
            found += held.buffers
        there = {one.number for one in found}
        missing = [n for n, buffer in list(core.buffers.items()) if buffer.state is READY and n not in there]
        if not missing:
            return found
        yield Pause(LOOK_S)
    raise WaitTimeout(f"arrays {missing[:3]} are on their way to the controller, or were lost just now: try again")


def is_quiet(core: ClientCore) -> bool:
    """Whether nothing of the session is under way."""
    if core.pending or core.queue or core.freed or core.donations.by_launch:
        return False
    buffers = list(core.buffers.values())
    return not any((b.upload is not None and not b.upload.done) or b.undecided for b in buffers)


def renumbered(
    core: ClientCore, copied: Sequence[tuple[BufferRecord, BufferRecord]], slices: Container[int]
) -> list[BufferRecord]:
    """Each of the first records names the copy from now on, and each of the others what it was made of. Returns those
    whose last handle has gone meanwhile, perhaps before it had the name of the copy."""
    for old, new in copied:
        old.id, new.id = new.id, old.id
        core.buffers[old.id], core.buffers[new.id] = old, new
        old.results = None
    core.renewals.moved(slices)
    core.coalescer.moved(slices)
    return [old for old, _ in copied if old.dropped]


def living(core: ClientCore, held: Sequence[wire.HeldBuffer]) -> list[tuple[BufferRecord, wire.HeldBuffer]]:
    """The arrays on the slice that a handle is left to, and that are there."""
    found = [(core.buffers.get(one.number), one) for one in held]
    return [(record, one) for record, one in found if record is not None and record.state is READY]


def _copies(held: Sequence[wire.HeldBuffer], meshes: dict[int, SliceType], targets: dict[int, SliceType]) -> Graph:
    """A program that takes arrays to the slices that are to have them, laid out as they are."""
    sources = [(one.type, meshes[one.slice], one.spec) for one in held]
    return copies_graph("move", sources, [(targets[one.slice], one.spec) for one in held])


def copies_graph(
    name: str, sources: Sequence[tuple[ArrayType, SliceType, Spec]], targets: Sequence[tuple[SliceType, Spec]]
) -> Graph:
    """A program that takes arrays from their slices and layouts to others."""
    slices = dict.fromkeys([*(mesh for _, mesh, _ in sources), *(mesh for mesh, _ in targets)])
    nodes: list[Node] = [Argument(k, kind, Layout(mesh.id, spec)) for k, (kind, mesh, spec) in enumerate(sources)]
    for k, ((kind, _, _), (mesh, spec)) in enumerate(zip(sources, targets, strict=True)):
        nodes.append(Transfer(Ref(k), kind, Layout(mesh.id, spec)))
    nodes.append(Result(tuple(Ref(len(sources) + k) for k in range(len(sources)))))
    return Graph(name, tuple(slices), (), tuple(nodes))
