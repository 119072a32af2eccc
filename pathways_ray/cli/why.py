"""`pathways why`: the reasons for which a launch, a slice or a session waits, as one chain."""

from __future__ import annotations

import json
import re

import click

from pathways_ray.cli.output import console_beside, readable
from pathways_ray.cli.status import cluster_meant, of_cluster
from pathways_ray.client.asking import call, text_in
from pathways_ray.errors import UsageError
from pathways_ray.observe.why import WHY, Why
from pathways_ray.transport import messages

_SUBJECT = re.compile(r"(?:(launch|slice|session)[ :]?)?(?:(\d{1,18})\.)?(\d{1,18})")


@click.command("why")
@click.argument("subject", nargs=-1, required=True)
@of_cluster
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of text.")
def command(subject: tuple[str, ...], url: str | None, token: str | None, ca: str | None, as_json: bool) -> None:
    """The reasons for which something waits: 640 (a launch, by its number in the cluster), 7.12 (launch 12 of session
    7), slice 7.2 (slice 2 of session 7), session 7.

    Prints a chain: each line is the reason of the one above it.
    """
    asked = parsed(" ".join(subject))
    url, token, ca = cluster_meant(url, token, ca)
    found: Why = WHY.decode(text_in(call(url, token, asked, ca=ca), url))
    if as_json:
        click.echo(json.dumps(found.dict(), indent=2))
    else:
        console_beside(None, markup=False).print(readable_lines(str(found)))


def parsed(subject: str) -> messages.Look:
    """The question that a subject on the command line means. Raises `UsageError` for one that is not understood."""
    found = _SUBJECT.fullmatch(subject.strip())
    if found is not None:
        kind, of, number = found[1] or "launch", int(found[2] or 0), int(found[3])
        if kind == "session" and not of:
            return messages.Look(0, "session", 0, number)
        if kind == "launch" or (kind == "slice" and of):
            return messages.Look(0, kind, number, of)
        if kind == "slice":
            raise UsageError(
                f"{subject!r} is no subject: sessions number their slices, so give the session's number too: "
                f"'slice 7.{number}' is slice {number} of session 7. 'pathways status' shows both numbers"
            )
    raise UsageError(
        f"{subject!r} is no subject: give 640 (a launch), 7.12 (launch 12 of session 7), 'slice 7.2' or 'session 7'"
    )


def readable_lines(text: str) -> str:
    """The text without characters that would steer a terminal."""
    return "\n".join(str(readable(line)) for line in text.splitlines())
