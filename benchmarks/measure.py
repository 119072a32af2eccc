"""The method of all benchmarks: a description of the machine, interleaved rounds, statistics with their spread."""

import contextlib
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import psutil

Case = TypeVar("Case", bound=Hashable)
Sample = TypeVar("Sample")

RAY_WORKERS = {"IDLE", "DashboardAgent", "RuntimeEnvAgent"}  # of the raylet, and not actors of the runtime
PACKAGES = ("jax", "jaxlib", "ray", "grpcio", "numpy")


def machine() -> dict[str, Any]:
    """The machine and packages. `load` is the mean number of running processes over 1, 5 and 15 minutes."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in PACKAGES},
        "load": [round(load, 2) for load in os.getloadavg()],
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


def cpu_model() -> str:
    """The processor's name, with family and model where they say more than the name."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or "unknown"
    lines = [line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines() if ":" in line]
    fields = {key.strip(): value.strip() for key, value in lines}
    details = " ".join(f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields)
    return f"{fields.get('model name', 'unknown')} ({details})" if details else fields.get("model name", "unknown")


def installed(package: str) -> str:
    """The installed version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cpu_seconds() -> float:
    """CPU time of this process and all below it so far, which are all systems."""
    total = 0.0
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def runtime_processes() -> dict[str, psutil.Process]:
    """This process and the runtime's actors, which Ray names `ray::Class`; each by a name of its own, `Class 0`."""
    here = psutil.Process()
    below = here.children(recursive=True)
    # Workers are below the raylet, or below the process that started it.
    others = below if any(process.name() == "raylet" for process in below) else psutil.process_iter()
    found = {"client": here}
    for process in others:
        try:
            prefix, _, title = (process.cmdline() or [""])[0].partition("::")
        except psutil.Error:
            continue  # it has ended
        name = re.split(r"\W", title)[0]  # an actor at work shows its method too
        if prefix == "ray" and name not in RAY_WORKERS:
            found[f"{name} {sum(key.startswith(f'{name} ') for key in found)}"] = process
    return found


class Peaks:
    """The most memory that processes have at a time from now on, beyond what they have now."""

    def __init__(self, processes: Mapping[str, psutil.Process]) -> None:
        self._before = {name: (process.pid, process.memory_info().rss) for name, process in processes.items()}
        for pid, _ in self._before.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is what there is now

    def grown(self) -> dict[str, int]:
        """Bytes, by the names of the processes."""
        found = {}
        for name, (pid, before) in self._before.items():
            status = Path(f"/proc/{pid}/status").read_text()
            found[name] = 1024 * int(status.partition("VmHWM:")[2].split()[0]) - before
        return found


def busy_cores(seconds: float) -> float:
    """CPU use of the whole machine over some time: of idle systems, and of other people's work."""
    return float(psutil.cpu_percent(seconds)) / 100 * (psutil.cpu_count() or 1)


def settle(limit_s: float = 30.0, window_s: float = 0.5, cores: float = 0.15) -> bool:
    """Waits until the systems are idle: a compilation in the background would slow down the next measurement.

    Args:
        limit_s: the longest wait.
        window_s: the time over which CPU use is measured.
        cores: the CPU use of all systems that counts as idle.

    Returns:
        Whether they became idle in time.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        before = cpu_seconds()
        time.sleep(window_s)
        if cpu_seconds() - before <= cores * window_s:
            return True
    return False


def in_turn(cases: Sequence[Sample], number: int) -> list[Sample]:
    """All cases in the order of a round, every second round the other way round: none is always first, and none always
    behind the same one, for whose last work it would pay."""
    order = list(cases)[:: -1 if number % 2 else 1]
    first = number // 2 % max(len(order), 1)
    return [*order[first:], *order[:first]]


def interleaved(
    cases: Sequence[Case],
    measure: Callable[[Case], Sample],
    rounds: int,
    warm_up: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> dict[Case, list[Sample]]:
    """Measures every case once per round, so that a disturbance of the machine hits all of them alike.

    Warm-up rounds are not recorded. The i-th values of two cases are from the same round: compare those. `say` is told
    when a round begins.
    """
    samples: dict[Case, list[Sample]] = {case: [] for case in cases}
    for number in range(-warm_up, rounds):
        say("warming up" if number < 0 else f"round {number + 1} of {rounds}")
        for case in in_turn(cases, number):
            value = measure(case)
            if number >= 0:
                samples[case].append(value)
    return samples


def narrowed(
    passes: Callable[[float], bool], first: float, lower: float, upper: float, close: float
) -> tuple[float | None, float | None]:
    """A value that does not pass and one that does, at most a factor of `close` above: doubles or halves `first` until
    it has both, then bisects. The first is None where `lower` passes, the second where `upper` does not."""
    low = high = None
    value = first
    while low is None or high is None:
        if passes(value):
            at_end, high, value = value <= lower, value, max(value / 2, lower)
        else:
            at_end, low, value = value >= upper, value, min(value * 2, upper)
        if at_end:
            return low, high
    while high / low > close:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if passes(middle) else (middle, high)
    return low, high


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def median_within(values: Sequence[float]) -> tuple[float, float]:
    """The values between which the median of what they are drawn from lies, with a confidence of 95%: those at equal
    ranks from both ends, whatever the distribution. With a few values it is all of them."""
    ordered, n = sorted(values), len(values)
    outside, rank = 0.0, 0
    while rank < (n - 1) // 2 and outside + math.comb(n, rank) / 2**n <= 0.025:
        outside += math.comb(n, rank) / 2**n
        rank += 1
    rank = max(0, rank - 1)
    return ordered[rank], ordered[n - 1 - rank]


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Spread of the ratios taken round by round, which is steadier than the ratio of the medians."""
    return spread([n / d for n, d in zip(numerators, denominators, strict=True)])


def p99(values: Sequence[float]) -> float:
    """The value that 99 in 100 do not exceed."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Change of y per unit of x, by least squares; 0 when x does not vary."""
    return statistics.linear_regression(x, y).slope if len(set(x)) > 1 else 0.0


def describe(machine: Mapping[str, Any]) -> str:
    """One line for people."""
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    load = " ".join(f"{value:.2f}" for value in machine["load"])
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}, "
        f"Python {machine['python']}, {packages}; load before: {load}"
    )
