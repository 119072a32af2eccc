"""The outcome of a launch that went to its islands in parts: one, once all its parts have ended."""

from __future__ import annotations

from collections.abc import Sequence

from pathways_ray.controller.state import Send, SendClient, SendIsland, Session, Tables, Whole
from pathways_ray.story import Entry
from pathways_ray.transport.messages import Drop, LaunchFailed


def kept(whole: Whole, outcome: Sequence[Send]) -> list[Send]:
    """Notes the failure of a part, of which the client does not hear. Returns what is left to send of its outcome."""
    report, *drops = outcome
    assert isinstance(report.message, LaunchFailed)
    whole.failed(report.message.failure, report.message.consumed, report.message.undecided)
    return drops


def report_of(tables: Tables, session: Session, whole: Whole) -> list[Send]:
    """The outcome of a launch that has failed, and has no part under way."""
    assert whole.failure is not None
    numbers = tuple(whole.results)
    for number in numbers:
        buffer = session.find(number)
        if buffer is not None and buffer.failure is None:
            session.fail(number, buffer, whole.failure)
    text = f"after {whole.course.rounds} rounds"
    tables.story.note_launch(Entry(tables.now, "ended", text, whole.failure.message, session.id))
    report = LaunchFailed(whole.launch, whole.failure, tuple(whole.consumed), tuple(whole.undecided))
    drops = [SendIsland(island, Drop(session.id, numbers)) for island in whole.islands]
    return [SendClient(session.id, report), *drops]
