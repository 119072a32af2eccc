"""Placement and plans: the steps that each island takes for a launch, as data.

A `PlacedSlice` maps the virtual devices of a slice to physical ones. An `IslandPlan` lists the steps of a program that
one island takes, in the order its devices see them; all hosts of the island get the same plan and find their own part
in it. Values live in numbered slots. Every step belongs to a gang: the position of its compute node in the program,
where a host function counts twice, for its call and its return. The two sides of a bundle of edges meet by a transfer
id that both compute from the launch, the bundle and the receiving host, so that neither has to ask the other.
`passes/plan_islands.py` makes plans, `verify_plan.py` checks them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable

import msgspec

from pathways_ray import limits
from pathways_ray.errors import Failure
from pathways_ray.ir.graph import Recipe, has_loop
from pathways_ray.ir.types import ArrayType, Layout, SliceType

MAX_NAMED = 4
"""Computations that a failure of unknown origin names."""


class Device(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A physical device: the number of its host in the cluster and its place on that host."""

    host: int
    index: int

    def __str__(self) -> str:
        return f"{self.host}.{self.index}"


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring devices: `count` from number `index` on, on each of `hosts` hosts from `host` on."""

    host: int
    hosts: int
    index: int
    count: int


class PlacedSlice(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """A slice and its devices. Devices are written as blocks: any number of whole hosts side by side is one block."""

    mesh: SliceType
    island: int
    blocks: tuple[Block, ...]

    @classmethod
    def on(cls, mesh: SliceType, island: int, devices: Iterable[Device]) -> PlacedSlice:
        """The slice on these devices, which are in row-major order of the mesh."""
        return cls(mesh, island, _blocks(devices))

    def on_devices_of(self, mesh: SliceType) -> PlacedSlice:
        """Another slice on these devices."""
        return PlacedSlice(mesh, self.island, self.blocks)

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """The devices in row-major order of the mesh."""
        return tuple(
            Device(host, index)
            for block in self.blocks
            for host in range(block.host, block.host + block.hosts)
            for index in range(block.index, block.index + block.count)
        )

    @functools.cached_property
    def hosts(self) -> tuple[int, ...]:
        return tuple(sorted({host for b in self.blocks for host in range(b.host, b.host + b.hosts)}))


def _blocks(devices: Iterable[Device]) -> tuple[Block, ...]:
    """These devices in this order, as long blocks as can be taken from the front."""
    runs: list[list[int]] = []  # host, index, count
    for device in devices:
        if runs and runs[-1][0] == device.host and sum(runs[-1][1:]) == device.index:
            runs[-1][2] += 1
        else:
            runs.append([device.host, device.index, 1])
    blocks: list[list[int]] = []
    for host, index, count in runs:
        last = blocks[-1] if blocks else [0, 0, 0, 0]
        if last[2:] == [index, count] and last[0] + last[1] == host:
            last[1] += 1
        else:
            blocks.append([host, 1, index, count])
    return tuple(Block(*block) for block in blocks)


class Executable(msgspec.Struct, frozen=True, array_like=True):
    """A recipe for one slice with the types and layouts of its inputs and outputs: the unit of compilation."""

    recipe: Recipe
    slice: int
    inputs: tuple[ArrayType, ...]
    input_layouts: tuple[Layout, ...]
    outputs: tuple[ArrayType, ...]
    output_layouts: tuple[Layout, ...]
    donated: tuple[int, ...]


class Edge(msgspec.Struct, frozen=True, array_like=True):
    """A value that changes its layout between producer and consumer."""

    type: ArrayType
    source: Layout
    target: Layout


class Bundle(msgspec.Struct, frozen=True, array_like=True):
    """Edges between the same two slices that travel together: the same node makes their values, or all of them are
    arguments, and the same node asks for them first. So none waits for another one. `source` and `target` are slices.
    """

    source: int
    target: int
    edges: tuple[Edge, ...]


class Execute(msgspec.Struct, frozen=True, tag_field="step", tag="execute"):
    """Enqueue an executable. `drops` lists slots that this island does not need afterwards."""

    gang: int
    node: int
    executable: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    drops: tuple[int, ...] = ()


class Call(msgspec.Struct, frozen=True, tag_field="step", tag="call"):
    """Have this host's part of a host function called, beside the devices; `Return` has what comes of it."""

    gang: int
    node: int
    executable: int
    inputs: tuple[int, ...]


