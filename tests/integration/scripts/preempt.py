"""A device of 5 MiB and two tenants with states of 2 MiB, whose steps need 2 MiB more: too much for both.

1. The lower one goes round. The higher one comes, and its first step finds no room.
2. The lower one gives way: status and the log of the audit say so, its calls wait, and the higher one goes on.
3. The higher one ends. The lower one comes back, with the bits that it had, and goes on.

With "turns" as the second argument both have the same priority: they take turns, and each has two.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import pathways_ray as pw

MIB = 1 << 20
TOKENS = {"low": "l" * 20, "high": "h" * 20}


class Tenant:
    """A session whose state has as many ones added as it has made steps."""

    def __init__(self, url: str, name: str) -> None:
        self.session = pw.connect(url, TOKENS[name], name=name)
        self.where = self.session.virtual_slice((1,), island=0)
        self.add = pw.compiled(lambda s: s + jnp.float32(1), slice=self.where)
        self.state: Any = pw.put(np.zeros(MIB // 2, np.float32), self.where)
        self.steps, self.over = 0, False

    def go(self, steps: int) -> None:
        while self.steps < steps and not self.over:
            self.state = self.add(self.state).block_until_ready(timeout=200)
            self.steps += 1

    def check(self) -> None:
        np.testing.assert_array_equal(np.asarray(self.state), np.full(MIB // 2, self.steps, np.float32))


def entry(session: Any, name: str) -> dict[str, Any]:
    """The session of a tenant in status."""
    found: dict[str, Any] = next(one for one in session.status()["sessions"] if one["tenant"] == name)
    return found


def one_gives_way(session: Any) -> None:
    """What the docstring above says."""
    low = Tenant(session.url, "low")
    low.go(5)
    rest = threading.Thread(target=low.go, args=(10_000,), daemon=True)
    rest.start()
    began = time.monotonic()
    high = Tenant(session.url, "high")
    high.go(20)
    print(f"high waited and made 20 steps in {time.monotonic() - began:.1f} s")
    found = entry(session, "low")
    assert (found["suspended"], found["gives_way_to"], found["buffers"]) == (True, high.session.id, 0), found
    there = low.steps
    time.sleep(1.0)
    assert low.steps == there, "a session that has given way makes no step"
    high.check()
    began = time.monotonic()
    high.session.close()
    while low.steps < there + 20:
        time.sleep(0.05)
        assert time.monotonic() - began < 60, entry(session, "low")
    low.over = True
    rest.join(60)
    low.check()
    print(f"low came back and made 20 steps in {time.monotonic() - began:.1f} s")
    assert not entry(session, "low")["suspended"]


def both_take_turns(session: Any) -> None:
    """Until each of them has given way, and made steps afterwards, twice."""
    tenants = {name: Tenant(session.url, name) for name in TOKENS}
    threads = [threading.Thread(target=one.go, args=(1_000_000,), daemon=True) for one in tenants.values()]
    for thread in threads:
        thread.start()
    turns: list[str] = []
    began = time.monotonic()
    while min(map(turns.count, tenants)) < 2:
        away = [name for name in tenants if entry(session, name)["suspended"]]
        if len(away) == 1 and (not turns or turns[-1] != away[0]):
            turns.append(away[0])
            print(f"{time.monotonic() - began:.1f} s: {away[0]} gives way", flush=True)
        assert all(thread.is_alive() for thread in threads), "a tenant has failed"
        assert time.monotonic() - began < 240, [entry(session, name) for name in tenants]
        time.sleep(0.05)
    for one in tenants.values():
        one.over = True
    for one, thread in zip(tenants.values(), threads, strict=True):
        thread.join(100)
        one.check()
        print(f"{one.steps} steps")
        one.session.close()


file, turns = Path(sys.argv[1]), sys.argv[2:] == ["turns"]
rows = [{"name": name, "token": TOKENS[name], "priority": 5 * (name == "high" and not turns)} for name in TOKENS]
file.write_text(json.dumps({"tenants": rows}))
file.chmod(0o600)
island = pw.Island("cpu", devices=1, memory=5 * MIB)
with pw.init(islands=[island], policy="preempt", tenants=str(file)) as session:
    (both_take_turns if turns else one_gives_way)(session)
    print("given way")
