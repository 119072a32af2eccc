"""Logs of the processes of a runtime, read through its controller wherever they lie; of a runtime whose controller is
away, those of this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import click

from pathways_ray import process_log
from pathways_ray.client import registry
from pathways_ray.client.asking import call
from pathways_ray.errors import PathwaysError, UsageError
from pathways_ray.transport import messages

FOLLOW_EVERY_S = 1.0

AT_ONCE = 8
"""Processes that are asked at once."""

Read = Callable[[int, int], tuple[str, int]]
"""A part of a log, by offset and number of the file, as `process_log.read` gives it."""

Entry = dict[str, Any]


class Log(NamedTuple):
    """The log of a process."""

    process: str
    read: Read


def through_controller(url: str, token: str, ca: str, status: dict[str, Any]) -> list[Log]:
    """The logs of all processes that a status names."""

    def read(process: str, node: str, offset: int, rolled: int) -> tuple[str, int]:
        match call(url, token, messages.ReadLog(0, process, node, offset, rolled), ca=ca):
            case messages.LogPart(text, end):
                return text, end
        raise UsageError(f"what answers at {url} is no cluster of this version")

    return [Log(one["process"], partial(read, one["process"], one.get("node", ""))) for one in status.get("logs", ())]


def of_this_machine(url: str) -> list[Log]:
    """The logs that lie here of a runtime that this user started with `pathways up`."""
    names = [record.name for record in registry.all_records() if record.url == url and record.name]
    found = []
    for name in names[:1]:
        for path in sorted((process_log.folder() / name).glob("*.jsonl")):
            kind, _, number = path.stem.rpartition("-")
            process = f"{kind} {number}" if number.isdigit() else path.stem.replace("-", " ")
            found.append(Log(process, partial(process_log.read, name, process)))
    return found


def last(logs: Sequence[Log], lines: int) -> tuple[list[Entry], dict[str, int]]:
    """The last events of each log, in the order of time, and where each ended."""
    ends: dict[str, int] = {}
    found: list[Entry] = []
    for log, (text, end) in _read(logs, dict.fromkeys((log.process for log in logs), -1)):
        ends[log.process] = end
        found += entries(text)[-lines:] if lines else []
    return sorted(found, key=lambda entry: str(entry["time"])), ends


def whole(log: Log) -> Iterator[Entry]:
    """All events of a log, the rolled files first."""
    for rolled in range(process_log.KEPT_FILES, -1, -1):
        end, text = 0, "-"
        while text:
            text, end = log.read(end, rolled)
            yield from entries(text)


def following(logs: Sequence[Log], ends: dict[str, int]) -> Iterator[Entry]:
    """Events from now on; a file that was rolled is read from its beginning."""
    while True:
        for log, (text, end) in _read(logs, ends):
            ends[log.process] = end
            yield from entries(text)
        time.sleep(FOLLOW_EVERY_S)


def entries(text: str) -> list[Entry]:
    """The events of some lines, without what is no event, as a process that was killed may leave it."""
    found = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "time" in entry and "event" in entry:
            found.append(entry)
    return found


def _read(logs: Sequence[Log], at: dict[str, int]) -> Iterator[tuple[Log, tuple[str, int]]]:
    """The next part of each log that can be read; of others it is said why not."""

    def one(log: Log) -> tuple[str, int] | PathwaysError:
        try:
            return log.read(at.get(log.process, -1), 0)
        except PathwaysError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for log, found in zip(logs, pool.map(one, logs), strict=True):
            if isinstance(found, PathwaysError):
                click.echo(f"{log.process}: {found}", err=True)
            else:
                yield log, found
