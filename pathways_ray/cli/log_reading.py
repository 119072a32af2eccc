"""Logs of the processes of a runtime, read through its controller wherever they lie; of a runtime whose controller is
away, those of this machine."""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import click

from pathways_ray import process_log
from pathways_ray.client import registry
from pathways_ray.client.asking import call
from pathways_ray.errors import PathwaysError, UsageError
from pathways_ray.process_log import Part
from pathways_ray.transport import messages

FOLLOW_EVERY_S = 1.0

LIST_EVERY = 10
"""Rounds of following after which it is seen which processes there are: islands come and go."""

AT_ONCE = 8
"""Processes that are asked at once."""

MAX_NAMED = 4

Place = tuple[int, int]
"""A place in a log: the offset in a file, and the number of the file; see `process_log.read`."""

BEGINNING: Place = (0, 0)
END: Place = (-1, 0)

Read = Callable[[int, int], Part]
"""A part of a log, as `process_log.read` gives it."""

Entry = dict[str, Any]


class Log(NamedTuple):
    """The log of a process."""

    process: str
    read: Read


def through_controller(url: str, token: str, ca: str, status: dict[str, Any]) -> list[Log]:
    """The logs of all processes that a status names."""

    def read(process: str, node: str, offset: int, file: int) -> Part:
        match call(url, token, messages.ReadLog(0, process, node, offset, file), ca=ca):
            case messages.LogPart(text, end, number):
                return Part(text, end, number)
        raise UsageError(f"what answers at {url} is no cluster of this version")

    return [Log(one["process"], partial(read, one["process"], one.get("node", ""))) for one in status.get("logs", ())]


def of_this_machine(url: str, pattern: str = "*") -> list[Log]:
    """The logs that lie here of a runtime that this user started with `pathways up`.

    Args:
        pattern: of the names of files, without their end; "operator" is what this user's commands have written.
    """
    found = []
    for name in runtimes_at(url):
        for path in sorted((process_log.folder() / name).glob(f"{pattern}.jsonl")):
            kind, _, number = path.stem.rpartition("-")
            process = f"{kind} {number}" if number.isdigit() else path.stem.replace("-", " ")
            found.append(Log(process, partial(process_log.read, name, process)))
    return found


def runtimes_at(url: str) -> list[str]:
    """The name of the runtime at a url that this user started here with `pathways up`, if there is one."""
    return [record.name for record in registry.all_records() if record.url == url and record.name][:1]


def last(logs: Sequence[Log], lines: int) -> tuple[list[Entry], dict[str, Place]]:
    """The last events of each log, in the order of time, and where each ended."""
    ends: dict[str, Place] = {}
    found: list[Entry] = []
    for process, part in _read(logs, {log.process: END for log in logs}, {}):
        ends[process] = part.offset, part.file
        found += entries(part.text)[-lines:] if lines else []
    return in_order(found), ends


def last_of(logs: Sequence[Log], lines: int, wanted: Callable[[Entry], bool]) -> tuple[list[Entry], dict[str, Place]]:
    """The last of certain events of each log, however many others came since; as `last`."""
    ends: dict[str, Place] = {}
    found: list[Entry] = []
    for log in logs:
        kept: deque[Entry] = deque(maxlen=lines)
        try:
            for part in parts(log):
                kept.extend(filter(wanted, entries(part.text)))
                ends[log.process] = part.offset, part.file
        except PathwaysError as error:
            _complain({log.process: str(error)}, {})
        found += kept
    return in_order(found), ends


def whole(log: Log) -> Iterator[Entry]:
    """All events of a log, those of rolled files first."""
    for part in parts(log):
        yield from entries(part.text)


def parts(log: Log) -> Iterator[Part]:
    """All parts of a log, those of rolled files first."""
    part = log.read(*BEGINNING)
    while part.text:
        yield part
        part = log.read(part.offset, part.file)


def following(listed: Callable[[], Sequence[Log]], ends: dict[str, Place], logs: Sequence[Log] = ()) -> Iterator[Entry]:
    """Events from now on. What cannot be read is said once, and looked for again.

    Args:
        listed: the logs that there are now; of one that is new, all is new.
        logs: those to follow until they can be listed.
    """
    said: dict[str, str] = {}
    for count in itertools.count():
        if count % LIST_EVERY == 0 or not logs:
            try:
                logs = listed()
            except PathwaysError as error:
                _complain({"processes": str(error)}, said)
        found: list[Entry] = []
        for process, part in _read(logs, ends, said):
            ends[process] = part.offset, part.file
            found += entries(part.text)
        yield from in_order(found)
        time.sleep(FOLLOW_EVERY_S)


def in_order(found: Sequence[Entry]) -> list[Entry]:
    """Events in the order of time."""
    return sorted(found, key=lambda entry: str(entry["time"]))


def entries(text: str) -> list[Entry]:
    """The events of some lines, without what is no event, as a process that was killed may leave it. A line ends at
    "\\n" alone: names have other characters that Python breaks lines at."""
    found = []
    for line in text.split("\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "time" in entry and "event" in entry:
            found.append(entry)
    return found


def _read(logs: Sequence[Log], at: Mapping[str, Place], said: dict[str, str]) -> list[tuple[str, Part]]:
    """The next part of each log that can be read; of others it is said why not, unless it was."""

    def one(log: Log) -> Part | PathwaysError:
        try:
            return log.read(*at.get(log.process, BEGINNING))
        except PathwaysError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip((log.process for log in logs), pool.map(one, logs), strict=True))
    _complain({process: str(one) if isinstance(one, PathwaysError) else "" for process, one in found.items()}, said)
    return [(process, part) for process, part in found.items() if isinstance(part, Part)]


def _complain(wrong: Mapping[str, str], said: dict[str, str]) -> None:
    """Says what is wrong with logs, or with the list of them, unless it was said; "" is nothing."""
    new: dict[str, list[str]] = defaultdict(list)
    for name, text in wrong.items():
        if text and said.get(name) != text:
            new[text].append(name)
        said[name] = text
    for text, names in new.items():
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        click.echo(f"{', '.join(names[:MAX_NAMED])}{more}: {text}", err=True)
