"""The policies of a run: the real ones, and one whose ranks change all the time, without rhyme or reason.

No policy may make launches wait for each other, however bad it is. The arbitrary one stands for all policies that users
may write.
"""

from __future__ import annotations

from pathways_ray.scheduler import policies
from pathways_ray.scheduler.policies import Candidate, Policy, Rank
from pathways_ray.simulation.values import mixed, named


def arbitrary(candidate: Candidate, now: float) -> Rank:
    """Another rank at each time, for each tenant and launch: repeatable, and as unfair as it comes."""
    return (float(mixed(named(candidate.usage.tenant), candidate.arrival, int(now * 10)) % 1000),)


_OWN: dict[str, Policy] = {"arbitrary": arbitrary}
POLICIES = {name: rank for name, rank in policies.POLICIES.items() if name != "preempt"} | _OWN
"""Those of the runtime, but for "preempt", which orders as "priority" does: `Settings.preempts` is for the rest."""
