"""The simulated resource manager: `ManagerCore`, called as Ray calls: a message there, a message back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from pathways_ray.ir.links import Hardware
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.resource_manager import events
from pathways_ray.resource_manager.controllers import TICK_S
from pathways_ray.resource_manager.core import ManagerCore
from pathways_ray.resource_manager.islands import KeptIslands
from pathways_ray.resource_manager.slice_requests import SliceRequest
from pathways_ray.simulation.environment import Environment, Observer
from pathways_ray.simulation.network import Process
from pathways_ray.simulation.placing import ring
from pathways_ray.simulation.settings import Settings
from pathways_ray.transport.messages import (
    HeldSlices,
    Holdings,
    HostInfo,
    JoinReply,
    KnownHost,
    NotYet,
    Refused,
    SliceCreated,
)

_KNOWN_HOST = msgspec.msgpack.Decoder(KnownHost)
_SLICES = msgspec.msgpack.Decoder(HeldSlices)


class IslandObserver(Observer, Protocol):
    """An observer that checks where slices go too."""

    def slice_mapped(self, placed: PlacedSlice) -> None:
        """A session got a slice."""

    def island_ends(self, island: int) -> None:
        """An island is about to be ended."""


class ManagerEnvironment(Environment, Protocol):
    """The environment of a resource manager."""

    def kill_number(self, number: int, why: str) -> None:
        """Ends the process of this number, if it is alive."""

    kept: KeptIslands
    islands: dict[int, list[int]]

    def kill_host(self, host: int, why: str) -> None:
        """Ends the process of a host, whichever it is."""

    def end_island(self, island: int, hosts: tuple[int, ...]) -> None:
        """Ends the processes of an island for good."""

    @property
    def checker(self) -> IslandObserver: ...


def info_of(settings: Settings, island: int, members: Sequence[int], host: int, process: Process) -> HostInfo:
    """The report of a host that joins."""
    hardware = ring(members, host, settings.devices) if settings.rings else Hardware()
    place = (host, island, "cpu", settings.devices, "node", process.number, "")
    return HostInfo(*place, tuple(members), hardware=hardware)


class SimulatedManager:
    """One incarnation of the resource manager's process; hosts join it under epochs above `last_epoch`."""

    def __init__(self, world: ManagerEnvironment, last_epoch: int = 0, controller: str = "") -> None:
        self.world = world
        self.process = world.network.process("manager", "manager")
        settings = world.settings
        self.core = ManagerCore(
            world.kept,
            last_epoch=last_epoch,
            lost_after_s=settings.lost_after_s,
            controller=controller,
        )
        self.tokens = itertools.count()
        self.calls: dict[int, tuple[Process, Callable[[Any], None]]] = {}
        self._tick()

    # --- calls; what comes twice in bad weather can do no harm --------------------------------------------------------

    def controller_serves(self, caller: Process, incarnation: str, busy: events.Busy) -> None:
        self._post(caller, events.ControllerServes(incarnation, incarnation, incarnation, busy, 0, int(incarnation)))

    def controller_holds(self, caller: Process, incarnation: str, holdings: Holdings) -> None:
        self._post(caller, events.ControllerHolds(incarnation, holdings), twice=True)

    def slices(self, started: int) -> HeldSlices:
        """Answers at once, as the rest of a start does that takes no time here."""
        (answer,) = self.core.handle(events.ControllerAsks(0, started), self.world.clock.now)
        assert isinstance(answer, events.Answer)
        assert isinstance(answer.value, HeldSlices)
        return answer.value

    def publish(self, caller: Process, name: str, address: str) -> None:
        self._post(caller, events.Published(name, address), twice=True)

    def withdraw(self, caller: Process, name: str, address: str) -> None:
        self._post(caller, events.Withdrawn(name, address), twice=True)

    def lookup(self, caller: Process, name: str, answer: Callable[[str], None]) -> None:
        """Answers once `name` has published its address."""
        self._post(caller, events.LookedUp(self._token(caller, answer), name))

    def join(self, caller: Process, island: int, host: int, answer: Callable[[JoinReply], None]) -> None:
        """Answers once all hosts of the island have come."""
        info = info_of(self.world.settings, island, self.world.islands[island], host, caller)
        self._post(caller, events.JoinRequested(self._token(caller, answer), info))

    def serves(self, caller: Process, host: bytes) -> None:
        self._post(caller, events.HostServes(_KNOWN_HOST.decode(host)), twice=True)

    def leave(self, caller: Process, host: int, epoch: int) -> None:
        self._post(caller, events.HostLeft(host, epoch), twice=True)

    def kill_host(self, caller: Process, host: int, epoch: int) -> None:
        self._post(caller, events.KillRequested(host, epoch), twice=True)

    def create_slice(
        self,
        caller: Process,
        started: int,
        session: int,
        request: SliceRequest,
        final: bool,
        answer: Callable[[SliceCreated | Refused | NotYet], None],
    ) -> None:
        self._post(
            caller,
            events.FromController(started, events.SliceRequested(self._token(caller, answer), session, request, final)),
        )

    def release_slice(
        self,
        caller: Process,
        started: int,
        session: int,
        slice_id: int,
        answer: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._post(
            caller,
            events.FromController(started, events.SliceReleased(self._token(caller, answer), session, slice_id)),
        )

    def release_session(
        self, caller: Process, started: int, session: int, answer: Callable[[int], None] = lambda _: None
    ) -> None:
        self._post(caller, events.FromController(started, events.SessionReleased(self._token(caller, answer), session)))

    def hold_slices(
        self,
        caller: Process,
        started: int,
        session: int,
        found: bytes,
        answer: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._post(
            caller,
            events.FromController(
                started, events.SlicesHeld(self._token(caller, answer), session, _SLICES.decode(found))
            ),
        )

    def add_island(self, caller: Process, hosts: int, answer: Callable[[Any], None]) -> None:
        self._post(caller, events.IslandAdded(self._token(caller, answer), hosts))

    def exchange_slices(
        self,
        caller: Process,
        started: int,
        session: int,
        pairs: tuple[tuple[int, int], ...],
        call: int,
        answer: Callable[[bool], None] = lambda _: None,
    ) -> None:
        asked = events.SlicesExchanged(self._token(caller, answer), session, pairs, call)
        self._post(caller, events.FromController(started, asked))

    def drain_island(
        self, caller: Process, started: int, island: int, deadline_s: float, reason: str, answer: Callable[[Any], None]
    ) -> None:
        self._post(
            caller,
            events.FromController(
                started, events.DrainRequested(self._token(caller, answer), island, deadline_s, reason)
            ),
        )

    def undrain_island(self, caller: Process, started: int, island: int, answer: Callable[[Any], None]) -> None:
        self._post(caller, events.FromController(started, events.UndrainRequested(self._token(caller, answer), island)))

    def end_island(self, caller: Process, started: int, island: int, answer: Callable[[Any], None]) -> None:
        self._post(caller, events.FromController(started, events.RemoveRequested(self._token(caller, answer), island)))

    # --- driver -------------------------------------------------------------------------------------------------------

    def _token(self, caller: Process, answer: Callable[[Any], None]) -> int:
        token = next(self.tokens)
        self.calls[token] = (caller, answer)
        return token

    def _post(self, caller: Process, event: events.Event, twice: bool = False) -> None:
        self.world.network.post(caller, self.process, self._handle, event, twice=twice, in_order=True)

    def _tick(self) -> None:
        self._handle(events.Ticked(self.world.machine_slowness))
        self.world.network.after(self.process, TICK_S, self._tick)

    def _handle(self, event: events.Event) -> None:
        """Takes an event to the core, and carries out its commands."""
        for command in self.core.handle(event, self.world.clock.now):
            match command:
                case events.Answer(token, value):
                    if isinstance(value, SliceCreated):
                        self.world.checker.slice_mapped(value.placed)
                    caller, answer = self.calls.pop(token)
                    self.world.network.post(self.process, caller, answer, value)
                case events.KillProcess(pid=pid, reason=reason):
                    self.world.kill_number(pid, reason)
                case events.KillHost(host, reason):
                    self.world.kill_host(host, reason)
                case events.Keep(islands):
                    self.world.kept = islands
                case events.EndIsland(island, hosts):
                    self.world.checker.island_ends(island)
                    self.world.end_island(island, hosts)
                case events.KillController(actor, reason):
                    self.world.kill_number(int(actor), reason)
