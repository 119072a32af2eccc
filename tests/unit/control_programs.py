"""Random programs with branches and loops, written once and run twice: as a `pw.program`, and by `jax.lax` alone.

A program is a function of a library (`pathways_ray`, or `jax.lax`) and of `Functions`: compiled functions on any slices
in one case, plain ones in the other. Numbers are whole, so that no order of arithmetic changes a bit. Whatever is
carried, or comes out of branches, is made last by one function, chosen for each operation: so that it lies in one
layout, wherever the others are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

Vector = Any
SIZE = 4

VECTORS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: x * 3 + y,
    lambda x, y: x - jnp.roll(y, 1),
    lambda x, y: jnp.where(x % 3 == 0, y, x) + 1,
)
HELD = np.array([2, -3, 5, 7], np.int32)


def _take(x: Any, y: Any) -> Any:
    return x * 2 - y


def _pair(x: Any) -> tuple[Any, Any]:
    return x + 1, x.sum()


def _is_odd(x: Any, bias: Any) -> Any:
    return (x.sum() + bias) % 2 == 1


@dataclass(frozen=True)
class Functions:
    """What a program calls: `vectors` of two vectors; `take` of two, the first of which it is given for good; `pair` of
    one, which gives a vector and a scalar; `is_odd` of a vector and a number. `held` is captured."""

    vectors: Sequence[Callable[[Any, Any], Any]]
    take: Callable[[Any, Any], Any]
    pair: Callable[[Any], tuple[Any, Any]]
    is_odd: Callable[[Any, Any], Any]
    held: Any


PLAIN = Functions(VECTORS, _take, _pair, _is_odd, HELD)


def compiled_functions(slices: Sequence[pw.VirtualSlice], spec: Any, held: Any = HELD) -> Functions:
    """The functions on slices, in turns."""
    at = [slices[k % len(slices)] for k in range(len(VECTORS) + 3)]
    both = {"in_specs": spec, "out_specs": spec}
    return Functions(
        [pw.compiled(f, slice=where, **both) for f, where in zip(VECTORS, at, strict=False)],
        pw.compiled(_take, slice=at[-3], donate_argnums=0, **both),
        pw.compiled(_pair, slice=at[-2], in_specs=spec, out_specs=(spec, P())),
        pw.compiled(_is_odd, slice=at[-1], in_specs=(spec, P())),
        held,
    )


Code = Callable[[Any, Functions, Vector, Vector], Vector]
"""A piece of a program: from a library, the functions, and two vectors, to a vector."""


def random_program(seed: int, depth: int = 3) -> Code:
    """A program with branches and loops that are nested up to `depth` deep."""
    return _code(random.Random(seed), depth)


def arguments(seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two vectors for the program of a seed."""
    return np.arange(SIZE, dtype=np.int32) * 7 - seed, np.arange(SIZE, dtype=np.int32) + 2 * seed


def expected(program: Code, x: Any, y: Any) -> Any:
    """The result by `jax.lax`, in one function of JAX."""
    return jax.jit(lambda a, b: program(jax.lax, PLAIN, a, b))(x, y)


def _code(rng: random.Random, depth: int) -> Code:
    kind = rng.choice(["call", "chain", "taken"]) if depth == 0 else rng.choice(sorted(_KINDS))
    return _KINDS[kind](rng, depth)


def _home(rng: random.Random) -> int:
    """The number of the function that makes what an operation carries or gives."""
    return rng.randrange(len(VECTORS))


def _call(rng: random.Random, _depth: int) -> Code:
    k = rng.randrange(len(VECTORS))
    return lambda lib, f, x, y: f.vectors[k](x, y)


def _taken(rng: random.Random, _depth: int) -> Code:
    k = rng.randrange(len(VECTORS))
    return lambda lib, f, x, y: f.take(f.vectors[k](x, y), y)


def _chain(rng: random.Random, depth: int) -> Code:
    one, other = _code(rng, max(depth - 1, 0)), _code(rng, max(depth - 1, 0))
    return lambda lib, f, x, y: other(lib, f, one(lib, f, x, y), x)


