"""JAX's own tests through a proxy, beside the same tests on plain CPU devices.

    python -m tests.jax_suite --files array_test pjit_test --output results/jax_suite

fetches the tests of the installed version from JAX's repository (or takes them from a checkout: `--source`), runs each
through a proxy to a cluster that it starts, and those that do not pass on plain CPU devices: what fails, or is skipped,
there as well says nothing, and is not counted. `OUTPUT.json` has the outcome of every test, `OUTPUT.md` a table of them
with the reasons of those that do not pass. What is in the JSON already is not run again: so it can be run in parts
(`--budget`), several processes at a time (`--workers`). Of large files a sample of tests is run (`--sample`, drawn by
`--seed`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from tests.jax_suite.compare import compared, table
from tests.jax_suite.worker import CHOSEN, PASSED, STARTED

REPOSITORY = "https://github.com/jax-ml/jax"
ROOT = Path(__file__).parents[2]

FILES = (
    *("array_test", "pjit_test", "shard_map_test", "api_test", "lax_test", "lax_control_flow_test", "lax_numpy_test"),
    *("linalg_test", "random_test", "memories_test", "multi_device_test", "aot_test", "layout_test"),
    *("custom_partitioning_test", "debug_nans_test", "mutable_array_test", "state_test", "nn_test", "fft_test"),
)

SHARD = 200  # tests that a process runs
TEST_LIMIT_S = 240  # on the wall; tests of some seconds take a minute where others use the processors
START_LIMIT_S = 120


def fetch(folder: Path) -> str:
    """Fetches JAX's tests at the tag of the installed version; returns the commit."""
    tag = f"jax-v{jax.__version__}"
    git = ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, REPOSITORY, str(folder)]
    subprocess.run(git, check=True)
    shown = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(shown, check=True, capture_output=True, text=True).stdout.strip()


