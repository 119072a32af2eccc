"""What the processes of the newest Ray of this machine logged last: a test that failed shows it."""

from __future__ import annotations

from pathlib import Path

SESSION = Path("/tmp/ray/session_latest/logs")
LINES = {"worker-*": 3, "gcs_server.out": 6, "raylet.err": 6, "raylet.out": 12}
"""The last lines that are shown, by the names of files."""
NEWEST = 10  # files of a name
WIDTH = 200
ENDS = "received SIGTERM"


def last_words(folder: Path = SESSION) -> str:
    """The end of each file that has more than the name of its process; "" without a Ray."""
    found = []
    for pattern, most in LINES.items():
        newest = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)[-NEWEST:]
        for path in newest:
            text = path.read_text(errors="replace").partition(ENDS)[0]
            if said := [line[:WIDTH] for line in text.splitlines() if line and not line.startswith(":")]:
                found.append("\n".join([f"--- {path.name}", *said[-most:]]))
    return "\n".join(found)
