"""The command of all benchmarks.

    python -m benchmarks list
    python -m benchmarks run NAME [--smoke] [--json FILE] [...]     the same as python -m benchmarks.NAME
    python -m benchmarks report [RESULT ...] [--html FILE]
    python -m benchmarks [--smoke] [--output DIR] [--only NAME ...]  the usual ones in turn, with all their outputs

Each benchmark of the last form runs in a process of its own. With `--smoke` these are all benchmarks, at their smallest
size: to see that they run.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.registry import BENCHMARKS, load


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="all benchmarks at their smallest size")
    parser.add_argument("--output", type=Path, help="folder (default: results, or results/smoke with --smoke)")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help="these benchmarks")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="names of all benchmarks")
    one = commands.add_parser("run", help="one benchmark", add_help=False)
    one.add_argument("name", choices=BENCHMARKS, metavar="NAME")
    one.add_argument("options", nargs=argparse.REMAINDER)
    report = commands.add_parser("report", help="one page of all results", add_help=False)
    report.add_argument("options", nargs=argparse.REMAINDER)
    # `report` takes its own options, also those that come first.
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "report":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command and (options.smoke or options.only or options.output is not None):
        parser.error(
            f"--smoke, --output and --only are of all benchmarks; options of '{options.command}' come behind it"
        )
    match options.command:
        case "list":
            for name, entry in BENCHMARKS.items():
                print(f"{name:<14}{entry.title}")
            return 0
        case "run":
            return load(BENCHMARKS[options.name]).main(options.options)
        case "report":
            from benchmarks import report as page

            return page.main([*rest, *options.options])
    usual = [name for name, entry in BENCHMARKS.items() if entry.usual or options.smoke]
    folder = Path("results", "smoke") if options.smoke else Path("results")
    return run_all(options.only or usual, options.smoke, options.output or folder)


def run_all(names: Sequence[str], smoke: bool, output: Path) -> int:
    """Runs benchmarks in turn and writes their results, figures and the page of all results into a folder."""
    output.mkdir(parents=True, exist_ok=True)
    failed = []
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name}", flush=True)
        start, target = time.monotonic(), output / f"{name}.json"
        target.unlink(missing_ok=True)  # an older one is no result of this run, which may write none
        command = [sys.executable, "-m", "benchmarks", "run", name, "--json", str(target), *["--smoke"] * smoke]
        if run_one(command):
            failed.append(name)
            continue
        for written in load(BENCHMARKS[name]).outputs:
            try:
                written.write_below(json.loads(target.read_text()), output)
            except Exception as error:  # no matplotlib, say: the result is there all the same
                print(f"{name}: no {written.file or 'pictures'}: {type(error).__name__}: {error}", file=sys.stderr)
        print(f"[{number}/{len(names)}] {name}: {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        print(f"Failed: {', '.join(failed)}", file=sys.stderr)

    from benchmarks import report as page

    if results := sorted(output.glob("*.json")):  # given none, the page would be of those in results/
        page.main([*map(str, results), "--html", str(output / "report.html")])
    return 1 if failed else 0


def run_one(command: Sequence[str]) -> int:
    """Runs a benchmark and returns its exit status. When this process is told to end, so is the benchmark, and it has
    the time that it takes to end all that it started."""
    told: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def tell(number: int, frame: object) -> None:
        told.append(number)
        if process is not None:
            process.terminate()

    before = signal.signal(signal.SIGTERM, tell)
    try:
        process = subprocess.Popen(command)
        if told:  # while it was started
            process.terminate()
        status = process.wait()
    except KeyboardInterrupt:  # of the terminal, for both
        if process is not None:
            process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if told:
        sys.exit(128 + told[0])
    return status


if __name__ == "__main__":
    raise SystemExit(main())
