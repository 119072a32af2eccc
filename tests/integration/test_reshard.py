"""Transfers and resharding between any two slices and shardings: the bits of the array, whatever way it takes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

MESHES = {
    "a4": (0, (4,), ("x",)),
    "a4 again": (0, (4,), ("i",)),
    "a22": (0, (2, 2), ("x", "y")),
    "a14": (0, (1, 4), ("x", "y")),
    "a212": (0, (2, 1, 2), ("x", "y", "z")),
    "a2 one": (0, (2,), ("x",)),
    "a2 two": (0, (2,), ("x",)),
    "a3": (0, (3,), ("x",)),
    "a1": (0, (1,), ("x",)),
    "b4": (1, (4,), ("x",)),
    "b22": (1, (2, 2), ("y", "x")),
    "b122": (1, (1, 2, 2), ("x", "y", "z")),
    "b2": (1, (2,), ("x",)),
    "b1": (1, (1,), ("x",)),
}
SHAPES = [(), (1,), (4,), (12,), (24,), (0, 4), (4, 6), (8, 12), (3, 4), (12, 2, 4), (2, 6, 8), (24, 1)]
DTYPES = [np.float32, np.uint16, np.bool_, np.int8, np.complex64]


class Place(NamedTuple):
    slice: pw.VirtualSlice
    spec: P

    def __str__(self) -> str:
        return f"{self.slice.name}{self.slice.devices} {self.spec}"


@pytest.fixture(scope="module")
def meshes(cluster) -> Iterator[dict[str, pw.VirtualSlice]]:
    made = {
        name: cluster.virtual_slice(shape, axes, island=island, name=name)
        for name, (island, shape, axes) in MESHES.items()
    }
    yield made
    for s in made.values():
        s.release()


def parts(s: pw.VirtualSlice, axes: Sequence[str]) -> int:
    return math.prod(s.shape[s.axes.index(axis)] for axis in axes)


def random_place(choose: random.Random, meshes: dict[str, pw.VirtualSlice], shape: tuple[int, ...]) -> Place:
    """A slice and a spec that the shape can have there; entries are none, one, or several axes in any order."""
    s = meshes[choose.choice(sorted(meshes))]
    free = choose.sample(s.axes, len(s.axes))
    entries: list[str | tuple[str, ...] | None] = []
    for size in shape:
        taken: list[str] = []
        while free and choose.random() < 0.6 and size % parts(s, [*taken, free[-1]]) == 0:
            taken.append(free.pop())
        entries.append(None if not taken else taken[0] if len(taken) == 1 else tuple(taken))
    return Place(s, P(*entries))


def moved(place: Place) -> Callable[..., Any]:
    """A compiled function that leaves its argument as it is, in a layout."""
    return pw.compiled(lambda v: v, slice=place.slice, in_specs=place.spec, out_specs=place.spec)


def array_of(choose: random.Random, shape: tuple[int, ...]) -> np.ndarray:
    dtype = np.dtype(choose.choice(DTYPES))
    bits = np.random.default_rng(choose.randrange(1 << 30)).integers(0, 100, shape)
    return (bits % 2 == 0) if dtype == np.bool_ else bits.astype(dtype)


@pytest.mark.parametrize("seed", range(12))
def test_from_one_place_to_many(session, meshes, equal, seed) -> None:
    choose = random.Random(seed)
    shape = SHAPES[seed]
    value = array_of(choose, shape)
    source = random_place(choose, meshes, shape)
    targets = [random_place(choose, meshes, shape) for _ in range(10)]
    program = pw.program(lambda v: [moved(target)(v) for target in targets])
    results = program(pw.put(value, slice=source.slice, spec=source.spec))
    for target, result in zip(targets, results, strict=True):
        print(f"{value.dtype}{shape}: {source} -> {target}")
        assert result.sharding.mesh == target.slice.mesh
        equal(result, value)


@pytest.mark.parametrize("seed", range(100, 112))
def test_along_a_path_of_places(session, meshes, equal, seed) -> None:
    choose = random.Random(seed)
    shape = SHAPES[seed % len(SHAPES)]
    value = array_of(choose, shape)
    path = [random_place(choose, meshes, shape) for _ in range(10)]
    print(f"{value.dtype}{shape}: {' -> '.join(map(str, path))}")

    @pw.program
    def program(v):
        seen = []
        for place in path:
            v = moved(place)(v)
            seen.append(v)
        return seen

    for result in program(value):
        equal(result, value)


def test_between_every_two_slices(session, meshes, equal) -> None:
    """Each slice hands a sharded and a replicated array to each slice, which takes it sharded and replicated."""
    value = np.arange(48, dtype=np.float32).reshape(12, 4)
    targets = [Place(s, P(s.axes[-1])) for s in meshes.values()] + [Place(s, P()) for s in meshes.values()]
    functions = [moved(target) for target in targets]
    program = pw.program(lambda v: [f(v) for f in functions])
    for source in meshes.values():
        for spec in (P(source.axes[-1]), P()):
            placed = pw.put(value, slice=source, spec=spec)
            for target, result in zip(targets, program(placed), strict=True):
                assert np.asarray(result).tobytes() == value.tobytes(), f"{source.name} {spec} -> {target}"


def test_the_slices_stand_to_each_other_in_all_ways(meshes) -> None:
    pairs = [(set(s.devices), set(t.devices)) for s in meshes.values() for t in meshes.values() if s is not t]
    assert any(s == t for s, t in pairs), "the same devices"
    assert any(s < t for s, t in pairs), "some of the other's devices"
    assert any(s.isdisjoint(t) and {d[0] for d in s} == {d[0] for d in t} for s, t in pairs), "others of the same host"
    assert any({d[0] for d in s} != {d[0] for d in t} for s, t in pairs), "another island"


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (P("x"), P(None, "x")),
        (P("x", "y"), P("y", "x")),
        (P(("x", "y")), P(("y", "x"))),
        (P(("x", "y")), P(None, ("x", "y"))),
        (P("x", "y"), P()),
        (P(), P(("y", "x"))),
        (P("y"), P(None, None, "x")),
    ],
    ids=str,
)
def test_each_kind_of_change(session, meshes, equal, source, target) -> None:
    value = np.random.default_rng(5).standard_normal((4, 8, 4)).astype(np.float32)
    places = [meshes["a22"], meshes["b22"]]
    for here in places:
        x = pw.put(value, slice=here, spec=source)
        equal([moved(Place(there, target))(x) for there in places], [value, value])


def test_only_what_is_needed_moves(session, meshes) -> None:
    here, there, one = meshes["a4"], meshes["b4"], meshes["b1"]
    same = pw.program(lambda v: moved(Place(there, P("x")))(v))
    x = pw.put(np.zeros((8, 8), np.float32), slice=here, spec=P("x"))
    plan = same.lower(x).as_text("plan")
    assert plan.count("send") == 1
    assert plan.count("receive") == 1
    within = pw.program(lambda v: moved(Place(here, P(None, "x")))(v)).lower(x).as_text("plan")
    assert "reshard" in within
    assert "send" not in within
    stays = pw.program(lambda v: moved(Place(here, P("x")))(v)).lower(x).as_text("plan")
    assert "reshard" not in stays
    assert "send" not in stays
    twice = pw.program(lambda v: (moved(Place(one, P()))(v), moved(Place(one, P()))(v))).lower(x).as_text("plan")
    assert twice.count("send") == 1


def test_dimensions_that_do_not_divide_are_refused_with_the_sizes(session, meshes) -> None:
    value = np.zeros((6, 5), np.float32)
    message = r"dimension 0 of float32\[6,5\] has size 6, which does not divide into 4 parts over x of slice\d+\(x=4\)"
    with pytest.raises(pw.errors.SpecError, match=f"f, input 0: {message}"):
        pw.compiled(named("f"), slice=meshes["a4"], in_specs=P("x"))(value)
    with pytest.raises(pw.errors.SpecError, match=f"f, output 0: {message}"):
        pw.compiled(named("f"), slice=meshes["a4"], out_specs=P("x"))(value)
    with pytest.raises(pw.errors.SpecError, match=f"put: {message}"):
        pw.put(value, slice=meshes["a4"], spec=P("x"))
    with pytest.raises(pw.errors.SpecError, match=r"size 5, which does not divide into 4 parts over x and y of slice"):
        pw.put(value, slice=meshes["a22"], spec=P(None, ("x", "y")))
    x = pw.put(value, slice=meshes["a2 one"], spec=P("x"))
    with pytest.raises(pw.errors.SpecError, match=message):
        pw.program(lambda v: moved(Place(meshes["b4"], P("x")))(v))(x)


def test_specs_longer_than_the_shape_are_refused(session, meshes) -> None:
    with pytest.raises(pw.errors.SpecError, match=r"has 2 entries, and the array has 1 dimensions"):
        pw.put(np.zeros(4, np.float32), slice=meshes["a4"], spec=P(None, "x"))
    with pytest.raises(pw.errors.SpecError, match=r"axis 'x' is used 2 times in P\(x, x\)"):
        pw.put(np.zeros((4, 4), np.float32), slice=meshes["a4"], spec=P("x", "x"))


def named(name: str):
    def function(v):
        return v

    function.__name__ = name
    return function


def test_a_tree_moves_in_one_launch_whatever_its_leaves(session, meshes, equal) -> None:
    """Leaves of all kinds of shapes and types, on two islands, each to a layout of its own on another slice; by one
    call outside of programs, and by one inside."""
    choose = random.Random(7)
    places = {name: [random_place(choose, {name: meshes[name]}, shape) for shape in SHAPES] for name in ("b22", "a4")}
    tree = {f"leaf {k}": array_of(choose, shape) for k, shape in enumerate(SHAPES)}
    tree |= {f"small {k}": np.full((4,), k, np.float32) for k in range(20)}
    specs = {f"leaf {k}": place.spec for k, place in enumerate(places["b22"])} | dict.fromkeys(
        (name for name in tree if name.startswith("small")), P("x")
    )
    there = pw.put(tree, meshes["b22"], specs)
    back = {f"leaf {k}": place.spec for k, place in enumerate(places["a4"])} | dict.fromkeys(
        (name for name in tree if name.startswith("small")), P()
    )
    here = pw.reshard(there, meshes["a4"], back)
    equal(here, tree)
    assert {leaf.slice for leaf in here.values()} == {meshes["a4"]}
    round_trip = pw.program(lambda t: pw.reshard(pw.reshard(t, meshes["b1"]), meshes["a22"], P()))
    equal(round_trip(here), tree)
    plan = pw.program(lambda t: pw.reshard(t, meshes["b22"], specs)).lower(here).as_text("plan")
    assert (plan.count("] send"), plan.count("receive")) == (1, 1)


def test_a_tree_within_a_slice_is_laid_out_anew_in_one_computation(session, meshes, equal) -> None:
    tree = [np.arange(16, dtype=np.float32).reshape(4, 4) + k for k in range(5)]
    x = pw.put(tree, meshes["a4"], P("x"))
    equal(pw.reshard(x, meshes["a4"], P(None, "x")), tree)
    turned = pw.program(lambda t: pw.reshard(t, meshes["a4"], P(None, "x")))
    assert turned.lower(x).as_text("plan").count("reshard") == 1


def test_the_derivative_of_a_reshard_goes_back(session, meshes) -> None:
    here, there = meshes["a4"], meshes["b4"]
    f = pw.compiled(lambda v: v * 3, slice=here, in_specs=P("x"), out_specs=P("x"))
    loss = pw.compiled(lambda v: (v**2).sum(), slice=there, in_specs=P("x"))
    grad = pw.program(jax.grad(lambda v: loss(pw.reshard(f(v), there, P("x")))))
    x = np.arange(8, dtype=np.float32)
    np.testing.assert_allclose(np.asarray(grad(x)), 18 * x)
