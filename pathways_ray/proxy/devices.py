"""The devices that a client of a proxy gets: slices of a session of its own."""

from __future__ import annotations

import math

from pathways_ray.client.session import Session
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import Unschedulable


def open_session(url: str, token: str, ca: str, devices: int, name: str) -> tuple[Session, list[VirtualSlice]]:
    """A session with slices of as many devices: one slice on the island that has room for all, else on several.

    Args:
        devices: 0 stands for all of one island.

    Raises:
        Unschedulable: the cluster has fewer.
    """
    session = Session.connect(url, token, name, ca=ca or None)
    session.wait_for_islands()
    try:
        return session, _slices(session, devices)
    except BaseException:
        session.close()
        raise


def _slices(session: Session, devices: int) -> list[VirtualSlice]:
    if not devices:
        return [session.virtual_slice(None, ("x",), name="proxy")]
    try:
        return [session.virtual_slice((devices,), ("x",), name="proxy")]
    except Unschedulable:
        islands = {
            island["island"]: sum(len(host["devices"]) for host in island["hosts"] if host["up"])
            for island in session.status()["islands"]
        }
        if sum(islands.values()) < devices:
            raise
    found: list[VirtualSlice] = []
    for island, size in sorted(islands.items()):
        taken = min(size, devices - sum(math.prod(part.shape) for part in found))
        if taken:
            found.append(session.virtual_slice((taken,), ("x",), island=island, name="proxy"))
    return found
