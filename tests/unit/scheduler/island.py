"""A scheduler's core driven by hand: each method is one event, at time `now`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pathways_ray.ir.plan import Device
from pathways_ray.scheduler.core import SchedulerCore
from pathways_ray.scheduler.events import (
    Accept,
    Command,
    ControllerMessage,
    ForgetHosts,
    HostConnected,
    HostDisconnected,
    HostMessage,
    Ticked,
    ToController,
)
from pathways_ray.transport.messages import FromHost, Heartbeat, HostUp, Load, Running, ToIsland


def devices(*names: str) -> tuple[Device, ...]:
    """Devices by their names, `host.index`."""
    return tuple(Device(*map(int, name.split("."))) for name in names)


class Island:
    """Commands are returned without those that only concern links (`Accept`, `ForgetHosts`) and load reports."""

    def __init__(self, hosts: Iterable[int], window: int, *arguments: Any) -> None:
        self.core = SchedulerCore(0, hosts, window, *arguments)
        self.order = self.core.order
        self.now = 0.0

    def _handle(self, event: Any) -> list[Command]:
        return [command for command in self.core.handle(event, self.now) if not _of_links(command)]

    def from_controller(self, message: ToIsland) -> list[Command]:
        return self._handle(ControllerMessage(message))

    def from_host(self, host: int, epoch: int, message: FromHost) -> list[Command]:
        return self._handle(HostMessage(host, epoch, message))

    def host_up(self, message: HostUp) -> list[Command]:
        return self._handle(HostConnected(message))

    def host_lost(self, host: int, epoch: int) -> list[Command]:
        return self._handle(HostDisconnected(host, epoch))

    def tick(
        self, now: float, silent: int = -1, running: Mapping[int, float] | None = None, queued: tuple[int, ...] = ()
    ) -> list[Command]:
        """All hosts but `silent` say that they run, and since when they are at which launches (all at the same ones);
        then time has come to `now`."""
        self.now = now
        entries = tuple(Running(launch, round(1000 * (now - at))) for launch, at in (running or {}).items())
        for host in self.core.members.present - {silent}:
            message = Heartbeat(host, 1.0, entries, queued)
            self._handle(HostMessage(host, self.core.members.epochs[host], message))
        return self._handle(Ticked())


def _of_links(command: Command) -> bool:
    return isinstance(command, Accept | ForgetHosts) or (
        isinstance(command, ToController) and isinstance(command.message, Load)
    )
