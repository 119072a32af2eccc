"""Shares and turns of tenants on the devices, from a trace of gangs. Pure: lists in, numbers out.

A gang here is what a host ran as one computation: `(tenant, start, end)`, times in seconds, in the order of the
ends. All gangs use the same devices, so they do not overlap.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import measure


class Gang(NamedTuple):
    tenant: str
    start: float
    end: float


def describe(gangs: Sequence[Gang]) -> dict[str, Any]:
    """Utilisation of the devices, from the first gang to the last, and how finely tenants were interleaved.

    A *turn* is what runs of one tenant before another's; `away_ms` is how long tenants were off the devices between two
    turns.
    """
    if len(gangs) < 2:
        return {"gangs": len(gangs)}
    turns = [list(group) for _, group in itertools.groupby(gangs, key=lambda gang: gang.tenant)]
    span = gangs[-1].end - gangs[0].start
    away: list[float] = []
    last: dict[str, float] = {}
    for turn in turns:
        if (since := last.get(turn[0].tenant)) is not None:
            away.append(1e3 * (turn[0].start - since))
        last[turn[0].tenant] = turn[-1].end
    return {
        "gangs": len(gangs),
        "seconds": span,
        "utilisation": sum(by_tenant(gangs).values()) / span,
        "gang_ms": quantiles([1e3 * (gang.end - gang.start) for gang in gangs]),
        "switches_per_second": (len(turns) - 1) / span,
        "turn_ms": quantiles([1e3 * (turn[-1].end - turn[0].start) for turn in turns]),
        "away_ms": quantiles(away) if away else None,
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median, the value that 99 in 100 do not exceed, and the largest."""
    return {"median": statistics.median(values), "p99": measure.p99(values), "max": max(values)}


def shares(used: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, Any]:
    """The use of each tenant, its share of the whole, and the share that its weight gives it.

    `error` is the largest relative difference between the two.
    """
    total, weight = sum(used.values()), sum(weights.values())
    achieved = {name: used.get(name, 0.0) / total if total else 0.0 for name in weights}
    target = {name: weights[name] / weight for name in weights}
    error = max(abs(achieved[name] / target[name] - 1) for name in weights)
    mine = {name: used.get(name, 0.0) for name in weights}
    return {"used": mine, "achieved": achieved, "target": target, "error": error}


def by_tenant(gangs: Sequence[Gang]) -> dict[str, float]:
    """Seconds on the devices of each tenant."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for gang in gangs:
        seconds[gang.tenant] += gang.end - gang.start
    return dict(seconds)


def count_at(seen: Sequence[tuple[float, int]], moment: float) -> float:
    """The number of computations that were over at a moment, interpolated between observations."""
    moments, counts = zip(*seen, strict=True)
    return float(np.interp(moment, moments, counts, left=0.0))


def sample(gangs: Sequence[Gang], milliseconds: float) -> list[list[Any]]:
    """The gangs of a span in the middle, for a picture: `[tenant, start, end]`, in ms from its beginning."""
    if not gangs:
        return []
    start = max(gangs[0].start, (gangs[0].start + gangs[-1].end - milliseconds / 1e3) / 2)
    end = start + milliseconds / 1e3
    return [
        [gang.tenant, round(1e3 * (max(gang.start, start) - start), 4), round(1e3 * (gang.end - start), 4)]
        for gang in gangs
        if gang.end > start and gang.start < end
    ]
