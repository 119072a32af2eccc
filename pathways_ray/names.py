"""The names under which Ray knows the actors and placement groups of a runtime."""

from __future__ import annotations

import re

from pathways_ray.errors import UsageError

NAMESPACE = "pathways"
"""The Ray namespace of all runtimes of a Ray cluster."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


def check_name(name: str) -> None:
    """Raises `UsageError` unless `name` may name a runtime: 1 to 40 lower-case letters, digits, and - inside."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"a runtime's name has 1 to 40 lower-case letters, digits, and - inside, not {name!r}")


def resource_manager(name: str) -> str:
    return f"{name}-resource-manager"


def controller(name: str) -> str:
    return f"{name}-controller"


def scheduler(name: str, island: int) -> str:
    return f"{name}-scheduler-{island}"


def host(name: str, number: int) -> str:
    return f"{name}-host-{number}"


def process(name: str, process: str) -> str:
    """The actor of a process by the name that logs have for it: "controller", "scheduler 0", "host 3"."""
    return f"{name}-{process.replace(' ', '-')}"


def tenant_islands(name: str) -> str:
    """The actor that starts and ends the islands that tenants have for themselves."""
    return f"{name}-tenant-islands"


def keeper(name: str) -> str:
    """The actor that has islands follow Ray's nodes."""
    return f"{name}-keeper"


def group(name: str, island: int) -> str:
    """The placement group of an island."""
    return f"{name}-island-{island}"


def belongs(actor_or_group: str, name: str) -> bool:
    """Whether an actor or a placement group of this name is part of the runtime `name`."""
    rest = actor_or_group.removeprefix(f"{name}-")
    return rest != actor_or_group and bool(
        re.fullmatch(r"resource-manager|controller|tenant-islands|keeper|(scheduler|host|island)-[0-9]+", rest)
    )
