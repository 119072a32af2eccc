"""What is traced and exported again, and what is not, as arguments come from one slice and from another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray import compat
from pathways_ray.client.codes import jax_settings, settings_of_calls
from pathways_ray.client.operation import Operation
from pathways_ray.client.registered import type_of
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.ir.graph import Compute, Part, Recipe, Ref
from pathways_ray.ir.plan import Executable
from pathways_ray.ir.types import ArrayType, Layout
from tests.unit.client import local
from tests.unit.client.local import LocalSession
from tests.unit.helpers import placed, spec

V = np.arange(8, dtype=np.float32)
HIGH = np.arange(8, dtype=np.int64) << 40


def test_the_type_of_an_array_goes_by_the_settings_of_the_moment() -> None:
    wide = np.ones(2)
    before = type_of(wide)
    with jax.enable_x64(True):
        assert type_of(wide).array == ArrayType((2,), "float64")
    assert type_of(wide) is before
    assert before.array == ArrayType((2,), "float32")
    assert type_of(wide.astype(">f8")) is before, "in the order of bytes of this machine"


WIDE_CONSTANTS: dict[str, Callable[[Any], Any]] = {
    "returned": lambda x: (x + 1, jnp.full(8, 1e300, jnp.float64), jnp.arange(3), jnp.asarray(HIGH)),
    "used": lambda x: x * jnp.full(8, 1e300, jnp.float64),
    "used by one that gives 32 bits": lambda x: (((jnp.arange(8) << 33) + x) >> 33).astype(jnp.float32),
    "inside": lambda x: x + jax.jit(lambda: ((jnp.arange(8) << 40) >> 39).astype(jnp.float32))(),
    "captured": lambda x: x + HIGH,
    "large": lambda x: x[0] + jnp.arange(1 << 12) * 2**40,
}


@pytest.mark.parametrize("function", WIDE_CONSTANTS.values(), ids=WIDE_CONSTANTS)
def test_constants_of_64_bits_keep_them_where_they_are_made_under_the_setting(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch, function: Callable[[Any], Any]
) -> None:
    """1. A program makes constants under `jax.enable_x64`, and runs outside of it, on hosts, which have it.
    2. Its results are those of `jax.jit`, and their types those that it says ahead.
    """
    run = local._run

    def run_wide(*given: Any) -> list[Any]:
        with jax.enable_x64(True):
            return run(*given)

    def wide(x: Any) -> Any:
        with jax.enable_x64(True):
            return function(x)

    monkeypatch.setattr(local, "_run", run_wide)
    x = pw.put(V.astype(np.int32), session.virtual_slice((1,), ("x",)))
    program = pw.program(wide)
    expected = jax.tree.leaves(jax.jit(wide)(V.astype(np.int32)))
    for _ in range(2):
        found = jax.tree.leaves(program(x))
        assert [one.dtype for one in found] == [one.dtype for one in expected]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert [one.dtype for one in jax.tree.leaves(program.eval_shape(x))] == [one.dtype for one in expected]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operations that are exported."""
    names: list[str] = []

    export = Operation.export

    def counted(self: Operation, *rest: Any) -> Any:
        names.append(self.name)
        return export(self, *rest)

    monkeypatch.setattr(Operation, "export", counted)
    return names


def test_arguments_on_another_slice_of_the_layout_are_neither_traced_nor_exported_again(session, exported) -> None:
    """1. A program is traced for an array on one of four slices.
    2. Arrays on the others run on their own slices, and nothing is traced nor exported for them.
    3. Another layout is not traced, but exported: the code says how arrays lie.
    4. Another shape is traced.
    """
    slices = [session.virtual_slice((2,), ("x",)) for _ in range(4)]
    traced: list[tuple[int, ...]] = []

    @pw.program(on_retrace="raise")
    def winner(v: Any, scale: Any) -> Any:
        traced.append(v.shape)
        return jnp.tanh(v * scale), v.sum()

    scale = np.float32(0.5)
    first = winner(pw.put(V, slices[0], P("x")), scale)
    assert traced == [(8,)]
    before = len(exported)
    assert before
    for where in slices[1:]:
        value, total = winner(pw.put(V, where, P("x")), scale)
        assert (value.slice, total.slice) == (where, where)
        assert np.asarray(value).tobytes() == np.asarray(first[0]).tobytes()
        assert float(total) == V.sum()
    assert (traced, len(exported)) == ([(8,)], before)
    value, _ = winner(pw.put(V, slices[2], P()), scale)
    assert (value.sharding.spec, traced, len(exported)) == (P(), [(8,)], 2 * before)
    with pytest.raises(pw.errors.TraceError, match="winner was traced again"):
        winner(pw.put(V[:4], slices[0], P("x")), scale)


