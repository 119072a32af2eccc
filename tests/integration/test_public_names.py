"""The public names, each used as the design says, against what NumPy or plain JAX gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

V = np.arange(8, dtype=np.float32)


def test_the_names_are_those_of_the_design() -> None:
    names = {
        "init",
        "connect",
        "virtual_slice",
        "compiled",
        "program",
        "put",
        "transfer_bytes",
        "islands",
        "devices",
        "shutdown",
        "errors",
    }
    assert names <= set(pw.__all__)
    assert all(hasattr(pw, name) for name in pw.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = pw.nonsense


def test_first_program_of_the_design(session, slices, equal) -> None:
    @pw.compiled(slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    def double(v):
        return v * 2

    @pw.program
    def f(v):
        return double(double(v))

    y = f(np.arange(8.0))
    assert isinstance(y, pw.Array)
    assert (y.shape, y.dtype, y.ndim, y.size, y.nbytes, len(y)) == ((8,), np.dtype(np.float32), 1, 8, 32, 8)
    assert y.sharding == NamedSharding(slices.a4.mesh, P("x"))
    assert y.block_until_ready() is y
    assert y.is_ready()
    equal(y, V * 4)
    assert double.__name__ == "double"
    assert f.__name__ == "f"


def test_array_gives_python_values(session, slices) -> None:
    y = pw.put(np.float32(2.5), slice=slices.a4)
    assert (float(y), int(y), bool(y), complex(y), y.item()) == (2.5, 2, True, 2.5 + 0j, 2.5)
    x = pw.put(np.arange(6).reshape(2, 3), slice=slices.a4)
    assert [row.tolist() for row in x] == [[0, 1, 2], [3, 4, 5]]
    assert x[1, 2] == 5
    assert jnp.sum(jnp.asarray(x)) == 15
    assert np.asarray(x, dtype=np.float64).dtype == np.float64
    with pytest.raises(TypeError, match=r"len\(\) of an array without dimensions"):
        len(y)
    assert "int32[2,3]" in repr(x)


def test_array_handed_out_is_the_callers_own(session, slices, equal) -> None:
    x = pw.put(V, slice=slices.a4)
    first = np.asarray(x)
    first[:] = -1
    equal(x, V)


def test_put_copies_before_it_returns(session, slices, equal) -> None:
    mine = V.copy()
    x = pw.put(mine, slice=slices.a4, spec=P("x"))
    mine[:] = -1
    equal(x, V)
    assert x.sharding.spec == P("x")


def test_put_places_pytrees_by_a_prefix_of_specs(session, slices, equal) -> None:
    tree = {"a": V, "b": (V.reshape(2, 4), V.reshape(4, 2))}
    placed = pw.put(tree, slice=slices.a22, spec={"a": None, "b": P("x", "y")})
    assert placed["a"].sharding.spec == P()
    assert [leaf.sharding.spec for leaf in placed["b"]] == [P("x", "y")] * 2
    equal(placed, tree)


def test_delete_ends_an_array(session, slices) -> None:
    x = pw.put(V, slice=slices.a4)
    assert not x.is_deleted()
    x.delete()
    x.delete()
    assert x.is_deleted()
    for use in (np.asarray, pw.Array.block_until_ready, pw.Array.is_ready):
        with pytest.raises(pw.errors.BufferDeleted, match=r"float32\[8\] cannot be used: it was deleted"):
            use(x)


def test_virtual_slice_names_its_mesh_and_its_place(session) -> None:
    with pw.virtual_slice((2, 2), ("rows", "columns"), island=1, platform="cpu", name="grid") as s:
        assert s.mesh.shape_tuple == (("rows", 2), ("columns", 2))
        assert (s.island, s.size, s.shape, s.axes) == (1, 4, (2, 2), ("rows", "columns"))
        assert set(s.devices) == {"1.0", "1.1", "1.2", "1.3"}
        labels = [label for d in pw.devices() if d["device"] == "1.0" for label in d["slices"]]
        assert any("grid" in label for label in labels)
    assert not any("grid" in label for d in pw.devices() for label in d["slices"])


def test_slices_spread_over_the_least_loaded_devices(session) -> None:
    with pw.virtual_slice((1,), ("x",), island=1) as s, pw.virtual_slice((1,), ("x",), island=1) as t:
        assert s.devices != t.devices


def test_islands_and_devices_say_what_there_is(session) -> None:
    islands = pw.islands()
    assert [island["island"] for island in islands] == [0, 1]
    assert all(island["platform"] == "cpu" for island in islands)
    devices = pw.devices()
    assert [d["device"] for d in devices] == [f"{h}.{k}" for h in range(2) for k in range(4)]
    assert all(d["up"] and d["island"] == d["host"] for d in devices)


def test_compiled_works_bare_with_arguments_and_as_a_call(session, slices, equal) -> None:
    @pw.compiled
    def bare(v):
        return v + 1

    @pw.compiled(out_specs=P("x"))
    def with_arguments(v):
        return v + 1

    as_call = pw.compiled(lambda v: v + 1, slice=slices.b2, in_specs=P("x"))
    for function in (bare, with_arguments, as_call):
        equal(function(V), V + 1)


def test_program_works_bare_with_arguments_and_as_a_call(session, slices, equal) -> None:
    inc = pw.compiled(lambda v: v + 1, slice=slices.a4)

    @pw.program
    def bare(v):
        return inc(v)

    @pw.program(name="other")
    def named(v):
        return inc(v)

    for function in (bare, named, pw.program(lambda v: inc(v))):
        equal(function(V), V + 1)
    assert named.lower(V).as_text().startswith("program other {")


def test_left_out_slice_is_all_devices_of_one_island_on_axis_x(session, equal) -> None:
    y = pw.compiled(lambda v: v * 3, in_specs=P("x"), out_specs=P("x"))(V)
    assert y.sharding.mesh is y.slice.mesh
    equal(y, V * 3)


def test_left_out_specs_are_replicated(session, slices, equal) -> None:
    y = pw.compiled(lambda v: v * 3, slice=slices.a4)(V)
    assert y.sharding.spec == P()
    equal(y, V * 3)


def test_single_spec_stands_for_all_and_prefixes_for_their_subtrees(session, slices, equal) -> None:
    def f(a, tree):
        return {"sum": a + tree["x"], "pair": (tree["y"][0], tree["y"][1])}

    tree = {"x": V, "y": (V * 2, V * 3)}
    expected = {"sum": V * 2, "pair": (V * 2, V * 3)}
    one = pw.compiled(f, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))(V, tree)
    equal(one, expected)
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(one)} == {P("x")}
    specs = (P("x"), {"x": P(), "y": P("x")})
    outs = {"sum": P("x"), "pair": (None, P("x"))}
    prefixed = pw.compiled(f, slice=slices.a4, in_specs=specs, out_specs=outs)
    result = prefixed(V, tree)
    equal(result, expected)
    assert [leaf.sharding.spec for leaf in result["pair"]] == [P(), P("x")]
    text = prefixed.lower(V, tree).as_text()
    assert text.count(":P(x)") == 5, text


def test_jitted_function_is_taken_as_it_is(session, slices, equal) -> None:
    jitted = jax.jit(lambda v, n: v * n, static_argnums=1)
    equal(pw.compiled(jitted, slice=slices.a4, static_argnums=1)(V, 3), V * 3)
    equal(pw.compiled(jax.jit(jnp.tanh), slice=slices.a4, in_specs=P("x"), out_specs=P("x"))(V), jax.jit(jnp.tanh)(V))


def test_shard_map_inside_a_compiled_function(session, slices, equal) -> None:
    @pw.compiled(slice=slices.a4, in_specs=P("x"), out_specs=P())
    def total(v):
        return jax.shard_map(lambda s: jax.lax.psum(s.sum(), "x"), mesh=slices.a4.mesh, in_specs=P("x"), out_specs=P())(
            v
        )

    equal(total(V), np.float32(28))


def test_lowered_program_prints_graph_plan_and_explanation(session, slices) -> None:
    first = pw.compiled(lambda v: v + 1, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    second = pw.compiled(lambda v: v * 2, slice=slices.b2, in_specs=P("x"), out_specs=P("x"))
    lowered = pw.program(lambda v: second(first(v)), name="two").lower(jax.ShapeDtypeStruct((8,), np.float32))
    text = lowered.as_text()
    assert text.startswith("program two {")
    assert len(lowered.graph.nodes) == 4
    assert "test_public_names.py:" in text
    plan = lowered.as_text("plan")
    assert "island 0 {" in plan
    assert "island 1 {" in plan
    assert "send" in plan
    assert "receive" in plan
    explained = lowered.explain()
    for part in ("devices 0.0, 0.1, 0.2, 0.3", "bytes a device", "gang 0", "transfers and reshards: 1"):
        assert part in explained, explained
    with pytest.raises(pw.errors.UsageError, match="'graph', 'plan' or 'stablehlo', not 'hlo'"):
        lowered.as_text("hlo")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_graph_does_not_grow_with_the_devices(session, size) -> None:
    with pw.virtual_slice((size,), ("x",), island=0) as s:
        f = pw.compiled(lambda v: v + 1, slice=s, in_specs=P("x"), out_specs=P("x"))
        assert len(pw.program(lambda v: f(f(v))).lower(V).graph.nodes) == 4


def test_everything_raises_from_one_tree() -> None:
    kinds = [kind for kind in vars(pw.errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 20
    assert all(issubclass(kind, pw.errors.PathwaysError) for kind in kinds)
