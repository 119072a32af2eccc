"""Events that a scheduler's core takes, and commands that its decisions end in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pathways_ray.transport.messages import FromHost, FromIsland, HostUp, ToHost, ToIsland

# --- events -----------------------------------------------------------------------------------------------------------


class ControllerConnected(NamedTuple):
    """The link to the controller is open. Hosts reach this scheduler at `address`."""

    address: str


class ControllerDisconnected(NamedTuple):
    """The link to the controller at `address` has ended, or could not be opened."""

    address: str


class ControllerMessage(NamedTuple):
    """A message from the controller."""

    message: ToIsland


class HostConnected(NamedTuple):
    """A host has opened a link; `hello` was its first message."""

    hello: HostUp


class HostMessage(NamedTuple):
    """A further message on the link that a host opened under `epoch`."""

    host: int
    epoch: int
    message: FromHost


class HostDisconnected(NamedTuple):
    """The link that a host opened under `epoch` has ended."""

    host: int
    epoch: int


class Ticked(NamedTuple):
    """Time has passed; comes every `core.TICK_S`. `slowness` is that of this machine."""

    slowness: float = 1.0


Event = (
    HostMessage
    | ControllerMessage
    | Ticked
    | HostConnected
    | HostDisconnected
    | ControllerConnected
    | ControllerDisconnected
)

# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToHosts:
    """Send to every host whose link was accepted."""

    message: ToHost


@dataclass(frozen=True, slots=True)
class ToController:
    """Send to the controller."""

    message: FromIsland


@dataclass(frozen=True, slots=True)
class Accept:
    """Keep the link that a host has just opened: what is sent to hosts from now on goes there too."""

    host: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Close the link that a host has just opened under an epoch that is over, or is not this island's."""

    host: int
    epoch: int

    @property
    def reason(self) -> str:
        return f"epoch {self.epoch} of host {self.host} is over"


@dataclass(frozen=True, slots=True)
class ForgetHosts:
    """Send nothing more on the links accepted so far, nor what waits to be sent on them: the island restarts."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Have the process of a host under `epoch` killed, so that it comes back under a new one; hang up its link, which
    ends it as well if it runs."""

    host: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Have the resource manager forget that `name` is at `address`."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Exit:
    """End this process after `REJOIN_PAUSE_S`; its successor starts without state."""

    reason: str


Command = ToHosts | ToController | Accept | Refuse | ForgetHosts | Kill | Withdraw | Exit
