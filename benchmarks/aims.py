"""What the benchmarks are held to. One table: `benchmarks.report` marks what misses its aim.

A result says its figures under "ratios", and under "figures" for what is not a ratio: each with a `name` and a
`median`, or `min`, `median` and `max`. An aim holds for all figures of its benchmarks whose name fits its pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Aim:
    """A bound for the median of some figures.

    Args:
        benchmarks: the results it is looked for in.
        names: a pattern, with * for anything.
        bound: the least value, or the most when `most` is set, in `unit`; a ratio has none.
    """

    text: str
    benchmarks: tuple[str, ...]
    names: str
    bound: float
    most: bool = False
    unit: str = ""

    def holds_for(self, benchmark: str, name: str) -> bool:
        return benchmark in self.benchmarks and fnmatchcase(name, self.names)

    def met_by(self, value: float) -> bool:
        return value <= self.bound if self.most else value >= self.bound

    @property
    def bound_text(self) -> str:
        return f"{'≤' if self.most else '≥'} {self.bound:g}{' ' + self.unit if self.unit else ''}"


HERE = ("dispatch",)
PEERS = ("peers", "dispatch")

AIMS = (
    Aim("OpByOp against JAX called op by op", HERE, "pathways opbyop / jax opbyop*", 0.95),
    Aim("Chained against JAX called op by op", HERE, "pathways chained / jax opbyop*", 1.5),
    Aim("Fused against JAX fused", HERE, "pathways fused / jax fused*", 0.98),
    Aim("OpByOp against Ray actors", PEERS, "pathways opbyop / ray opbyop*", 10),
    Aim("Chained against Ray actors that are given lists", PEERS, "pathways chained / ray* list*", 1.25),
    Aim("Chained against Ray Compiled Graphs", PEERS, "pathways chained / *graph* chained*", 1.5),
    Aim("OpByOp against TF1 sessions", PEERS, "pathways opbyop / tf1* opbyop*", 10),
    Aim("OpByOp against Monarch actors", PEERS, "pathways opbyop / monarch* opbyop*", 4),
    Aim("Parallel against sequential dispatch, 8 stages", ("pipeline",), "parallel / sequential, flowing, 8 stages", 2),
    Aim("Blocking round trip", ("dispatch", "profile", "roundtrip"), "*round trip*", 500, most=True, unit="us"),
    Aim("Figure 6, parity with JAX, 2 hosts", ("parity", "figure6"), "*2 hosts*", 1, most=True, unit="ms"),
    Aim("METG, 1 host x 4 devices, stencil", ("metg",), "pathways*stencil*", 100, most=True, unit="us"),
    Aim(
        "Scheduler, per launch and host, 512 hosts against 16",
        ("scale",),
        "scheduler cost per launch and host*, 512 / 16 hosts*",
        1.5,
        most=True,
    ),
)
"""In the order of the page. Names of peers are those of their results."""


def aim_of(benchmark: str, name: str) -> Aim | None:
    """The first aim that holds for a figure."""
    return next((aim for aim in AIMS if aim.holds_for(benchmark, name)), None)
