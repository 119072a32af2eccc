"""Scheduling policies, and the accounts of device time that they decide by.

A policy is a function from a candidate to a rank; the lowest rank goes first. That is the whole seam: to add a policy,
write such a function and name it in `POLICIES`, or give its full name, `package.module:function`, as the policy of a
runtime. A policy may use everything in a candidate, but its callers (`order.IslandOrder` and the controller) decide
which candidates there are, and keep launches over several islands in one order. So no policy can make launches wait for
each other; a bad one is only unfair.

Device time is counted in device seconds: seconds on the devices, times their number. A launch is charged with what
earlier ones of its program took when it is sent to the hosts, and with the difference when they report what it took. A
guess for those that nobody has measured would raise the clock, at which newcomers begin, by time that nobody had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pathways_ray.errors import UsageError

AGEING_S = 1.0
"""Under "priority", a launch rises by one level for each second at the head of its session."""


@dataclass(slots=True)
class Usage:
    """A tenant's account.

    `virtual` is its device seconds divided by its weight, raised to those of the others whenever it has launches again
    after it had none: unused time cannot be saved up. `busy` counts its launches that are not over, and `parts`
    those of them that others are made of, as rounds of a loop are. `launch_limit_s` is the limit of each launch on its
    devices, 0 where that of the runtime holds.
    """

    tenant: str
    weight: float = 1.0
    priority: int = 0
    device_seconds: float = 0.0
    virtual: float = 0.0
    launch_limit_s: float = 0.0
    sessions: int = 0
    busy: int = 0
    parts: int = 0


OPERATOR = "the operator"
"""The name under which usage has the sessions that were opened with the runtime's own token."""

ANONYMOUS = "session "
"""The names of their tenants begin so, and those of no others."""


def anonymous(session: int) -> str:
    """The tenant of a session that the runtime's own token opened: itself."""
    return f"{ANONYMOUS}{session}"


def account_name(tenant: str) -> str:
    """The name under which usage has a tenant."""
    return OPERATOR if tenant.startswith(ANONYMOUS) else tenant


@dataclass(slots=True)
class Candidate:
    """A session whose next launch could run now.

    `arrival` numbers launches as they came, `since` is when the launch came to the head of its session, in seconds.
    """

    usage: Usage
    arrival: int
    since: float


Rank = tuple[float, ...]
Policy = Callable[[Candidate, float], Rank]


def fifo(candidate: Candidate, now: float) -> Rank:
    """First come, first served."""
    return (candidate.arrival,)


def share(candidate: Candidate, now: float) -> Rank:
    """Device time in proportion to weights, by start-time fair queueing (Goyal, Vin, Cheng 1996): the tenant with the
    least device time per weight goes first."""
    return (candidate.usage.virtual, candidate.arrival)


def priority(candidate: Candidate, now: float) -> Rank:
    """Highest priority first; a launch that waits rises by one level each `AGEING_S`, so that no tenant starves."""
    return (-(candidate.usage.priority + (now - candidate.since) / AGEING_S), candidate.arrival)


POLICIES: dict[str, Policy] = {"fifo": fifo, "share": share, "priority": priority, "preempt": priority}
"""Under "preempt", sessions also give way where memory is short (`controller.preemption`)."""


def check_policy(name: str) -> None:
    """Raises `UsageError` unless `name` is in `POLICIES` or looks like `package.module:function`."""
    module, colon, function = name.partition(":")
    if name not in POLICIES and not (
        colon and function.isidentifier() and all(map(str.isidentifier, module.split(".")))
    ):
        raise UsageError(
            f"there is no policy {name!r}; there are {', '.join(POLICIES)}, or give package.module:function"
        )


MAX_ACCOUNTS = 4096
"""Accounts of tenants without sessions that a ledger keeps: more names than an operator's table has."""


