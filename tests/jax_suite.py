"""JAX's own tests through a proxy, beside the same tests on plain CPU devices.

    python -m tests.jax_suite --files array_test pjit_test --output results/jax_suite.md

fetches the tests of the installed version from JAX's repository (or takes them from a checkout: `--source`), runs each
file twice on eight devices, as many as the tests ask for, and writes a table: of the tests that pass on plain CPU how
many pass through the proxy, and the reasons of the others. The cluster is the one that `pathways proxy` finds, or one
that it starts.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import jax

REPOSITORY = "https://github.com/jax-ml/jax"

FILES = ("array_test", "pjit_test", "lax_test", "random_test", "multi_device_test", "aot_test", "memories_test")

TEST_LIMIT_S = 120

DEVICES = 8

PASSED = "passed"


@dataclass
class Compared:
    """One file: the outcome of each test that passes on plain CPU, when it went through the proxy."""

    name: str
    outcomes: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> int:
        return sum(outcome == PASSED for outcome in self.outcomes.values())


def fetch(folder: Path) -> str:
    """Fetches JAX's tests at the tag of the installed version; returns the commit."""
    tag = f"jax-v{jax.__version__}"
    git = ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, REPOSITORY, str(folder)]
    subprocess.run(git, check=True)
    shown = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(shown, check=True, capture_output=True, text=True).stdout.strip()


def run(file: Path, report: Path, proxy: bool, select: str, limit_s: float) -> dict[str, str]:
    """The outcome of each test of a file: "passed", "skipped", or the first line of what went wrong."""
    # A worker of its own: one that JAX ends is replaced, and the other tests go on.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "-n", "1"]
    command += ["--rootdir", str(file.parent), "--import-mode=importlib", f"--timeout={TEST_LIMIT_S}"]
    command += [f"--junitxml={report}", str(file), *(["-k", select] if select else [])]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    environment |= {"JAX_NUM_GENERATED_CASES": os.environ.get("JAX_NUM_GENERATED_CASES", "3")}
    if proxy:
        command = [
            sys.executable,
            "-m",
            "pathways_ray.cli",
            "proxy",
            "--devices",
            str(DEVICES),
            "--exec",
            "--",
            *command,
        ]
    else:
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    try:
        subprocess.run(command, env=environment, check=False, timeout=limit_s, stdout=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        print(f"{file.name} took longer than {limit_s} s", file=sys.stderr)
    return outcomes(report) if report.exists() else {}


def outcomes(report: Path) -> dict[str, str]:
    """What a report says of each test."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = PASSED
        for child in case:
            if child.tag == "skipped":
                outcome = "skipped"
            elif child.tag in ("failure", "error"):
                outcome = (child.get("message") or child.tag).strip().splitlines()[0][:300]
        found[f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"] = outcome
    return found


def reason(outcome: str) -> str:
    """A failure without what differs from test to test, so that equal ones count together."""
    shorter = re.sub(r"0x[0-9a-f]+|\d+", "N", outcome)
    return re.sub(r"\[[^]]*\]|\([^)]*\)", "…", shorter)[:140].replace("|", "/").replace("`", "'")


def table(compared: list[Compared], commit: str) -> str:
    """Markdown: passes by file, and reasons of what does not pass."""
    lines = [f"JAX {jax.__version__}, commit {commit}; {DEVICES} CPU devices.", ""]
    lines += ["| file | pass on plain CPU | of these, through the proxy | |", "|---|---|---|---|"]
    for one in compared:
        share = one.passed / len(one.outcomes) if one.outcomes else 0.0
        lines.append(f"| `{one.name}` | {len(one.outcomes)} | {one.passed} | {share:.1%} |")
    reasons: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for one in compared:
        for test, outcome in one.outcomes.items():
            if outcome != PASSED:
                reasons[reason(outcome)] += 1
                examples.setdefault(reason(outcome), f"{one.name}: {test}")
    lines += ["", "| reason | tests | for example |", "|---|---|---|"]
    lines += [f"| {text} | {count} | `{examples[text]}` |" for text, count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", nargs="+", default=FILES)
    parser.add_argument("--source", type=Path, help="a checkout of JAX at the tag of the installed version")
    parser.add_argument("--select", default="", help="only tests that match, as pytest's -k")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for a file, each time")
    parser.add_argument("--output", type=Path, default=Path("results/jax_suite.md"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, commit = asked.source, "of a checkout"
        if source is None:
            source = Path(folder) / "jax"
            commit = fetch(source)
        compared = []
        for name in asked.files:
            file, reports = source / "tests" / f"{name}.py", Path(folder)
            plain = run(file, reports / f"{name}-plain.xml", False, asked.select, asked.limit)
            through = run(file, reports / f"{name}-proxy.xml", True, asked.select, asked.limit)
            there = [test for test, outcome in plain.items() if outcome == PASSED]
            compared.append(Compared(name, {test: through.get(test, "not run") for test in there}))
            asked.output.parent.mkdir(parents=True, exist_ok=True)
            asked.output.write_text(table(compared, commit), encoding="utf-8")
            print(f"{name}: {compared[-1].passed} of {len(there)}", flush=True)


if __name__ == "__main__":
    main()
