"""Records of a run for people and programs: a line of JSON and a TensorBoard event for each step.

After a restart the steps since the checkpoint are run again. Their lines are taken out first, so that the file has each
step once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from megatron_ptdp.errors import ConfigError, TrainingStopped

METRICS, EVENTS, CHECKPOINTS, RECOVERIES = "metrics.jsonl", "events", "checkpoints", "recoveries.jsonl"
"""Names in the directory of a run."""

FLUSH_S = 10.0
"""Time between two writes of TensorBoard events to the disk."""


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Writes files of a run.

    Raises:
        TrainingStopped: they cannot be written, as on a full disk.
    """
    try:
        yield
    except OSError as error:
        raise TrainingStopped(f"the records in {directory} cannot be written: {error.strerror or error}") from error


class Records:
    """The files of a run; a context manager that closes them.

    Events are written by the thread that calls, and no other: one that a full disk ended would not be missed, until
    what waits for it has no end.

    Args:
        after: steps that are done already; lines of later ones are removed.

    Raises:
        TrainingStopped: they cannot be written; so do `write` and `close`.
    """

    def __init__(self, directory: Path, after: int) -> None:
        self.directory, self.path = directory, directory / METRICS
        with writing(directory):
            (directory / EVENTS).mkdir(parents=True, exist_ok=True)
            cut_after(self.path, after)
            self._lines = self.path.open("a", encoding="utf-8")
            self._events = EventsWriter(str(directory / EVENTS / "events"))
            self._add_event(step=after + 1, file_version="brain.Event:2")
            self._add_event(step=after + 1, session_log=SessionLog(status=SessionLog.START))  # purges later steps
        self._flushed_at = 0.0

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One step: numbers go to both files, all else, and the time (Unix), to the lines only."""
        line = json.dumps({"step": step, "time": time.time(), **values}, allow_nan=False)
        scalars = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        with writing(self.directory):
            print(line, file=self._lines, flush=True)
            self._add_event(step=step, summary=Summary(value=scalars))
            if time.monotonic() - self._flushed_at > FLUSH_S:
                self._events.flush()
                self._flushed_at = time.monotonic()

    def _add_event(self, **parts: Any) -> None:
        self._events.write_event(Event(wall_time=time.time(), **parts))

    def close(self) -> None:
        with writing(self.directory), contextlib.closing(self._events):
            self._lines.close()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(TrainingStopped) if kind else contextlib.nullcontext():  # the first error says more
            self.close()


def note_recovery(directory: Path, values: Mapping[str, Any]) -> None:
    """Adds a line about a loss, or about islands that have come, to `recoveries.jsonl`, with the time (Unix)."""
    with writing(directory), (directory / RECOVERIES).open("a", encoding="utf-8") as lines:
        print(json.dumps({"time": time.time(), **values}), file=lines)


def cut_after(path: Path, step: int) -> None:
    """Takes out the lines of later steps, and one that was not written to its end."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    partial.replace(path)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks the directory for this process.

    Raises:
        ConfigError: another one trains there, or it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"the directory {directory} cannot be used: {error.strerror}; set directory") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another training runs in {directory}; wait for its end, or set another directory"
            ) from error
        yield
    finally:
        os.close(lock)
