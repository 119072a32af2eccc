"""README's table of figures, made from results.

A line is replaced where the results have all of its figures; others stay as they are, so that a table can be made
of what was measured on several days. What misses its aim (`benchmarks.aims`) is bold.

    python -m benchmarks report results/*.json --readme README.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from benchmarks.aims import Aim

HEAD = "| figure | measured | aim | command |"
ONE_HOST, TWO_HOSTS = ", allreduce, 1 x 4", ", allreduce, 2 x 1"
PEERS = "python -m benchmarks.peers --json peers.json"
WAYS = ("put", "fetch", "island to island")
CALLERS = ("8 threads", "8 threads, joined", "4 processes")
TRAINING = "python -m benchmarks.training --json training.json"


class Figure(Protocol):
    """A figure of a result, as the table needs it."""

    @property
    def name(self) -> str: ...
    @property
    def values(self) -> Mapping[str, float]: ...
    @property
    def aim(self) -> Aim | None: ...


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        title: its first cell, by which it is found again.
        benchmark: the name of the results that have its figures.
        figures: the name of each, a pattern with * for anything.
        aim: its third cell.
        command: its last cell; empty where it is that of the line before.
        form: of a number.
        unit: behind a number.
    """

    title: str
    benchmark: str
    figures: tuple[str, ...]
    aim: str
    command: str = ""
    form: str = ".2f"
    unit: str = ""

    def found_in(self, figures: Sequence[Figure]) -> list[Figure] | None:
        """Its figures; None where one is not there."""
        found = [next((one for one in figures if fnmatchcase(one.name, name)), None) for name in self.figures]
        return None if None in found else [one for one in found if one is not None]

    def text(self, found: Sequence[Figure]) -> str:
        """The line with these figures."""
        command = f"`{self.command}`" if self.command else "the same"
        return f"| {self.title} | {'; '.join(map(self._measured, found))} | {self.aim} | {command} |"

    def _measured(self, one: Figure) -> str:
        low, median, high = (
            format(one.values[key], self.form) if key in one.values else "" for key in ("min", "median", "max")
        )
        missed = one.aim is not None and not one.aim.met_by(one.values["median"])
        text = f"**{median}**" if missed else median
        unit = f" {self.unit}" if self.unit else ""
        return f"{text}{unit} ({low} to {high})" if low and high else f"{text}{unit}"


def on_both(ratio: str) -> tuple[str, str]:
    """The names of a ratio of `peers`, on one host of 4 devices and on two hosts of one."""
    return f"{ratio}{ONE_HOST}", f"{ratio}{TWO_HOSTS}"


