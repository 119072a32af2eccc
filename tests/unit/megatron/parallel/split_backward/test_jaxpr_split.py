"""A jaxpr in two parts computes what it did as one, and each part its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatron_ptdp.parallel.split_backward.jaxpr_split import SplitJaxpr, used_inputs


def split_of(function: Callable[..., Any], first: int, *arguments: Any) -> tuple[SplitJaxpr, Any]:
    """Of a function with a flat list of outputs, of which the first ones are the first part's."""
    closed = jax.make_jaxpr(function)(*arguments)
    return SplitJaxpr.of(closed.jaxpr, range(first), range(first, len(closed.jaxpr.outvars))), closed.consts


def both(function: Callable[..., Any], first: int, *arguments: Any) -> tuple[list[Any], list[Any]]:
    """All outputs, one part after the other; and the values saved for the second."""
    split, constants = split_of(function, first, *arguments)
    outputs, saved = split.run_first({k: arguments[k] for k in split.needs[0]}, constants)
    outputs |= split.run_second({k: arguments[k] for k in split.needs[1]}, saved, constants)
    return [outputs[number] for number in sorted(outputs)], saved


def test_what_both_need_is_computed_once_and_handed_on() -> None:
    def function(x: Any, y: Any) -> list[Any]:
        middle = jnp.sin(x)
        return [jnp.sum(middle), jnp.sum(middle.reshape(-1) * y)]

    x, y = jnp.arange(6.0).reshape(2, 3), jnp.arange(6.0)
    found, saved = both(function, 1, x, y)
    for one, other in zip(found, function(x, y), strict=True):
        assert one == other
    assert [value.shape for value in saved] == [(2, 3)]  # and the second part reshapes it again
    split, _ = split_of(function, 1, x, y)
    assert split.needs == ({0}, {1})


def test_a_scan_is_split_into_two_that_carry_their_own() -> None:
    """The first part carries a chain. The second one carries a sum of the chain's values in all iterations."""

    def function(x: Any, rows: Any, factors: Any) -> list[Any]:
        def turn(carry: Any, taken: Any) -> Any:
            chain, total = carry
            row, factor = taken
            new = jnp.cos(chain) * row
            return (new, total + factor * chain), new * factor

        (chain, total), given = jax.lax.scan(turn, (x, jnp.zeros(())), (rows, factors), reverse=True)
        return [chain, total, given]

    x, rows, factors = jnp.float32(0.5), jnp.arange(4.0), jnp.arange(4.0) + 1
    found, saved = both(function, 1, x, rows, factors)
    for one, other in zip(found, function(x, rows, factors), strict=True):
        np.testing.assert_array_equal(one, other)
    assert [value.shape for value in saved] == [(4,), (4,)]  # of each iteration, the chain before and after
    split, _ = split_of(function, 1, x, rows, factors)
    assert split.needs == ({0, 1}, {2})
    (scan,) = split.scans.values()
    assert (scan.carries, scan.given) == (([0], [1]), ([], [2]))


def test_outputs_that_are_inputs_or_shared_are_given_too() -> None:
    def function(x: Any) -> list[Any]:
        y = jnp.exp(x)
        return [y, y, x, jnp.float32(2.0)]

    found, _ = both(function, 1, jnp.float32(1.0))
    assert [float(value) for value in found] == pytest.approx([np.e, np.e, 1, 2])


def test_used_inputs_are_those_that_an_output_depends_on() -> None:
    def function(used: Any, unused: Any, output: Any, captured: Any) -> list[Any]:
        jnp.sin(unused)
        return [jax.lax.scan(lambda carry, _: (carry * captured, None), used, length=2)[0], output]

    assert used_inputs(jax.make_jaxpr(function)(1.0, 2.0, 3.0, 4.0).jaxpr) == {0, 2, 3}
