"""`pathways logs`, `pathways usage`: what the processes of a runtime have written, and what tenants have used.

Logs lie on the machines of their processes; these commands read those of this machine.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from pathways_ray import process_log
from pathways_ray.cli.output import console_beside
from pathways_ray.cli.status import ask, cluster_meant, of_cluster, readable
from pathways_ray.errors import UsageError
from pathways_ray.observe.usage import used

FOLLOW_EVERY_S = 0.5

AUDIT = {
    "session opened",
    "session closed",
    "session ended",
    "client gone",
    "slice created",
    "slice released",
    "program refused",
    "request refused",
    "refusal lifted",
    "tenants read",
    "usage",
}
"""Events that say who did what."""

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
    """Events of processes of a runtime, out of their logs on this machine, in the order of time. The operator's."""
    url, token, ca = cluster_meant(url, token, ca)
    named = {one.replace(":", " ") for one in wanted}
    found = {one["process"]: Path(one["path"]) for one in ask(url, token, ca=ca).get("logs", [])}
    if unknown := sorted(named - set(found)):
        raise UsageError(f"no process named {', '.join(unknown)}; there are {', '.join(sorted(found)) or 'none here'}")
    here = {process: path for process, path in found.items() if (not named or process in named) and path.exists()}
    if not here:
        raise UsageError("the logs lie on other machines: 'pathways status' says on which")
    tails = {process: list(_entries(path))[-lines:] if lines else [] for process, path in here.items()}
    for entry in sorted((entry for tail in tails.values() for entry in tail), key=lambda entry: str(entry["time"])):
        _show(entry, audit, as_json)
    with contextlib.suppress(KeyboardInterrupt):
        if follow:
            for entry in _following(list(here.values())):
                _show(entry, audit, as_json)


@click.command("usage")
@of_cluster
@click.option("--since", default="24h", show_default=True, help="30m, 12h, 7d, or a time as 2026-11-21T12:00:00+00:00.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
def usage(url: str | None, token: str | None, ca: str | None, since: str, as_json: bool) -> None:
    """Device seconds of each tenant over a span, out of the controller's log on this machine."""
    url, token, ca = cluster_meant(url, token, ca)
    begin = since_of(since, datetime.datetime.now(datetime.UTC))
    status = ask(url, token, ca=ca)
    path = next((Path(one["path"]) for one in status.get("logs", []) if one["process"] == "controller"), None)
    if path is None or not path.exists():
        raise UsageError("the controller's log lies on another machine: 'pathways status' says on which")
    entries = [entry for file in _rolled(path) for entry in _entries(file)]
    now = datetime.datetime.now(datetime.UTC).isoformat()
    entries += [
        {"time": now, "event": "usage", "detail": one["tenant"], "cause": str(one["device_seconds"])}
        for one in status["tenants"]
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


def _rolled(path: Path) -> list[Path]:
    """The files of a log, oldest first."""
    files = [path.with_name(f"{path.name}.{k}") for k in range(process_log.KEPT_FILES, 0, -1)]
    return [file for file in (*files, path) if file.exists()]


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from filter(None, map(_entry, file))


def _entry(line: str) -> dict[str, Any] | None:
    """The event of a line; None for half a line, as a process that was killed may leave it."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "time" in found and "event" in found else None


def _following(paths: list[Path]) -> Iterator[dict[str, Any]]:
    """Events written to files from now on; a file that was rolled is read from its beginning."""
    places = {path: path.stat().st_size for path in paths}
    rest = dict.fromkeys(paths, "")
    while True:
        for path in paths:
            with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
                if path.stat().st_size < places[path]:
                    places[path], rest[path] = 0, ""
                file.seek(places[path])
                *whole, rest[path] = (rest[path] + file.read()).split("\n")
                places[path] = file.tell()
                yield from filter(None, map(_entry, whole))
        time.sleep(FOLLOW_EVERY_S)


def _show(entry: dict[str, Any], audit: bool, as_json: bool) -> None:
    if audit and entry["event"] not in AUDIT:
        return
    if as_json:
        click.echo(json.dumps(entry))
        return
    entry = readable(entry)
    where = "".join(f" {key} {entry[key]}" for key in ("session", "launch", "host") if key in entry)
    detail = f": {entry['detail']}" if entry.get("detail") else ""
    cause = f" (because {entry['cause']})" if entry.get("cause") else ""
    click.echo(f"{entry['time']} {entry.get('process', '')}: {entry['event']}{where}{detail}{cause}")
