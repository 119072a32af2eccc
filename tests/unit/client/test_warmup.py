"""`pw.warmup` and `pw.like`: what is compiled ahead is found by the call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from tests.unit.client.local import LocalSession

V = np.arange(8, dtype=np.float32)


def test_the_first_call_finds_what_was_compiled(session) -> None:
    a = session.virtual_slice((4,), ("x",))
    traced = []

    def serve(params, batch, times=1):
        traced.append(batch.shape)
        return batch * params["w"] * times

    f = pw.compiled(serve, slice=a, in_specs=P("x"), out_specs=P("x"), static_argnums=2)
    g = pw.program(lambda params, batch: f(params, batch, 2))
    params = {"w": pw.put(V, a, P("x"))}
    batch = jax.ShapeDtypeStruct((8,), np.float32)
    pw.warmup(f, (params, batch, 3), (pw.like(params), batch, 4))
    pw.warmup(g, (pw.like({"w": V}, a, P("x")), batch))
    assert session.compiled == 3
    assert not session.launched
    before = len(traced)
    np.testing.assert_array_equal(np.asarray(f(params, V, 3)), V * V * 3)
    np.testing.assert_array_equal(np.asarray(f(params, V, 4)), V * V * 4)
    np.testing.assert_array_equal(np.asarray(g(params, V)), V * V * 2)
    assert len(traced) == before


def test_numbers_of_python_stay_weakly_typed(session) -> None:
    a = session.virtual_slice((4,), ("x",))
    traced = []

    def step(state):
        traced.append(1)
        return jax.tree.map(lambda leaf: leaf + 1, state)

    state = pw.put({"step": 0, "w": V}, a)
    kinds = pw.like(state)
    assert (kinds["step"].weak_type, kinds["w"].weak_type) == (True, False)
    program = pw.program(step)
    pw.warmup(program, (kinds,))
    before = len(traced), len(session._programs)
    program(state)
    assert (len(traced), len(session._programs)) == before
    there = pw.like({"here": jnp.asarray(2.5), "there": state["step"]}, a)
    assert there["here"].weak_type
    assert there["there"].weak_type


def test_jitted_functions_too(session, monkeypatch) -> None:
    a = session.virtual_slice((4,), ("x",))
    traced: list[Any] = []
    registered: list[Any] = []

    def register(*given: Any) -> int:
        registered.append(given)
        return LocalSession.register(session, *given)

    monkeypatch.setattr(session, "register", register)

    def serve(w: Any, batch: Any) -> Any:
        traced.append(batch.shape)
        return batch * w

    w = pw.put(V, a, P("x"))
    for function in (pw.jit(serve, slice=a), jax.jit(serve)):
        traced.clear()
        registered.clear()
        pw.warmup(function, (pw.like(w), jax.ShapeDtypeStruct((8,), np.float32)))
        np.testing.assert_array_equal(np.asarray(function(w, V)), V * V)
        assert (len(traced), len(registered)) == (1, 1)


def test_types_of_arrays_to_come(session) -> None:
    a, b = session.virtual_slice((4,), ("x",)), session.virtual_slice((2,), ("x",))
    tree = {"w": pw.put(V, a, P("x")), "key": jax.random.key(0)}
    found = pw.like(tree)
    assert (found["w"].shape, found["w"].sharding.mesh) == ((8,), a.mesh)
    assert found["key"].dtype == tree["key"].dtype
    there = pw.like(tree, b, {"w": P("x"), "key": None})
    assert (there["w"].sharding.mesh, there["w"].sharding.spec) == (b.mesh, P("x"))
    with pytest.raises(pw.errors.SpecError, match=r"leaf \['key'\]: .* has 1 entries"):
        pw.like(tree, b, P("q"))
    with pytest.raises(
        pw.errors.UsageError, match=r"pw.warmup takes a pw.program, pw.compiled or pw.jit function, not 3"
    ):
        pw.warmup(3)
    with pytest.raises(pw.errors.UsageError, match=r"each call of pw.warmup is a tuple of arguments, not"):
        pw.warmup(pw.program(lambda v: v + 1), V)  # type: ignore[arg-type]