def test_a_function_whose_slices_and_arrays_are_gone_is_traced_again(session) -> None:
    """It takes others now, as a program does that goes on after a loss."""
    slices = [session.virtual_slice((2,), ("x",)) for _ in range(3)]
    used: dict[str, Any] = {}

    def uses(where: Any, number: int) -> None:
        used["step"] = pw.compiled(lambda v: v + number, slice=where, in_specs=P("x"), out_specs=P("x"))
        used["w"] = pw.put(V * number, where, P("x"))

    f = pw.program(lambda v: used["step"](v) * used["w"])
    for number, where in enumerate(slices):
        uses(where, number)
        found = np.asarray(f(pw.put(V, where, P("x"))))
        np.testing.assert_array_equal(found, (V + number) * (V * number))
        if number == 0:
            used["w"].delete()
        else:
            where.released = True


@pytest.mark.parametrize(
    "use",
    [
        lambda v, there: jax.device_put(v, there) + 1,
        lambda v, there: jax.lax.with_sharding_constraint(v, there) + 1,
        lambda v, there: jax.shard_map(lambda u: u + 1, mesh=there.mesh, in_specs=P("x"), out_specs=P("x"))(v),
    ],
)
def test_a_function_that_puts_values_on_a_slice_that_is_gone_is_traced_again(session, use) -> None:
    slices = [session.virtual_slice((2,), ("x",)) for _ in range(2)]
    there: list[Any] = []
    f = pw.program(lambda v: use(v, NamedSharding(there[-1].mesh, P("x"))))
    for where in slices:
        there.append(where)
        found = f(pw.put(V, session.virtual_slice((1,), ("y",))))
        assert found.slice is where
        np.testing.assert_array_equal(np.asarray(found), V + 1)
        where.released = True


def test_settings_that_change_random_numbers_are_not_those_of_an_earlier_trace(session) -> None:
    def drawn(seed: Any) -> Any:
        return jax.random.uniform(jax.random.key(seed), (8,))

    f = pw.program(drawn)
    found = []
    for setting in (
        jax.threefry_partitionable(True),
        jax.threefry_partitionable(False),
        jax.default_prng_impl("rbg"),
    ):
        with setting:
            found.append(np.asarray(f(np.int32(3))))
            np.testing.assert_array_equal(found[-1], drawn(np.int32(3)))
    assert len({one.tobytes() for one in found}) == 3


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.enable_x64(True),
        lambda: jax.default_matmul_precision("float32"),
        lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),  # type: ignore[attr-defined]
        lambda: jax.default_prng_impl("rbg"),
        lambda: jax.debug_nans(True),
        lambda: jax.debug_infs(True),
        lambda: jax.numpy_dtype_promotion("strict"),
    ],
)
def test_a_call_looks_for_its_program_by_all_settings_that_a_trace_depends_on(setting: Callable[[], Any]) -> None:
    before = jax_settings(), settings_of_calls()
    with setting():
        assert jax_settings() != before[0]
        assert settings_of_calls() != before[1]
    assert (jax_settings(), settings_of_calls()) == before


def set_to(name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    """Has a setting of JAX be another one meanwhile."""

    @contextlib.contextmanager
    def meanwhile() -> Iterator[None]:
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        try:
            yield
        finally:
            jax.config.update(name, before)

    return meanwhile()


@pytest.mark.parametrize("make", [pw.program, pw.compiled])
def test_what_another_setting_draws_or_refuses_is_not_that_of_an_earlier_trace(session, make) -> None:
    """JAX traces again for each of them."""

    def drawn(v: Any) -> Any:
        return v + jax.random.uniform(jax.random.key(3), (8,))

    draw, mixed, ranks = make(drawn), make(lambda v: v + np.arange(8)), make(lambda v: v + np.ones((2, 8), "float32"))
    for offset in (0, 5, 0):
        with set_to("jax_random_seed_offset", offset):
            np.testing.assert_array_equal(np.asarray(draw(V)), jax.jit(lambda v: drawn(v))(V))
    for f, setting, word in (
        (mixed, jax.numpy_dtype_promotion("strict"), "promotion"),
        (ranks, jax.numpy_rank_promotion("raise"), "rank"),
    ):
        f(V)
        with setting, pytest.raises(pw.errors.TraceError, match=word):
            f(V)
        f(V)


def test_operations_outside_of_programs_are_exported_once_for_a_layout(session, exported) -> None:
    slices = [session.virtual_slice((2,), ("x",)) for _ in range(3)]
    step = jax.jit(lambda v: jnp.sin(v) + 1)
    for where in slices:
        v = pw.put(V, where, P("x"))
        for found, wanted in ((step(v), np.sin(V) + 1), (v * 3, V * 3)):
            assert found.slice is where
            np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-6)
    assert len(exported) == 2


