"""Branches and loops of a program: their graphs, what these compute, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import graph_builder, jaxprs
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.stages import Lowered
from pathways_ray.errors import GraphError, TraceError, UsageError
from pathways_ray.ir.graph import Argument, Compute, Repeat
from tests.unit.control_runs import Nowhere, compare, opened, run, run_script


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Nowhere:
    return opened(monkeypatch)


@pytest.fixture
def a(session: Nowhere) -> VirtualSlice:
    return session.slice(1, 1)


@pytest.fixture
def b(session: Nowhere) -> VirtualSlice:
    return session.slice(1, 2)


def names(lowered: Lowered) -> list[str]:
    return [node.name for node in lowered.graph.nodes if isinstance(node, Compute)]


def double(where: VirtualSlice, spec: Any = P()) -> Any:
    def double(v: Any) -> Any:
        return v * 2

    return pw.compiled(double, slice=where, in_specs=spec, out_specs=spec)


def total(where: VirtualSlice) -> Any:
    def total(v: Any) -> Any:
        return v.sum()

    return pw.compiled(total, slice=where)


V = np.arange(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("slices", "depth", "seeds"),
    [(1, 3, range(6)), pytest.param(2, 2, (1, 4, 25), marks=pytest.mark.slow), (3, 2, (2, 5))],
)
def test_random_programs_compute_what_jax_computes(
    session: Nowhere, slices: int, depth: int, seeds: Sequence[int]
) -> None:
    for seed in seeds:
        compare(session, seed, slices, depth)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("slices", [1, 2, 3])
def test_many_random_programs_compute_what_jax_computes(session: Nowhere, slices: int) -> None:
    for seed in range(1000, 1150):
        compare(session, seed, slices, depth=2 + (slices == 1))


def test_a_loop_on_one_slice_is_one_computation(a: VirtualSlice) -> None:
    f = double(a)
    lowered = pw.program(lambda v: pw.while_loop(lambda c: c.sum() < 100, lambda c: f(f(c)), v)).lower(V)
    assert names(lowered) == ["while(double)"]
    np.testing.assert_array_equal(run(lowered, V)[0], V * 64)


def test_a_branch_on_one_slice_is_one_computation_wherever_its_predicate_lies(a: VirtualSlice, b: VirtualSlice) -> None:
    f, t = double(a), total(b)
    lowered = pw.program(lambda v: pw.cond(t(v) > 3, f, lambda x: x + 1, v)).lower(V)
    assert names(lowered)[-1] == "cond(double)"
    last = lowered.graph.nodes[-2]
    assert isinstance(last, Compute)
    assert last.slice == a.id
    np.testing.assert_array_equal(run(lowered, V)[0], V * 2)
    np.testing.assert_array_equal(run(lowered, V * 0)[0], V * 0 + 1)


def test_an_operand_may_lie_on_a_slice_that_nothing_has_used_before(a: VirtualSlice, b: VirtualSlice) -> None:
    t, f, g = total(a), double(a), double(b)
    program = pw.program(lambda v, w: pw.cond(t(v) > 3, g, lambda w: g(f(w)), w))
    lowered = program.lower(V, pw.like(V, b, P()))
    np.testing.assert_array_equal(run(lowered, V, V)[0], V * 2)
    np.testing.assert_array_equal(run(lowered, V * 0, V)[0], V * 4)


def test_the_trip_count_may_lie_on_another_slice(a: VirtualSlice, b: VirtualSlice) -> None:
    f, t = double(a), total(b)
    program = pw.program(lambda n, v: pw.fori_loop(0, t(n), lambda i, c: f(c) + i, v))
    n = np.ones(3, np.int32)
    np.testing.assert_array_equal(run(program.lower(n, V), n, V)[0], ((V * 2) * 2 + 1) * 2 + 2)


@pytest.mark.parametrize("unroll", [None, 1, 2, 3, True])
def test_rounds_may_be_unrolled(a: VirtualSlice, b: VirtualSlice, unroll: int | bool | None) -> None:
    f, g = double(a), double(b)
    program = pw.program(lambda v: pw.fori_loop(0, 5, lambda i, c: g(f(c)) + i, v, unroll=unroll))
    wanted = jax.lax.fori_loop(0, 5, lambda i, c: c * 4 + i, V)
    np.testing.assert_array_equal(run(program.lower(V), V)[0], wanted)


def test_rounds_without_a_known_number_cannot_be_unrolled(a: VirtualSlice) -> None:
    f, t = double(a), total(a)
    with pytest.raises(GraphError, match=r"unroll.*\(pw.fori_loop at test_control.py:\d+\)"):
        pw.program(lambda v, n: pw.fori_loop(0, t(n), lambda i, c: f(c), v, unroll=2)).lower(V, np.ones(2, np.int32))


def test_the_only_operand_may_have_its_name(a: VirtualSlice) -> None:
    f = double(a)
    chosen = pw.program(lambda v: pw.cond(v.sum() > 0, f, lambda x: x, operand=v))
    np.testing.assert_array_equal(run(chosen.lower(V), V)[0], V * 2)
    numbered = pw.program(lambda v: pw.switch(1, [f, lambda x: x], operand=f(v)))
    np.testing.assert_array_equal(run(numbered.lower(V), V)[0], V * 2)
    with pytest.raises(TraceError, match="takes operand= or positional operands, and was given 1 of these"):
        pw.program(lambda v: pw.cond(True, f, f, v, operand=v)).lower(V)


def test_layouts_come_from_the_compiled_functions(session: Nowhere) -> None:
    wide = session.slice(4, 3)
    f = double(wide, P("x"))
    program = pw.program(lambda v: pw.cond(True, f, lambda x: x, pw.fori_loop(0, 3, lambda i, c: f(c), v)))
    graph = program.lower(np.arange(8.0)).graph
    first = graph.nodes[0]
    assert isinstance(first, Argument)
    assert first.layout.spec == (("x",),)
    assert graph.layout_of(graph.result.inputs[0]).spec == (("x",),)


def test_arrays_and_numbers_may_be_operands_and_results(a: VirtualSlice) -> None:
    f = double(a)

    def fun(v: Any) -> Any:
        return pw.cond(v.sum() > 0, lambda: (f(v), 1), lambda: (v, 2))

    found = run(pw.program(fun).lower(V), V)
    np.testing.assert_array_equal(found[0], V * 2)
    assert found[1] == 1


def test_an_operation_without_calls_is_one_node(a: VirtualSlice) -> None:
    f = double(a)
    lowered = pw.program(lambda v: pw.cond(True, lambda x: x * 3, lambda x: x, f(v))).lower(V)
    assert names(lowered)[-1] == "cond"
    np.testing.assert_array_equal(run(lowered, V)[0], V * 6)


def test_keys_may_be_carried(a: VirtualSlice) -> None:
    f = double(a)

    def fun(v: Any) -> Any:
        def step(carry: Any) -> Any:
            key, x = carry
            key, sub = jax.random.split(key)
            return key, f(x) + jax.random.uniform(sub, (4,))

        start = (jax.random.key(3), v)
        return pw.fori_loop(0, 3, lambda i, c: step(c), start)[1]

    def plain(v: Any) -> Any:
        def step(carry: Any) -> Any:
            key, x = carry
            key, sub = jax.random.split(key)
            return key, x * 2 + jax.random.uniform(sub, (4,))

        return jax.lax.fori_loop(0, 3, lambda i, c: step(c), (jax.random.key(3), v))[1]

    np.testing.assert_allclose(run(pw.program(fun).lower(V), V)[0], jax.jit(plain)(V), rtol=1e-6)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda: pw.cond(True, abs, abs, 1), "if float"),
        (lambda: pw.switch(0, [abs], 1), "branches"),
        (lambda: pw.while_loop(bool, abs, 1), "while float"),
        (lambda: pw.fori_loop(0, 1, lambda i, c: c, 1), "range"),
        (lambda: pw.scan(lambda c, x: (c, x), 1, [1]), "loop over launches"),
    ],
)
def test_outside_of_a_program_it_says_what_to_write(call: Any, instead: str) -> None:
    with pytest.raises(UsageError, match=f"outside of a program.*{instead}"):
        call()


def test_branches_of_different_types_are_refused_with_both_lines(a: VirtualSlice) -> None:
    f, t = double(a), total(a)

    def yes(v: Any) -> Any:
        return f(v)

    def no(v: Any) -> Any:
        return t(v)

    with pytest.raises(GraphError, match=r"(?s)yes at .*test_control.py:\d+.*no at .*test_control.py:\d+"):
        pw.program(lambda v: pw.cond(True, yes, no, v)).lower(V)


def test_branches_of_different_layouts_are_refused_with_both_lines(session: Nowhere) -> None:
    wide = session.slice(4, 3)
    cut, whole = double(wide, P("x")), double(wide)
    with pytest.raises(GraphError, match=r"different layouts: .*test_control.py:\d+.*and .*test_control.py:\d+"):
        pw.program(lambda v: pw.cond(True, lambda x: cut(x), lambda x: whole(x), v)).lower(np.arange(8.0))


def test_a_carry_that_changes_its_layout_is_refused_with_its_line(session: Nowhere) -> None:
    wide = session.slice(4, 3)
    cut, whole = double(wide, P("x")), double(wide)
    with pytest.raises(GraphError, match=r"changes the layout of carry 0: .*P\(\).*P\(x\) .*made at test_control.py"):
        pw.program(lambda v: pw.fori_loop(0, 3, lambda i, c: cut(c), whole(v))).lower(np.arange(8.0))


def test_a_scan_over_two_slices_that_changes_a_layout_is_refused_with_the_line_of_its_body(session: Nowhere) -> None:
    """Its rounds pick the rows that it takes, in a function of the runtime."""
    here, there = double(session.slice(4, 3)), double(session.slice(4, 4))

    def body(c: Any, row: Any) -> Any:
        return there(here(c)), row.sum()

    with pytest.raises(GraphError, match=r"leaves it as slice4:P\(\) \(.*body at \S*test_control.py:\d+"):
        pw.program(lambda v: pw.scan(body, here(v), np.ones((3, 2)))).lower(np.arange(8.0))


def test_a_scan_says_the_number_that_a_carry_has_for_the_user(session: Nowhere) -> None:
    """It carries the number of the round as well, where it takes rows, and leaves out what nobody uses."""
    here, there = double(session.slice(4, 3)), double(session.slice(4, 4))

    def body(c: Any, row: Any) -> Any:
        return (c[0] + 1, c[1] * 2, there(c[2])), here(c[2])

    for rows in (np.ones((3, 8)), None):
        with pytest.raises(GraphError, match=r"changes the layout of carry 2: it takes it as slice3:P\(\)"):
            pw.program(lambda v, rows=rows: pw.scan(body, (0, 1.0, here(v)), rows, 3)[0][2]).lower(np.arange(8.0))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("upper", [3, np.int32(3)])
def test_a_fori_loop_says_the_number_that_a_carry_has_for_the_user(session: Nowhere, several: bool, upper: Any) -> None:
    """JAX carries the count, and the upper bound where the program gets it, before what the user does."""
    here, there = double(session.slice(4, 3)), double(session.slice(4, 4))

    def program(v: Any, n: Any) -> Any:
        bound = n if isinstance(upper, np.int32) else upper
        first = here(v) if several else there(v)

        def body(_: Any, c: Any) -> Any:
            return c[0] + 1, there(here(c[1])) if several else here(c[1])

        return pw.fori_loop(0, bound, body, (0, first))[1]

    with pytest.raises(GraphError, match=r"changes the layout of carry 1: it takes it as slice"):
        pw.program(program).lower(np.arange(8.0), np.int32(3))


def test_what_a_program_uses_is_looked_for_once(
    monkeypatch: pytest.MonkeyPatch, a: VirtualSlice, b: VirtualSlice
) -> None:
    """Each branch and loop looked through the whole of the program: the time grew with the square of its size."""
    f, g = double(a), double(b)
    looked: list[int] = []
    by_itself = jaxprs.used_equations

    def counted(jaxpr: Any, *wanted: Any) -> Any:
        looked.append(len(jaxpr.eqns))
        return by_itself(jaxpr, *wanted)

    for module in (jaxprs, graph_builder):
        monkeypatch.setattr(module, "used_equations", counted)

    def program(v: Any) -> Any:
        for _ in range(5):
            v = pw.cond(v[0] > 0, lambda v: g(f(v)), lambda v: g(f(f(v))), v)
        return v

    pw.program(program).lower(V)
    assert looked.count(max(looked)) == 1


def test_a_loop_leaves_out_what_nobody_uses(a: VirtualSlice, b: VirtualSlice) -> None:
    """The count of a `fori_loop` would be a computation in each round."""
    f, g = double(a), double(b)
    counted = pw.program(lambda v: pw.fori_loop(0, 3, lambda i, c: f(g(c)), v))
    stacked = pw.program(lambda v: pw.scan(lambda c, _: (f(g(c)), c), v, None, length=3)[0])
    while_ = pw.program(lambda v: pw.while_loop(lambda c: c[1] < 20, lambda c: (c[0] + 1, f(g(c[1]))), (0, v[1]))[1])
    for program, wanted in ((counted, V * 64), (stacked, V * 64), (while_, V[1] * 64)):
        lowered = program.lower(V)
        (loop,) = (node for node in lowered.graph.nodes if isinstance(node, Repeat))
        assert len(loop.inputs) == 1
        assert len([node for node in loop.body.nodes if isinstance(node, Compute)]) == 2
        np.testing.assert_array_equal(run(lowered, V)[0], wanted)


LINES = (
    r"\(test_control.py:\d+\): the body changes the layout of carry 0: it takes it as {} "
    r"\(made at test_control.py:\d+\), and leaves it as {} \(.*at .*test_control.py:\d+"
)


def changes(body: Any, first: Any) -> Any:
    """Lowers a loop on what `first` makes of an argument."""
    return pw.program(lambda v: pw.while_loop(lambda c: c.sum() < 3, lambda c: body(c), first(v))).lower(np.arange(8.0))


@pytest.mark.parametrize(
    ("body", "begins", "ends"),
    [
        ("other slice", r"slice3:P\(x\)", r"slice4:P\(x\)"),
        ("an operation on another slice", r"slice3:P\(x\)", r"slice4:P\(x\)"),
        ("reshard", r"slice3:P\(x\)", r"slice4:P\(\)"),
        ("out_shardings", r"slice3:P\(x\)", r"slice3:P\(\)"),
        ("in a branch", r"slice3:P\(x\)", r"slice3:P\(\)"),
    ],
)
def test_a_body_that_changes_a_layout_is_refused_with_both_lines(
    session: Nowhere, body: str, begins: str, ends: str
) -> None:
    here, there = session.slice(4, 3), session.slice(4, 4)
    f, g, whole = double(here, P("x")), double(there, P("x")), double(here)
    jitted = pw.jit(lambda v: v * 2, slice=here, out_shardings=P())
    bodies = {
        "other slice": g,
        "an operation on another slice": lambda c: g(f(c)) - c,
        "reshard": lambda c: pw.reshard(f(c), there),
        "out_shardings": lambda c: jitted(c),
        "in a branch": lambda c: pw.cond(c.sum() > 0, whole, lambda v: whole(v + 1), c),
    }
    with pytest.raises(GraphError, match=LINES.format(begins, ends)):
        changes(bodies[body], f)


def test_what_moves_back_or_is_left_open_keeps_its_layout(session: Nowhere) -> None:
    here, there = session.slice(4, 3), session.slice(4, 4)
    f, g, cut = double(here, P("x")), double(there, P("x")), double(here)
    jitted = pw.jit(lambda v: v * 2, slice=here)
    for body in (
        lambda c: pw.reshard(g(c), here, P("x")),
        lambda c: f(g(c)) - c,
        lambda c: jnp.roll(cut(c), 1) + c,
        lambda c: jitted(c),
        lambda c: pw.cond(c.sum() > 0, f, lambda v: v, c),
    ):
        graph = changes(body, f).graph
        assert str(graph.layout_of(graph.result.inputs[0])) == "slice3:P(x)"


def test_what_the_client_has_lies_where_the_body_wants_it(a: VirtualSlice, b: VirtualSlice) -> None:
    """Another function has taken it before, on another slice."""
    f, g, t = double(a), double(b), total(b)
    for body, times in ((f, 2), (lambda c: f(g(c)), 4)):
        lowered = pw.program(lambda v, body=body: (pw.fori_loop(0, 3, lambda i, c: body(c), v), t(v))).lower(V)
        np.testing.assert_array_equal(run(lowered, V)[0], V * times**3)
        np.testing.assert_array_equal(run_script(lowered, V, late=random.Random(0))[0], V * times**3)


def test_what_an_operation_made_of_that_lies_where_the_body_wants_it(a: VirtualSlice, b: VirtualSlice) -> None:
    """It was put on the first slice of the program for want of another: before a loop, in a loop, and in a branch."""
    f, g, t = double(a), double(b), total(b)
    programs: Sequence[tuple[Any, Any]] = (
        (lambda v: (pw.fori_loop(0, 3, lambda i, c: g(c), v + 1), f(v)), (V + 1) * 8),
        (lambda v: (pw.fori_loop(0, 3, lambda i, c: g(f(c)), v + 1), f(v)), (V + 1) * 64),
        (lambda v: pw.fori_loop(0, 3, lambda i, c: (f(c[0]), t(c[0]) + c[1]), (v, v.sum())), V * 8),
        (lambda v: (pw.fori_loop(0, 3, lambda i, c: f(c) + pw.fori_loop(0, 2, lambda j, d: g(d), v + 1), v),), None),
        (lambda v: (pw.cond(v[3] > 0, lambda x: g(f(x)), lambda x: x * 0, v / 2), f(v)), V * 2),
        (lambda v: (pw.fori_loop(0, 3, lambda i, c: pw.cond(i > 1, lambda x: g(f(x)), lambda x: v + 1, c), v),), None),
    )
    for made, expected in programs:
        lowered = pw.program(made).lower(V)
        found = run(lowered, V)[0]
        np.testing.assert_array_equal(run_script(lowered, V, late=random.Random(0))[0], found)
        if expected is not None:
            np.testing.assert_array_equal(found, expected)


def test_bodies_may_call_jitted_functions(a: VirtualSlice, b: VirtualSlice) -> None:
    f, g = (pw.jit(lambda v: v * 2 + 1, slice=where) for where in (a, b))
    one = pw.program(lambda v: pw.fori_loop(0, 3, lambda i, c: f(c), v)).lower(V)
    assert len(names(one)) == 1
    np.testing.assert_array_equal(run(one, V)[0], V * 8 + 7)
    two = pw.program(lambda v: pw.fori_loop(0, 3, lambda i, c: f(g(c)), v)).lower(V)
    assert any(isinstance(node, Repeat) for node in two.graph.nodes)
    np.testing.assert_array_equal(run(two, V)[0], V * 64 + 63)


def test_branches_on_different_slices_are_refused(session: Nowhere) -> None:
    here, there = session.slice(4, 3), session.slice(4, 4)
    f, g = double(here, P("x")), double(there, P("x"))
    with pytest.raises(
        GraphError, match=r"in different layouts: slice\d:.*test_control.py:\d+.*, and .*test_control.py:\d"
    ):
        pw.program(lambda v: pw.cond(True, lambda x: f(x) * 2, lambda x: g(x) + 1, v)).lower(np.arange(8.0))


def test_a_carry_that_changes_its_type_is_refused(a: VirtualSlice) -> None:
    t = total(a)
    with pytest.raises(GraphError, match="carry input and carry output must have equal types"):
        pw.program(lambda v: pw.while_loop(lambda c: True, lambda c: t(c), v)).lower(V)


def test_a_predicate_is_a_scalar(a: VirtualSlice) -> None:
    f = double(a)
    with pytest.raises(GraphError, match=r"must be a scalar.*\(pw.cond at test_control.py:\d+\)"):
        pw.program(lambda v: pw.cond(v > 1, f, f, v)).lower(V)


def test_what_a_body_raises_is_its_own(a: VirtualSlice) -> None:
    f = double(a)
    with pytest.raises(TraceError, match=r"test_control.py.*ZeroDivisionError"):
        pw.program(lambda v: pw.cond(True, lambda x: 1 / 0, f, v)).lower(V)
    with pytest.raises(TraceError, match=r"TypeError: mine"):
        pw.program(lambda v: pw.cond(True, _raises, f, v)).lower(V)


def _raises(_: Any) -> Any:
    raise TypeError("mine")


def test_a_branch_is_a_function(a: VirtualSlice) -> None:
    with pytest.raises(UsageError, match="branches and bodies are functions, not 3"):
        pw.program(lambda v: pw.cond(True, double(a), 3, v)).lower(V)  # type: ignore[arg-type]


def test_other_transformations_still_cannot_hold_calls(a: VirtualSlice) -> None:
    f = double(a)
    mapped = jax.shard_map(f, mesh=a.mesh, in_specs=P(), out_specs=P())
    with pytest.raises(TraceError, match="calls a compiled function inside shard_map"):
        pw.program(mapped).lower(V)


def test_an_ordinary_operation_leaves_its_result_where_the_other_branch_does(session: Nowhere) -> None:
    wide = session.slice(4, 3)
    f = double(wide, P("x"))
    shift = np.ones(8, np.float32)
    program = pw.program(lambda v: pw.cond(True, f, lambda x: pw.cond(True, lambda: x + shift, lambda: x - 1), v))
    graph = program.lower(np.arange(8.0)).graph
    assert graph.layout_of(graph.result.inputs[0]).spec == (("x",),)
