"""The controller's records of launches that have ended: the last ones, latencies by tenant, failures by kind.

The way of a launch writes one record. Latencies are counted when somebody asks for them, out of the records that came
since: of a burst that is longer than the ring between two looks, the first are not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pathways_ray.observe.ring import Histogram, Ring

MAX_TENANTS = 1024
"""Tenants with a histogram of their own; what ends for further ones counts under `OTHERS`."""

MAX_SESSIONS = 8192
"""Sessions that are over whose tenants are remembered."""

OTHERS = "others"


class Recorder:
    """Launches that have ended, from admission to outcome.

    `ring` has number, session, program, admission and outcome (seconds of the controller's clock), and the client's
    number for it, negative for a failure.
    """

    def __init__(self) -> None:
        self.ring = Ring("qqqddq")
        self.failures: dict[str, int] = {}
        self.served = 0
        """Calls that hosts have served, which were no launches."""
        self.busy: dict[int, float] = {}
        """Device seconds of each island: its busy share is what they grow by, by its devices."""
        self._tenants: dict[int, str] = {}
        self._over: deque[int] = deque()
        self._latencies: dict[str, Histogram] = {}
        self._counted = 0

    def opened(self, session: int, tenant: str) -> None:
        """A session of a tenant has opened."""
        self._tenants[session] = tenant

    def closed(self, session: int) -> None:
        """A session is over; its tenant is remembered for a while."""
        self._over.append(session)
        if len(self._over) > MAX_SESSIONS:
            self._tenants.pop(self._over.popleft(), None)

    def tenant_of(self, session: int) -> str:
        """The tenant of a session, also of one that is over."""
        return self._tenants.get(session, OTHERS)

    def tenants(self) -> dict[int, str]:
        """The tenants of the open sessions, and of the last that are over. May be called from another thread."""
        return self._tenants.copy()

    def failed(self, kind: str) -> None:
        """A launch has failed."""
        self.failures[kind] = self.failures.get(kind, 0) + 1

    def latencies(self, named: Callable[[str], str] = str) -> dict[str, Histogram]:
        """Times of launches from admission to outcome, by tenant.

        Args:
            named: gives the name under which a tenant counts.
        """
        new = self.ring.added - self._counted
        self._counted += new
        found = self._latencies
        for _, session, _, admitted, ended, _ in self.ring.last(new):
            tenant = named(self._tenants.get(session, OTHERS))
            if tenant not in found and len(found) >= MAX_TENANTS:
                tenant = OTHERS
            found.setdefault(tenant, Histogram()).observe(ended - admitted)
        return found
