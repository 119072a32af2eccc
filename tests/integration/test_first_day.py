"""What a JAX user types on the first day, on a real cluster."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import orbax_arrays
from pathways_ray.client.api import ClusterSession
from pathways_ray.client.data import DataLinks
from tests.integration.conftest import ROOT, Cluster, Slices

Equal = Callable[[Any, Any], None]

V = np.arange(8, dtype=np.float32)


def test_debug_calls_come_from_both_islands_in_order(session: ClusterSession, slices: Slices, capsys: Any) -> None:
    def shard(v: Any) -> Any:
        jax.debug.print("{}", v[0])
        return v * 2

    def whole(v: Any) -> Any:
        jax.debug.print("sum {}", v.sum())
        return jnp.log(v - 3)

    a = jax.shard_map(shard, mesh=slices.a4.mesh, in_specs=P("x"), out_specs=P("x"))
    there = pw.compiled(a, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    here = pw.compiled(whole, slice=slices.b4, in_specs=P("x"), out_specs=P("x"))
    program = pw.program(lambda v: here(there(v)))
    program(V)
    jax.effects_barrier()
    devices = slices.a4.devices
    expected = [*(f"[device {devices[k]}] {2.0 * k}" for k in range(4)), "sum 56.0"]
    assert capsys.readouterr().out.splitlines() == expected
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=r"made by log \(test_first_day.py:\d+\) in whole on"),
    ):
        program(V)
    jax.effects_barrier()


def test_ahead_of_time_and_few_sizes(session: ClusterSession, slices: Slices) -> None:
    """And what hosts compiled is what XLA says of it: of one device, which has a quarter of the array, and in code."""
    lowered: Any = jax.jit(lambda v: v @ v).lower(pw.put(V, slices.a4, P("x")))
    ready: Any = lowered.compile()
    assert float(ready(pw.put(V, slices.a4, P("x")))) == float(V @ V)
    assert lowered.cost_analysis()["flops"] == 16
    assert 4 <= ready.cost_analysis()["flops"] < 16
    assert ready.cost_analysis()["bytes accessed"] > 0
    assert ready.memory_analysis().peak_memory_in_bytes >= 8
    assert ready.as_text().startswith("HloModule")
    assert "all-reduce" in ready.as_text()
    there = pw.compiled(jnp.sin, slice=slices.b2)
    both = pw.program(lambda v: there(pw.reshard(v, slices.b2) * 2)).lower(pw.put(V, slices.a4, P("x"))).compile()
    assert both.cost_analysis()["transcendentals"] == 8
    assert "cosine" not in both.as_text()
    assert "sine" in both.as_text()
    once = pw.compiled(lambda v: jax.lax.while_loop(lambda u: u[0] < 3, lambda u: u + 1, v), slice=slices.a1)
    assert once.lower(V).compile().cost_analysis()["flops"] < 100  # without what has it run by a thread of its own
    here = pw.compiled(lambda v: v * 3.0, slice=slices.a4)
    chosen = pw.program(lambda v: pw.cond(v.sum() > 3, lambda u: pw.reshard(there(u), slices.a4), lambda u: here(u), v))
    assert chosen.lower(V).compile().cost_analysis()["transcendentals"] == 8  # a program that decides: all its parts
    serve = pw.padded(pw.compiled(lambda w, rows: rows @ w, slice=slices.b4), sizes=(4, 8), in_axes=(None, 0))
    w = pw.put(np.ones((3, 2), np.float32), slices.b4)
    pw.warmup(serve, (w, np.zeros((1, 3), np.float32)))
    for count in (1, 4, 7):
        np.testing.assert_array_equal(serve(w, np.ones((count, 3), np.float32)), np.full((count, 2), 3.0))


def test_the_code_of_the_page_about_watching_runs(
    session: ClusterSession, slices: Slices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    f, x = pw.compiled(lambda v: v + 1, slice=slices.a4), pw.put(V, slices.a4)
    names = {"pw": pw, "f": f, "x": x, "y": f(x).block_until_ready()}
    page = (ROOT / "docs" / "observe.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/observe.md", "exec"), names)
    assert "is ready" in capsys.readouterr().out
    assert (tmp_path / "t.json").stat().st_size > 0


def test_a_checkpoint_goes_from_slice_to_slice(
    session: ClusterSession, slices: Slices, equal: Equal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts write and read it; an array that is overwritten after the save is saved as it was."""

    def fetched(*_: Any, **__: Any) -> Any:
        raise AssertionError("values go through the client")

    orbax_arrays.register()
    m = np.arange(24, dtype=np.float32).reshape(4, 6)
    double = pw.compiled(lambda v: v * 2, slice=slices.a4, in_specs=P("x"), out_specs=P("x"), donate_argnums=0)
    state = {
        "w": pw.put(V, slices.a4, P("x")),
        "m": pw.put(m, slices.a22, P("x", "y")),
        "n": pw.put(7, slices.a1),
        "step": 3,
    }
    with ocp.StandardCheckpointer() as checkpoints, monkeypatch.context() as patch:
        patch.setattr(DataLinks, "fetch", fetched)
        checkpoints.save(tmp_path / "3", state)
        twice = double(state["w"])
        checkpoints.wait_until_finished()
        targets = pw.like({"w": V}, slices.b4, P("x")) | pw.like({"m": m}, slices.b2, P(None, "x")) | {"n": state["n"]}
        found = checkpoints.restore(tmp_path / "3", targets | {"step": 3})
    assert (found["w"].slice, found["m"].slice, found["step"]) == (slices.b4, slices.b2, 3)
    equal(found["w"], V)
    equal(found["m"], m)
    equal(found["n"], np.asarray(state["n"]))
    equal(twice, V * 2)


def test_hosts_write_and_read_the_parts_of_a_checkpoint_that_they_have(
    pairs: Cluster, equal: Equal, tmp_path: Path
) -> None:
    orbax_arrays.register()
    m = np.arange(24, dtype=np.float32).reshape(4, 6)
    with pw.connect(pairs.url, pairs.token) as session, ocp.StandardCheckpointer() as checkpoints:
        there, here = (session.virtual_slice((2, 2), ("x", "y"), island=k) for k in (0, 1))
        checkpoints.save(tmp_path / "1", {"m": pw.put(m, there, P("x", "y")), "v": pw.put(V, there, P(("x", "y")))})
        checkpoints.wait_until_finished()
        targets = pw.like({"m": m}, here, P(None, "y")) | pw.like({"v": V}, here, P("x"))
        found = checkpoints.restore(tmp_path / "1", targets)
        equal(found, {"m": m, "v": V})
        assert found["m"].slice is here
