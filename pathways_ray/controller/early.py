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


def host_of(tables: Tables, program: PlannedProgram) -> int:
    """The host that takes launches of a program from clients, the only one of its island or the one that leads it;
    `NO_HOST` where no host does."""
    parts = list(program.messages.items())
    if len(parts) != 1 or program.script is not None or program.takes_memory or not program.results:
        return NO_HOST
    ((island, message),) = parts
    leader = min(hosts_of(tables, island), default=NO_HOST)
    temporary = max(program.temporary_bytes.values(), default=0)
    has_part = any(device.host == leader for device in message.devices)
    if message.calls or not has_part or program.result_bytes > limits.MAX_EARLY_BYTES:
        return NO_HOST
    return leader if temporary <= limits.MAX_EARLY_TEMPORARY_BYTES else NO_HOST


def hosts_of(tables: Tables, island: int) -> list[int]:
    """The hosts of an island."""
    return [number for number, host in tables.hosts.items() if host.island == island]


def prepared(tables: Tables, program: PlannedProgram) -> Prepared:
    """The message that tells a client that a program is compiled, and whether its calls may be handed to a host."""
    host = host_of(tables, program)
    return Prepared(program.number) if host == NO_HOST else Prepared(program.number, program.key, host)


def withdrawn(session: Session, program: PlannedProgram | None, launch: Launch) -> list[Send]:
    """Takes back what a host may have made of a launch that never goes to it."""
    if not isinstance(launch, EarlyLaunch) or program is None:
        return []
    numbers = dict.fromkeys((*launch.covers, *range(launch.results, launch.results + program.result_count)))
    return [SendIsland(island, Drop(session.id, tuple(numbers))) for island in program.islands]
