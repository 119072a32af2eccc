"""Snapshots of a simulated client: copies of its arrays on slices elsewhere, and what it makes of them after a loss.

The programs are those of `client/snapshots.py`. A copy is a result as any other one, so the checker knows its value,
and that of the array which comes back from it.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from pathways_ray.client import events
from pathways_ray.client.buffer import READY
from pathways_ray.client.moving import copies_graph
from pathways_ray.ir.types import Layout
from pathways_ray.simulation.client_data import Handle
from pathways_ray.simulation.client_view import Client
from pathways_ray.simulation.programs import ARRAY, Drawn
from pathways_ray.transport import messages as wire

MOST = 3
"""Snapshots that a client keeps at once."""


class Snapshot(NamedTuple):
    """An array, and its copy elsewhere."""

    array: Handle
    copy: Handle


class SimulatedSnapshots:
    """The snapshots of one client. `restored` counts the arrays that came back after a loss."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.kept: list[Snapshot] = []
        self.programs: dict[tuple[Layout, Layout], Drawn] = {}
        self.restored = 0

    def go_on(self, random: Random) -> None:
        """Takes a snapshot now and then, gives back what was lost, and forgets the oldest."""
        chance = self.client.world.settings.snapshots
        if not chance:
            return
        self.look()
        if len(self.kept) == MOST and random.random() < chance:
            self._forget(self.kept[0])
        if len(self.kept) < MOST and random.random() < chance:
            self._take(random)

    def _take(self, random: Random) -> None:
        client = self.client
        there = [h for h in client.handles.values() if h.record.state is READY and h.record.failure is None]
        found = [
            (handle, placed)
            for handle in there
            for placed in client.slices
            if placed.island != client.slice_of(handle.layout).island
        ]
        if found:
            handle, placed = random.choice(found)
            spec = random.choice([(), (("x",),)])
            copy = self._copied(handle, Layout(placed.mesh.id, spec))
            self.kept.append(Snapshot(handle, copy))
            for one in self.kept[-1]:
                one.fetches += 1  # so that it is neither dropped nor donated

    def look(self) -> None:
        """Makes arrays again that were lost, and of which there is the copy."""
        for one in list(self.kept):
            self._look(one)

    def _look(self, snapshot: Snapshot) -> None:
        array, copy = snapshot
        if array.record.failure is None and copy.record.failure is None:
            return
        if array.record.failure is not None and copy.record.failure is None and copy.record.state is READY:
            self._copied(copy, array.layout)
            self.restored += 1
        if array.record.failure is None or copy.record.state is READY or copy.record.failure is not None:
            self._forget(snapshot)

    def _forget(self, snapshot: Snapshot) -> None:
        self.kept.remove(snapshot)
        for one in snapshot:
            one.fetches -= 1

    def _copied(self, handle: Handle, target: Layout) -> Handle:
        """A copy of an array in another layout, made by a program of its own."""
        client = self.client
        client.world.step_begins()
        key = handle.layout, target
        program = self.programs.get(key)
        if program is None:
            source, mesh = (client.slice_of(layout).mesh for layout in key)
            graph = copies_graph("copy", [(ARRAY, source, handle.layout.spec)], [(mesh, target.spec)])
            number = client.core.new_program()
            program = self.programs[key] = Drawn(number, graph, {}, (handle.layout,), frozenset(), (target,))
            client.handle(events.Registered(number, graph, wire.encode(graph), {}))
        (made,) = client.launch(program, [handle])
        return made
