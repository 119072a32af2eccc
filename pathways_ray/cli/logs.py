"""`pathways logs`, `pathways usage`: what the processes of a runtime have written, and what tenants have used."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from typing import Any

import click
from rich.table import Table

from pathways_ray.cli.log_reading import Log, following, last, last_of, of_this_machine, through_controller, whole
from pathways_ray.cli.output import console_beside, readable
from pathways_ray.cli.status import ask, cluster_meant, of_cluster
from pathways_ray.errors import UsageError
from pathways_ray.observe.usage import used

AUDIT = {
    "session opened",
    "session closed",
    "session ended",
    "session suspended",
    "session resumed",
    "session gives way",
    "session came back",
    "client gone",
    "slice created",
    "slice released",
    "slice moved",
    "slice refused",
    "program refused",
    "request refused",
    "notes left out",
    "refusal lifted",
    "tenants read",
    "island added",
    "island drained",
    "drain taken back",
    "island removed",
    "drill",
    "runtime started",
    "runtime ended",
}
"""Events that say who did what."""

AUDITED = ("controller", "resource manager", "operator")
"""The processes that note them."""

_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.command("logs")
@of_cluster
@click.option("--process", "wanted", multiple=True, help="host:1, scheduler:0, controller, ...; repeat it for several.")
@click.option("--follow", is_flag=True, help="Go on with what is written, until Ctrl-C.")
@click.option("--audit", is_flag=True, help="Only who did what: sessions, slices, refusals, operator's commands.")
@click.option("--lines", type=click.IntRange(min=0), default=50, show_default=True, help="Of each log, at first.")
@click.option("--json", "as_json", is_flag=True, help="The lines as they are written.")
def logs(
    url: str | None,
    token: str | None,
    ca: str | None,
    wanted: tuple[str, ...],
    follow: bool,
    audit: bool,
    lines: int,
    as_json: bool,
) -> None:
    """Events of processes of a runtime, out of their logs, in the order of time. The operator's."""
    url, token, ca = cluster_meant(url, token, ca, away=True)
    found, problem = _logs(url, token, ca)
    if problem:
        click.echo(f"{problem}; these are the logs of this machine", err=True)
    if not found:
        raise UsageError("no process is shown to this token: logs are the operator's")
    named, there = {one.replace(":", " ") for one in wanted}, {log.process for log in found}
    if unknown := sorted(named - there):
        raise UsageError(f"no process named {', '.join(unknown)}; there are {', '.join(sorted(there)) or 'none here'}")

    def chosen(logs: list[Log]) -> list[Log]:
        asked = [log for log in logs if not named or log.process in named]
        return [log for log in asked if log.process in AUDITED] if audit else asked

    first, ends = last_of(chosen(found), lines, _is_audited) if audit else last(chosen(found), lines)
    for entry in first:
        _show(entry, as_json)
    with contextlib.suppress(KeyboardInterrupt):
        if follow:
            # Where the controller is away, what was followed is: files of this machine are of earlier runtimes as well.
            for entry in following(lambda: chosen(_through_controller(url, token, ca)), ends, chosen(found)):
                if not audit or _is_audited(entry):
                    _show(entry, as_json)


def _is_audited(entry: dict[str, Any]) -> bool:
    return entry["event"] in AUDIT


def _logs(url: str, token: str, ca: str) -> tuple[list[Log], str]:
    """The logs of a runtime; where its controller is away, those of this machine, and what is wrong."""
    try:
        return _through_controller(url, token, ca), ""
    except UsageError as error:
        here = of_this_machine(url)
        if not here:
            raise
        return here, str(error)


def _through_controller(url: str, token: str, ca: str) -> list[Log]:
    """The logs of a runtime, and that of this user's commands. Raises `UsageError` where its controller is away."""
    found = through_controller(url, token, ca, ask(url, token, ca=ca))
    return found + (of_this_machine(url, "operator") if found else [])


@click.command("usage")
@of_cluster
@click.option("--since", default="24h", show_default=True, help="30m, 12h, 7d, or a time as 2026-11-21T12:00:00+00:00.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
def usage(url: str | None, token: str | None, ca: str | None, since: str, as_json: bool) -> None:
    """Device seconds of each tenant over a span, out of the controller's log."""
    url, token, ca = cluster_meant(url, token, ca)
    begin = since_of(since, datetime.datetime.now(datetime.UTC))
    status = ask(url, token, ca=ca)
    if "device_seconds" not in status:
        raise UsageError(
            "no log is shown to this token: usage is the operator's; 'pathways status' has the tenant's own"
        )
    entries = [
        entry
        for log in through_controller(url, token, ca, status)
        if log.process == "controller"
        for entry in whole(log)
    ]
    now = datetime.datetime.now(datetime.UTC).isoformat()
    entries += [
        {"time": now, "event": "usage", "detail": tenant, "cause": str(seconds)}
        for tenant, seconds in status["device_seconds"].items()
    ]
    found = readable(used(entries, begin))
    if as_json:
        click.echo(json.dumps({"since": begin.isoformat(), "device_seconds": found}, indent=2))
        return
    table = Table("tenant", "device seconds", title=f"since {begin.isoformat(timespec='seconds')}")
    for tenant, seconds in sorted(found.items(), key=lambda one: -one[1]):
        table.add_row(tenant, f"{seconds:.1f}")
    console_beside(None, markup=False).print(table)


def since_of(text: str, now: datetime.datetime) -> datetime.datetime:
    """The beginning of a span. Raises `UsageError` for a text that is neither a span nor a time."""
    span = _SPAN.fullmatch(text)
    if span is not None:
        with contextlib.suppress(OverflowError):
            return now - datetime.timedelta(seconds=float(span[1]) * _SECONDS[span[2]])
    with contextlib.suppress(ValueError):
        found = datetime.datetime.fromisoformat(text)
        return found if found.tzinfo is not None else found.replace(tzinfo=datetime.UTC)
    raise UsageError(f"{text!r} is no span such as 30m, 12h or 7d, and no time such as 2026-11-21T12:00:00+00:00")


def _show(entry: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(entry))
        return
    entry = readable(entry)
    where = "".join(f" {key} {entry[key]}" for key in ("session", "launch", "host") if key in entry)
    detail = f": {entry['detail']}" if entry.get("detail") else ""
    cause = f" (because {entry['cause']})" if entry.get("cause") else ""
    click.echo(f"{entry['time']} {entry.get('process', '')}: {entry['event']}{where}{detail}{cause}")
