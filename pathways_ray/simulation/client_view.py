"""A simulated client as the modules see it that do a part of its work."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

from pathways_ray.client import events
from pathways_ray.client.core import ClientCore
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import Layout
from pathways_ray.simulation.client_data import ClientData, Handle
from pathways_ray.simulation.controller import SimulatedController
from pathways_ray.simulation.network import End, Process
from pathways_ray.simulation.programs import Drawn


class Client(Protocol):
    """The client. The user goes round its `loop`, where it has one.

    `mover` and `loops` are made by such modules, and `world` has more than an `Environment` for some of them.
    """

    number: int
    process: Process
    random: Random
    tenant: Tenant
    controller: SimulatedController
    core: ClientCore
    data: ClientData
    end: End
    mover: Any
    slices: list[PlacedSlice]
    programs: list[Drawn]
    loop: Drawn | None
    loops: list[Any]
    handles: dict[int, Handle]
    over: bool
    last_drop: float

    @property
    def session(self) -> int: ...

    @property
    def world(self) -> Any: ...

    def handle(self, event: Any) -> None: ...

    def do(self, commands: Sequence[events.Command]) -> None: ...

    def connect(self, controller: SimulatedController) -> bool: ...

    def left_behind(self, before: list[int], failure: Failure | None, by_client: bool = True) -> None: ...

    def slice_of(self, layout: Layout) -> PlacedSlice: ...

    def launch(self, program: Drawn, given: list[Handle] | None = None) -> tuple[Handle, ...]: ...

    def put(self, layout: Layout) -> Handle: ...

    def drop(self, handle: Handle) -> None: ...
