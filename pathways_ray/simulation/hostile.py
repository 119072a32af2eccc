"""A hostile client: it says what no client of this project says. Others must not notice, and its own end is allowed.

What it may not do is told to the checker like everything else: every launch of the other clients has its outcome and
its value, tables agree, and what it held is free after its end.
"""

from __future__ import annotations

from random import Random
from typing import Any, Protocol

from pathways_ray import limits
from pathways_ray.controller.tenants import Tenant
from pathways_ray.ir.graph import Graph, Part, Recipe, Ref, Result
from pathways_ray.ir.types import ArrayType, SliceType
from pathways_ray.resource_manager.slice_requests import SliceRequest
from pathways_ray.simulation.controller import SimulatedController
from pathways_ray.simulation.environment import Environment
from pathways_ray.simulation.network import End
from pathways_ray.simulation.programs import ARRAY
from pathways_ray.transport import messages as wire

BATCHES = 30
"""Batches of one hostile client; then it waits for what comes."""


class HostileEnvironment(Environment, Protocol):
    """The environment of a hostile client."""

    controller: SimulatedController


class HostileClient:
    """A session that floods the controller with what is refused, oversized, doubled or out of order."""

    def __init__(self, world: HostileEnvironment, number: int) -> None:
        self.world = world
        self.random = Random(world.random.getrandbits(60))
        self.process = world.network.process(f"hostile{number}", f"hostile{number}")
        self.left = BATCHES
        self.session = 0
        world.network.after(self.process, 1.0 + self.random.random(), self._open)

    def _open(self) -> None:
        controller, post = self.world.controller, self.world.network.post
        post(self.process, controller.process, controller.open, self.process, Tenant("hostile"), self._opened)

    def _opened(self, opened: wire.SessionOpened, controller: SimulatedController) -> None:
        session = opened.session
        self.session, self.controller = session, controller
        self.end = End(self.world.network, self.process, lambda batch: None, self._ended)
        if controller.process.alive and controller.client_connects(session, self.end):
            self._flood()

    def _ended(self) -> None:
        self.left = 0

    def _flood(self) -> None:
        """A batch, and calls beside it."""
        if not self.left:
            self.world.checker.session_ended(self.session)
            self.end.close()
            return
        self.left -= 1
        random = self.random
        kind = random.choice(["launch", "free", "put", "register", "slice", "status"])
        for _ in range(random.choice([1, 10, 600])):
            self.end.send(self._message(kind))
        if kind in ("slice", "status"):
            request: Any = wire.Status(self.session)
            if kind == "slice":
                shape = random.choice([(1,), (0,), (1, 1, 1, 1), (10**6,)])
                wanted = SliceRequest(shape, ("x", "y", "z", "w")[: len(shape)])
                request = wire.CreateSlice(self.session, wanted.shape, wanted.axes, -1, "", "")
            for _ in range(random.choice([1, 40])):
                self.world.network.post(
                    self.process, self.controller.process, self.controller.ask, self.session, request
                )
        self.world.network.after(self.process, random.choice([0.0, 0.001, 0.1]), self._flood)

    def _message(self, kind: str) -> Any:
        random = self.random
        number = random.choice([0, 1, 7, random.getrandbits(40)])
        match kind:
            case "launch":
                return wire.Launch(number, random.choice([1, 2]), (number,) * random.choice([0, 1, 500]), number)
            case "free":
                return wire.Free((number,) * random.choice([1, 500]))
            case "put":
                return wire.Put(number, random.choice([1, 99]), random.choice([ARRAY, ArrayType((-1,), "x")]), ())
            case "register":
                return wire.Register(random.choice([1, 2]), self._graph(), {"f": b""})
            case _:
                return wire.Free((1,))

    def _graph(self) -> bytes:
        """A graph that cannot be planned, or bytes that are no graph."""
        mesh = SliceType(1, (1,), ("x",))
        recipe = Recipe((Part("", "f", (Ref(-1, 9),)),) * 50, (Ref(0),))
        results = Result((Ref(0),) * self.random.choice([0, 1, limits.MAX_RESULTS + 1]))
        graph = Graph("hostile", (mesh,) * self.random.choice([1, 2]), (recipe,), (results,))
        return wire.encode(graph)[: self.random.choice([10, None])]
