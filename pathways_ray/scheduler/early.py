"""The right to hand launches to the host of an island, which its scheduler gives to the clients of a tenant. Pure.

Early launches go round the order of the island. So they are allowed only where there is nothing to order: to the
clients of one tenant, while nobody else has launches there. The launch of another one ends that before it goes to the
hosts, which hear both in this order. Of several hosts one leads the others in a term (`executor.run.leading`), while it
says that this pays.
"""

from __future__ import annotations

from pathways_ray.scheduler.events import Command, ToHosts
from pathways_ray.transport.capabilities import tenant_mark
from pathways_ray.transport.messages import AllowEarly

ALONE_S = 0.2
"""A tenant has been alone on an island for this long before its clients may hand over launches: where several take
turns, each message that allows and forbids would be for nothing."""


class EarlyRight:
    """The tenant that may hand over launches; "" while none may. `last` is the one whose launch came last."""

    def __init__(self) -> None:
        self.alone_s = ALONE_S
        self.tenant = ""
        self.last = ""
        self.terms = 0
        self._since = 0.0

    def entered(self, tenant: str, now: float) -> list[Command]:
        """A launch of a tenant has come."""
        if tenant == self.last:
            return []
        self.last, self._since = tenant, now
        return self.end()

    def tick(self, alone: bool, hosts: int, now: float) -> list[Command]:
        """Time has passed; `alone` says whether the island serves one tenant, and one of its `hosts` can lead."""
        if not alone:
            return self.end()
        if self.tenant or not self.last or now - self._since < self.alone_s:
            return []
        self.tenant = self.last
        self.terms += hosts > 1
        return [ToHosts(AllowEarly(tenant_mark(self.tenant), self.terms))]

    def forget(self) -> list[Command]:
        """The hosts, or the controller, are others from now on."""
        self.last = ""
        return self.end()

    def end(self) -> list[Command]:
        """Nobody may hand over launches."""
        if not self.tenant:
            return []
        self.tenant = ""
        return [ToHosts(AllowEarly(""))]
