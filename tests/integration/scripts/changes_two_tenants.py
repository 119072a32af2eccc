"""Islands that are added, drained and removed, and slices that move, at random under the load of two tenants.

Arguments: a file for the table of tenants, their tokens, changes, and seed. It prints what became of all launches, as
JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from tests.integration.scripts.two_tenants import Load, Programs, left, serving_since, written

table, tokens = sys.argv[1], sys.argv[2].split(",")
changes, seed = map(int, sys.argv[3:5])
choose = random.Random(seed)
written(table, tokens)

DEVICES = 2
MOST_ISLANDS = 4
DRAIN_S = 60.0


class Tenant(Load):
    """A load with a state on each slice as well, to which every batch adds one: it goes along with its slice."""

    known: Programs | None = None

    def batch(self, programs: Programs) -> None:
        if programs is not self.known:
            self.known, self.steps = programs, 0
            zeros = np.zeros(DEVICES, np.float32)
            self.states: list[Any] = [pw.put(zeros, place, P("x")) for place in programs.places]
            self.more = [
                pw.compiled(lambda v: v + 1, slice=place, in_specs=P("x"), out_specs=P("x"), donate_argnums=(0,))
                for place in programs.places
            ]
        self.states = [more(state) for more, state in zip(self.more, self.states, strict=True)]
        self.steps += 1
        super().batch(programs)
        for state in self.states:
            self.wrong += not np.array_equal(np.asarray(state), np.full(DEVICES, self.steps, np.float32))


class Operator:
    """Changes what there is. `up` are the islands that take slices."""

    def __init__(self, session: Any, tenants: list[Tenant]) -> None:
        self.session, self.tenants = session, tenants
        self.up = [0, 1]

    def possible(self) -> list[Callable[[], None]]:
        """The changes that there may be now."""
        several = [self.remove, self.drain, self.move, self.move] if len(self.up) > 1 else []
        return several + ([self.add, self.add] if len(self.up) < MOST_ISLANDS else [])

    def add(self) -> None:
        devices = choose.choice([DEVICES, DEVICES + 1])
        self.up.append(self.session.add_island("cpu", hosts=1, devices=devices))

    def remove(self) -> None:
        island = self.drained()
        self.session.remove_island(island)
        self.up.remove(island)

    def drain(self) -> None:
        """Has an island emptied, which serves again afterwards."""
        self.session.undrain_island(self.drained())

    def drained(self) -> int:
        island = choose.choice(self.up)
        there = self.session.drain_island(island, deadline_s=DRAIN_S)
        assert not there, there
        return island

    def move(self) -> None:
        """Moves a slice of a tenant, which its own thread calls on meanwhile."""
        place = choose.choice(choose.choice(self.tenants).programs.places)
        place.move(island=choose.choice([island for island in self.up if island != place.island]))


with pw.init(2, 1, DEVICES, tenants=table, policy="share") as session:
    url, token = session.url, session.token
    programs = Programs.of(session, DEVICES)
    expected = programs.values()
    for place in programs.places:
        place.release()
    loads = [Tenant(url, token, DEVICES, expected) for token in tokens]
    operator = Operator(session, loads)
    made: Counter[str] = Counter()
    took: dict[str, list[float]] = {}
    serving_since(loads, 0.0)
    while made.total() < changes:
        change = choose.choice(operator.possible())
        at = time.monotonic()
        change()
        seconds = time.monotonic() - at
        serving_since(loads, time.monotonic())
        name = change.__name__
        made[name] += 1
        took.setdefault(name, []).append(seconds)
        print(f"{made.total()}: {name} took {seconds:.2f} s, serving after {time.monotonic() - at:.2f} s", flush=True)
    for load in loads:
        load.over.set()
    for load in loads:
        load.thread.join(60)
    report = {
        "changes": made,
        "right": sum(load.right for load in loads),
        "wrong": sum(load.wrong for load in loads),
        "lost": sum(load.hung + load.errors.total() for load in loads),
        "sessions": sum(load.sessions for load in loads),
        "median_s": {name: round(float(np.median(each)), 2) for name, each in took.items()},
        "left": left(url, token),
    }
    print(json.dumps(report))
