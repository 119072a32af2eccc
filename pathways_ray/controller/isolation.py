"""Tenants that have processes of their own: for which of them islands run, and since when they are not needed.

With `isolation="process"` every tenant has an island of its own beside each island of the runtime: a scheduler and
hosts that share its devices, and nothing else, with those of other tenants. They start when the tenant opens its first
session, and end `IDLE_LIMIT_S` after its last one. The operator's sessions use the islands that the runtime began with.

The list of tenants is repeated: the actor that starts the islands may have restarted, or this controller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pathways_ray.controller import events
from pathways_ray.controller.clients import Client
from pathways_ray.controller.tenants import Tenant
from pathways_ray.resource_manager.core import MAX_REJOIN_S
from pathways_ray.transport import messages as wire

IDLE_LIMIT_S = 60.0
"""Islands of a tenant without sessions end after this time: a tenant that comes back at once finds them."""

START_LIMIT_S = 60.0
"""An island of a tenant has to start within this time."""

MAX_ENDED = 256
"""Islands that are gone and are remembered: the answer to a request for a slice may come later. Their numbers never
come again."""

REPEAT_S = 5.0
"""The list of tenants is sent again after this time."""


@dataclass
class Isolation:
    """Tenants with islands for themselves.

    Args:
        enabled: whether tenants have any.

    While it `waits`, nothing is said: it is not known yet who has any. `ended` are the last islands that are gone.
    """

    enabled: bool = False
    needed: dict[str, float] = field(default_factory=dict)
    held: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sent: float = float("-inf")
    waits: bool = False
    ended: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_ENDED))

    def islands_of(self, client: Client) -> str:
        """The tenant whose islands a client's slices lie on; "" for those of all."""
        return self.islands_for(client.tenant, client.token)

    def islands_for(self, tenant: Tenant, token: str) -> str:
        """The same for a client that is to be, of a tenant with a token; "" stands for that of the operator."""
        return tenant.name if self.enabled and token else ""

    def patience_s(self, client: Client) -> float:
        """Seconds that a request for a slice waits for islands to join: those of a tenant may have yet to start."""
        return MAX_REJOIN_S + (START_LIMIT_S if self.islands_of(client) else 0.0)

    def opened(self, client: Client, now: float) -> list[events.Command]:
        """A session has opened: its tenant needs islands."""
        tenant = self.islands_of(client)
        if not tenant or tenant in self.needed:
            return []
        self.needed[tenant] = now
        return self._want(now)

    def held_before(self, tenant: str, now: float) -> None:
        """A tenant had islands under the controller before: its sessions may come back."""
        if self.enabled and tenant:
            self.needed[tenant] = now

    def tick(self, clients: Iterable[Client], now: float) -> list[events.Command]:
        """Time has passed: sends the list again, without the tenants that have been away for too long."""
        if not self.enabled:
            return []
        for client in clients:
            if tenant := self.islands_of(client):
                self.needed[tenant] = now
        idle = [tenant for tenant, last in self.needed.items() if now - last > IDLE_LIMIT_S]
        for tenant in idle:
            del self.needed[tenant]
        return self._want(now) if idle or now - self.sent >= REPEAT_S else []

    def is_ending(self, island: int) -> bool:
        """Whether an island is one of a tenant that needs none any more: its processes are ended, and not lost."""
        return any(island in islands and tenant not in self.needed for tenant, islands in self.held.items())

    def _want(self, now: float) -> list[events.Command]:
        if self.waits:
            return []
        self.sent = now
        return [events.WantIslands(tuple(self.needed))]

    def answered(self, event: events.IslandsHeld) -> list[int]:
        """Takes the answer to the list; returns the islands that have ended since the last one."""
        before = {island for islands in self.held.values() for island in islands}
        self.held = dict(event.islands)
        for tenant in event.failures:
            self.needed.pop(tenant, None)
        gone = sorted(before - {island for islands in self.held.values() for island in islands})
        self.ended.extend(gone)
        return gone

    def checked(
        self, found: wire.SliceCreated | wire.Refused | wire.NotYet
    ) -> wire.SliceCreated | wire.Refused | wire.NotYet:
        """The resource manager's answer for a slice: one whose island has ended meanwhile is not there yet."""
        return wire.NotYet() if isinstance(found, wire.SliceCreated) and found.placed.island in self.ended else found
