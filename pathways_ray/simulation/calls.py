"""Host functions on a simulated host: calls of a session one after the other, beside the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pathways_ray.errors import Failure
from pathways_ray.ir.plan import Executable, NodeLabel, PlacedSlice
from pathways_ray.simulation.network import Network, Process
from pathways_ray.simulation.values import POISON, Future, agreed, is_poisoned, named, run_recipe, when_all_ready

SHORTEST_S, LONGEST_S = 0.001, 0.03
"""Time of a call, by its function."""


class SimulatedCall(Future):
    """A call: ready when it is over, with `failure` or the arrays that it `made`."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Future] = []

    @property
    def failure(self) -> Failure | None:
        return self.error

    def is_ready(self) -> bool:
        return self.ready

    def block_until_ready(self) -> None:
        assert self.ready

    def values(self) -> list[Any]:
        return list(self.made)

    def abandon(self, failure: Failure) -> None:
        self.settle({}, failure)


class SimulatedCalls:
    """The calls on one host process. `last` is the last one of each session."""

    def __init__(self, network: Network, process: Process, host: int) -> None:
        self.network = network
        self.process = process
        self.host = host
        self.last: dict[int, SimulatedCall] = {}

    def function(self, executable: Executable, placed: PlacedSlice) -> Callable[[int, NodeLabel, list[Any]], Any]:
        """A host function on this host's devices of a slice."""
        local = [device.index for device in placed.devices if device.host == self.host]
        digest = named(executable.recipe.parts[0].function)  # type: ignore[union-attr]
        seconds = SHORTEST_S + (LONGEST_S - SHORTEST_S) * (digest % 1000) / 1000

        def call(session: int, label: NodeLabel, inputs: list[Future]) -> SimulatedCall:
            asked, before = SimulatedCall(), self.last.get(session)
            self.last[session] = asked

            def begin() -> None:
                failed = next((value.error for value in inputs if value.error is not None), None)
                if failed is not None:
                    asked.settle({}, failed)
                elif not asked.ready:
                    self.network.after(self.process, seconds, end)

            def end() -> None:
                if asked.ready:
                    return
                if is_poisoned(executable.recipe):
                    asked.settle({}, Failure("ExecutionError", POISON, label.name, label.where, self.host))
                    return
                # The function reads its arguments until it returns: none may have been overwritten meanwhile.
                given = [agreed(value.memory().values()) for value in inputs]
                outputs = run_recipe(executable.recipe, given)
                asked.made = [Future.of(dict.fromkeys(local, output)) for output in outputs]
                asked.settle({})

            waits = inputs if before is None else [*inputs, before]
            when_all_ready(waits, lambda: self.process.run(begin))
            return asked

        return call

    def end(self, session: int) -> None:
        """The process of a session's functions is killed."""
        last = self.last.pop(session, None)
        if last is not None:
            last.abandon(Failure("SessionClosed", "the session has ended", host=self.host))
