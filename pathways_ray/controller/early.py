"""Early launches as the controller sees them: the programs of which clients may hand some to their host. Pure.

Everything else about such a launch is decided where it is for every launch, when it comes here: it was only begun
before. One that ends here for another reason leaves nothing on the host.
"""

from __future__ import annotations

from pathways_ray import limits
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import Send, SendIsland, Session, Tables
from pathways_ray.transport.messages import Drop, EarlyLaunch, Launch, Prepared

NO_HOST = -1


def host_of(program: PlannedProgram) -> int:
    """The host that takes launches of a program from clients: the only one on which anything of it happens; `NO_HOST`
    where no host does."""
    parts = tuple(program.messages.values())
    if len(parts) != 1 or program.script is not None or program.donated or not program.results:
        return NO_HOST
    temporary = max(program.temporary_bytes.values(), default=0)
    if parts[0].calls or len(program.hosts) != 1 or program.result_bytes > limits.MAX_EARLY_BYTES:
        return NO_HOST
    (host,) = program.hosts
    return host if temporary <= limits.MAX_EARLY_TEMPORARY_BYTES else NO_HOST


def only_host_of(tables: Tables, program: PlannedProgram) -> int:
    """The same, where its island has no other host."""
    host = host_of(program)
    there = [number for number, one in tables.hosts.items() if one.island in program.islands]
    return host if there == [host] else NO_HOST


def prepared(program: PlannedProgram) -> Prepared:
    """The message that tells a client that a program is compiled, and whether its calls may be handed to a host."""
    host = host_of(program)
    return Prepared(program.number) if host == NO_HOST else Prepared(program.number, program.key, host)


def withdrawn(session: Session, program: PlannedProgram | None, launch: Launch) -> list[Send]:
    """Takes back what a host may have made of a launch that never goes to it."""
    if not isinstance(launch, EarlyLaunch) or program is None:
        return []
    numbers = tuple(range(launch.results, launch.results + program.result_count))
    return [SendIsland(island, Drop(session.id, numbers)) for island in program.islands]
