"""Random programs with branches and loops, written once and run twice: as a `pw.program`, and by `jax.lax` alone.

A program is a function of a library (`pathways_ray`, or `jax.lax`) and of functions on vectors, which are compiled
functions in one case and plain ones in the other. Numbers are whole: so no order of arithmetic changes a bit. Bodies
end with the first function, so that they leave their results in one layout, wherever the others are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Vector = Any
Code = Callable[[Any, Sequence[Callable[..., Vector]], Vector, Vector], Vector]
"""A piece of a program: from a library, the functions, and two vectors, to a vector."""

PLAIN: list[Callable[[jax.Array, jax.Array], jax.Array]] = [
    lambda x, y: x * 3 + y,
    lambda x, y: x - jnp.roll(y, 1),
    lambda x, y: jnp.where(x % 3 == 0, y, x) + 1,
]
SIZE = 4


def random_program(seed: int, depth: int = 3) -> Code:
    """A program with branches and loops that are nested up to `depth` deep."""
    return _code(random.Random(seed), depth)


def _code(rng: random.Random, depth: int) -> Code:
    kind = rng.choice(["call", "chain"]) if depth == 0 else rng.choice(sorted(_KINDS))
    return _KINDS[kind](rng, depth)


def _call(rng: random.Random, _depth: int) -> Code:
    k = rng.randrange(len(PLAIN))
    return lambda lib, f, x, y: f[k](x, y)


def _chain(rng: random.Random, depth: int) -> Code:
    one, other = _code(rng, max(depth - 1, 0)), _code(rng, max(depth - 1, 0))
    return lambda lib, f, x, y: other(lib, f, one(lib, f, x, y), x)


def _cond(rng: random.Random, depth: int) -> Code:
    yes, no, parity = _code(rng, depth - 1), _code(rng, depth - 1), rng.randrange(2)

    def run(lib: Any, f: Any, x: Vector, y: Vector) -> Vector:
        return lib.cond(
            x.sum() % 2 == parity, lambda a: f[0](yes(lib, f, a, y), a), lambda a: f[0](no(lib, f, a, x), x), x
        )

    return run


def _switch(rng: random.Random, depth: int) -> Code:
    bodies = [_code(rng, depth - 1) for _ in range(3)]

    def run(lib: Any, f: Any, x: Vector, y: Vector) -> Vector:
        branches = [lambda a, b, body=body: f[0](body(lib, f, a, b), b) for body in bodies]
        return lib.switch(y.max() % 5 - 1, branches, x, y)

    return run


def _while(rng: random.Random, depth: int) -> Code:
    body, rounds = _code(rng, depth - 1), rng.randrange(4)

    def run(lib: Any, f: Any, x: Vector, y: Vector) -> Vector:
        def test(carry: Any) -> Any:
            return (carry[0] < rounds) & (carry[1].max() % 7 != 3)

        return lib.while_loop(test, lambda c: (c[0] + 1, f[0](body(lib, f, c[1], y), y)), (0, f[0](x, y)))[1]

    return run


def _fori(rng: random.Random, depth: int) -> Code:
    body, rounds, known = _code(rng, depth - 1), rng.randrange(1, 4), rng.random() < 0.5

    def run(lib: Any, f: Any, x: Vector, y: Vector) -> Vector:
        upper = rounds if known else y.min() % 4
        return lib.fori_loop(0, upper, lambda i, c: f[0](body(lib, f, c, y) + i, y), f[0](x, y))

    return run


def _scan(rng: random.Random, depth: int) -> Code:
    body, reverse = _code(rng, depth - 1), rng.random() < 0.5

    def run(lib: Any, f: Any, x: Vector, y: Vector) -> Vector:
        def step(carry: Vector, row: Any) -> tuple[Vector, Any]:
            made = f[0](body(lib, f, carry, y), y)
            return made, made.max() + row

        last, rows = lib.scan(step, f[0](x, y), x[:3], reverse=reverse)
        return f[1](last, last) + rows.sum()

    return run


_KINDS: dict[str, Callable[[random.Random, int], Code]] = {
    "call": _call,
    "chain": _chain,
    "cond": _cond,
    "fori": _fori,
    "scan": _scan,
    "switch": _switch,
    "while": _while,
}


def expected(program: Code, x: Any, y: Any) -> Any:
    """The result by `jax.lax`, in one function of JAX."""
    return jax.jit(lambda a, b: program(jax.lax, PLAIN, a, b))(x, y)
