"""Runtimes that outlive the process that started them: found, described and removed by their name.

All that belongs to one is known to Ray by name (`names.py`), so that it can be removed whatever state it is in: after
half a start, without its controller, by another user of the Ray cluster.
"""

from __future__ import annotations

import contextlib
import time

import ray
from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

from pathways_ray import names
from pathways_ray.errors import PathwaysError, UsageError
from pathways_ray.executor.profiling import crash_log

REMOVE_LIMIT_S = 30.0
DESCRIBE_LIMIT_S = 5.0
LOOK_S = 0.2


def actors(name: str) -> list[str]:
    """The names of the actors of a runtime that live, or that Ray would start again."""
    there = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        actor["name"] for actor in there if actor["namespace"] == names.NAMESPACE and names.belongs(actor["name"], name)
    )


def groups(name: str) -> list[str]:
    """The names of the placement groups of a runtime."""
    return sorted(
        group["name"]
        for group in placement_group_table().values()
        if group["state"] != "REMOVED" and names.belongs(group["name"], name)
    )


def find(name: str, limit_s: float = 0.0) -> tuple[str, str, str]:
    """Url, token and CA file of a runtime that serves.

    Args:
        limit_s: seconds to wait for one of which only part runs: it may be being started.

    Raises:
        UsageError: no such runtime serves, or only part of one runs.
    """
    deadline = time.monotonic() + limit_s
    while not _has_controller(name) and actors(name) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    try:
        controller = ray.get_actor(names.controller(name), names.NAMESPACE)
        left_s = max(DESCRIBE_LIMIT_S, deadline - time.monotonic())  # one that is just made answers once it serves
        found: tuple[str, str, str] = ray.get(controller.access.remote(), timeout=left_s)
    except ValueError as error:
        rest = (
            f"; it is being started, or 'pathways down --name {name}' removes what half a start has left"
            if actors(name)
            else ""
        )
        raise UsageError(f"no runtime named {name!r} serves on this Ray cluster{rest}") from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise UsageError(f"the controller of {name!r} does not answer ({error}); try again in a few seconds") from error
    return found


def _has_controller(name: str) -> bool:
    try:
        ray.get_actor(names.controller(name), names.NAMESPACE)
    except ValueError:
        return False
    return True


def remove(name: str, limit_s: float = REMOVE_LIMIT_S) -> tuple[int, int]:
    """Kills every actor and frees every placement group of a runtime; returns how many there were.

    Waits until Ray has none of them any more. A runtime that is not there is fine.

    Raises:
        PathwaysError: Ray still has some after `limit_s` seconds.
    """
    killed: set[str] = set()
    freed: set[str] = set()
    deadline = time.monotonic() + limit_s
    while True:
        # Again and again: what was on its way when the first look was taken comes up meanwhile.
        left, held = actors(name), groups(name)
        if not left and not held:
            crash_log.forget(name)
            return len(killed), len(freed)
        # Hosts first and the resource manager, whose name keeps others from starting the same runtime, last.
        for actor in sorted(left, key=lambda actor: actor == names.resource_manager(name)):
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.kill(ray.get_actor(actor, names.NAMESPACE))
        for group in held:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                remove_placement_group(get_placement_group(group))
        killed.update(left)
        freed.update(held)
        if time.monotonic() > deadline:
            raise PathwaysError(f"Ray still has {', '.join([*left, *held])} after {limit_s:.0f} s")
        time.sleep(0.1)
