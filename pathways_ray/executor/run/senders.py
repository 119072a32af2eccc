"""The hosts from which a launch waits for data."""

from __future__ import annotations

from collections.abc import Mapping

from pathways_ray.executor.run.active_launch import ActiveLaunch
from pathways_ray.transport.messages import Peer


def lost_sender(active: ActiveLaunch, host: int, peers: Mapping[int, Peer]) -> int | None:
    """A host from which a launch waits for data, and which has none of it any more: it is gone, or began after the
    launch. None where there is no such host.

    Args:
        host: on which the launch waits.
        peers: the hosts that are there.
    """
    barrier = active.barrier
    if barrier is None or not barrier.bundles or barrier.number == active.arrived:
        return None
    plan, sequence = active.plan.plan, active.launch.sequence
    senders = {sender for k in barrier.bundles for sender in plan.placed(plan.bundles[k].source).hosts}
    senders.discard(host)
    there = {sender for sender in senders if sender in peers and peers[sender].since < sequence}
    return min(senders - there, default=None)
