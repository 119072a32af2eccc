"""Calls over two hosts that nobody waits for, and that do not depend on each other, in many sizes and on slices that
have devices in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

Call = tuple[Any, np.ndarray[Any, Any]]
"""The array that a call makes, and what it has to be."""

TURNS, CALLS = 30, 20


def summed(where: Any, axis: str, spec: P) -> Any:
    mapped = jax.shard_map(
        lambda v: jax.lax.psum(v, axis), mesh=where.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return pw.compiled(mapped, slice=where, in_specs=spec, out_specs=spec)


def check(what: str, make: Callable[[Any], Callable[[], Call]]) -> None:
    """Makes calls, and looks at their values only then; `make` prepares one with a generator of numbers."""
    random = np.random.default_rng(0)
    wrong = 0
    for _ in range(TURNS):
        prepared = [make(random) for _ in range(CALLS)]
        wrong += sum((np.asarray(made) != wanted).any() for made, wanted in [call() for call in prepared])
    assert not wrong, f"{wrong} of {TURNS * CALLS} values are wrong: {what}"
    print(f"{what}: {TURNS * CALLS} values are right")


def one_device_each() -> None:
    with pw.init(islands=1, hosts_per_island=2, devices_per_host=1) as session:
        where = session.virtual_slice((2,), ("x",))
        total = summed(where, "x", P("x"))

        def make(random: Any, sizes: tuple[int, ...], placed: bool) -> Callable[[], Call]:
            rows = random.integers(1, 100, (2, sizes[random.integers(len(sizes))])).astype(np.float32)
            given = rows.reshape(-1)
            if placed:
                given = pw.put(given, where, P("x"))
                given.block_until_ready()
            return lambda: (total(given), np.tile(rows[0] + rows[1], 2))

        for placed in (True, False):
            for sizes in ((1, 3, 64, 5000), (5000, 6000, 7000), (100_000, 120_000)):
                what = f"sums of {sizes}, of {'arrays' if placed else 'NumPy arrays'}"
                check(what, partial(make, sizes=sizes, placed=placed))
        in_two_layouts(where, *(session.part_of(where, (place,), (1,), ("x",)) for place in (0, 1)))


def in_two_layouts(both: Any, first: Any, second: Any) -> None:
    """A program takes an array of two hosts in two layouts; before each use a value goes from one host to the other."""
    double, more = pw.compiled(lambda v: v * 2, slice=first), pw.compiled(lambda v: v + 1, slice=second)
    split = pw.compiled(lambda v: v * 3, slice=both, in_specs=P("x"), out_specs=P("x"))
    whole = pw.compiled(lambda v: v.cumsum(), slice=both, in_specs=P(), out_specs=P())

    @pw.program
    def crossing(v: Any, w: Any) -> Any:
        twice = double(v)
        return more(twice), split(w), more(double(twice)), whole(w)

    given = np.arange(8, dtype=np.float32)
    made = crossing(given, pw.put(given, both, P("x")))
    for found, wanted in zip(made, (given * 2 + 1, given * 3, given * 4 + 1, given.cumsum()), strict=True):
        np.testing.assert_array_equal(np.asarray(found), wanted)
    print("an argument in two layouts: right")


def devices_in_common() -> None:
    """Sums over both hosts, on all four devices or on one of each host, and changes of layout between them."""
    with pw.init(islands=1, hosts_per_island=2, devices_per_host=2) as session:
        all_four = session.virtual_slice((2, 2), ("h", "d"))
        two = session.part_of(all_four, (0, 2), (2,), ("x",))
        over_four, over_two = summed(all_four, "h", P(("h", "d"))), summed(two, "x", P("x"))

        def make(random: Any) -> Callable[[], Call]:
            size = (64, 5000, 20_000)[random.integers(3)]
            rows = random.integers(1, 100, (4, size)).astype(np.float32)
            kind = random.integers(3)
            if kind == 0:
                given, of_two = pw.put(rows[:2].reshape(-1), two, P("x")), np.tile(rows[0] + rows[1], 2)
                return lambda: (over_two(given), of_two)
            given = pw.put(rows.reshape(-1), all_four, P(("h", "d")))
            if kind == 1:
                wanted = np.concatenate([rows[0] + rows[2], rows[1] + rows[3]] * 2)
                return lambda: (over_four(given), wanted)
            return lambda: (pw.reshard(given, all_four, P("d")), rows.reshape(-1))

        check("sums and layouts on devices in common", make)


if __name__ == "__main__":
    one_device_each()
    devices_in_common()
    print("nothing was wrong")
