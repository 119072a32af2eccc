"""Calls that users should not make: of a simulated client, now and then."""

from __future__ import annotations

from pathways_ray.client import events
from pathways_ray.client.buffer import BufferRecord
from pathways_ray.simulation.client_data import AMISS
from pathways_ray.simulation.client_view import Client
from pathways_ray.simulation.programs import ARRAY
from pathways_ray.simulation.values import mixed
from pathways_ray.transport import messages as wire


def name_what_is_not_mine(client: Client) -> None:
    """A launch with a buffer that this session does not have: another one may have a buffer of that number."""
    program = client.random.choice(client.programs)
    last = max(client.core.buffers, default=0) + 1000
    strange = tuple(last + k for k in range(len(program.arguments)))
    other = next((c for c in client.world.clients if c is not client and c.handles), None)
    if other is not None and client.random.random() < 0.5:
        found = [number for number in other.handles if number > last]
        strange = tuple(found[:1] * len(program.arguments)) or strange
    given = [BufferRecord(number) for number in strange]
    message = client.core.launch(program.number, given, (BufferRecord(last + 5000),))
    client.world.checker.trespassed(client.session, next(reversed(client.core.pending)))
    client.do((message or events.ReleaseQueue(),))


def upload_amiss(client: Client) -> None:
    """A launch whose arguments are not on all hosts, or of a wrong type or with other bytes on one of several; this
    client does not wait for any. It has called the program before, so nobody can blame that."""
    program = client.random.choice(client.programs)
    given = client.core.new_buffers(len(program.arguments))
    how = client.random.choice(AMISS)
    for record, layout in zip(given, program.arguments, strict=True):
        placed, value = client.slice_of(layout), mixed(client.session, record.id)
        message = wire.Put(record.id, layout.slice, ARRAY, layout.spec)
        client.data.upload_amiss(message, value, placed, how)
        client.end.send(message)
    results = client.core.new_buffers(len(program.results))
    launch = client.core.launch(program.number, given, results)
    client.world.checker.uploaded_amiss(client.session, next(reversed(client.core.pending)))
    client.do((launch or events.ReleaseQueue(),))
    client.do([freed for record in (*given, *results) if (freed := client.core.free(record)) is not None])
    client.last_drop = client.world.clock.now
