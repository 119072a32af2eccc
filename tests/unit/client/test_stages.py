"""`lower`, `compile`, `trace` and what they say, by the names of `jax.stages`."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from tests.unit.client.offline import LIMIT_S, Background

V = np.arange(8, dtype=np.float32)
M = np.ones((8, 8), np.float32)


def layer(v: Any, m: Any) -> Any:
    return {"y": jnp.tanh(v @ m)}


def test_what_is_compiled_can_be_copied(session) -> None:
    """As JAX's can."""
    ready = pw.compiled(layer, slice=session.virtual_slice((1,), ("x",))).lower(V, M).compile()
    np.testing.assert_array_equal(copy.copy(ready)(V, M)["y"], ready(V, M)["y"])


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
        assert lowered.cost_analysis() == {"flops": 2 * 64 + 8, "bytes accessed": 4 * (64 + 8 + 8 + 8 + 8)}
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


def test_what_is_compiled_takes_arrays_that_lie_elsewhere(session) -> None:
    """As in JAX: those of this process are placed as they were compiled for, and one that was lowered without a
    sharding may lie on a slice."""
    a = session.virtual_slice((4,), ("x",))
    x, scale = pw.put(V, a, P("x")), pw.put(np.float32(3), a)
    kept = pw.put(np.ones(8, np.float32), a)
    function = jax.jit(lambda v, s, unused: (v * s + kept, v))
    scalar = jax.ShapeDtypeStruct((), np.float32)
    ready = function.lower(x, scalar, scalar).compile()
    for given in (x, V, jnp.asarray(V)):
        for by in (scale, np.float32(3), 3.0):
            found, same = ready(given, by, by)
            np.testing.assert_array_equal(np.asarray(found), 3 * V + 1)
            np.testing.assert_array_equal(np.asarray(same), V)
            assert found.sharding == x.sharding
    own = pw.program(lambda v: pw.compiled(jnp.sin, slice=a, in_specs=P("x"))(v)).lower(V).compile()
    np.testing.assert_allclose(np.asarray(own(pw.put(V, a))), np.sin(V), rtol=1e-6)
    for wrong in (V[:4], V.astype(np.int32), pw.put(V, a)):  # a layout that was said is not changed, as in JAX
        with pytest.raises(TypeError, match=r"compiled for float32\[8\] @ slice \d+ .* as leaf 0, and is called with"):
            ready(wrong, scale, scale)
    with pytest.raises(TypeError, match=r"compiled for float32\[\] @ client as leaf 1, and is called with int32\[\]"):
        ready(x, pw.put(np.int32(3), a), scale)


def test_what_is_said_of_a_compiled_function_is_what_xla_says_of_it_in_jax(session) -> None:
    """The same names and figures: of one device, and with the code that XLA made."""
    a = session.virtual_slice((4,), ("x",))
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
    plain: Any = jax.jit(layer, out_shardings=NamedSharding(mesh, P())).lower(
        *jax.device_put((V, M), (NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))))
    )
    expected: Any = plain.compile()
    ours = pw.compiled(layer, slice=a, in_specs=(P(), P("x"))).lower(V, M)
    found = ours.compile()
    for name in ("flops", "transcendentals", "bytes accessed"):
        assert found.cost_analysis()[name] == expected.cost_analysis()[name] > 0
    memory, said = found.memory_analysis(), expected.memory_analysis()
    assert memory.argument_size_in_bytes == said.argument_size_in_bytes
    assert memory.temp_size_in_bytes == said.temp_size_in_bytes
    assert "all-reduce" in found.as_text()
    assert found.as_text().startswith("HloModule")
    assert "stablehlo.dot_general" in ours.as_text("stablehlo")
    assert found.as_text("graph").startswith("program")
    assert ours.donate_argnums == ()
    assert jax.tree.leaves(ours.args_info)[1].shape == (8, 8)
    giving = pw.jit(layer, slice=a, donate_argnums=1).lower(V, M)
    assert "stablehlo.dot_general" in giving.as_text()  # what jax.jit gives shows what it shows in JAX
    assert giving.donate_argnums == (1,)
    assert [info.donated for info in jax.tree.leaves(giving.args_info)] == [False, True]


def test_the_cost_of_a_program_is_that_of_its_computations(session) -> None:
    a, b = session.virtual_slice((4,), ("x",)), session.virtual_slice((2,), ("x",))
    one = pw.compiled(lambda v, m: v @ m, slice=a)
    two = pw.compiled(lambda v: jnp.sin(v), slice=b)
    cost = pw.program(lambda v, m: two(one(v, m))).lower(V, M).compile().cost_analysis()
    parts = [one.lower(V, M).compile().cost_analysis(), two.lower(V).compile().cost_analysis()]
    assert cost["flops"] == parts[0]["flops"] == 2 * 64
    assert cost["transcendentals"] == parts[1]["transcendentals"] == 8
    assert not any("{" in name for name in cost)  # what is of one operand of one computation has no sum


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


def test_the_types_of_another_program_within_one(session) -> None:
    """It is traced amid the trace of the first, which goes on as it was."""
    a = session.virtual_slice((4,), ("x",))
    g = pw.compiled(lambda v: v * 2, slice=a)
    w = pw.put(V, a)

    @pw.program
    def f(v: Any) -> Any:
        x = w + v
        for look in (g.eval_shape, g.lower, g.trace):
            look(jax.ShapeDtypeStruct(v.shape, v.dtype))
        return pw.cond(v.sum() > 0, g, g, x)

    np.testing.assert_array_equal(np.asarray(f(V)), V * 4)


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


def test_a_program_that_two_threads_send_at_once_is_registered_once(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both make its first call. The second number is given back, else the cluster would keep that program."""
    program = pw.compiled(layer, slice=session.virtual_slice((1,), ("x",))).lower(V, M)
    both, register = threading.Barrier(2), session.register
    sent: list[int] = []
    dropped: list[int] = []

    def together(*about: Any) -> int:
        both.wait(LIMIT_S)
        sent.append(number := register(*about))
        return number

    monkeypatch.setattr(session, "register", together)
    monkeypatch.setattr(session, "unregister", dropped.append)
    threads = [Background(program.compile) for _ in range(2)]
    for one in threads:
        one.end()
    assert len(sent) == 2
    assert len(dropped) == 1
    del program, threads, one
    gc.collect()
    assert sorted(dropped) == sorted(sent)