def _cond(rng: random.Random, depth: int) -> Code:
    yes, no, parity, home = _code(rng, depth - 1), _code(rng, depth - 1), rng.randrange(2), _home(rng)
    called = rng.random() < 0.5

    def run(lib: Any, f: Functions, x: Vector, y: Vector) -> Vector:
        end = f.vectors[home]
        odd = f.is_odd(x, jnp.int32(parity)) if called else x.sum() % 2 == parity
        return lib.cond(odd, lambda a: end(yes(lib, f, a, y), a), lambda a: end(no(lib, f, a, x), x), x)

    return run


def _bare(rng: random.Random, depth: int) -> Code:
    """A branch without operands, that also gives a number and nothing at all."""
    yes, home, bias = _code(rng, depth - 1), _home(rng), rng.randrange(3)

    def run(lib: Any, f: Functions, x: Vector, y: Vector) -> Vector:
        end, constant = f.vectors[home], np.arange(SIZE, dtype=np.int32) + bias
        found, number, rest = lib.cond(
            x.max() > bias, lambda: (end(yes(lib, f, x, f.held), y), 3, ()), lambda: (end(f.held, constant), bias, ())
        )
        assert rest == ()
        return found + number

    return run


def _switch(rng: random.Random, depth: int) -> Code:
    bodies, home = [_code(rng, depth - 1) for _ in range(rng.randrange(1, 4))], _home(rng)

    def run(lib: Any, f: Functions, x: Vector, y: Vector) -> Vector:
        branches = [lambda a, b, body=body: f.vectors[home](body(lib, f, a, b), b) for body in bodies]
        return lib.switch(y.max() % 5 - 1, branches, x, y)

    return run


def _while(rng: random.Random, depth: int) -> Code:
    body, rounds, home, called = _code(rng, depth - 1), rng.randrange(4), _home(rng), rng.random() < 0.5

    def run(lib: Any, f: Functions, x: Vector, y: Vector) -> Vector:
        def test(carry: Any) -> Any:
            go_on = f.is_odd(carry["at"], carry["n"]) if called else carry["at"].max() % 7 != 3
            return (carry["n"] < rounds) & go_on

        def step(carry: Any) -> Any:
            at = f.vectors[home](body(lib, f, carry["at"], y), f.held)
            return {"n": carry["n"] + 1, "at": at, "none": None, "nothing": ()}

        first = {"n": jnp.int32(0), "at": f.vectors[home](x, y), "none": None, "nothing": ()}
        return lib.while_loop(test, step, first)["at"]

    return run


def _fori(rng: random.Random, depth: int) -> Code:
    body, rounds, known, home = _code(rng, depth - 1), rng.randrange(4), rng.random() < 0.5, _home(rng)

    def run(lib: Any, f: Functions, x: Vector, y: Vector) -> Vector:
        upper = rounds if known else y.min() % 4
        end = f.vectors[home]
        return lib.fori_loop(0, upper, lambda i, c: end(body(lib, f, c, y) + i, y), end(x, y))

    return run


def _scan(rng: random.Random, depth: int) -> Code:
    body, reverse, home = _code(rng, depth - 1), rng.random() < 0.5, _home(rng)
    length, unroll = rng.randrange(SIZE), rng.choice([1, 1, 2])

    def run(lib: Any, f: Functions, x: Vector, y: Vector) -> Vector:
        def step(carry: Vector, row: Any) -> tuple[Vector, Any]:
            made = f.vectors[home](body(lib, f, carry, y), y)
            return made, {"row": made.max() + row, "all": made}

        last, rows = lib.scan(step, f.vectors[home](x, y), x[:length], reverse=reverse, unroll=unroll)
        return f.vectors[1](last, last) + rows["row"].sum() + rows["all"].sum(0)

    return run


def _scan_of_nothing(rng: random.Random, depth: int) -> Code:
    """Scans that carry nothing, or take nothing."""
    body, length, home = _code(rng, depth - 1), rng.randrange(1, 4), _home(rng)

    def run(lib: Any, f: Functions, x: Vector, y: Vector) -> Vector:
        end = f.vectors[home]
        nothing, rows = lib.scan(lambda c, row: (c, f.pair(end(f.held, y) + row)[1]), (), x)
        assert nothing == ()
        last, none = lib.scan(lambda c, _: (end(body(lib, f, c, y), y), None), end(x, y), None, length=length)
        assert none is None
        return last + rows.sum()

    return run


