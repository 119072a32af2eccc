"""Events that a scheduler's core takes, and commands that its decisions end in.

Each launch makes several of both: they are structs, since the interpreter has no part in making one.
"""

from __future__ import annotations

import msgspec

from pathways_ray.transport.messages import FromHost, FromIsland, HostUp, ToHost, ToIsland

# --- events -----------------------------------------------------------------------------------------------------------


class ControllerConnected(msgspec.Struct, frozen=True):
    """The link to the controller is open. Hosts reach this scheduler at `address`."""

    address: str


class ControllerDisconnected(msgspec.Struct, frozen=True):
    """The link to the controller at `address` has ended, or could not be opened."""

    address: str


class ControllerMessage(msgspec.Struct, frozen=True):
    """A message from the controller."""

    message: ToIsland


class HostConnected(msgspec.Struct, frozen=True):
    """A host has opened a link; `hello` was its first message."""

    hello: HostUp


class HostMessage(msgspec.Struct, frozen=True):
    """A further message on the link that a host opened under `epoch`."""

    host: int
    epoch: int
    message: FromHost


class HostDisconnected(msgspec.Struct, frozen=True):
    """The link that a host opened under `epoch` has ended."""

    host: int
    epoch: int


class Ticked(msgspec.Struct, frozen=True):
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


class ToHosts(msgspec.Struct, frozen=True):
    """Send to every host whose link was accepted."""

    message: ToHost


class ToController(msgspec.Struct, frozen=True):
    """Send to the controller."""

    message: FromIsland


class Accept(msgspec.Struct, frozen=True):
    """Keep the link that a host has just opened: what is sent to hosts from now on goes there too."""

    host: int
    epoch: int


class Refuse(msgspec.Struct, frozen=True):
    """Close the link that a host has just opened under an epoch that is over, or is not this island's."""

    host: int
    epoch: int

    @property
    def reason(self) -> str:
        return f"epoch {self.epoch} of host {self.host} is over"


class ForgetHosts(msgspec.Struct, frozen=True):
    """Send nothing more on the links accepted so far, nor what waits to be sent on them: the island restarts."""


class Kill(msgspec.Struct, frozen=True):
    """Have the process of a host under `epoch` killed, so that it comes back under a new one; hang up its link, which
    ends it as well if it runs."""

    host: int
    epoch: int


class Withdraw(msgspec.Struct, frozen=True):
    """Have the resource manager forget that `name` is at `address`."""

    name: str
    address: str


class Exit(msgspec.Struct, frozen=True):
    """End this process after `REJOIN_PAUSE_S`; its successor starts without state."""

    reason: str


Command = ToHosts | ToController | Accept | Refuse | ForgetHosts | Kill | Withdraw | Exit
