"""Small computations called on each device by itself: which they are, with the bits of one call for all devices."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters.mlir import make_ir_context
from jax.sharding import AbstractMesh, NamedSharding
from jaxlib.mlir import ir

from pathways_ray.client.jaxpr_formulas import formula_of
from pathways_ray.executor.compile import compiled_sections, sections
from pathways_ray.executor.compile.by_device import ByDevice
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.compile.per_device import Steps
from pathways_ray.formulas.calls import FormulaCall
from pathways_ray.ir.graph import Loop, Part, Recipe, Ref
from pathways_ray.ir.plan import Executable
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.jax_types import partition_spec
from tests.drawn import drawn
from tests.unit.client.test_formulas import BITS, FLOATS, ONE, TWO, values
from tests.unit.executor.compile.exports import exported
from tests.unit.helpers import placed, spec

jax.config.update("jax_num_cpu_devices", 8)  # as other tests of this process do, which need more

Function = Callable[..., Any]


class Case:
    """Functions on a slice of devices of one host, all arguments in one layout, as a host compiles them.

    Args:
        layouts: of arguments and of results, each for all or one for each.
        how: whether functions come as formulas, or as exports.
        compiler: that of a host of an island, of which `hosts`, left out all, have the devices of the slice in turn.
    """

    name = b""

    def __init__(
        self,
        *functions: Function,
        given: Sequence[np.ndarray[Any, Any]],
        layouts: Sequence[str] = ("x",),
        results: Sequence[str] = ("x",),
        shape: tuple[int, ...] = (4,),
        order: Sequence[int] = range(8),
        how: str = "export",
        donated: tuple[int, ...] = (),
        compiler: Compiler | None = None,
        hosts: Sequence[int] = (),
    ) -> None:
        devices = jax.local_devices()
        self.compiler = compiler or Compiler(0, devices, {0: devices})
        hosts = hosts or list(self.compiler.island)
        names = [f"{host}.{order[k]}" for host in hosts for k in range(int(np.prod(shape)) // len(hosts))]
        self.slice = placed(1, names, shape)
        mesh = AbstractMesh(shape, self.slice.mesh.axes)
        avals = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in given]
        traced = [jax.jit(lambda *a, f=f: jax.tree.leaves(f(*a)), keep_unused=True) for f in functions]
        self.calls: dict[str, Any] = {}
        for k, one in enumerate(traced):
            with jax.sharding.use_abstract_mesh(mesh):
                formula = formula_of(one.trace(*avals).jaxpr, mesh) if how == "formula" else None
            assert (formula is not None) == (how == "formula")
            self.calls[str(k)] = exported(one, *avals, mesh=mesh) if formula is None else FormulaCall.of(formula)
        made = [
            ArrayType(tuple(a.shape), np.dtype(a.dtype).name) for a in self.calls[str(len(functions) - 1)].out_avals
        ]
        kinds = [ArrayType(value.shape, value.dtype.name) for value in given]
        self.layouts = [Layout(1, spec(text)) for text in (layouts if len(layouts) > 1 else [*layouts] * len(given))]
        self.results = [Layout(1, spec(text)) for text in (results if len(results) > 1 else [*results] * len(made))]
        first = Part("0", "0", tuple(Ref(-1, k) for k in range(len(given))))
        parts = (first, *(Part(str(k), str(k), (Ref(k - 1, 0),)) for k in range(1, len(functions))))
        recipe = Recipe(parts, tuple(Ref(len(parts) - 1, k) for k in range(len(made))))
        self.executable = Executable(
            recipe, 1, tuple(kinds), tuple(self.layouts), tuple(made), tuple(self.results), donated
        )
        self.given = given

    def compiled(self) -> Any:
        return self.compiler._compile(self.executable, self.slice, self.calls, self.name)

    def placed(self, given: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
        mesh = self.compiler.mesh(self.slice)
        where = [NamedSharding(mesh, partition_spec(layout.spec)) for layout in self.layouts]
        return [
            jax.make_array_from_callback(value.shape, one, value.__getitem__)
            for value, one in zip(given, where, strict=True)
        ]

    def as_one(self) -> Any:
        """The same as one call for all devices, as accelerators have it."""
        before, self.compiler.backend.elements_apart = self.compiler.backend.elements_apart, 0
        try:
            return self.compiled()
        finally:
            self.compiler.backend.elements_apart = before

    def check(self, *others: Sequence[np.ndarray[Any, Any]]) -> None:
        """It is called by device, and all shards of what it gives, of these arguments, are those of one call."""
        apart, one = self.compiled(), self.as_one()
        assert isinstance(apart, ByDevice)
        assert not isinstance(one, ByDevice)
        assert not self.compiler.queues(apart, self.slice)
        for given in (self.given, *others):
            *made, end = apart(*self.placed(given))
            *wanted, _ = one(*self.placed(given))
            assert end.is_ready()
            for a, b in zip(made, wanted, strict=True):
                assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
                shards = [[np.asarray(s.data).tobytes() for s in value.addressable_shards] for value in (a, b)]
                assert shards[0] == shards[1]


def per_device(function: Function, takes: Sequence[Any], gives: Any, checked: bool = True) -> Function:
    """A function of each device's shards, as one of whole arrays."""
    return lambda *whole: jax.shard_map(function, in_specs=tuple(takes), out_specs=gives, check_vma=checked)(*whole)


