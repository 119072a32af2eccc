"""Registers the programs of a simulated client: at first, and others in their place later."""

from __future__ import annotations

from random import Random
from typing import Any, Protocol

from pathways_ray.client import events
from pathways_ray.client.core import ClientCore
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.simulation.decisions import drawn_program
from pathways_ray.simulation.programs import Drawn, drawn_loop
from pathways_ray.transport import messages as wire


class Registering(Protocol):
    """The client. The user goes round its `loop`, where it has one."""

    number: int
    random: Random
    core: ClientCore
    slices: list[PlacedSlice]
    programs: list[Drawn]
    loop: Drawn | None

    @property
    def world(self) -> Any: ...

    def handle(self, event: Any) -> None: ...


def register_all(client: Registering) -> None:
    """Draws and registers what the user begins with."""
    for _ in range(client.world.settings.programs):
        client.programs.append(_another(client))
    if client.random.random() < client.world.settings.loops:
        client.loop = _another_loop(client)


def replace_some(client: Registering) -> None:
    """Drops programs, of which some launches may be under way, and registers others."""
    place = client.random.randrange(len(client.programs))
    client.core.dropped.append(client.programs[place].number)
    if client.loop is not None and client.random.random() < 0.3:
        client.core.dropped.append(client.loop.number)
        client.loop = _another_loop(client)
    client.programs[place] = _another(client)


def _another(client: Registering) -> Drawn:
    number = client.core.new_program()
    name = f"c{client.number}p{number}"
    return _registered(client, drawn_program(client.random, number, name, client.slices, client.world.settings))


def _another_loop(client: Registering) -> Drawn:
    """One more loop of the same function."""
    number = client.core.new_program()
    return _registered(client, drawn_loop(client.random, number, f"c{client.number}", client.slices))


def _registered(client: Registering, made: Drawn) -> Drawn:
    client.handle(events.Registered(made.number, made.graph, wire.encode(made.graph), made.functions))
    return made
