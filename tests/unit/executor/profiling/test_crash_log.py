"""The note of a process that dies of a signal of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pathways_ray.executor.profiling.crash_log import CrashLog, forget

DYING = """
import os, sys
from pathlib import Path
from pathways_ray.executor.profiling.crash_log import CrashLog, forget

CrashLog("r", 0, Path(sys.argv[1])).watch()
os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGSEGV, "Segmentation fault"), (signal.SIGABRT, "Aborted"), (signal.SIGKILL, ""), (signal.SIGTERM, "")],
)
def test_a_signal_of_its_own_leaves_a_note_and_one_from_outside_does_not(
    tmp_path: Path, number: int, words: str
) -> None:
    process = subprocess.run([sys.executable, "-c", DYING, str(tmp_path), str(int(number))], check=False, timeout=60)
    assert process.returncode == -number
    log = CrashLog("r", 0, tmp_path)
    assert log.take() == words
    assert log.take() == "", "it is taken once"


def test_a_folder_that_cannot_be_written_is_as_good_as_no_note(tmp_path: Path) -> None:
    log = CrashLog("r", 0, tmp_path / "no" / "such")
    log.watch()
    assert log.take() == ""


def test_a_runtime_that_ends_leaves_no_note(tmp_path: Path) -> None:
    for runtime, host in (("r", 0), ("r", 12), ("other", 0), ("r-b", 0)):
        (tmp_path / f"crash-{runtime}-{host}").write_text("")
    forget("r", tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["crash-other-0", "crash-r-b-0"]
