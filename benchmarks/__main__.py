"""Runs every benchmark in turn: `python -m benchmarks`, or `python -m benchmarks --smoke` to see that they run."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from benchmarks import (
    dispatch,
    figures,
    memory,
    report,
    scale,
    scale_figure,
    startup,
    tenants,
    training,
    training_figure,
)

SMOKE_LAUNCHES = 400


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="smallest sizes; the numbers mean nothing")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder (default: %(default)s)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    results = []
    for module, settings in (
        (startup, {"repetitions": 1} if options.smoke else {}),
        (dispatch, dispatch.SMOKE if options.smoke else {}),
        (memory, {"launches": SMOKE_LAUNCHES} if options.smoke else {}),
        (tenants, {"settings": tenants.SMOKE} if options.smoke else {}),
        (scale, {"settings": scale.SMOKE} if options.smoke else {}),
        (training, {"settings": training.SMOKE} if options.smoke else {}),
    ):
        results.append(module.run(**settings))
        module.show(results[-1], console)
        (options.output / f"{results[-1]['benchmark']}.json").write_text(json.dumps(results[-1], indent=2) + "\n")
    figures.dispatch(results[1], options.output / "dispatch.png")
    figures.tenants(results[3], options.output)
    scale_figure.draw(results[4], options.output / "scale.png")
    training_figure.draw(results[5], options.output / "training.png")
    report.main([*map(str, sorted(options.output.glob("*.json"))), "--html", str(options.output / "report.html")])
    return 1 if results[2]["buffers_left"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