@dataclass
class Ledger:
    """The accounts of all tenants, by name, and the tenant of each session.

    The account of a tenant of the operator's table outlives its sessions: otherwise who has used more than its share
    would be rid of that by connecting again.

    `clock` is the virtual time of the launch that was started last, `active` the number of tenants with launches.
    `operators_s` are the device seconds of the operator's sessions that are over.
    """

    usages: dict[str, Usage] = field(default_factory=dict)
    tenant_of: dict[int, str] = field(default_factory=dict)
    clock: float = 0.0
    active: int = 0
    operators_s: float = 0.0

    @property
    def longest_limit_s(self) -> float:
        """The longest limit that a tenant with sessions has of its own, in seconds; 0 where none has."""
        return max((one.launch_limit_s for one in self.usages.values() if one.sessions), default=0.0)

    def open(
        self, session: int, tenant: str, weight: float = 1.0, priority: int = 0, launch_limit_s: float = 0.0
    ) -> None:
        """Notes a session, and its tenant's weight, priority and limit, which may have changed."""
        usage = self.usages.setdefault(tenant, Usage(tenant))
        usage.weight, usage.priority, usage.launch_limit_s = weight, priority, launch_limit_s
        if session not in self.tenant_of:
            self.tenant_of[session] = tenant
            usage.sessions += 1

    def close(self, session: int) -> None:
        """Forgets a session, and with it the tenant that has no name but the session's."""
        tenant = self.tenant_of.pop(session, None)
        if tenant is None:
            return
        usage = self.usages[tenant]
        usage.sessions -= 1
        if usage.sessions:
            return
        if tenant == anonymous(session):
            self.operators_s += self.usages.pop(tenant).device_seconds
        elif len(self.usages) > MAX_ACCOUNTS:
            idle = [one for one in self.usages.values() if not one.sessions and not one.busy]
            if idle:
                del self.usages[min(idle, key=lambda one: one.virtual).tenant]

    def of(self, session: int) -> Usage:
        """The account of a session's tenant; a session that was not opened has one of its own."""
        tenant = self.tenant_of.get(session)
        if tenant is None:
            self.open(session, anonymous(session))
            tenant = self.tenant_of[session]
        return self.usages[tenant]

    def device_seconds(self) -> dict[str, float]:
        """Device seconds by tenant; those of the operator's sessions together, also of those that are over."""
        found = {OPERATOR: self.operators_s} if self.operators_s else {}
        for name, usage in self.usages.items():
            tenant = account_name(name)
            found[tenant] = found.get(tenant, 0.0) + usage.device_seconds
        return found

    def enter(self, usage: Usage) -> None:
        """Adds a launch of the tenant."""
        if not usage.busy:
            usage.virtual = max(usage.virtual, self.clock)
            self.active += 1
        usage.busy += 1

    def leave(self, usage: Usage) -> None:
        """Removes a launch of the tenant, which is over."""
        usage.busy -= 1
        if not usage.busy:
            self.active -= 1

    def start(self, usage: Usage, estimate: float) -> None:
        """Charges a launch that goes to the devices; it is expected to take `estimate` device seconds."""
        if usage.virtual > self.clock:
            self.clock = usage.virtual
        usage.virtual += estimate / usage.weight

    def charge(self, tenant: str, seconds: float) -> None:
        """Charges a tenant device seconds that were no launch, as if one that took them had just ended; its sessions
        may be over."""
        usage = self.usages.get(tenant)
        if usage is not None:
            self.enter(usage)
            self.start(usage, seconds)
            self.settle(usage, seconds, seconds)
            self.leave(usage)
        elif account_name(tenant) == OPERATOR:
            self.operators_s += seconds

    def settle(self, usage: Usage, estimate: float, actual: float) -> None:
        """Corrects the charge of a launch that was started with `estimate` and took `actual` device seconds."""
        usage.virtual += (actual - estimate) / usage.weight
        usage.device_seconds += actual

    def end(self, usage: Usage, estimate: float, actual: float) -> None:
        """A launch that was started with `estimate` is over, and took `actual` device seconds."""
        usage.virtual += (actual - estimate) / usage.weight
        usage.device_seconds += actual
        usage.busy -= 1
        if not usage.busy:
            self.active -= 1
