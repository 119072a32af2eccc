"""`pathways status`: what a running cluster has, and who holds it.

Asks the controller with one call that opens no session, so the answer does not show the asker, and neither JAX nor
Ray is loaded.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from pathways_ray.cli.output import console_beside, readable
from pathways_ray.client import registry
from pathways_ray.client.asking import ANSWER_WITHIN_S, NoAnswer, call, look, text_in
from pathways_ray.errors import UsageError
from pathways_ray.observe.diagnosis import Finding, diagnosis
from pathways_ray.transport import messages

LATE = ". If one runs there, 'pathways status --diagnose' says which of its parts is silent"

MAX_LOGS = 16
"""Log files that are printed; a runtime may have thousands of processes."""


def of_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which cluster a command asks."""
    for option in (
        click.option(
            "--ca", envvar="PATHWAYS_CA", show_envvar=True, help="File with the certificates to trust, for TLS."
        ),
        click.option("--token", envvar="PATHWAYS_TOKEN", show_envvar=True, help="What the cluster was started with."),
        click.option("--url", envvar="PATHWAYS_URL", show_envvar=True, help="grpc://host:port of the cluster."),
    ):
        command = option(command)
    return command


@click.command("status")
@of_cluster
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of tables.")
@click.option("--diagnose", is_flag=True, help="Print what is unhealthy, as JSON; ends with 1 if anything is an error.")
@click.pass_context
def command(
    ctx: click.Context, url: str | None, token: str | None, ca: str | None, as_json: bool, diagnose: bool
) -> None:
    """Islands, devices, slices, sessions, and who holds what.

    Without --url, the cluster that this user started on this machine.
    """
    url, token, ca = cluster_meant(url, token, ca, away=diagnose)
    if diagnose:
        diagnosed = diagnosis_of(url, token, ca)
        click.echo(json.dumps(diagnosed, indent=2))
        ctx.exit(0 if diagnosed["healthy"] else 1)
    found = {"url": url, **ask(url, token, ca=ca)}
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show(found, console_beside(None, markup=False))


def cluster_meant(
    url: str | None, token: str | None, ca: str | None, away: bool = False, shared: bool = False
) -> tuple[str, str, str]:
    """Address, token and trusted certificates of the cluster that these options mean; see `choose`.

    Args:
        away: without a cluster that answers, the only one that was started to stay is meant.
        shared: one that a command has for itself is meant only where it is named.
    """
    running, silent = registry.running(), registry.silent()
    if shared and not url:
        running = [record for record in running if not record.private]
    if away and not url and not running and len(silent) == 1:
        url = silent[0].url
    url, token = choose(url or "", token or "", running, silent)
    return url, token, ca or next((record.ca for record in (*running, *silent) if record.url == url), "")


def cluster_to_change(url: str | None, token: str | None, ca: str | None) -> tuple[str, str, str]:
    """The cluster that a command is about to change, as `cluster_meant` finds it. One that the user has not named is
    named on stderr first: it may be another one than he thinks of."""
    found = cluster_meant(url, token, ca)
    if not url:
        click.echo(f"pathways: acting on {found_here(found[0])}", err=True)
    return found


def found_here(url: str) -> str:
    """A cluster that was found on this machine, in words, with the label in its record."""
    label = next((record.label for record in registry.running() if record.url == url), "")
    return f"the cluster at {url} ({label}), which runs on this machine"


def choose(
    url: str, token: str, running: Sequence[registry.Record], silent: Sequence[registry.Record] = ()
) -> tuple[str, str]:
    """The cluster to ask, and its token, from what the caller said and the clusters this user runs here.

    Args:
        silent: clusters that were started to stay and do not answer.

    Raises:
        UsageError: the caller has to say more.
    """
    say = "say which with --url and --token, or PATHWAYS_URL and PATHWAYS_TOKEN"
    if url:
        known = {record.url: record.token for record in (*silent, *running)}
        if not token and url not in known:
            raise UsageError(f"{url} is no cluster that you started on this machine: it needs --token as well")
        return url, token or known[url]
    if not running and silent:
        there = ", ".join(f"{record.url} ({record.label})" for record in silent)
        raise UsageError(
            f"{there} does not answer: try again in a few seconds if its controller has just died, otherwise "
            "'pathways down' clears what is left"
        )
    if not running:
        raise UsageError(f"no cluster of yours runs on this machine; {say}")
    if len(running) > 1:
        there = ", ".join(f"{record.url} ({record.label})" for record in running)
        raise UsageError(f"several clusters of yours run on this machine: {there}; choose one with --url")
    return running[0].url, token or running[0].token


def ask(url: str, token: str, timeout: float = ANSWER_WITHIN_S, ca: str = "") -> dict[str, Any]:
    """The status of the cluster at `url`; see `call`."""
    found: dict[str, Any] = json.loads(text_in(call(url, token, messages.Status(session=0), timeout, ca, LATE), url))
    return found


def check_token(url: str, token: str, ca: str = "") -> None:
    """Raises `AuthenticationError` for a wrong token, before something begins that lasts. A cluster that does not
    answer may be on its way back."""
    with contextlib.suppress(UsageError):
        ask(url, token, ca=ca)


