"""Processes of the runtime, killed and stopped at random under the load of two tenants.

Arguments: a file for the table of tenants, their tokens, hosts of an island, strikes, seed, "kind:signal" where all
strikes are to be of one kind ("" otherwise), and the seconds after which there are no more. It prints what became of
all launches, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from tests.integration.scripts.two_tenants import Load, Programs, X, left, serving_since, written

table, tokens = sys.argv[1], sys.argv[2].split(",")
hosts_per_island, strikes, seed = map(int, sys.argv[3:6])
choose = random.Random(seed)
written(table, tokens)

KINDS = {
    ("HostExecutor", signal.SIGKILL): 40,
    ("HostExecutor", signal.SIGSTOP): 20,
    ("IslandScheduler", signal.SIGKILL): 15,
    ("IslandScheduler", signal.SIGSTOP): 10,
    ("ResourceManager", signal.SIGKILL): 8,
    ("ResourceManager", signal.SIGSTOP): 7,
    ("Controller", signal.SIGKILL): 8,
}
if sys.argv[6:7] > [""]:
    KINDS = {one: weight for one, weight in KINDS.items() if sys.argv[6] == f"{one[0]}:{one[1].name}"}
seconds = float(sys.argv[7]) if sys.argv[7:] else math.inf


def victims(kind: str) -> list[psutil.Process]:
    """The processes of a kind, without what they are just starting: that has their command line for a moment."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if f"ray::{kind}" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process, process.ppid()
    return [process for process, parent in found.values() if parent not in found]


def last_words(processes: set[psutil.Process]) -> str:
    """What processes that have ended wrote, as Ray keeps it."""
    logs = [log for one in processes for log in Path("/tmp/ray").glob(f"session_*/logs/*[-_]{one.pid}.*")]
    return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-3000:]}" for log in sorted(logs))


with pw.init(2, hosts_per_island, 2, tenants=table, policy="share") as session:
    url, token = session.url, session.token
    expected = Programs.of(session, 2 * hosts_per_island).values()
    np.testing.assert_array_equal(expected[1], X + X.sum())
    begun = time.monotonic()
    loads = [Load(url, token, 2 * hosts_per_island, expected) for token in tokens]
    struck: Counter[str] = Counter()
    serving: list[float] = []
    serving_since(loads, 0.0)
    # Of these deaths nobody else dies, and what lies on devices stays there.
    harmless = {"ResourceManager", "Controller"} | ({"IslandScheduler"} if len(KINDS) == 1 else set())
    kept = [pw.put(X, place, P("x")) for load in loads for place in load.programs.places]
    while struck.total() < strikes and time.monotonic() - begun < seconds:
        kind, sign = choose.choices(list(KINDS), list(KINDS.values()))[0]
        time.sleep(choose.random() * 0.2)
        there = victims(kind)
        if not there:
            continue
        sessions, hosts = [load.sessions for load in loads], set(victims("HostExecutor"))
        before = [len(load.took) for load in loads]
        victim = choose.choice(there)
        Load.struck_at = at = time.monotonic()
        os.kill(victim.pid, sign)
        struck[f"{kind} {sign.name}"] += 1
        serving_since(loads, time.monotonic())  # by what was there before, nobody is served from here on
        if kind in harmless:
            assert [load.sessions for load in loads] == sessions, f"a session ended with the {kind}"
            gone = hosts - set(victims("HostExecutor"))
            assert not gone, f"hosts {[one.pid for one in gone]} ended with the {kind}\n{last_words(gone)}"
        if KINDS.keys() <= {(one, sign) for one in harmless}:
            assert all(np.array_equal(np.asarray(array), X) for array in kept)
        serving.append(time.monotonic() - at)
        slowest = max((t for load, n in zip(loads, before, strict=True) for t in load.took[n:]), default=0.0)
        name = f"{kind} {sign.name}"
        print(f"{at - begun:.0f} s: {name}: serving in {serving[-1]:.1f} s; slowest error {slowest:.1f} s", flush=True)
    for load in loads:
        load.over.set()
    for load in loads:
        load.thread.join(60)
    took = [t for load in loads for t in load.took] or [0.0]
    report = {
        "struck": struck,
        "right": sum(load.right for load in loads),
        "wrong": sum(load.wrong for load in loads),
        "hung": sum(load.hung for load in loads),
        "errors": sum((load.errors for load in loads), Counter()),
        "to_error": {"median": float(np.median(took)), "p99": float(np.percentile(took, 99)), "max": max(took)},
        "serving": {"median": float(np.median(serving)), "max": max(serving)},
        "left": left(url, token),
    }
    print(json.dumps(report))