def test_calls_of_one_jitted_function_keep_their_own_layouts(session, exported) -> None:
    """Two calls in one program share a jaxpr, and differ in what they ask for."""
    where = session.virtual_slice((2,), ("x",))
    double = jax.jit(lambda v: v * 2)
    split = jax.jit(double, out_shardings=jax.NamedSharding(where.mesh, P("x")))
    whole = jax.jit(double, out_shardings=jax.NamedSharding(where.mesh, P()))
    f = pw.program(lambda v: (split(v), whole(v), split(v)))
    for _ in range(2):
        found = f(pw.put(V, where, P("x")))
        assert [one.sharding.spec for one in found] == [P("x"), P(), P("x")]


def test_exports_of_a_thread_share_an_mlir_context_for_a_while() -> None:
    """The code is that of contexts of their own. Another thread has another one, and one is used for some exports."""

    def made(share: bool) -> list[bytes]:
        with compat.shared_mlir_context(0) if share else contextlib.nullcontext():
            return [
                bytes(jax.export.export(jax.jit(lambda v, k=k: v * k + 1), platforms=("cpu",))(V).serialize())
                for k in range(4)
            ]

    blobs = []
    for share in (False, True, True, False):  # from one line, which the code names
        blobs.append(made(share))
        if share:
            shared, uses = compat._contexts.context, compat._contexts.uses
    assert blobs[1:] == blobs[:1] * 3
    assert compat._contexts.uses == uses
    with ThreadPoolExecutor(1) as pool:
        pool.submit(made, True).result()
    assert compat._contexts.uses == uses
    compat._contexts.uses = compat.MAX_CONTEXT_USES
    made(True)
    assert compat._contexts.context is not shared


