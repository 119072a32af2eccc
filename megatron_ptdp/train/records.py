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

from tensorboardX import SummaryWriter

from megatron_ptdp.errors import ConfigError

METRICS, EVENTS, CHECKPOINTS, RECOVERIES = "metrics.jsonl", "events", "checkpoints", "recoveries.jsonl"
"""Names in the directory of a run."""


class Records:
    """The files of a run; a context manager that closes them.

    Args:
        after: steps that are done already; lines of later ones are removed.
    """

    def __init__(self, directory: Path, after: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / METRICS
        cut_after(self.path, after)
        self._lines = self.path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(directory / EVENTS), purge_step=after + 1, flush_secs=10)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One step: numbers go to both files, all else, and the time (Unix), to the lines only."""
        print(json.dumps({"step": step, "time": time.time(), **values}, allow_nan=False), file=self._lines, flush=True)
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._lines.close()
        self._events.close()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def note_recovery(directory: Path, values: Mapping[str, Any]) -> None:
    """Adds a line about a loss, or about islands that have come, to `recoveries.jsonl`, with the time (Unix)."""
    with (directory / RECOVERIES).open("a", encoding="utf-8") as lines:
        print(json.dumps({"time": time.time(), **values}), file=lines)


def cut_after(path: Path, step: int) -> None:
    """Takes out the lines of later steps, and one that was not written to its end."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
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
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(
            f"another training runs in {directory}; wait for its end, or set another directory"
        ) from error
    finally:
        os.close(lock)
