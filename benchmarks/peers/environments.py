"""The environments of the peers: one folder each under `.peers/`, built from a file of exact versions.

`make peers` runs this file with any Python 3.11 or newer, so it imports nothing outside the standard library. An
environment that does not build keeps its error in a file beside it, and the benchmark reports that error.

    python -m benchmarks.peers.environments            # what is missing or out of date
    python -m benchmarks.peers.environments tf1 dask   # these
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = Path(os.environ.get("PATHWAYS_PEERS", HERE.parents[1] / ".peers"))
NAMES = tuple(sorted(path.stem.removeprefix("requirements-") for path in HERE.glob("requirements-*.txt")))
ERROR_LINES = 12  # of what pip printed last: enough for its message, short enough for a table


def requirements(name: str) -> Path:
    return HERE / f"requirements-{name}.txt"


def interpreter(name: str) -> Path:
    """The Python of the environment, whether it is built or not."""
    return ROOT / name / "bin" / "python"


def fingerprint(name: str) -> str:
    """Changes with what the environment is built from."""
    text = f"{sys.version_info[:2]}\n{requirements(name).read_text()}"
    return hashlib.sha256(text.encode()).hexdigest()


def problem(name: str) -> str | None:
    """The reason that the environment cannot be used; None if it can."""
    error = ROOT / f"{name}.error"
    if error.exists():
        return f"its environment did not build: {error.read_text().strip()}"
    return None if (ROOT / name / ".built").exists() else "its environment is not there: run 'make peers'"


def build(name: str) -> str | None:
    """Rebuilds the environment and returns the error, if any.

    The stamp is written last, so that what was interrupted is built again.
    """
    folder, log, error = ROOT / name, ROOT / f"{name}.log", ROOT / f"{name}.error"
    ROOT.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    error.unlink(missing_ok=True)
    # Settings for another environment must not leak into this one; where to find packages may be set.
    foreign = ("PYTHONHOME", "PYTHONPATH", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV")
    environment = {key: value for key, value in os.environ.items() if key not in foreign}
    pip = [str(interpreter(name)), "-m", "pip", "install", "--no-input", "--no-deps", "--only-binary=:all:"]
    with log.open("w") as output:
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [*pip, "--disable-pip-version-check", "--requirement", str(requirements(name))],
        ):
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            if done.returncode:
                break
    if done.returncode:
        text = "\n".join(log.read_text().strip().splitlines()[-ERROR_LINES:])
        error.write_text(text + "\n")
        shutil.rmtree(folder, ignore_errors=True)  # half an environment is useless
        return text
    (folder / ".built").write_text(fingerprint(name))
    return None


def is_current(name: str) -> bool:
    stamp = ROOT / name / ".built"
    return stamp.exists() and stamp.read_text() == fingerprint(name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="name", help=f"of {', '.join(NAMES)}")
    options = parser.parse_args(arguments)
    wanted = options.names or [name for name in NAMES if not is_current(name)]
    if not wanted:
        print(f"All environments are built: {', '.join(NAMES)}.")
    failed = []
    for place, name in enumerate(wanted, 1):
        print(f"[{place}/{len(wanted)}] {name}: ", end="", flush=True)
        start = time.monotonic()
        error = build(name)
        if error is None:
            print(f"built in {time.monotonic() - start:.0f} s", flush=True)
        else:
            print(f"does not build (all of it is in {name}.log):\n{error}", flush=True)
            failed.append(name)
    if failed:
        print(f"Without {', '.join(failed)}: the benchmark reports them as not run.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
