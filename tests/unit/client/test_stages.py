"""`lower`, `compile`, `trace` and what they say, by the names of `jax.stages`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

V = np.arange(8, dtype=np.float32)
M = np.ones((8, 8), np.float32)


def layer(v: Any, m: Any) -> Any:
    return {"y": jnp.tanh(v @ m)}


def test_ahead_of_time(session) -> None:
    a = session.virtual_slice((4,), ("x",), name="a")
    x, m = pw.put(V, a), pw.put(M, a, P("x"))
    compiled = pw.compiled(layer, slice=a, in_specs=(P(), P("x")))
    for function in (compiled, pw.program(lambda v, w: compiled(v, w)), pw.jit(layer, slice=a), jax.jit(layer)):
        lowered = function.lower(x, m)
        before = session.compiled
        ready = lowered.compile()
        assert session.compiled == before + 1
        found = ready(x, m)["y"]
        assert (found.slice, lowered.out_info["y"].shape) == (a, (8,))
        np.testing.assert_allclose(np.asarray(found), np.tanh(V @ M))
        assert ready.cost_analysis() == {"flops": 2 * 64 + 8, "bytes accessed": 4 * (64 + 8 + 8 + 8 + 8)}
        memory: Any = ready.memory_analysis()
        assert memory.argument_size_in_bytes == 8 * 4 + 64
        assert memory.output_size_in_bytes in (8, 32)
        assert ready.input_shardings[0][1] == NamedSharding(a.mesh, P("x"))
        assert ready.output_shardings["y"].mesh is a.mesh
        with pytest.raises(
            TypeError, match=r"compiled for float32\[8\] @ slice a .* as leaf 0, and is called with float"
        ):
            ready(V[:4], m)
        with pytest.raises(TypeError, match=r"was compiled for arguments of the tree .*, and is called with"):
            ready(x)
    here = jax.jit(layer).lower(V, M).compile()
    assert type(here(V, M)["y"]) is not pw.Array


def test_types_before_values(session) -> None:
    a = session.virtual_slice((4,), ("x",))
    f = pw.compiled(layer, slice=a)
    types = pw.like((V, M), a, (P(), P("x")))
    assert f.eval_shape(*types)["y"].sharding.mesh is a.mesh
    ready = jax.jit(layer).lower(*types).compile()
    assert ready(pw.put(V, a), pw.put(M, a, P("x")))["y"].slice is a
    traced = f.trace(V, M)
    assert (traced.out_info["y"].shape, len(traced.jaxpr.eqns)) == ((8,), 1)
    assert pw.program(lambda v: f(v, M)).trace(V).jaxpr.in_avals[0].shape == (8,)


def test_the_count_of_operations_is_that_of_xla() -> None:
    """XLA counts what is left of a function once it has simplified it."""
    from pathways_ray.client.estimates import work

    def f(v: Any, m: Any) -> Any:
        def row(c: Any, _: Any) -> Any:
            return jnp.tanh(c @ m) * 2.0, None

        return jax.lax.scan(row, v, None, 3)[0].sum()

    traced = jax.jit(f).trace(np.ones((64, 64), np.float32), np.ones((64, 64), np.float32))
    cost: Any = jax.jit(lambda v, m: f(v, m)).lower(*traced.in_avals[0]).cost_analysis()
    assert work(traced.jaxpr, 1).operations == pytest.approx(3 * cost["flops"], rel=0.02)