def diagnosis_of(url: str, token: str, ca: str = "") -> dict[str, Any]:
    """The diagnosis of the cluster at `url`; one that does not answer is unhealthy.

    Raises:
        AuthenticationError: the token is wrong.
        UsageError: `url` is no address, or `ca` no file with certificates.
    """
    try:
        return {"url": url, **diagnosis(look(url, token, ca))}
    except NoAnswer as error:
        do = "it restarts by itself where Ray runs; see the controller's log, else 'pathways up'"
        silent = Finding("error", "controller-silent", str(error), do)
        found = {"severity": silent.severity, "kind": silent.kind, "what": silent.what, "do": silent.do}
        return {"url": url, "healthy": False, "findings": [found]}


def show(found: dict[str, Any], console: Console) -> None:
    """Prints a status as tables; `console` must leave markup alone, since names are what clients chose."""
    found = readable(found)
    console.print(f"cluster at {found['url']}")
    if not any(host["up"] for island in found["islands"] for host in island["hosts"]):
        console.print("warning: no host is up: nothing can run ('pathways status --diagnose' says more)")
    if trusted := found.get("trusted_tenants"):
        console.print(f"warning: code of {', '.join(trusted)} runs unchecked (trusted tenants)")
    names = {session["session"]: session["name"] for session in found["sessions"]}
    for table in (
        devices_table(found["islands"]),
        slices_table(found["slices"], names),
        sessions_table(found["sessions"]),
        *([tenants_table(found["tenants"])] if found.get("tenants") else []),
        *([refusals_table(found["refusals"])] if found.get("refusals") else []),
        *([logs_table(found["logs"])] if found.get("logs") else []),
    ):
        console.print(table)


def devices_table(islands: Iterable[dict[str, Any]]) -> Table:
    """One row for each run of neighbouring devices of a host that the same slices hold."""
    table = Table("island", "platform", "host", "node", "process", "devices", "held by", title="devices")
    for island in islands:
        state = island.get("state", "up")
        reason = f": {island['reason']}" if island.get("reason") else ""
        named = f"{island['island']}" if state == "up" and not reason else f"{island['island']} ({state}{reason})"
        for host in island["hosts"]:
            where = (named, island["platform"], str(host["host"]), host["node"][:8])
            process = str(host["pid"] or "up") if host["up"] else "lost" if island.get("state") == "lost" else "down"
            devices = [{"device": "-", "slices": []}] if host.get("epoch") == 0 else host["devices"]  # it never joined
            for names, holders in grouped(devices):
                table.add_row(*where, process, names, "\n".join(holders) or "nobody")
    return table


def grouped(devices: Iterable[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Neighbouring devices with the same holders as one entry: `0.0 - 0.3`, who holds them."""
    found = []
    for holders, members in itertools.groupby(devices, key=lambda device: device["slices"]):
        names = [member["device"] for member in members]
        found.append((names[0] if len(names) == 1 else f"{names[0]} - {names[-1]}", holders))
    return found


def slices_table(slices: Iterable[dict[str, Any]], sessions: dict[int, str]) -> Table:
    """One row for each virtual slice."""
    table = Table("slice", "name", "mesh", "island", "devices", "held by", title="slices")
    for one in slices:
        mesh = ", ".join(f"{axis}={size}" for axis, size in one["mesh"].items())
        holder = f"session {one['session']} {sessions.get(one['session'], '')}".strip()
        table.add_row(str(one["slice"]), one["name"], mesh, str(one["island"]), " ".join(one["devices"]), holder)
    return table


def sessions_table(sessions: Iterable[dict[str, Any]]) -> Table:
    """One row for each client."""
    table = Table("session", "name", title="sessions")
    for heading in ("programs", "buffers", "bytes", "in flight", "waiting"):
        table.add_column(heading, justify="right")
    for one in sessions:
        counts = (one["programs"], one["buffers"], decimal(one["bytes"]), one["in_flight"], one["waiting"])
        to = f" for session {other}" if (other := one.get("gives_way_to")) else ""
        name = f"{one['name']} (suspended{to})".strip() if one.get("suspended") else one["name"]
        table.add_row(str(one["session"]), name, *map(str, counts))
    return table


def refusals_table(refusals: Iterable[dict[str, Any]]) -> Table:
    """One row for each program that is refused since it ended hosts."""
    table = Table("refusal", "tenant", "program", "since", "reason", title="refused programs")
    for one in refusals:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - one["age_s"]))
        table.add_row(one["id"], one["tenant"], one["program"], since, one["reason"])
    return table


def logs_table(logs: Sequence[dict[str, str]]) -> Table:
    """One row for each process, of large runtimes for the first ones only."""
    table = Table("process", "node", "log", title="logs")
    for one in logs[:MAX_LOGS]:
        table.add_row(one["process"], one["node"][:8], one["path"])
    if len(logs) > MAX_LOGS:
        table.add_row(f"{len(logs) - MAX_LOGS} more", "", "pathways status --json names them")
    return table


def tenants_table(tenants: Iterable[dict[str, Any]]) -> Table:
    """One row for each tenant: what it may have, and what it had; its share is of the device time of all."""
    table = Table("tenant", title="tenants")
    for heading in (
        "weight",
        "priority",
        "launch limit",
        "device seconds",
        "share",
        "queued",
        "in flight",
        "waiting",
        "bytes",
    ):
        table.add_column(heading, justify="right")
    for one in tenants:
        limit = f"{one['launch_limit_s']:g} s" if one.get("launch_limit_s") else "-"
        times = (
            f"{one['weight']:g}",
            str(one["priority"]),
            limit,
            f"{one['device_seconds']:.1f}",
            f"{one['share']:.0%}",
        )
        counts = (one["queued"], one["in_flight"], one["waiting"], decimal(one["device_bytes"]))
        table.add_row(one["tenant"], *times, *map(str, counts))
    return table
