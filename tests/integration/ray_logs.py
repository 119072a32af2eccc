"""What the processes of the newest Ray of this machine logged last: a test that failed shows it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LINES = {"worker-*": 3, "gcs_server.out": 6, "raylet.err": 6, "raylet.out": 12}
"""The last lines that are shown, by the names of files."""
NEWEST = 10  # files of a name
WIDTH = 200
ENDS = "received SIGTERM"


def folder() -> Path:
    """The logs of the newest Ray."""
    above = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(above, "ray", "session_latest", "logs")


def say(text: str) -> bool:
    """Whether a process of the runtime has printed this."""
    return any(text in path.read_text(errors="replace") for path in folder().glob("worker-*.err"))


def last_words() -> str:
    """The end of each file that has more than the name of its process; "" without a Ray."""
    found: list[str] = []
    for pattern, most in LINES.items():
        files = []
        for path in folder().glob(pattern):
            with contextlib.suppress(OSError):  # Ray has moved it away
                files.append((path.stat().st_mtime, path, path.read_text(errors="replace")))
        for _, path, whole in sorted(files)[-NEWEST:]:
            text = whole.partition(ENDS)[0]
            if said := [line[:WIDTH] for line in text.splitlines() if line and not line.startswith(":")]:
                found.append("\n".join([f"--- {path.name}", *said[-most:]]))
    return "\n".join(found)
