"""The state that an elastic step returned: which changes of it are told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_ray as pw
from pathways_ray.client.returned import Returned
from tests.unit.client.local import LocalSession, opened


@pytest.fixture
def session() -> Iterator[LocalSession]:
    session = opened()
    yield session
    session.close()


class Odd:
    """A leaf, or a part of a structure, that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("no comparison")

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("kept", "same", "changed"),
    [
        (1.0, 1.0, [np.nextafter(1.0, 2.0), 1, True, np.float32(1), np.float64(1), None, "1"]),
        (0.0, 0.0, [-0.0]),
        (float("nan"), float("nan"), [0.0]),
        (np.float32(2), np.float32(2), [np.float32(3), np.float64(2), np.full((), 2, np.float32)]),
        (np.ones(3), np.ones(3), [np.ones(4), np.ones(3, np.float32), np.ones((3, 1)), np.zeros(3), [1.0, 1.0, 1.0]]),
        (np.full(2, np.nan), np.full(2, np.nan), [np.zeros(2)]),
        (1 << 80, 1 << 80, [(1 << 80) + 1]),
        ("adam", "adam", ["sgd"]),
    ],
)
def test_leaves_are_the_same_where_type_and_bits_are(kept: Any, same: Any, changed: list[Any]) -> None:
    returned = Returned({"a": kept})
    assert returned.is_same({"a": kept})
    assert returned.is_same({"a": same})
    for other in changed:
        assert not returned.is_same({"a": other}), other


def test_arrays_of_jax_are_told_by_their_bits() -> None:
    returned = Returned(jnp.ones(3))
    assert returned.is_same(jnp.ones(3))
    assert not any(map(returned.is_same, (jnp.zeros(3), jnp.ones(2), jnp.ones(3, jnp.int32), np.ones(3, np.float32))))


def test_a_numpy_array_that_was_changed_in_place_is_another_one() -> None:
    array = np.zeros(3)
    returned = Returned([array])
    array[1] = -0.0
    assert not returned.is_same([array])


def test_arrays_are_told_by_what_they_are_handles_to_and_are_not_kept(session: LocalSession) -> None:
    where = pw.virtual_slice((2,), ("x",))
    array: Any = pw.put(np.ones(4), where)
    returned = Returned((array, 1))
    assert returned.is_same((array._alias(), 1))
    assert not returned.is_same((pw.put(np.ones(4), where), 1))
    assert not returned.is_same((np.ones(4), 1))
    number = array._buffer.id
    del array
    assert number not in session.values
    assert not returned.is_same((pw.put(np.ones(4), where), 1))


def test_another_structure_is_a_change() -> None:
    returned = Returned({"a": 1, "b": [2, 3]})
    assert returned.is_same({"b": [2, 3], "a": 1})
    for other in ({"a": 1, "c": [2, 3]}, {"a": 1, "b": (2, 3)}, {"a": 1, "b": [2, [3]]}, {"a": [1], "b": [2]}):
        assert not returned.is_same(other)


def test_what_cannot_be_compared_counts_as_changed() -> None:
    odd = Odd()
    assert Returned(odd).is_same(odd)
    assert not Returned(odd).is_same(Odd())
    assert not Returned(jax.random.key(0)).is_same(jax.random.key(0))

    class Node:
        def __init__(self, aux: Any) -> None:
            self.aux = aux

    jax.tree_util.register_pytree_node(Node, lambda node: ((1,), node.aux), lambda aux, _: Node(aux))
    assert not Returned(Node(Odd())).is_same(Node(Odd()))