def _paired(rng: random.Random, depth: int) -> Code:
    body, home = _code(rng, depth - 1), _home(rng)

    def run(lib: Any, f: Functions, x: Vector, y: Vector) -> Vector:
        more, total = f.pair(body(lib, f, x, y))
        return lib.cond(total > 0, lambda: f.vectors[home](more, y), lambda: f.vectors[home](x, x))

    return run


def _wide(rng: random.Random, depth: int) -> Code:
    """A loop that carries fifty vectors, each made of two others, on any slices."""
    count, rounds, body = 50, rng.randrange(3), _code(rng, max(depth - 2, 0))
    homes = [_home(rng) for _ in range(count)]
    others = [(rng.randrange(count), rng.randrange(count)) for _ in range(count)]

    def run(lib: Any, f: Functions, x: Vector, y: Vector) -> Vector:
        def step(_: Any, carry: dict[str, Any]) -> dict[str, Any]:
            made = body(lib, f, carry["0"], y)
            return {
                str(k): f.vectors[homes[k]](carry[str(a)], made if k == 0 else carry[str(b)])
                for k, (a, b) in enumerate(others)
            }

        last = lib.fori_loop(0, rounds, step, {str(k): f.vectors[homes[k]](x, y) for k in range(count)})
        return f.vectors[0](last["0"], f.vectors[0](last["7"], last["49"]))

    return run


def _odd(rng: random.Random, depth: int) -> Code:
    """A loop whose carry has a counter that overflows, a typed key, an array without elements, and truth values."""
    body, home, rounds, start = _code(rng, depth - 1), _home(rng), rng.randrange(4), rng.randrange(120, 128)

    def run(lib: Any, f: Functions, x: Vector, y: Vector) -> Vector:
        def step(carry: Any, row: Any) -> Any:
            key, sub = jax.random.split(carry["key"])
            drawn = jax.random.bits(sub, (SIZE,), "uint16").astype(np.int32)
            at = f.vectors[home](body(lib, f, carry["at"], drawn), y)
            small, large = carry["small"] + np.int8(3), carry["large"] * np.uint32(2654435761)
            flags = carry["flags"] ^ (drawn % 2 == 0)
            made = {"at": at, "key": key, "small": small, "large": large, "nothing": carry["nothing"], "flags": flags}
            return made, (drawn[:0], small + row.astype(np.int8))

        first = {
            "at": f.vectors[home](x, y),
            "key": jax.random.key(start),
            "small": np.int8(start),
            "large": np.uint32(start),
            "nothing": np.zeros((0, 3), np.int32),
            "flags": np.zeros(SIZE, bool),
        }
        last, (none, rows) = lib.scan(step, first, y[:rounds])
        assert none.shape == (rounds, 0)
        total = rows.sum(dtype=np.int32) + last["small"].astype(np.int32) + last["large"].astype(np.int32)
        return f.vectors[1](last["at"], jnp.where(last["flags"], total, last["nothing"].sum(0).sum()))

    return run


def _deep(rng: random.Random, depth: int) -> Code:
    """A branch in a loop in a scan, each by a value of the one around it."""
    yes, home, rounds = _code(rng, max(depth - 2, 0)), _home(rng), rng.randrange(3)

    def run(lib: Any, f: Functions, x: Vector, y: Vector) -> Vector:
        end = f.vectors[home]

        def choose(c: Any, n: Any) -> Any:
            return lib.cond(f.is_odd(c, n), lambda u: end(yes(lib, f, u, y), u), lambda u: end(u, f.held), c)

        def step(carry: Vector, row: Any) -> tuple[Vector, Any]:
            def go_on(c: Any) -> Any:
                return (c[0] < rounds) & (c[1].min() + row < 1000)

            n, made = lib.while_loop(go_on, lambda c: (c[0] + 1, choose(c[1], c[0])), (jnp.int32(0), carry))
            return made, n * row

        last, counts = lib.scan(step, end(x, y), y[:2])
        return end(last, last) + counts.sum()

    return run


_KINDS: dict[str, Callable[[random.Random, int], Code]] = {
    "bare": _bare,
    "call": _call,
    "chain": _chain,
    "cond": _cond,
    "deep": _deep,
    "fori": _fori,
    "odd": _odd,
    "paired": _paired,
    "scan": _scan,
    "scan_of_nothing": _scan_of_nothing,
    "switch": _switch,
    "taken": _taken,
    "while": _while,
    "wide": _wide,
}
