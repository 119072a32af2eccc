"""The devices that a client of a proxy gets: slices of a session of its own."""

from __future__ import annotations

import contextlib

from pathways_ray.client.session import Session, exported_for
from pathways_ray.client.slices import VirtualSlice, of_its_tenant
from pathways_ray.errors import Unschedulable

BEST_FIRST = ("tpu", "gpu", "cpu")

STATES = ("up", "away")
"""States of islands that take slices, best first."""


def open_session(url: str, token: str, ca: str, devices: int, name: str) -> tuple[Session, list[VirtualSlice]]:
    """A session with slices of as many devices: one slice on the island that has room for all, else on several. All are
    of the best platform that has as many, for which alone the session's programs are then made: JAX knows of one.

    Args:
        devices: 0 stands for all of one island.

    Raises:
        Unschedulable: the cluster has fewer of each platform.
    """
    session = Session.connect(url, token, name, ca=ca or None)
    session.wait_for_islands()
    try:
        platform, slices = _on_best(session, devices)
        if platform:
            session.platforms = exported_for(platform)
        return session, slices
    except BaseException:
        session.close()
        raise


def _on_best(session: Session, devices: int) -> tuple[str, list[VirtualSlice]]:
    """The best platform that has as many devices, "" where there is no island yet, and slices on it."""
    there = {island["platform"] for island in of_its_tenant(session.status()["islands"])}
    *better, last = [platform for platform in BEST_FIRST if platform in there] or [""]
    for platform in better:
        with contextlib.suppress(Unschedulable):
            return platform, _slices(session, devices, platform)
    return last, _slices(session, devices, last if better else None)


def _slices(session: Session, devices: int, platform: str | None) -> list[VirtualSlice]:
    if not devices:
        return [session.virtual_slice(None, ("x",), platform=platform, name="proxy")]
    try:
        return [session.virtual_slice((devices,), ("x",), platform=platform, name="proxy")]
    except Unschedulable:
        if not (found := _on_several(session, devices, platform)):
            raise
        return found


def _on_several(session: Session, devices: int, platform: str | None) -> list[VirtualSlice]:
    """Slices on several islands, on those that are up first; none where these have not as many devices. One that
    refuses is left out: it may have begun to drain since the look."""
    islands = [
        (STATES.index(state), island["island"], sum(len(host["devices"]) for host in island["hosts"] if host["up"]))
        for island in of_its_tenant(session.status()["islands"])
        if platform in (None, island["platform"]) and (state := island["state"]) in STATES
    ]
    if sum(size for _, _, size in islands) < devices:
        return []
    found: list[VirtualSlice] = []
    left = devices
    for _, island, size in sorted(islands):
        if taken := min(size, left):
            with contextlib.suppress(Unschedulable):
                found.append(session.virtual_slice((taken,), ("x",), island=island, name="proxy"))
                left -= taken
    if left:
        for one in found:
            one.release()
        return []
    return found