LINES = (
    Line(
        "op by op, ÷ JAX called op by op; 1 host of 4 devices, 2 hosts of 1",
        "peers",
        on_both("pathways opbyop / jax-multicontroller opbyop"),
        "≥ 1.5, 1.0",
        PEERS,
    ),
    Line(
        "the same with `fusion=False, coalesce=False`: each computation by itself, each call a message",
        "peers",
        on_both("pathways-no-fusion opbyop / jax-multicontroller opbyop"),
        "≥ 0.95",
    ),
    Line(
        "op by op, each value waited for, ÷ JAX doing the same",
        "peers",
        on_both("pathways opbyop-wait / jax-multicontroller opbyop-wait"),
        "≥ 0.5",
    ),
    Line(
        "chained (128 nodes a call), ÷ JAX called op by op",
        "peers",
        on_both("pathways chained / jax-multicontroller opbyop"),
        "≥ 1.5, 1.0",
    ),
    Line("chained, ÷ JAX fused", "peers", on_both("pathways chained / jax-multicontroller fused"), "≥ 0.9"),
    Line(
        "op by op, ÷ Ray actors that keep the value", "peers", on_both("pathways opbyop / ray-actors kept-opbyop"), "–"
    ),
    Line(
        "a loop of three programs, ÷ the same with each call a message; 1 device, 4 devices",
        "loops",
        tuple(f"coalesced / each by itself, three programs, {count} devices" for count in (1, 4)),
        "≥ 1.5",
        "python -m benchmarks.loops --json loops.json",
    ),
    Line(
        "from `pw.init` to the first result, two islands",
        "startup",
        ("pw.init to the first result",),
        "≤ 4 s",
        "python -m benchmarks.startup --json startup.json",
        ".1f",
        "s",
    ),
    Line(
        "first call of a program of 100 small nodes, ÷ the first call of `jax.jit` of the same",
        "compiling",
        ("first start, nodes / jax.jit",),
        "≤ 1.5",
        "python -m benchmarks.compiling --json compiling.json",
    ),
    Line(
        "computations that a second start compiles",
        "compiling",
        ("computations that a second start compiles",),
        "0",
        form=".0f",
    ),
    Line(
        "first call with the argument on another slice of the same layout, ÷ the first call of all",
        "compiling",
        ("other slices / one slice",),
        "–",
    ),
    Line(
        "serving: requests a second, ÷ `jax.jit` in one process; 8 threads; with their calls joined; 4 processes",
        "serving",
        tuple(f"requests a second / jax.jit in one process, {callers}" for callers in CALLERS),
        "≥ 0.5",
        "python -m benchmarks.serving --json serving.json",
    ),
    Line(
        "serving: 99th percentile of a request, ÷ that of `jax.jit`; the same",
        "serving",
        tuple(f"p99 of a request / jax.jit in one process, {callers}" for callers in CALLERS),
        "≤ 2",
    ),
    Line(
        "put; fetch; island to island, 256 MiB in one shard, ÷ a raw loopback socket",
        "bytes",
        tuple(f"{way}, 256 MiB, 1 devices, of a raw socket" for way in WAYS),
        "≥ 0.7",
        "python -m benchmarks.bytes --json bytes.json",
    ),
    Line(
        "the same in four shards",
        "bytes",
        tuple(f"{way}, 256 MiB, 4 devices, of a raw socket" for way in WAYS),
        "≥ 0.7",
    ),
    Line(
        "the most memory that a transfer takes, ÷ the array; client, host",
        "bytes",
        tuple(f"peak memory / array, 256 MiB, 4 devices, {who}" for who in ("client", "host")),
        "≤ 1.25",
    ),
    Line(
        "a call with 32 bytes of NumPy, waited for, ÷ with a future",
        "bytes",
        ("call with 32 bytes of NumPy / with a future",),
        "≤ 1.3",
    ),
    Line(
        "a tree of 20 leaves to another slice and layout, ÷ one array; 1, 2, 25 MiB",
        "bytes",
        tuple(f"tree of 20 leaves / one array, {mib} MiB, another" for mib in (1, 2, 25)),
        "≤ 1.3",
    ),
    Line(
        "blocking round trip, value at the client, one device",
        "profile",
        ("blocking round trip, 1 devices",),
        "≤ 500 us",
        "python -m benchmarks.hotpath --json hotpath.json",
        ".0f",
        "us",
    ),
    Line(
        "the same, ÷ 40 bytes through three relay processes and back; one device, four",
        "profile",
        tuple(f"the same, of the floor, {count} devices" for count in (1, 4)),
        "≤ 2",
    ),
    Line(
        "computations from this length on at 95 % of JAX, 2 hosts (Figure 6); the same, each call a message",
        "parity",
        ("parity, pathways, 2 hosts of 1", "parity, pathways-no-fusion, 2 hosts of 1"),
        "≤ 1, 2 ms",
        "python -m benchmarks.parity --systems pathways pathways-no-fusion --hosts 2x1 --json parity.json",
        ".1f",
        "ms",
    ),
    Line(
        "parallel ÷ sequential dispatch, 8 stages, waiting; flowing (Figure 7)",
        "pipeline",
        tuple(f"parallel / sequential, {mode}, 8 stages" for mode in ("waiting", "flowing")),
        "≥ 2",
        "python -m benchmarks.pipeline --json pipeline.json",
    ),
    Line(
        "the same, each stage with host work that needs no core: 1 ms; 4 ms",
        "pipeline",
        tuple(f"parallel / sequential, with {ms} ms of host work, 8 stages" for ms in (1, 4)),
        "≥ 2",
    ),
    Line(
        "METG, stencil of 4 tasks; plain JAX, each task a call; plain JAX in one function",
        "metg",
        ("pathways tasks stencil", "jax tasks stencil", "jax fused stencil"),
        "≤ 100 us",
        "python -m benchmarks.metg --json metg.json",
        ".0f",
        "us",
    ),
    Line(
        "scheduler, CPU time a launch and host, 512 hosts ÷ 16, lone; batches of 64",
        "scale",
        tuple(f"scheduler cost per launch and host over links, 512 / 16 hosts, {count} at once" for count in (1, 64)),
        "≤ 1.2",
        "python -m benchmarks.scale --parts streams --json scale.json",
    ),
    Line(
        "unmodified JAX through a proxy: calls of 10 ms, ÷ plain JAX",
        "proxy",
        ("proxy / plain JAX, rate, work",),
        "≥ 0.98",
        "python -m benchmarks.proxy --json proxy.json",
    ),
    Line(
        "the same: a small call that is not waited for; with nothing behind the proxy",
        "proxy",
        ("proxy, a small call on the road", "floor, a small call on the road"),
        "≤ 60 us",
        form=".0f",
        unit="us",
    ),
    Line(
        "the same: `float(x)`, time ÷ that of the native client; with nothing behind the proxy",
        "proxy",
        tuple(f"{one} / native client, time, blocking" for one in ("proxy", "floor")),
        "≤ 1.3",
    ),
    Line(
        "the same: put; get of 64 MB, rate ÷ that of the native client",
        "proxy",
        tuple(f"proxy / native client, rate, {way}" for way in ("put", "get")),
        "≥ 0.7",
    ),
    Line(
        "training, a pipeline of two stages (1F1B, 8 microbatches), ÷ ideal 1/(1+bubble) of SPMD",
        "training",
        ("pipeline / ideal 1/(1+bubble) of SPMD, 1f1b, S 2, M 8, inside",),
        "≥ 0.95",
        TRAINING,
    ),
)