class Suite:
    """The tests of one checkout, in an environment for each side.

    Args:
        ends: when no test is begun any more, by `time.monotonic`.
    """

    def __init__(self, source: Path, devices: int, folder: Path, ends: float) -> None:
        self.source, self.folder, self.ends = source, folder, ends
        self._running: set[subprocess.Popen[bytes]] = set()
        clean = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
        self.plain = clean | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        self.plain |= {
            "PYTHONPATH": str(ROOT),
            "JAX_NUM_GENERATED_CASES": os.environ.get("JAX_NUM_GENERATED_CASES", "10"),
        }
        self.proxied = {key: value for key, value in self.plain.items() if key != "JAX_NUM_CPU_DEVICES"}

    def chosen(self, name: str, choice: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Chooses tests of a file; the worker's last lines where it could not."""
        lines, _, tail = self._lines(name, choice, self.plain)
        chosen = [test for test, outcome in lines if outcome == CHOSEN]
        if not chosen:
            return {}, tail or "there was no time"
        return {"tests": int(chosen[0]), "selected": chosen[1:]}, ""

    def outcomes(self, name: str, tests: Sequence[str], environment: dict[str, str]) -> dict[str, str]:
        """The outcome of each test, of as many as there was time for. A process that ends early is replaced."""
        found: dict[str, str] = {}
        while (left := [test for test in tests if test not in found]) and time.monotonic() < self.ends:
            lines, ended, tail = self._lines(name, left, environment)
            new = dict(lines)
            for test in [test for test, outcome in new.items() if outcome == STARTED]:
                if ended is None:
                    del new[test]  # there was no more time for it
                else:
                    new[test] = f"the process ended with {ended}, or the test took longer than {TEST_LIMIT_S} s"
            if not new and ended is not None:
                raise SystemExit(f"{name}: nothing ran, status {ended}; the last lines:\n{tail}")
            found |= new
        return found

    def _lines(
        self, name: str, wanted: Any, environment: dict[str, str]
    ) -> tuple[list[tuple[str, str]], int | None, str]:
        """Tests and what was noted of them, the last word last; the status of the worker, and its last lines."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            target, asked, log = (Path(folder) / name for name in ("outcomes", "wanted", "log"))
            asked.write_text(json.dumps(wanted))
            ended = self._work(name, target, str(asked), environment, log)
            noted = [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        order: dict[str, str] = {}
        chosen = [(test, outcome) for test, outcome, _ in noted if outcome == CHOSEN]
        for test, outcome, _ in noted:
            if outcome != CHOSEN and (outcome != STARTED or test not in order):
                order[test] = outcome
        return [*chosen, *order.items()], ended, tail

    def _work(self, name: str, target: Path, wanted: str, environment: dict[str, str], log: Path) -> int | None:
        """Runs a worker; its status, or None if it ran out of time."""
        file = self.source / "tests" / f"{name}.py"
        command = [sys.executable, "-m", "tests.jax_suite.worker", str(file), str(target), wanted, str(TEST_LIMIT_S)]
        with log.open("w") as said:
            process = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT)
            self._running.add(process)
            try:
                return process.wait(max(1.0, self.ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None
            finally:
                process.kill()
                process.wait()
                self._running.discard(process)

    def stop(self) -> None:
        """Has no test begin any more, and ends those that run."""
        self.ends = 0.0
        for process in list(self._running):
            process.kill()


@contextlib.contextmanager
def proxy(asked: argparse.Namespace, folder: Path) -> Iterator[dict[str, str]]:
    """A proxy, and the variables with which a program uses it."""
    if not asked.local:
        import pathways_ray as pw

        shape = {"hosts_per_island": asked.hosts, "devices_per_host": asked.devices // asked.hosts}
        with pw.init(**shape) as session, session.proxy(devices=asked.devices) as door:
            yield door.env
        return
    command = [sys.executable, "-m", "tests.unit.proxy.local_proxy", str(folder / "s"), str(asked.devices)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["env"]
        server.stdin.close()


def compare(suite: Suite, asked: argparse.Namespace, result: dict[str, Any]) -> bool:
    """Runs what is not in the result yet; returns whether there was time for all of it."""
    choice = {"select": asked.select, "sample": asked.sample, "seed": asked.seed}
    lock = threading.Lock()

    def run(name: str, shard: Sequence[str]) -> None:
        """Runs some tests of a file through the proxy, and those that do not pass there on plain CPU."""
        file = result["files"][name]
        for side, environment in (("proxy", suite.proxied), ("plain", suite.plain)):
            of_side = [test for test in shard if side == "proxy" or file["proxy"].get(test, PASSED) != PASSED]
            missing = [test for test in of_side if test not in file[side]]
            found = suite.outcomes(name, missing, environment) if missing else {}
            with lock:
                file[side] |= found
                save(asked.output, result)
        with lock:
            found = compared(file)
            passed = sum(outcome == PASSED for outcome in found.values())
            print(f"{name}: {len(file['proxy'])} of {file['tests']} tests, {passed} of {len(found)} pass", flush=True)

    with ThreadPoolExecutor(asked.workers) as workers:
        begun = []
        for name in asked.files:
            with lock:  # workers save the result
                file = result["files"].setdefault(name, {"tests": 0, "plain": {}, "proxy": {}})
            if not file.get("selected"):
                found, why = suite.chosen(name, choice)
                with lock:
                    file |= found
                if why:
                    print(f"{name}: not run, see below\n{why}", flush=True)
            wanted = file.get("selected", ())
            begun += [workers.submit(run, name, wanted[k : k + SHARD]) for k in range(0, len(wanted), SHARD)]
        try:
            for each in begun:
                each.result()
        except BaseException:
            workers.shutdown(wait=False, cancel_futures=True)
            suite.stop()
            raise
    return time.monotonic() < suite.ends


def save(output: Path, result: dict[str, Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(table(result), encoding="utf-8")


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", nargs="+", default=FILES)
    parser.add_argument("--source", type=Path, help="a checkout of JAX at the tag of the installed version")
    parser.add_argument("--select", default="", help="only tests with this in their names")
    parser.add_argument("--sample", type=int, default=0, help="of a file's tests, at most so many; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--devices", type=int, default=8, help="as many as the tests ask for on CPU")
    parser.add_argument("--hosts", type=int, default=1, help="of the island that has the devices")
    parser.add_argument("--workers", type=int, default=1, help="processes that run tests at a time, each of some")
    parser.add_argument("--budget", type=float, default=1e6, help="seconds, after which it stops; run it again then")
    parser.add_argument("--local", action="store_true", help="the executor's parts in one process for a cluster")
    parser.add_argument("--again", action="store_true", help="run those again that did not pass through the proxy")
    parser.add_argument("--output", type=Path, default=Path("results/jax_suite"))
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the proxy ends with this process
    file, ends = asked.output.with_suffix(".json"), time.monotonic() + asked.budget
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"files": {}}
    if asked.again:
        for one in result["files"].values():
            one["proxy"] = {test: outcome for test, outcome in one["proxy"].items() if outcome == PASSED}
    with tempfile.TemporaryDirectory(prefix="jaxs") as folder:
        source = asked.source or Path(folder) / "jax"
        commit = "of a checkout" if asked.source else fetch(source)
        result |= {"jax": jax.__version__, "commit": commit, "devices": asked.devices, "seed": asked.seed}
        suite = Suite(source, asked.devices, Path(folder), ends)
        with proxy(asked, Path(folder)) as variables:
            suite.proxied |= variables
            done = compare(suite, asked, result)
    print(table(result))
    return 0 if done else 3


if __name__ == "__main__":
    raise SystemExit(main())
