"""The note that a host's process writes as it dies of a signal of its own, and its successor reads.

A process that is killed from outside writes nothing. So a host that comes back can tell whether its predecessor brought
its death on itself, and the controller has the candidates for the crash.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
from pathlib import Path

from pathways_ray.process_log import user_folder


def forget(runtime: str, where: Path | None = None) -> None:
    """Removes what the hosts of a runtime that has ended left on this machine."""
    own = re.compile(rf"crash-{re.escape(runtime)}-\d+")  # another one's name may begin with it
    with contextlib.suppress(OSError):
        for file in (where or user_folder()).iterdir():
            if own.fullmatch(file.name):
                file.unlink(missing_ok=True)


_FIRST_LINE = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)


class CrashLog:
    """The file of one host on this machine. Only the user can read it; there is no log where it cannot be written.

    Args:
        runtime: the name of the runtime, without which two on a machine would mix their hosts up.
    """

    def __init__(self, runtime: str, host: int, where: Path | None = None) -> None:
        self.path = (where or user_folder()) / f"crash-{runtime}-{host}"

    def take(self) -> str:
        """The way in which the process before this one died, if of itself, in a few words. Removes the note."""
        with contextlib.suppress(OSError):
            text = self.path.read_text(errors="replace")[:10_000]
            self.path.unlink()
            found = _FIRST_LINE.search(text)
            return found.group(1)[:100] if found else ""
        return ""

    def watch(self) -> None:
        """Has a fatal signal of this process leave a note from now on."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            faulthandler.enable(descriptor, all_threads=False)
