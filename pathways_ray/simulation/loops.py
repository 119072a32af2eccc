"""The loops of a simulated user, `y = f(y)`: without a look, or with one at each value before the next call."""

from __future__ import annotations

from pathways_ray.simulation.client_data import Handle
from pathways_ray.simulation.client_view import Client
from pathways_ray.simulation.programs import Drawn

LOOK_S = 0.002
"""A user whose value is not there looks again after this time."""


def go_round(client: Client, program: Drawn) -> None:
    """Calls a program with its result, again and again; only some values are kept."""
    handle, random = client.put(program.arguments[0]), client.random
    if (waits := client.world.settings.waits) and random.random() < waits:
        return WaitingLoop(client, program, handle, random.choice([9, 33, 200])).go_on()
    for _ in range(random.choice([4, 9, 33])):
        (result,) = client.launch(program, [handle])
        if random.random() < 0.95:
            client.drop(handle)
        handle = result


class WaitingLoop:
    """Rounds of which each value is looked at: so many are left, and the next one takes `handle`."""

    def __init__(self, client: Client, program: Drawn, handle: Handle, rounds: int) -> None:
        self.client, self.program, self.handle, self.rounds = client, program, handle, rounds
        client.loops.append(self)

    def go_on(self) -> None:
        client, handle = self.client, self.handle
        dropped = client.loop is not self.program  # nobody calls it any more
        if (
            client.over
            or dropped
            or not self.rounds
            or handle.number not in client.handles
            or handle.record.failure is not None
        ):
            return client.loops.remove(self)
        if not client.mover.held and not handle.fetches:
            self.rounds -= 1
            (self.handle,) = client.launch(self.program, [handle])
            if client.random.random() < 0.95:
                client.drop(handle)
            client.data.fetch(self.handle, client.slice_of(self.handle.layout))
        client.world.network.after(client.process, LOOK_S, self.go_on)
