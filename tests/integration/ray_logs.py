"""What the processes of the newest Ray of this machine logged last: a test that failed shows it."""

from __future__ import annotations

from pathlib import Path

SESSION = Path("/tmp/ray/session_latest/logs")
LINES = {"gcs_server.out": 6, "raylet.out": 12, "worker-*.out": 3, "worker-*.err": 3}
"""The last lines that are shown, by the names of files."""
WIDTH = 200
ENOUGH = 6000


def last_words(folder: Path = SESSION) -> str:
    """The end of each file; "" without a Ray."""
    found = []
    for pattern, most in LINES.items():
        for path in sorted(folder.glob(pattern)):
            try:
                lines = [line[:WIDTH] for line in path.read_text(errors="replace").splitlines() if line.strip()]
            except OSError:  # Ray has moved it away
                continue
            if len(lines) > 1:  # the first one says which process this is
                found.append("\n".join([f"--- {path.name}", *lines[-most:]]))
    return "\n".join(found)[-ENOUGH:]
