"""The planner: a process in which graphs of clients are lowered and planned, with limits on time and memory.

The worst graph within the fixed limits would take minutes of the controller's loop, and all tenants with it.
"""

from __future__ import annotations

import msgspec

from pathways_ray.controller.planning import PlanReply, PlanRequest, answer
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import encode
from pathways_ray.worker import Limits, Worker, WorkerEnded, WorkerLate, serve

LIMITS = Limits(cpu_s=20, time_s=60.0, memory_bytes=2 << 30)
"""A chain of 8,000 nodes takes 0.5 s, or 3 s with a transfer at each, and less than 0.1 GiB."""

_REQUEST = msgspec.msgpack.Decoder(PlanRequest)
_REPLY = msgspec.msgpack.Decoder(PlanReply)


class Planner:
    """The planner's process, as the controller sees it; `plan` waits for the answer."""

    def __init__(self) -> None:
        self._worker = Worker(("-m", "pathways_ray.controller.planner"))

    def start(self) -> None:
        """Starts the process ahead of the first program."""
        self._worker.start()

    def plan(self, request: PlanRequest) -> PlanReply:
        """The answer; a failure where it takes too much, or there is no planner."""
        try:
            return _REPLY.decode(self._worker.ask(encode(request)))
        except WorkerEnded as error:
            text = f"the program, whose graph has {len(request.graph)} bytes, could not be planned: {error}. Split it"
            return PlanReply(failure=Failure("ProgramRefused", text), again=isinstance(error, WorkerLate))
        except (OSError, MemoryError, msgspec.MsgspecError) as error:
            text = f"programs of this size cannot be planned: {error}"
            return PlanReply(failure=Failure("ProgramRefused", text), again=True)

    def close(self) -> None:
        self._worker.close()


def main() -> None:
    """Plans what standard input asks for, until its end."""
    # A core that serves is worth more than one that plans.
    serve(lambda question: encode(answer(_REQUEST.decode(question))), LIMITS, niceness=5)


if __name__ == "__main__":
    main()
