"""Runs some tests of one file of JAX's, and notes the outcome of each as it comes: `python -m tests.jax_suite.worker`.

Whatever ends the process (JAX's client can, by a failed check), the outcomes so far are in the file.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

PASSED, STARTED, SKIPPED, CHOSEN = "passed", "started", "skipped", "chosen"

LONGEST = 600  # characters of an error


class Recorder:
    """Keeps the wanted tests, and appends a line of JSON for each when it begins and when it ends.

    Args:
        wanted: names of tests; or how to choose some, of which then only the names are noted: `select` is a part of
            them, of more than `sample` so many are drawn by `seed`.
    """

    def __init__(self, target: Path, wanted: Any) -> None:
        self._file = target.open("a", encoding="utf-8")
        self._wanted = wanted

    def _note(self, test: str, outcome: str, seconds: float = 0.0) -> None:
        self._file.write(json.dumps([test, outcome, round(seconds, 2)]) + "\n")
        self._file.flush()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        wanted = self._wanted
        if isinstance(wanted, dict):
            names = [name for item in items if wanted["select"] in (name := name_of(item.nodeid))]
            if 0 < wanted["sample"] < len(names):
                drawn = set(random.Random(wanted["seed"]).sample(sorted(names), wanted["sample"]))
                names = [name for name in names if name in drawn]
            self._note(str(len(items)), CHOSEN)
            for name in names:
                self._note(name, CHOSEN)
            wanted = ()
        kept = set(wanted)
        jax.devices()  # backends note in JAX's settings that they are there; tests look whether one changes these
        items[:] = [item for item in items if name_of(item.nodeid) in kept]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note(name_of(nodeid), STARTED)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome == SKIPPED:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._note(name_of(report.nodeid), f"{SKIPPED}: {why}"[:LONGEST])
        elif report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr)
            self._note(name_of(report.nodeid), text.strip()[:LONGEST] or "failed", report.duration)
        elif report.when == "call":
            self._note(name_of(report.nodeid), PASSED, report.duration)


def name_of(nodeid: str) -> str:
    """`Class.test` of pytest's name for a test."""
    return ".".join(nodeid.split("::")[1:])


def main(file: str, target: str, wanted: str, limit_s: str) -> int:
    """Runs the tests that a file of JSON asks for."""
    import jax._src

    # Some tests use modules of JAX's own tests, which are in the checkout and not in the installed package.
    jax._src.__path__.append(str(Path(file).parents[1] / "jax" / "_src"))
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null", "--import-mode=importlib"]
    options += ["--rootdir", str(Path(file).parent), "--tb=short", f"--timeout={limit_s}", "--timeout-method=thread"]
    return int(pytest.main([*options, file], plugins=[Recorder(Path(target), json.loads(Path(wanted).read_text()))]))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
