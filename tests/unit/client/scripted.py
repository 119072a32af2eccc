"""A core driven by hand: events in, messages out, as a session does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pathways_ray.client.buffer import BufferRecord, Upload
from pathways_ray.client.core import ClientCore
from pathways_ray.client.events import (
    Command,
    Placed,
    Registered,
    ReleaseQueue,
    Uploaded,
)
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import Cancel, Free, Launch, Message, Put, Register
from tests.unit.helpers import VECTOR, Sketch

GONE = Failure("HostLost", "host 1 is gone", host=1)


class Script:
    """A session without threads and sockets. `now` is the time of every event; `sent` has the messages that left."""

    def __init__(self, max_launches: int = 8) -> None:
        self.core = ClientCore(7, max_launches)
        self.now = 100.0
        self.sent: list[Message] = []
        self.commands: list[Command] = []
        """Those that are not about messages, since the test looked at them last."""

    def handle(self, event: Any) -> None:
        self.do(self.core.handle(event, self.now))

    def do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Launch() | Put() | Register() | Free() | Cancel():
                    self.sent.append(command)
                case ReleaseQueue():
                    while (head := self.core.head(self.now)) is not None:
                        self.do(head)
                        self.core.remove_head()
                case _:
                    self.commands.append(command)

    def take(self) -> list[Message]:
        """The messages that left since this was called last."""
        found, self.sent = self.sent, []
        return found

    # --- a user's calls -----------------------------------------------------------------------------------------------

    def register(self, name: str = "f", functions: dict[str, bytes] | None = None) -> int:
        sketch = Sketch(name)
        where = sketch.slice("0.0")
        graph = sketch.graph(sketch.call(name, sketch.argument(where), slice=where))
        number = self.core.new_program()
        self.handle(Registered(number, graph, name.encode(), functions or {}))
        return number

    def launch(
        self, *arguments: BufferRecord, program: int = 1, results: int = 1, donated: Sequence[BufferRecord] = ()
    ) -> list[BufferRecord]:
        made = self.core.new_buffers(results)
        self.do((self.core.launch(program, arguments, made, donated, "it was donated to f") or ReleaseQueue(),))
        return made

    def put(self, *hosts: int) -> BufferRecord:
        """Begins an upload to `hosts`."""
        (record,) = self.core.new_buffers(1)
        record.upload = Upload(set(hosts or (0,)))
        self.handle(Placed((Put(record.id, 1, VECTOR, ()),)))
        return record

    def acknowledge(self, record: BufferRecord, host: int = 0, failure: Failure | None = None) -> None:
        assert record.upload is not None
        self.handle(Uploaded(record, record.upload, host, failure))

    def free(self, record: BufferRecord) -> None:
        message = self.core.free(record)
        self.do((message,) if message is not None else ())
