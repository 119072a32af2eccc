"""`y.why()`: why an array is not ready, by this process's tables and, once its launch has left, by the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pathways_ray.client.buffer import DELETED, PENDING, BufferRecord
from pathways_ray.client.core import ClientCore
from pathways_ray.observe.why import Link, Why, hosts_text
from pathways_ray.transport import messages as wire

EXPLAIN_WITHIN_S = 3.0
"""The controller has this long at most to say why a wait is not over that is shown, or has come to its limit."""

Ask = Callable[[str, int], Why]
"""Asks the controller about a launch, or an upload, by its number."""


def why(core: ClientCore, record: BufferRecord, ask: Ask, hold: str = "") -> Why:
    """The reasons for which a buffer is not ready.

    Args:
        hold: why nothing of the session goes on, also with what is ready.
    """
    subject = f"array {record.id} of session {core.session}"
    if record.failure is not None:
        failure = record.failure
        return Why(subject, (Link(f"{subject} has failed: {failure.kind}: {failure.message}"),), failure.story)
    if record.state is DELETED:
        return Why(subject, (Link(f"{subject} is no more: {record.why_deleted}"),))
    if core.ended is not None:
        return Why(subject, (Link(core.ended.message),), core.ended.story)
    if record.shown is not PENDING:
        return Why(subject, (Link(f"{subject} is ready"), *([Link(hold)] if hold else [])))
    made_by = core.maker_of(record)
    if not made_by:
        return Why(subject, tuple(_uploads([record], ask)) or (Link(f"{subject} is ready"),))
    launch = core.coalescer.leader_of(made_by)
    for before, queued in enumerate(list(core.queue)):
        if isinstance(queued.message, wire.Launch) and queued.message.launch == launch:
            return Why(subject, tuple(_queued(core, subject, launch, before, queued.buffers, ask)))
    found = ask("launch", launch)
    links = (Link(f"{subject} is a result of launch {core.session}.{launch}"), *found.links)
    return Why(subject, links, found.story)


def _queued(
    core: ClientCore, subject: str, launch: int, before: int, buffers: Sequence[BufferRecord], ask: Ask
) -> list[Link]:
    """The reasons of a launch that has not left this process."""
    text = f"{subject} is a result of launch {core.session}.{launch}, which has not left this process"
    if own := _uploads(buffers, ask):
        return [Link(text), *own]
    first = next(iter(core.queue), None)
    return [
        Link(f"{text}: {before} calls before it wait"),
        *(_uploads(first.buffers, ask) if first is not None else []),
    ]


def _uploads(buffers: Sequence[BufferRecord], ask: Ask) -> list[Link]:
    """Uploads that are under way, each with what the controller knows of it."""
    found: list[Link] = []
    for buffer in buffers:
        upload = buffer.upload
        if upload is not None and not upload.done:
            hosts = sorted(upload.missing)
            said = ask("upload", buffer.id).links if not found else ()
            place = hosts[0] if hosts else -1
            found += [Link(f"array {buffer.id} is on its way to {hosts_text(hosts)}", host=place), *said]
    return found