def numbers(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray[Any, Any]:
    """Of all magnitudes, with infinities and NaNs among floats."""
    return np.resize(values(dtype), shape)


def any_bits(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Floats of random bits; numbers next to 0, which are taken for 0, of both signs; or NaNs, each another one, among
    infinities and ones."""
    random = np.random.default_rng(seed)
    found = random.integers(0, 1 << 32, shape, dtype=np.uint32)
    if seed % 3 == 1:
        found &= 0x807FFFFF
    elif seed % 3 == 2:
        some = np.array([found | 0x7FC00000, np.full_like(found, 0x7F800000), np.full_like(found, 0x3F800000)])
        found = np.take_along_axis(some, random.integers(0, 3, (1, *shape)), 0)[0]
    return found.view(np.float32)


X = jax.sharding.PartitionSpec("x")
Y = jax.sharding.PartitionSpec("y")
XY = jax.sharding.PartitionSpec(("x", "y"))
WHOLE = jax.sharding.PartitionSpec()


@pytest.fixture(autouse=True)
def nothing_unexpected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No code is met that is not as JAX writes it."""
    with caplog.at_level(logging.DEBUG, sections.__name__):
        yield
    assert not [record for record in caplog.records if record.name == sections.__name__]


# --- formulas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *BITS])
def test_each_operation_of_a_formula_has_the_bits_of_one_call_for_all_devices(dtype: str) -> None:
    with jax.enable_x64(True):
        one, other = values(dtype), values(dtype)[::-1].copy()
        ones = [each for each, takes in ONE.items() if dtype in takes]
        twos = [each for each, takes in TWO.items() if dtype in takes]
        for k in range(0, len(ones), 6):
            some = ones[k : k + 6]
            Case(lambda v, some=some: [each(v) for each in some], given=[one], how="formula").check()
        for k in range(0, len(twos), 6):
            some = twos[k : k + 6]
            Case(lambda a, b, some=some: [each(a, b) for each in some], given=[one, other], how="formula").check()


def test_formulas_of_several_arrays_of_numbers_and_one_behind_the_other() -> None:
    v, w = numbers((8,)), numbers((8,))[::-1].copy()
    rate = np.float32(0.3)
    step = lambda v, g, rate: (v - rate * g, rate * 2)  # noqa: E731
    Case(step, given=[v, w, np.asarray(rate)], layouts=["x", "x", ""], results=["x", ""], how="formula").check()
    Case(lambda v: v * 1.5 + 2, lambda v: v / 3 - 1, jnp.tanh, given=[v], how="formula").check()
    square = numbers((4, 6))
    Case(lambda v: v * v + v, given=[square], layouts=["x y"], results=["x y"], shape=(2, 2), how="formula").check()
    Case(lambda v: v * v + v, given=[square], layouts=["- x"], results=["- x"], shape=(2, 2), how="formula").check()
    Case(lambda v: v * v + v, given=[square], layouts=[""], results=[""], how="formula").check()
    Case(lambda v: v + 1, given=[np.zeros((0, 4), np.float32)], layouts=["- x"], results=["- x"], how="formula").check()


def test_formulas_of_arrays_and_formulas_of_numbers_in_one_computation() -> None:
    case = Case(lambda v: v * 2, given=[numbers((8,))], how="formula")
    number = Case(lambda v: v * 3, given=[np.asarray(np.float32(2))], layouts=[""], results=[""], how="formula")
    one, other = case.executable, number.executable
    parts = (Part("0", "0", (Ref(-1, 0),)), Part("1", "1", (Ref(-1, 1),)))
    case.executable = Executable(
        Recipe(parts, (Ref(0, 0), Ref(1, 0))), 1, (*one.inputs, *other.inputs),
        (*one.input_layouts, *other.input_layouts), (*one.outputs, *other.outputs),
        (*one.output_layouts, *other.output_layouts), (),
    )  # fmt: skip
    case.calls["1"] = number.calls["0"]
    case.layouts += number.layouts
    case.given = [*case.given, *number.given]
    case.check()


def test_what_devices_exchange_is_one_call() -> None:
    v = numbers((8,))
    for given, made in ((["x"], [""]), ([""], ["x"])):
        case = Case(lambda v: v + 1, given=[v], layouts=given, results=made, how="formula")
        assert not isinstance(case.compiled(), ByDevice)
    two = Case(lambda v, w: v + w, given=[v, v], layouts=["x", ""], results=["x"], how="formula")
    assert not isinstance(two.compiled(), ByDevice)


def test_long_ones_those_that_take_memory_and_those_of_one_device_are_called_as_before() -> None:
    long = Case(lambda v: v * 2 + 1, given=[numbers((4 * 500,))], how="formula")
    assert not isinstance(long.compiled(), ByDevice)
    short = Case(lambda v: v * 2 + 1, given=[numbers((4 * 499,))], how="formula")
    assert isinstance(short.compiled(), ByDevice)
    assert not isinstance(
        Case(lambda v: v + 1, given=[numbers((8,))], donated=(0,), how="formula").compiled(), ByDevice
    )
    assert not isinstance(Case(lambda v: v + 1, given=[numbers((8,))], shape=(1,), how="formula").compiled(), ByDevice)


def test_a_loop_is_one_call() -> None:
    case = Case(lambda v: v + 1, given=[numbers((8,))], how="formula")
    loop = Loop((Part("0", "0", (Ref(-1, 0),)),), 9, (Ref(-1, 0),), ((0, Ref(0, 0)),), (Ref(0, 0),))
    executable = case.executable
    case.executable = Executable(
        Recipe((loop,), (Ref(0, 0),)), 1, executable.inputs, executable.input_layouts, executable.outputs,
        executable.output_layouts, (),
    )  # fmt: skip
    made = case.compiled()
    assert not isinstance(made, ByDevice)
    assert np.array_equal(made(*case.placed(case.given))[0], sum([1] * 9, start=case.given[0]), equal_nan=True)


# --- functions of each device, and their sums -------------------------------------------------------------------------


def test_a_function_of_each_device_without_a_sum() -> None:
    v = numbers((8,))
    Case(per_device(lambda v: (v * 2 + 1, jnp.where(v > 0, v, -v)), [X], (X, X)), given=[v]).check()
    Case(per_device(lambda v, w: v.reshape(()) * w, [X, WHOLE], X), given=[v[:4], v], layouts=["x", ""]).check()


@pytest.mark.parametrize("shape", [(4,), (8,), (2,), (3,), (7,)])
def test_sums_over_devices_have_the_bits_of_xlas(shape: tuple[int, ...]) -> None:
    mean = per_device(lambda v: jax.lax.psum(v, "x") / shape[0] + 1, [X], WHOLE)
    given = [[any_bits((shape[0], 7), seed)] for seed in range(20)]
    Case(mean, given=given[0], results=[""], shape=shape).check(*given)


@pytest.mark.parametrize("count", [1, 16, 17, 29])
def test_long_sums(count: int) -> None:
    total = per_device(lambda v: jax.lax.psum(v, "x"), [X], WHOLE)
    given = [[any_bits((8, count), seed)] for seed in range(3)]
    Case(total, given=given[0], results=[""], shape=(8,)).check(*given)


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64", "uint32", "uint64"])
def test_sums_of_other_types(dtype: str) -> None:
    with jax.enable_x64(True):
        total = per_device(lambda v: jax.lax.psum(v * 2, "x"), [X], WHOLE)
        Case(total, given=[numbers((4, 9), dtype)], results=[""]).check()


def test_a_step_with_several_sums_one_behind_the_other() -> None:
    def step(v: Any, w: Any, rate: Any) -> Any:
        first = jax.lax.psum(v * w + 0.1, "x")
        second = jax.lax.psum(jnp.tanh(w - first), "x")
        return v * rate - second / 3, first, rate * 2 + second

    given = [[any_bits((4, 3), k), numbers((4, 3)), np.full((1, 3), 0.7, np.float32)] for k in range(6)]
    function = per_device(step, [X, X, WHOLE], (X, WHOLE, WHOLE))
    Case(function, given=given[0], layouts=["x", "x", ""], results=["x", "", ""]).check(*given)


def test_two_sums_that_are_added() -> None:
    both = per_device(lambda v, w: jax.lax.psum(v, "x") + jax.lax.psum(w, "x") * 3, [X, X], WHOLE)
    Case(both, given=[numbers((4, 5)), numbers((4, 5))[::-1].copy()], results=[""]).check()


def test_sums_over_one_axis_of_two_and_over_both() -> None:
    v = numbers((4, 6))
    for axes, gives, layout in (("x", Y, "y"), ("y", X, "x"), (("x", "y"), WHOLE, "")):
        total = per_device(lambda v, axes=axes: jax.lax.psum(v * 2, axes) + 1, [XY], gives)
        Case(total, given=[v], layouts=["x+y"], results=[layout], shape=(2, 2)).check()


def test_what_a_call_gives_stays_as_it_is() -> None:
    """The memory in which the values lie that are summed is the same in all calls."""
    sums = per_device(lambda v, w: (jax.lax.psum(v, "x"), jax.lax.psum(w, "x") * v), [X, X], (WHOLE, X))
    given = [[np.full((4, 3), k, np.float32), np.full((4, 3), k + 1, np.float32)] for k in range(6)]
    case = Case(sums, given=given[0], layouts=["x", "x"], results=["", "x"])
    made, one = case.compiled(), case.as_one()
    assert isinstance(made, ByDevice)
    first = [made(*case.placed(each)) for each in given]
    for each, found in zip(given, first, strict=True):
        for a, b in zip(found[:-1], one(*case.placed(each)), strict=False):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_arrays_that_may_yet_be_read_are_not_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A call is not known to be over. 2. The next one is given other arrays, 3. and so is one behind a call that
    fails amid its sections. 4. One behind a call that was over is not."""
    step = per_device(lambda v: jax.lax.psum(jnp.tanh(v - jax.lax.psum(v, "x")), "x"), [X], WHOLE)
    case = Case(step, given=[numbers((4, 3))], results=[""])
    made = case.compiled()
    assert isinstance(made, ByDevice)

    def lies() -> list[int]:
        return [array.unsafe_buffer_pointer() for stacks in made._stacks for array in stacks.filled([bytes(12)] * 4)]

    def call() -> None:
        made(*case.placed([np.ones((4, 3), np.float32)]))

    lay = lies()
    call()
    assert lies() == lay
    is_over = compiled_sections._is_over
    for question in (lambda arrays: False, lambda arrays: 1 // 0):
        monkeypatch.setattr(compiled_sections, "_is_over", question)
        with contextlib.suppress(ZeroDivisionError):
            call()
        monkeypatch.setattr(compiled_sections, "_is_over", is_over)
        assert lies() == lay
        kept = [stacks._arrays for stacks in made._stacks]  # or their memory could be taken again
        call()
        assert set(lies()).isdisjoint(lay), kept
        lay = lies()


def test_where_jax_copies_what_an_array_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_sections, "aligned", lambda size: np.empty(size + 1, np.uint8)[1:])
    total = per_device(lambda v: jax.lax.psum(v, "x") + v, [X], X)
    Case(total, given=[numbers((4, 3))]).check([numbers((4, 3))[::-1].copy()], [any_bits((4, 3), 1)])


def test_without_a_cache_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hosts of one tenant are: other devices get a copy of what was compiled for the first."""
    for question in ("is_cache_used", "is_persistent_cache_enabled"):
        monkeypatch.setattr(f"jax._src.compilation_cache.{question}", lambda *_: False)
    v = numbers((4, 6))
    Case(per_device(lambda v: jax.lax.psum(v * 5, "x") + v, [X], X), given=[v]).check()
    Case(lambda v: v * 5 + 1, given=[v], how="formula").check()


def test_devices_of_a_slice_in_any_order() -> None:
    v = numbers((4, 6))
    step = per_device(lambda v: (jax.lax.psum(v * 2, "x") + v, jax.lax.psum(v, ("x", "y"))), [XY], (XY, WHOLE))
    order = [6, 1, 3, 2]
    Case(step, given=[v], layouts=["x+y"], results=["x+y", ""], shape=(2, 2), order=order).check()
    Case(lambda v: v * 2 + 1, given=[v], order=order, how="formula").check()


def test_functions_that_call_each_other_without_end_are_not_read() -> None:
    """Each calls the next one twice, and does nothing else: 2**60 calls."""
    calls = "".join(
        f"func.func private @f{k}(%v: tensor<f32>) -> tensor<f32> {{ %1 = call @f{k + 1}(%v) : (tensor<f32>) -> "
        f"tensor<f32>\n %2 = call @f{k + 1}(%1) : (tensor<f32>) -> tensor<f32>\n return %2 : tensor<f32> }}\n"
        for k in range(60)
    )
    last = "func.func private @f60(%v: tensor<f32>) -> tensor<f32> { return %v : tensor<f32> }"
    with make_ir_context():
        module = ir.Module.parse(f"module {{ {calls} {last} }}")
        steps = Steps(module)
        block = steps.symbols["f0"].entry_block
        assert steps.read(block, steps.arguments(block)) is None


def test_functions_that_call_functions() -> None:
    inner = jax.jit(lambda v: jnp.where(v > 1, v, v * 3))
    total = per_device(lambda v: inner(jax.lax.psum(inner(v), "x")) - inner(v * 2), [X], X)
    Case(total, given=[numbers((8,))]).check()


@pytest.mark.parametrize(
    ("function", "gives"),
    [
        (lambda v: (u := v * v, jax.lax.psum(u, "x") + u)[1], "x"),
        (lambda v: jax.lax.psum(v * 3 + 1, "x") + (1 + 3 * v), "x"),  # which XLA takes for the same
        (lambda v: jax.lax.pmax(v, "x"), ""),
        (lambda v: jax.lax.psum(jax.lax.pcast(jax.lax.psum(v, "x"), "x", to="varying"), "x"), ""),
        (lambda v: v + jax.lax.axis_index("x"), "x"),
        (lambda v: jax.lax.ppermute(v, "x", [(0, 1), (1, 0)]), "x"),
        (lambda v: jax.lax.cumsum(v), "x"),
        (lambda v: v @ jnp.ones((2, 2), np.float32), "x"),
        (lambda v: jax.lax.fori_loop(0, 3, lambda _, v: v + 1, v), "x"),
        (lambda v: jax.lax.psum(v.astype(jnp.bfloat16), "x").astype(np.float32), ""),
        (lambda v: jnp.sort(v), "x"),
        (lambda v: jax.lax.reduce(v, np.float32(0), lambda a, b: a * 0.5 + b, (0,)).reshape(1) * v, "x"),
        (lambda v: jax.lax.reduce(v, np.float32(0), lambda a, b: jnp.where(a > b, a, b), (0,)).reshape(1) * v, "x"),
        (lambda v: jax.lax.psum(v, "x") * jax.lax.psum(v, "x"), ""),  # of which XLA makes one
        (lambda v: jax.lax.psum(jnp.where(v >= 0, 0.1, 0.1) + 0 * v[:1].astype(np.int32), "x"), ""),
        (lambda v: jax.lax.psum((v.astype(np.int32) * 0).astype(np.float32) + 0.1, "x"), ""),  # a constant
        (lambda v: functools.reduce(lambda s, _: jax.lax.psum(s * v, "x"), range(5), v), ""),
    ],
)
def test_other_functions_of_each_device_are_one_call(function: Function, gives: str) -> None:
    case = Case(per_device(function, [X], X if gives else WHOLE), given=[numbers((8,))], results=[gives])
    made = case.compiled()
    assert not isinstance(made, ByDevice)
    assert len(made(*case.placed(case.given))) == 2


def test_what_stands_around_a_function_of_each_device_keeps_it_one_call() -> None:
    v = numbers((8,))
    inner = per_device(lambda v: jax.lax.psum(v, "x"), [X], WHOLE)
    for function in (lambda v: inner(v + 1), lambda v: inner(v) + 1, lambda v: inner(inner(v).repeat(4))):
        assert not isinstance(Case(function, given=[v], results=[""]).compiled(), ByDevice)
    replicated = Case(per_device(lambda v: v + 1, [X], X), given=[v], layouts=[""], results=["x"])
    assert not isinstance(replicated.compiled(), ByDevice)
    sums = Case(per_device(lambda v: jax.lax.psum(v, "x"), [WHOLE], WHOLE), given=[v], layouts=[""], results=[""])
    assert not isinstance(sums.compiled(), ByDevice)
    long = Case(inner, given=[numbers((4 * 200,))], results=[""])
    assert not isinstance(long.compiled(), ByDevice)
    for function in (
        lambda v: (u := inner(v), u),
        lambda v: per_device(lambda a, b: jax.lax.psum(a * b, "x"), [X, X], WHOLE)(v, v),
    ):
        case = Case(function, given=[v], results=[""])
        made = case.compiled()
        assert not isinstance(made, ByDevice)
        results = made(*case.placed([v]))[:-1]
        assert len({result.addressable_shards[0].data.unsafe_buffer_pointer() for result in results}) == len(results)


def test_results_in_another_order_and_arguments_that_are_not_used() -> None:
    function = per_device(lambda a, b, c: (c + 1, a * 2), [X, X, X], (X, X))
    given = [numbers((8,)) + k for k in range(3)]
    Case(lambda a, b, c: function(c, b, a)[::-1], given=given).check()


def drawn_step(seed: int) -> Function:
    """Some operations on two arrays and a number, and sums of some of what they make."""
    random = np.random.default_rng(seed)
    ones = [jnp.tanh, jnp.exp, lambda v: v * 1.7, lambda v: v / 3, lambda v: v - 0.3, jnp.sqrt, jnp.abs, jnp.negative]
    rows = [
        lambda v: v + v.sum(),
        lambda v: v[:, ::-1],
        lambda v: v - v.max(1, keepdims=True),
        lambda v: v.T.reshape(v.shape),
    ]
    twos = [jnp.add, jnp.multiply, jnp.subtract, jnp.maximum, jnp.divide, lambda a, b: jnp.where(a > b, a, b)]
    plan = [(random.random(), int(random.integers(8)), *random.integers(1 << 30, size=2)) for _ in range(10)]

    def step(v: Any, w: Any, rate: Any) -> Any:
        sums: list[Any] = [v, w, jnp.broadcast_to(rate, v.shape)]
        made = sums[:]
        for kind, which, first, second in plan:
            a, b = made[-1 - first % 3], made[second % len(made)]
            if kind < 0.25:
                sums.append(jax.lax.psum(a, "x"))
                made = sums[:] if second % 8 else [*made, sums[-1]]  # in one of eight, what was made stays
            elif kind < 0.4:
                made.append(rows[which % len(rows)](a))
            else:
                made.append(ones[which](a) if kind < 0.6 else twos[which % len(twos)](a, b))
        return tuple(made[-3:])

    return per_device(step, [X, X, WHOLE], (X, X, X), checked=False)


@pytest.mark.parametrize("seed", range(drawn(60)))
def test_drawn_steps_have_the_bits_of_one_call(seed: int) -> None:
    given = [[any_bits((4, 5), seed + k), numbers((4, 5)) + k, np.full((1, 5), 0.7, np.float32)] for k in range(3)]
    case = Case(drawn_step(seed), given=given[0], layouts=["x", "x", ""], results=["x"])
    if isinstance(case.compiled(), ByDevice):
        case.check(*given)


# --- arguments that are not there -------------------------------------------------------------------------------------


def slow(value: Any, fails: bool = False) -> Any:
    """The value, once each device has worked for a while; or none, since it asked for 64 TiB beside it."""

    def work(v: Any) -> Any:
        busy = jax.lax.fori_loop(0, 60, lambda _, x: x @ x / 600, jnp.full((600, 600), 1 + 0 * v[0]))
        much = jnp.zeros((1 << 22, 1 << 22) if fails else (1, 1), np.float32)
        return v * busy[0, 0], much + busy[0, 0]

    function = jax.jit(jax.shard_map(work, mesh=value.sharding.mesh, in_specs=X, out_specs=(X, X)))
    return function.lower(value).compile()(value)[0]


def test_arguments_that_come_later() -> None:
    """Where devices exchange nothing, and where they sum: the end of the computation is not there before it is."""
    v = np.arange(1, 5, dtype=np.float32)
    total = per_device(lambda v: jax.lax.psum(v, "x") + v, [X], X)
    for function, how, wanted in ((lambda v: v + 1, "formula", v + 1), (total, "export", v + v.sum())):
        case = Case(function, given=[v], how=how)
        made = case.compiled()
        assert isinstance(made, ByDevice)
        (given,) = case.placed([v])
        late = slow(given)
        result, end = made(late)
        end.block_until_ready()
        assert late.is_ready()
        assert np.asarray(result).tolist() == wanted.tolist()


def test_an_argument_that_failed_fails_the_computation() -> None:
    v = np.arange(1, 5, dtype=np.float32)
    total = per_device(lambda v: jax.lax.psum(v, "x") + v, [X], X)
    for function, how in ((lambda v: v + 1, "formula"), (total, "export")):
        case = Case(function, given=[v], how=how)
        made = case.compiled()
        for waits in (False, True):
            (given,) = case.placed([v])
            late = slow(given, fails=True)
            if waits:
                with pytest.raises(jax.errors.JaxRuntimeError):
                    late.block_until_ready()
            for value in made(late):  # the end of the computation fails with its result
                with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
                    value.block_until_ready()
        (given,) = case.placed([v])
        assert made(given)[0].is_ready()


def test_what_is_told_of_such_a_computation() -> None:
    total = per_device(lambda v: jax.lax.psum(v, "x") + v, [X], X)
    for function, how, text in ((lambda v: v + 1, "formula", "add"), (total, "export", "all-reduce")):
        made = Case(function, given=[numbers((8,))], how=how).compiled()
        assert isinstance(made, ByDevice)
        assert text in made.as_text()
        assert made.cost_analysis()["flops"] > 0
        assert made.memory_analysis().output_size_in_bytes > 0
