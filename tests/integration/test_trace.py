"""Traces of a real cluster: slices on every process, in the order of cause and effect, and joined by flows."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.deployment import tracing
from pathways_ray.observe import timeline


def double(v):
    return v * 2


def test_a_launch_is_on_every_process_of_the_trace(session, slices, tmp_path: Path) -> None:
    """Over both islands: the call is before the admission, that before the hosts, these before the outcome."""
    here = pw.compiled(double, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    there = pw.compiled(double, slice=slices.b4, in_specs=P("x"), out_specs=P("x"))
    over = pw.program(lambda v: there(here(v)), name="over")
    over(np.arange(8.0)).block_until_ready()
    file = tmp_path / "t.json"
    with pw.trace(file):
        for _ in range(5):
            over(np.arange(8.0)).block_until_ready()
        time.sleep(0.05)  # the last reports of watchers
    events = json.loads(file.read_text())["traceEvents"]
    slices_ = [e for e in events if e["ph"] == "X" and e["args"]["program"] == "over"]
    launches = {e["args"]["launch"] for e in slices_}
    assert len(launches) == 5
    for launch in launches:
        mine = {e["pid"]: e for e in slices_ if e["args"]["launch"] == launch and e["tid"] < 1000}
        called, admitted = mine[timeline.CLIENT], mine[timeline.CONTROLLER]
        assert called["ts"] <= admitted["ts"]
        for island, host in ((0, 0), (1, 1)):
            sent, ran = mine[timeline.SCHEDULERS + island], mine[timeline.HOSTS + host]
            assert admitted["ts"] <= sent["ts"] <= ran["ts"]
            assert ran["ts"] + ran["dur"] <= sent["ts"] + sent["dur"] <= admitted["ts"] + admitted["dur"] + 1
        flows = [e["ph"] for e in events if e.get("id") == launch]
        assert flows[0] == "s"
        assert flows.count("f") == 2
    waits = [e for e in events if e["ph"] == "X" and e["name"].startswith("data for")]
    assert waits
    assert json.loads(file.read_text())["metadata"]["slices left out"] == 0


def test_a_step_that_was_never_called_before_is_recorded(session, slices) -> None:
    def never_before(v):
        return v * 2 + 1

    step = pw.compiled(never_before, slice=slices.a1)
    with pw.recording() as computed:
        for _ in range(3):
            step(np.arange(4.0)).block_until_ready()
    assert [one.name for one in computed[0]] == ["never_before"] * 3
    with pytest.raises(ValueError, match="no"), pw.recording() as computed:
        raise ValueError("no")
    assert list(computed.values()) == [[], []]  # each host has answered, and ended its record


def test_what_is_over_can_be_had(session, slices) -> None:
    single = pw.compiled(double, slice=slices.a1)
    since = time.monotonic()
    for _ in range(20):
        single(np.arange(4.0)).block_until_ready()
    session.await_outcomes()  # what a host was handed is sent with others, later
    found = tracing.trace(
        {"controller": session.cluster.controller, **{f"host {n}": h for n, h in session.cluster.hosts.items()}}, since
    )
    names = [found.programs[one.program] for one in found.ended if one.session == session.id]
    assert names.count("double") >= 20
    assert all(clock == timeline.Clock() for clock in found.clocks.values()), "one machine has one clock"
    assert tracing.trace({"controller": session.cluster.controller}, time.monotonic()).ended == []


def test_a_short_block_of_calls_has_all_of_them_on_all_processes(session, slices, tmp_path: Path) -> None:
    """Those that hosts were handed and that are sent later as well."""
    single = pw.compiled(double, slice=slices.a1)
    for _ in range(20):
        np.asarray(single(np.arange(4.0)))
    with pw.trace(tmp_path / "t.json"):
        for _ in range(20):
            np.asarray(single(np.arange(4.0)))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    named = [e for e in events if e["ph"] == "X" and e["args"]["program"] == "double"]
    of = {pid: {e["args"]["launch"] for e in named if e["pid"] == pid} for pid in {e["pid"] for e in named}}
    assert len(of[timeline.CLIENT]) == 20
    assert {timeline.CLIENT, timeline.CONTROLLER, timeline.SCHEDULERS, timeline.HOSTS} <= set(of)
    assert all(of[timeline.CLIENT] <= launches for launches in of.values())


def test_a_trace_to_nowhere_is_refused_before_it_begins(session, tmp_path: Path) -> None:
    with pytest.raises(pw.errors.UsageError, match="is no folder"), pw.trace(tmp_path / "missing" / "t.json"):
        raise AssertionError("the block ran")
