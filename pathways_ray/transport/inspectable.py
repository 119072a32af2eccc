"""Questions that every process of a runtime answers to who looks at it through Ray: its clock, and its log."""

from __future__ import annotations

from pathways_ray import process_log
from pathways_ray.os_process import clock
from pathways_ray.transport.clocks import answer


class Inspectable:
    """Base of the actors."""

    runtime: str
    process: str
    """Its name in logs, such as "host 3"."""

    def _unwrap(self, name: str) -> None:
        """Takes the tracing away that Ray puts around every method of an actor, from one that all messages go by."""
        method = getattr(type(self), name)
        setattr(self, name, getattr(method, "__wrapped__", method).__get__(self))

    def clock(self) -> tuple[str, float]:
        """See `os_process.clock`."""
        return clock()

    def compare_clock(self, address: str, port: int, nonce: bytes) -> bool:
        """See `clocks.answer`."""
        return answer(address, port, nonce)

    def read_log(self, offset: int, file: int) -> process_log.Part:
        """See `process_log.read`."""
        return process_log.read(self.runtime, self.process, offset, file)