class Return(msgspec.Struct, frozen=True, tag_field="step", tag="return"):
    """Take what a call gave, once it has. It has a gang of its own, the one behind that of its `Call`, whose inputs
    stay until then: the function may still read them."""

    gang: int
    node: int
    executable: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    drops: tuple[int, ...] = ()


class Send(msgspec.Struct, frozen=True, tag_field="step", tag="send"):
    """Serve the shards of slots, one for each edge of a bundle, to the hosts of its target."""

    gang: int
    bundle: int
    sources: tuple[int, ...]
    drops: tuple[int, ...] = ()


class Receive(msgspec.Struct, frozen=True, tag_field="step", tag="receive"):
    """Put together what a bundle brings; the pull itself was posted when the launch arrived."""

    gang: int
    bundle: int
    targets: tuple[int, ...]


class Reshard(msgspec.Struct, frozen=True, tag_field="step", tag="reshard"):
    """Change the layouts of slots on the same devices: a computation of its own, inside the island."""

    gang: int
    bundle: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    drops: tuple[int, ...] = ()


class Regroup(msgspec.Struct, frozen=True, tag_field="step", tag="regroup"):
    """Make a slot of shards of others on the same devices, as the node of the same name says."""

    gang: int
    sources: tuple[int, ...]
    shards: tuple[tuple[int, int], ...]
    type: ArrayType
    layout: Layout
    target: int
    drops: tuple[int, ...] = ()


Step = Execute | Call | Return | Send | Receive | Reshard | Regroup


class NodeLabel(msgspec.Struct, frozen=True, array_like=True):
    """Name and user's line of a node, for errors."""

    name: str
    where: str


class IslandPlan(msgspec.Struct, frozen=True):
    """The work of one island for a launch of a program.

    `slots` has the slice of every slot. `arguments` and `results` pair a slot with its number in the launch, and
    `argument_types` has what each of the former is; `awaited` are the slots whose readiness ends the launch on this
    island, `decides` those of them whose values the controller hears of.
    """

    name: str
    island: int
    gangs: int
    slots: tuple[int, ...]
    arguments: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]
    awaited: tuple[int, ...]
    slices: tuple[PlacedSlice, ...]
    executables: tuple[Executable, ...]
    bundles: tuple[Bundle, ...]
    steps: tuple[Step, ...]
    labels: tuple[NodeLabel, ...]
    decides: tuple[int, ...] = ()
    argument_types: tuple[tuple[ArrayType, Layout], ...] = ()

    def placed(self, slice_id: int) -> PlacedSlice:
        return next(s for s in self.slices if s.mesh.id == slice_id)

    @property
    def most_computations(self) -> int:
        """The most computations that a launch puts on the queue of one device."""
        counts: Counter[Device] = Counter()
        for step in self.steps:
            match step:
                case Execute():
                    counts.update(self.placed(self.executables[step.executable].slice).devices)
                case Receive():
                    counts.update(self.placed(self.bundles[step.bundle].target).devices)
                case Send() | Reshard():
                    counts.update(self.placed(self.bundles[step.bundle].source).devices)
        return max(counts.values(), default=1)

    def attributed(self, failure: Failure) -> Failure:
        """A failure with the names and lines of the computations that it can come from: of one that took too long,
        those with loops, if there are any."""
        steps = [step for step in self.steps if isinstance(step, Execute)]
        if failure.kind == "LaunchTimeout":
            steps = [step for step in steps if has_loop(self.executables[step.executable].recipe)] or steps
        labels = [self.labels[step.node] for step in steps]
        names = list(dict.fromkeys(label.name for label in labels))
        if len(names) > MAX_NAMED:
            names = [*names[:MAX_NAMED], f"{len(names) - MAX_NAMED} more"]
        where = list(dict.fromkeys(label.where for label in labels if label.where))[:MAX_NAMED]
        return msgspec.structs.replace(failure, node=" or ".join(names), where=", ".join(where))


def transfer_id(launch: int, bundle: int, receiver: int) -> int:
    """The name under which a producer serves, and a receiver pulls, a bundle of a launch. Unique for 2**38 launches."""
    return (launch * limits.MAX_NODES + bundle) * limits.MAX_HOSTS + receiver


def launch_of(name: int) -> int:
    """The launch that a transfer id belongs to."""
    return name // (limits.MAX_NODES * limits.MAX_HOSTS)


def receiver_of(name: int) -> int:
    """The host that pulls what has a transfer id."""
    return name % limits.MAX_HOSTS
