"""Registers the programs of a simulated client: at first, and others in their place later."""

from __future__ import annotations

from pathways_ray.client import events
from pathways_ray.simulation.client_view import Client
from pathways_ray.simulation.decisions import drawn_program
from pathways_ray.simulation.programs import Drawn, drawn_loop
from pathways_ray.transport import messages as wire


def register_all(client: Client) -> None:
    """Draws and registers what the user begins with."""
    for _ in range(client.world.settings.programs):
        client.programs.append(_another(client))
    if client.random.random() < client.world.settings.loops:
        client.loop = _another_loop(client)


def replace_some(client: Client) -> None:
    """Drops programs, of which some launches may be under way, and registers others."""
    place = client.random.randrange(len(client.programs))
    client.core.dropped.append(client.programs[place].number)
    if client.loop is not None and client.random.random() < 0.3:
        client.core.dropped.append(client.loop.number)
        client.loop = _another_loop(client)
    client.programs[place] = _another(client)


def _another(client: Client) -> Drawn:
    number = client.core.new_program()
    name = f"c{client.number}p{number}"
    return _registered(client, drawn_program(client.random, number, name, client.slices, client.world.settings))


def _another_loop(client: Client) -> Drawn:
    """One more loop of the same function."""
    number = client.core.new_program()
    return _registered(client, drawn_loop(client.random, number, f"c{client.number}", client.slices))


def _registered(client: Client, made: Drawn) -> Drawn:
    client.handle(events.Registered(made.number, made.graph, wire.encode(made.graph), made.functions))
    return made
