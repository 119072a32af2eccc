"""Calls that simulated users make for their values alone."""

from __future__ import annotations

from functools import partial

from pathways_ray.client.buffer import INLINE, READY
from pathways_ray.simulation.client_data import Handle, carried, may_carry
from pathways_ray.simulation.client_view import Client
from pathways_ray.simulation.serving_host import Shards
from pathways_ray.simulation.values import Outcome, made_alone, mixed
from pathways_ray.transport.messages import ServeCall

PAUSES_S = (0.0, 0.001, 0.02, 0.3, 1.0)
"""From when a user makes up its mind until the call."""


def ask_some(client: Client) -> None:
    """Calls programs for their values, now and in the moments that follow, where their hosts serve that."""
    for _ in range(client.random.choice([1, 4, 12])):
        client.world.network.after(client.process, client.random.choice(PAUSES_S), _ask, client)


def _ask(client: Client) -> None:
    if client.over or client.mover.held:
        return
    program = client.random.choice(client.programs)
    server = client.core.early.server_of(program.number)
    if server is None or program.donated or program.number in client.core.renewals.stale:
        return
    arguments: list[Handle] = []
    for place, layout in enumerate(program.arguments):
        known = [
            handle
            for handle in client.handles.values()
            if handle.layout == layout and handle.record.state is READY and not handle.doubtful
        ]
        if known:
            arguments.append(client.random.choice(known))
        elif may_carry(program, place):
            arguments.append(Handle(INLINE, layout, mixed(client.core.session, client.random.getrandbits(40))))
        else:
            return
    host, key = server
    made, _ = made_alone(program.graph, [handle.expected for handle in arguments])
    wanted = tuple(range(len(made)))
    message = ServeCall(key, tuple(h.number for h in arguments), wanted, ((),) * len(made), carried(arguments))
    client.data.ask_host(client.tenant.name, host, message, partial(_answered, client, program.number, host, made))


def _answered(client: Client, program: int, host: int, made: list[Outcome], values: Shards | None) -> None:
    client.core.early.served(program, values is not None)
    if values is None:
        return
    for expected, shards in zip(made, values, strict=True):
        found = {(host, device): value for device, value in shards.items()}
        client.world.checker.fetched(client.core.session, f"what program {program} was asked for", expected, found)