def updated(text: str, results: Sequence[tuple[str, Sequence[Figure]]]) -> tuple[str, int]:
    """A README with the lines whose figures are known, and how many these are.

    Args:
        results: the benchmark of each, and its figures.

    Raises:
        ValueError: it has no table of figures.
    """
    before, head, after = text.partition(HEAD)
    if not after.lstrip("\n"):
        raise ValueError(f"there is no table that begins with {HEAD!r}")
    rule, *rest = after.lstrip("\n").splitlines(keepends=True)
    end = next((number for number, line in enumerate(rest) if not line.startswith("|")), len(rest))
    kept = {_title(line): line.rstrip("\n") for line in rest[:end]}
    made = 0
    previous = ""
    for line in LINES:
        figures = [one for benchmark, ones in results if benchmark == line.benchmark for one in ones]
        found = line.found_in(figures)
        if found is not None:
            kept = _with(kept, line.title, line.text(found), previous)
            made += 1
        if line.title in kept:
            previous = line.title
    table = "".join(f"{line}\n" for line in kept.values())
    return before + head + "\n" + rule + table + "".join(rest[end:]), made


def _title(line: str) -> str:
    return line.strip("| \n").partition(" | ")[0]


def _with(kept: Mapping[str, str], title: str, line: str, previous: str) -> dict[str, str]:
    """The lines with this one in its place, or, where it is new, behind the previous one of `LINES`."""
    if title in kept:
        return {**kept, title: line}
    found: dict[str, str] = {} if previous in kept else {title: line}
    for other, text in kept.items():
        found[other] = text
        if other == previous:
            found[title] = line
    return found
