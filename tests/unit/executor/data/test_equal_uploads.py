"""Uploads that a host keeps once for several sessions of a tenant."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from pathways_ray.executor.data import equal_uploads
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.data.equal_uploads import LEAST_BYTES, EqualUploads
from tests.unit.executor.data.uploads import compiler, uploaded

V = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)


def uploads() -> EqualUploads:
    return EqualUploads(compiler().devices)


def kept(equal: EqualUploads, value: np.ndarray[Any, Any], session: int, tenant: str = "a", shared: bool = True) -> Any:
    """What a host keeps of an upload."""
    return equal.one_of(tenant, session, *uploaded(value, shared))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64"])
@pytest.mark.parametrize(("first", "second"), [(False, False), (True, False), (False, True), (True, True)])
def test_two_sessions_have_one_array(first: bool, second: bool, dtype: str) -> None:
    equal, value = uploads(), np.asarray(jax.numpy.asarray(V).astype(dtype))
    one = kept(equal, value, 1, shared=first)
    assert equal.shared == 0
    assert kept(equal, value, 2, shared=second) is one
    assert kept(equal, value.copy(), 3, shared=second) is one
    assert equal.shared == 1
    assert np.asarray(one).tobytes() == value.tobytes()


def test_arrays_that_differ_in_one_bit_are_two() -> None:
    equal, other = uploads(), V.copy()
    other.view(np.uint32)[len(V) // 3] ^= 1
    one, two = kept(equal, V, 1), kept(equal, other, 2)
    assert one is not two
    np.testing.assert_array_equal(one, V)
    np.testing.assert_array_equal(two, other)


def test_an_array_that_only_looks_equal_is_shared_by_nobody() -> None:
    """Of each part some bytes are looked at first. Its launches take its memory, and its session may share later."""
    equal = uploads()
    first, second = np.zeros(1 << 14, np.float32), np.zeros(1 << 14, np.float32)
    first.view(np.uint8)[1], second.view(np.uint8)[3] = 1, 1
    one = kept(equal, first, 1)
    assert kept(equal, second, 2) is not one
    assert equal.shared == 0
    assert kept(equal, first, 2) is one
    assert kept(equal, second, 3) is not one
    assert equal.shared == 1, "another one has it"
    assert equal.take_out(one)


def test_equal_bits_count_and_not_equal_values() -> None:
    equal = uploads()
    zeros = np.zeros(4096, np.float32)
    assert kept(equal, zeros, 1) is not kept(equal, -zeros, 2)
    nans = np.full(4096, np.nan, np.float32)
    assert kept(equal, nans, 1) is kept(equal, nans, 2)


def test_the_same_bytes_of_another_type_or_shape_are_another_array() -> None:
    equal = uploads()
    made = [kept(equal, value, session) for session, value in enumerate([V, V.view(np.int32), V.reshape(256, 256)])]
    assert all(one is not two for one, two in itertools.combinations(made, 2))


def test_other_tenants_and_those_that_nobody_knows_share_nothing() -> None:
    equal = uploads()
    made = [kept(equal, V, 1, "a"), kept(equal, V, 2, "b"), kept(equal, V, 3, ""), kept(equal, V, 4, "")]
    assert all(one is not two for one, two in itertools.combinations(made, 2))


def test_a_session_keeps_what_it_uploads_twice() -> None:
    """It may be about to have both overwritten, as a step does that is given the zeros of an optimizer."""
    equal = uploads()
    one = kept(equal, V, 1)
    assert one is not kept(equal, V, 1)
    assert kept(equal, V, 2) is one
    second = kept(equal, V, 2)
    assert second is not one, "also where another session was first"
    assert not equal.take_out(second), "nobody else has it"
    assert kept(equal, V, 1) is not one


def test_two_uploads_of_a_session_that_are_compared_at_a_time_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    equal = uploads()
    one = kept(equal, V, 1)
    compared = equal_uploads._has_bytes
    amid: list[Any] = []

    def has_bytes(*asked: Any) -> bool:
        if not amid:
            amid.append(None)
            amid[0] = kept(equal, V, 2)
        return compared(*asked)

    monkeypatch.setattr(equal_uploads, "_has_bytes", has_bytes)
    assert kept(equal, V, 2) is one
    assert amid[0] is not one


def test_an_array_of_very_many_sessions_remembers_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_uploads, "MAX_SESSIONS", 3)
    equal = uploads()
    one = kept(equal, V, 1)
    assert all(kept(equal, V, session) is one for session in range(2, 10))
    (only,) = equal._by_array.values()
    assert len(only.sessions) <= 3


def test_small_arrays_are_kept_as_they_come() -> None:
    equal, small = uploads(), V[: LEAST_BYTES // V.itemsize - 1]
    assert kept(equal, small, 1) is not kept(equal, small, 2)


def test_what_nobody_has_any_more_is_forgotten() -> None:
    equal = uploads()
    one = kept(equal, V, 1)
    del one
    assert not equal._by_key
    assert not equal._by_array
    again = kept(equal, V, 2)
    assert kept(equal, V, 3) is again


def test_an_array_that_a_launch_overwrites_is_given_to_nobody() -> None:
    equal = uploads()
    one = kept(equal, V, 1)
    assert not equal.take_out(one), "nobody else has it"
    two = kept(equal, V, 2)
    assert two is not one
    assert kept(equal, V, 3) is two
    assert equal.take_out(two), "it has to be copied"
    assert equal.take_out(two), "also the next time"
    assert kept(equal, V, 4) is not two
    assert not equal.take_out(jax.numpy.ones(3))


def test_an_array_that_is_overwritten_amid_the_look_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    1. A second session uploads what the first one has; while bytes are compared, a launch comes that takes the memory.
    2. It is told that another session may have it, and copies it: what is compared stays.
    3. From there on it is given to nobody.
    """
    equal = uploads()
    one = kept(equal, V, 1)
    compared, found = equal_uploads._has_bytes, []

    def amid(*asked: Any) -> bool:
        found.append(equal.take_out(one))
        return compared(*asked)

    monkeypatch.setattr(equal_uploads, "_has_bytes", amid)
    assert kept(equal, V, 2) is one
    assert found == [True]
    assert kept(equal, V, 3) is not one


def test_a_number_that_is_taken_is_not_free_for_the_same_array() -> None:
    store = BufferStore()
    array = uploaded(V, True)[1]
    assert store.add(7, 1, array)
    assert not store.add(7, 1, array)
    assert store.add(8, 1, array)