@pytest.mark.parametrize(("bytes_", "shares"), [(32, True), (compat.MAX_SHARED_BYTES + 4, False)])
def test_functions_with_large_constants_share_no_context(session, bytes_: int, shares: bool) -> None:
    """It would keep them as long as its thread lives, which a host's threads for compiling do as long as the host."""
    where = session.virtual_slice((1,), ("x",))
    table = np.arange(bytes_ // 4, dtype=np.float32)
    made = pw.compiled(lambda v: v + jnp.asarray(table), slice=where)
    before = compat._contexts.context, compat._contexts.uses
    ((digest, blob),) = pw.program(lambda v: made(v)).prepared((table,))._built.functions.items()
    assert ((compat._contexts.context, compat._contexts.uses) != before) is shares

    devices, kind, layout = jax.local_devices()[:1], ArrayType(table.shape, "float32"), Layout(1, spec(""))
    recipe = Recipe((Part("add", digest, (Ref(-1, 0),)),), (Ref(0, 0),))
    compiler = Compiler(0, devices, {0: devices})
    compiler.sandbox._known[True, digest] = "", 1  # as if it had read it
    before = compat._contexts.context, compat._contexts.uses
    node = Executable(recipe, 1, (kind,), (layout,), (kind,), (layout,), ())
    assert compiler.executable(node, placed(1, ["0.0"]), {digest: blob}, trusted=True) is not None
    assert ((compat._contexts.context, compat._contexts.uses) != before) is shares


def test_a_further_trace_for_a_python_number_says_that_its_type_is_weak(session) -> None:
    where = session.virtual_slice((1,), ("x",))
    scaled = pw.compiled(lambda v, c: v * c, slice=where, on_retrace="raise")
    scaled(V, np.float32(2))
    with pytest.raises(pw.errors.TraceError, match=r"leaf 1 was float32\[\] on client, now float32\[\] \(weak type\)"):
        scaled(V, 2.0)


def test_a_computed_value_that_comes_twice_is_two_arrays(session: Any) -> None:
    """They were one: donating or deleting either took both."""
    a, b = session.virtual_slice((4,), ("x",)), session.virtual_slice((2,), ("x",))
    init = pw.compiled(lambda v: v + 1, slice=a, in_specs=P("x"), out_specs=P("x"))
    start = pw.program(
        lambda v: (lambda p: (p, p, {"there": pw.reshard(p, b), "again": [p, pw.reshard(p, b)]}))(init(v))
    )
    v = np.arange(8, dtype=np.float32)
    params, mean, rest = start(v)
    step = pw.compiled(lambda p, e: (p * 2, e - 1), slice=a, donate_argnums=(0, 1))
    np.testing.assert_array_equal(step(params, mean), [(v + 1) * 2, v])
    rest["there"].delete()
    for one, where in zip(rest["again"], (a, b), strict=True):
        assert one.slice is where
        np.testing.assert_array_equal(one, v + 1)
    keys = pw.program(lambda key: (lambda k: (k, k))(jax.random.split(key)))(pw.put(jax.random.key(0), a))
    assert keys[1].dtype == keys[0].dtype
    assert keys[1].sharding == keys[0].sharding


def test_a_returned_constant_is_an_array_of_each_call(session: Any) -> None:
    """It was one for all calls: donating or deleting the result of one took that of another."""
    zeros = np.zeros(3, np.float32)
    init = pw.program(lambda: {"m": jnp.zeros(3), "n": zeros, "step": 0, "key": jax.random.key(5)})
    one = init()
    zeros += 1
    two, three = init(), init()
    jax.tree.map(lambda v: v.delete(), two)
    pw.compiled(lambda m, n: m + n, slice=one["m"].slice, donate_argnums=(0, 1))(one["m"], one["n"])
    assert one["m"].is_deleted()
    assert one["n"].is_deleted()
    for made in (three, init()):
        np.testing.assert_array_equal([made["m"], made["n"]], np.zeros((2, 3)))
        assert (int(made["step"]), made["step"].weak_type) == (0, True)
        np.testing.assert_array_equal(jax.random.key_data(made["key"]), jax.random.key_data(jax.random.key(5)))
    np.testing.assert_array_equal(jax.random.key_data(one["key"]), jax.random.key_data(jax.random.key(5)))


def test_a_returned_constant_is_uploaded_once(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are copies that are made with the launch: an upload for each call would take longer than it."""
    big = np.arange(1 << 16, dtype=np.float32)
    f = pw.program(lambda v: (v + 1, 0.5, big))
    x = pw.put(np.zeros(4, np.float32))
    f(x)
    monkeypatch.setattr(session, "put", Mock(side_effect=AssertionError("it is uploaded again")))
    one, two = f(x), f(x)
    assert two[2]._buffer is not one[2]._buffer
    assert [float(each[1]) for each in (one, two)] == [0.5, 0.5]
    np.testing.assert_array_equal(np.asarray(two[2]), big)


@pytest.mark.parametrize("by", ["pw.reshard", "jax.device_put"])
@pytest.mark.parametrize("is_key", [False, True])
def test_a_constant_that_a_program_moves_is_uploaded_once(
    session: Any, monkeypatch: pytest.MonkeyPatch, by: str, is_key: bool
) -> None:
    """A program keeps it for its calls, wherever it lies: it is not given away, and what is returned is a copy."""
    a, b = session.virtual_slice((4,), ("x",)), session.virtual_slice((2, 2), ("x", "y"))
    held = jax.random.split(jax.random.key(5), 1 << 14) if is_key else np.arange(1 << 14, dtype=np.float32)

    def moved(spec: P) -> Any:
        if by == "pw.reshard":
            return pw.reshard(held, b, spec)
        return jax.device_put(held, NamedSharding(b.mesh, spec))

    add = pw.compiled(lambda v: v + 1, slice=a)
    give = pw.compiled(lambda v: v[::-1], slice=b, in_specs=P("y"), out_specs=P("y"), donate_argnums=0)
    f = pw.program(lambda v: (add(v), give(moved(P("y"))), moved(P("x"))))
    x = pw.put(V, a)
    f(x)
    monkeypatch.setattr(session, "put", Mock(side_effect=AssertionError("it is uploaded again")))
    one, two, three = f(x), f(x), f(x)
    assert session.launched[-1].donated_arguments == ()
    one[2].delete()
    pw.compiled(lambda v: v[::-1], slice=b, in_specs=P("x"), donate_argnums=0)(two[2])
    data = jax.random.key_data if is_key else np.asarray
    np.testing.assert_array_equal(data(three[1]), data(held)[::-1])
    np.testing.assert_array_equal(data(three[2]), data(held))
    assert [str(array.sharding.spec) for array in three[1:]] == [str(P("y")), str(P("x"))]


def test_copies_of_returned_constants_are_exported_once_and_together(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As operations are: once for all slices of a layout, and with one code for those of one program."""
    copied = Mock(wraps=jnp.copy)
    monkeypatch.setattr(jnp, "copy", copied)
    constants = [np.arange(k, dtype=np.float32) for k in (4, 8, 12)]
    add = jax.jit(lambda v: v + 1)
    f = pw.program(lambda v: [add(v), *constants, *constants])
    for _ in range(2):
        x = pw.put(V, session.virtual_slice((2,), ("x",)), P("x"))
        built = f.prepared((x,))._built
        copies = [node for node in built.graph.nodes if isinstance(node, Compute) and node.name == "copy"]
        parts = [built.graph.recipes[node.recipe].parts[0] for node in copies]
        assert (len(parts), len({part.function for part in parts}), len({part.digest for part in parts})) == (6, 3, 1)
        assert copied.call_count == len(constants)
    for one, other in zip(f(x)[1:], constants * 2, strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)
