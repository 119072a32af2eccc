"""The aims of all benchmarks, in one table: `benchmarks.report` marks figures that miss theirs.

A result has its figures under "ratios", and under "figures" those that are not ratios: each with a `name` and a
`median`, or `min`, `median` and `max`. An aim holds for all figures of its benchmarks whose name fits its pattern.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Aim:
    """A bound for the median of some figures.

    Args:
        benchmarks: the results that it applies to.
        names: a pattern, with * for anything.
        bound: the lowest value, or the highest if `at_most` is set, in `unit`; a ratio has none.
    """

    text: str
    benchmarks: tuple[str, ...]
    names: str
    bound: float
    at_most: bool = False
    unit: str = ""

    def holds_for(self, benchmark: str, name: str) -> bool:
        return benchmark in self.benchmarks and fnmatchcase(name, self.names)

    def met_by(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    @property
    def bound_text(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.bound:g}{' ' + self.unit if self.unit else ''}"


BOTH = ("dispatch", "peers")
PEERS = ("peers",)
TRAINING = ("training",)
JAX = "jax*"  # called directly in one process (dispatch), or with a process for each host (peers)

AIMS = (
    Aim("OpByOp / JAX OpByOp, no batching", PEERS, f"pathways-no-fusion opbyop / {JAX} opbyop, allreduce,*", 0.95),
    Aim("OpByOp with batching / JAX OpByOp, 1 x 4", PEERS, f"pathways opbyop / {JAX} opbyop, allreduce, 1 x 4", 1.5),
    Aim("OpByOp with batching / JAX OpByOp, 2 x 1", PEERS, f"pathways opbyop / {JAX} opbyop, allreduce, 2 x 1", 1.0),
    Aim("OpByOp with batching / JAX OpByOp, 1 x 4", ("dispatch",), "pathways opbyop / jax opbyop", 1.5),
    Aim("Chained / JAX OpByOp, 1 x 4", PEERS, f"pathways chained / {JAX} opbyop, allreduce, 1 x 4", 1.5),
    Aim("Chained / JAX OpByOp, 2 x 1", PEERS, f"pathways chained / {JAX} opbyop, allreduce, 2 x 1", 1.0),
    Aim("Chained / JAX OpByOp, 1 x 4", ("dispatch",), "pathways chained / jax opbyop", 1.5),
    Aim("Chained / JAX Fused", BOTH, f"pathways chained / {JAX} fused*", 0.9),
    Aim("Fused / JAX Fused", BOTH, f"pathways fused / {JAX} fused*", 0.98),
    Aim("OpByOp, each waited for / JAX so", PEERS, f"pathways opbyop-wait / {JAX} opbyop-wait, allreduce,*", 0.5),
    Aim("OpByOp / Ray actors", PEERS, "pathways opbyop / ray-actors opbyop,*", 10),
    Aim("OpByOp / Ray actors", ("dispatch",), "pathways opbyop / ray opbyop", 10),
    Aim("OpByOp / TF1 sessions", PEERS, "pathways opbyop / tf1-sessions opbyop*", 10),
    Aim("OpByOp / Monarch actors, not waiting", PEERS, "pathways opbyop / monarch-actors opbyop,*", 4),
    Aim("Chained / Ray actors given lists", PEERS, "pathways chained / ray-actors list*", 1.25),
    Aim("Chained / Monarch actors given lists", PEERS, "pathways chained / monarch-actors list*", 1.0),
    Aim("Chained / Ray Compiled Graphs", PEERS, "pathways chained / ray-compiled-graphs chained*", 1.5),
    Aim("Parallel / sequential dispatch, 8 stages", ("pipeline",), "parallel / sequential, *, 8 stages", 2),
    Aim("pw.init to the first result", ("startup",), "pw.init to the first result", 4, at_most=True, unit="s"),
    Aim("First call of 100 small nodes / jax.jit", ("compiling",), "first start, nodes / jax.jit", 1.5, at_most=True),
    Aim("Compiled by a second start", ("compiling",), "computations that a second start*", 0, at_most=True),
    Aim("A loop of several programs / each call by itself", ("loops",), "coalesced / each by itself*", 1.5),
    Aim("Requests a second / jax.jit", ("serving",), "requests a second / jax.jit*", 0.5),
    Aim("p99 of a request / jax.jit", ("serving",), "p99 of a request / jax.jit*", 2, at_most=True),
    Aim("Blocking round trip", ("dispatch", "profile", "roundtrip"), "*round trip*", 500, at_most=True, unit="us"),
    Aim("A value there and back / three relays", ("profile",), "the same, of the floor*", 2, at_most=True),
    Aim("Dispatch while it is seen / unseen", ("observing",), "*records*", 0.97),
    Aim("A look, a second of the controller", ("observing",), "look at 512*", 10, at_most=True, unit="ms"),
    Aim("JAX through a proxy / plain JAX, work", ("proxy",), "proxy / plain JAX, rate, work", 0.98),
    Aim("Small calls through a proxy", ("proxy",), "proxy, a small call*", 60, at_most=True, unit="us"),
    Aim("Blocking, proxy / native", ("proxy",), "proxy / native client, time, blocking", 1.3, at_most=True),
    Aim("Put and get, proxy / native", ("proxy",), "proxy / native client, rate, *", 0.7),
    Aim("Idle proxy", ("proxy",), "proxy, share of a core*", 0.03, at_most=True, unit="cores"),
    Aim(
        "Figure 6, each call a message",
        ("parity", "figure6"),
        "parity, pathways-no-fusion, 2 hosts of *",
        2,
        at_most=True,
        unit="ms",
    ),
    Aim(
        "Figure 6, parity with JAX, 2 hosts",
        ("parity", "figure6"),
        "parity, pathways, 2 hosts of *",
        1,
        at_most=True,
        unit="ms",
    ),
    Aim("A decision / a blocking round trip", ("decisions",), "decision / *", 1.2, at_most=True),
    Aim("A loop over two slices / the same unrolled", ("decisions",), "while_loop over two slices / *", 0.8),
    Aim("Two jobs on the same devices / one after the other", ("rl",), "two jobs at once / *, tenants, *", 1.5),
    Aim("Weights to the other island / raw socket", ("rl",), "weights of * / raw socket", 0.7),
    Aim("Bytes through the controller", ("rl",), "bytes through *", 10_000, at_most=True, unit="bytes"),
    Aim("METG, 1 host x 4 devices, stencil", ("metg",), "pathways*stencil*", 100, at_most=True, unit="us"),
    Aim(
        "Scheduler, per launch and host, 512 hosts against 16",
        ("scale",),
        "scheduler cost per launch and host*, 512 / 16 hosts*",
        1.2,
        at_most=True,
    ),
    Aim("Put, fetch, island to island / a raw socket", ("bytes",), "*of a raw socket", 0.7),
    Aim("Most memory / the array", ("bytes",), "peak memory / array*", 1.25, at_most=True),
    Aim("A call with 32 bytes of NumPy / with a future", ("bytes",), "call with 32 bytes*", 1.3, at_most=True),
    Aim("Resuming a session / putting its arrays", ("suspending",), "resume / put, 256 MiB", 1.3, at_most=True),
    Aim("All rows / a tenth routed, to another slice", ("bytes",), "all rows / a tenth routed*", 3),
    Aim("A tree of 20 leaves / one array, to another slice", ("bytes",), "tree of 20 leaves*", 1.3, at_most=True),
    Aim("Derivatives over two slices / by hand", ("gradients",), "jax.value_and_grad / by hand", 1.1, at_most=True),
    Aim("Steps with a snapshot / without", ("snapshots",), "with a snapshot / without, time, *", 1.02, at_most=True),
    Aim("Memory kept by a launch", ("memory",), "memory kept by a launch*", 1, at_most=True, unit="KiB"),
    Aim("Buffers left", ("memory",), "buffers left", 0, at_most=True),
    Aim("Four clients / one client, 1 ms and more", ("tenants",), "4 clients / 1 client, [1-9]*", 1.0),
    Aim("Four clients / JAX alone, 1 ms and more", ("tenants",), "4 clients / JAX alone, [1-9]*", 0.95),
    Aim("SPMD training / plain JAX", TRAINING, "pathways / plain JAX*", 0.98),
    Aim("Pipeline / SPMD, of the ideal", TRAINING, "pipeline / ideal*", 0.95),
    Aim("Pipeline across islands / inside one", TRAINING, "pipeline across islands / inside one*", 0.95),
    Aim("Data parallel on two islands / on one", TRAINING, "two islands / one*", 0.95),
    Aim("Training / torch pipelining", TRAINING, "pathways / torch pipelining*", 1.5),
    Aim("Interleaved 1F1B / 1F1B", TRAINING, "interleaved / 1f1b*", 1.0),
    Aim("Bubble, off its prediction", TRAINING, "bubble, off its prediction*", 0.1, at_most=True),
    Aim("Bubble of ZB-H1 / of 1F1B", TRAINING, "bubble of zb-h1*", 1.0, at_most=True),
    Aim("Loss, off that of the first system", TRAINING, "loss, off*", 1e-4, at_most=True, unit="nats"),
)
"""In the order of the page. Names are those of the results; `report` adds to them what a record says beside its name:
payload, hosts x devices of each, milliseconds of a computation."""


def aim_of(benchmark: str, name: str) -> Aim | None:
    """The first aim that holds for a figure."""
    return next((aim for aim in AIMS if aim.holds_for(benchmark, name)), None)


def verdict_of(benchmark: str, figure: Mapping[str, Any]) -> dict[str, str]:
    """The aim of a figure and whether it is met, for people; nothing where it has no aim."""
    aim = aim_of(benchmark, figure["name"])
    return {"aim": aim.bound_text, "verdict": "met" if aim.met_by(figure["median"]) else "missed"} if aim else {}
