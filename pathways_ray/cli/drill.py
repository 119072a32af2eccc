"""`pathways drill`: rehearses losses, by killing processes of a runtime now and then, and says when they are back."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from pathways_ray import os_process
from pathways_ray.cli.log_reading import runtimes_at
from pathways_ray.cli.output import CommandFailed, NumberRange
from pathways_ray.cli.status import ask, cluster_to_change, of_cluster
from pathways_ray.errors import ControllerLost, UsageError
from pathways_ray.process_log import note_operator

BACK_LIMIT_S = 120.0
"""A host that is not back within this time is given up."""

LOOK_S = 0.1
"""Time between two looks at whether a host is back."""

_TARGET = re.compile(r"(?:(host|island):(\d{1,9}|any))|controller")

CONTROLLER = -1
"""In place of a host's number."""


@dataclass(frozen=True)
class Victim:
    """A host's process, and the epoch under which it runs; or the controller's, whose epoch does not count. It
    `started` then, by the kernel of its machine (`os_process`); 0 is not known."""

    host: int
    pid: int
    epoch: int
    started: int = 0

    def __str__(self) -> str:
        name = "the controller" if self.host == CONTROLLER else f"host {self.host}"
        return f"{name} (process {self.pid})"

    def is_back(self, status: dict[str, Any]) -> bool:
        """Whether another process has taken its place."""
        if self.host == CONTROLLER:
            return bool(status["controller"]["pid"] != self.pid)
        found = _hosts(status).get(self.host)
        return found is not None and found["up"] and found["epoch"] > self.epoch


@click.command("drill")
@click.option(
    "--kill", "target", required=True, help="host:N, host:any, island:N for all hosts of an island, or controller."
)
@click.option("--every", type=NumberRange(0.0, 1e6), default=30.0, show_default=True, help="Seconds between kills.")
@click.option("--times", type=click.IntRange(min=0), default=0, help="Kills; left out, until Ctrl-C.")
@of_cluster
def command(target: str, every: float, times: int, url: str | None, token: str | None, ca: str | None) -> None:
    """Kill hosts of a runtime again and again, as a machine that dies does, to see that programs survive it.

    What lies on the island of a killed host is lost, for all tenants; with the controller, what is under way. The
    process must be one of this machine. Ends with 1 when it does not come back.
    """
    kind, number = parsed(target)
    url, token, ca = cluster_to_change(url, token, ca)
    _victims(ask(url, token, ca=ca), kind, number)  # what cannot be killed is said now, and not after a wait
    kills: list[str] = []

    def note(said: str) -> None:
        kills.append(said)
        _note(url, said)

    try:
        for _ in range(times) if times else itertools.count():
            time.sleep(every)
            click.echo(drill(lambda: ask(url, token, ca=ca), kind, number, note))
    except KeyboardInterrupt:
        click.echo(f"{len(kills)} times")


def _note(url: str, said: str) -> None:
    """Enters what was done into the operator's log of this machine."""
    for runtime in runtimes_at(url):
        note_operator(runtime, "drill", said)


def parsed(target: str) -> tuple[str, int]:
    """The kind of what is to be killed, and its number; -1 stands for any. Raises `UsageError`."""
    found = _TARGET.fullmatch(target)
    if found is None or target == "island:any":
        raise UsageError(f"--kill takes host:1, host:any, island:0 or controller, not {target!r}")
    if target == "controller":
        return target, CONTROLLER
    return found[1], -1 if found[2] == "any" else int(found[2])


def drill(
    status: Callable[[], dict[str, Any]], kind: str, number: int, note: Callable[[str], object] = lambda said: None
) -> str:
    """Kills once, waits until what was killed is there again, and says so.

    Args:
        note: called with what was killed, before the wait: that may be interrupted.

    Raises:
        UsageError: there is no such host or island that is up; its process is not of this machine.
        CommandFailed: it did not come back.
    """
    victims = _victims(status(), kind, number)
    began = time.monotonic()
    for victim in victims:
        os_process.kill(victim.pid, victim.started)
    named = ", ".join(map(str, victims))
    note(f"{named} killed")
    while time.monotonic() - began < BACK_LIMIT_S:
        time.sleep(LOOK_S)
        try:
            there = status()
        except (ControllerLost, UsageError):
            continue
        if all(victim.is_back(there) for victim in victims):
            return f"{named} killed; back after {time.monotonic() - began:.1f} s"
    raise CommandFailed(f"{named} killed, and not back in {BACK_LIMIT_S:.0f} s")


def _victims(status: dict[str, Any], kind: str, number: int) -> list[Victim]:
    """The processes to be killed, all of this machine. Raises `UsageError`."""
    victims = chosen(status, kind, number)
    for victim in victims:
        check_here(victim)
    return victims


def chosen(status: dict[str, Any], kind: str, number: int) -> list[Victim]:
    """The processes to be killed. Raises `UsageError` where nothing is."""
    if kind == "controller":
        found = status.get("controller", {})
        return [Victim(CONTROLLER, _shown(found.get("pid", 0)), 0, found.get("started", 0))]
    hosts = _hosts(status)
    up = [host for host in hosts.values() if host["up"]]
    if number >= 0:
        up = [host for host in up if host[kind] == number]
    if not up:
        what = kind if number < 0 else f"{kind} {number}"
        raise UsageError(f"no {what} is up: there are hosts {sorted(hosts)} on islands {sorted(_islands(status))}")
    victims = [Victim(host["host"], _shown(host["pid"]), host["epoch"], host.get("started", 0)) for host in up]
    return victims if number >= 0 else [random.choice([v for v in victims if _is_here(v)] or victims)]


def _shown(pid: int) -> int:
    """The number of a process, unless it is hidden from a tenant: `UsageError`."""
    if not pid:
        raise UsageError("which processes there are, the operator's token shows alone")
    return pid


def check_here(victim: Victim) -> None:
    """Raises `UsageError` unless this is a process of Ray's on this machine: on another one its number may be that of
    a process of somebody else's."""
    try:
        with open(f"/proc/{victim.pid}/cmdline", "rb") as file:
            title = file.read()
    except OSError:
        title = b""
    other = victim.started and os_process.started_at(victim.pid) != victim.started
    if other or not title.startswith(b"ray::"):
        raise UsageError(f"{victim} is no process of this machine: run the drill where it is")


def _is_here(victim: Victim) -> bool:
    try:
        check_here(victim)
    except UsageError:
        return False
    return True


def _islands(status: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {island["island"]: island for island in status["islands"]}


def _hosts(status: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {
        host["host"]: {**host, "island": island["island"]} for island in status["islands"] for host in island["hosts"]
    }
