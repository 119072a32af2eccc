"""Runs seeds and prints what does not hold, with the command that shows it again.

python -m pathways_ray.simulation --seeds 1000
python -m pathways_ray.simulation --seed 17 --log
python -m pathways_ray.simulation --faults 10 --set controller_deaths=2 --set torn=0.3
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import fields, replace
from typing import Any

from pathways_ray.simulation.policies import POLICIES
from pathways_ray.simulation.settings import Settings
from pathways_ray.simulation.world import World


def _setting(text: str) -> tuple[str, Any]:
    """The name and value of a setting that is written as `name=value`, the value in JSON."""
    name, equals, value = text.partition("=")
    if not equals or name not in {field.name for field in fields(Settings)} - {"islands"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, with a name of `Settings`")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{value!r}, the value of {name}, is not JSON: {error}") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pathways_ray.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--faults", type=int, default=5, help="faults in each run, at least")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="", help="left out, the seed draws it")
    parser.add_argument("--log", action="store_true", help="print every message and fault")
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="a setting for all of them"
    )
    options = parser.parse_args(arguments)
    set_here = dict(options.set)
    first, count = (options.seed, 1) if options.seed is not None else (options.first, options.seeds)
    started = time.perf_counter()
    launches = values = struck = bad = 0
    for seed in range(first, first + count):
        settings = replace(Settings.drawn(seed, options.faults, options.policy), **set_here)
        result = World(seed, settings, options.log).run()
        launches, values, struck = launches + result.launches, values + result.values, struck + result.struck
        if options.log:
            print("\n".join(result.log))
        if result.violations:
            bad += 1
            again = f"python -m pathways_ray.simulation --seed {seed} --faults {options.faults}"
            again += f" --policy {options.policy}" if options.policy else ""
            again += "".join(f" --set {name}={json.dumps(value)}" for name, value in set_here.items())
            print(f"seed {seed}: {len(result.violations)} violations; again with: {again} --log")
            for violation in result.violations[:10]:
                print(f"  {violation}")
        if (seed - first + 1) % 100 == 0 and count > 100:
            print(f"{seed - first + 1} seeds, {bad} with violations, {time.perf_counter() - started:.1f} s", flush=True)
    seconds = time.perf_counter() - started
    print(
        f"{count} seeds in {seconds:.1f} s ({1000 * seconds / count:.0f} ms each): {launches} launches, {values} "
        f"values compared, {struck} faults, {bad} seeds with violations"
    )
    if count == 1:
        print(f"digest of the log: {result.digest}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
