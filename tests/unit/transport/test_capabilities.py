"""What clients show to hosts: right only as the controller made it, for that session, slice and allowance."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.transport.capabilities import data_token, grant_of, is_slice_tag, slice_tag
from tests.unit.helpers import placed
from tests.unit.strategies import repeatable

SECRET = "the data secret"
SLICE = placed(1, ["0.0", "0.1"])


@pytest.mark.parametrize("allowance", [None, 0, 1, 2**62])
def test_a_token_says_whose_it_is_and_how_much(allowance: int | None) -> None:
    token = data_token(SECRET, 7, allowance, "alice, ü.\ud800")
    assert token.isascii()
    found = grant_of(SECRET, 7, token)
    assert found is not None
    assert (found.session, found.allowance) == (7, allowance)
    assert found.tenant != grant_of(SECRET, 7, data_token(SECRET, 7, allowance, "bob")).tenant  # type: ignore[union-attr]
    assert grant_of(SECRET, 8, token) is None
    assert grant_of("another secret", 7, token) is None


def test_an_allowance_cannot_be_raised() -> None:
    signature = data_token(SECRET, 7, 5).partition(".")[2]
    for text in ("-1", "6", "05", "5 ", "+5", "", "-", "--1", "9" * 30, "５"):
        assert grant_of(SECRET, 7, f"{text}.{signature}") in (None, grant_of(SECRET, 7, data_token(SECRET, 7, 5)))
        if text != "05":
            assert grant_of(SECRET, 7, f"{text}.{signature}") is None


@repeatable(200)
@given(st.text(max_size=100))
def test_what_anybody_may_send_is_no_token(text: str) -> None:
    assert grant_of(SECRET, 7, text) is None
    assert not is_slice_tag(SECRET, 7, SLICE, text)


def test_a_proof_is_for_one_session_and_one_slice_on_its_devices() -> None:
    tag = slice_tag(SECRET, 7, SLICE)
    assert is_slice_tag(SECRET, 7, SLICE, tag)
    assert not is_slice_tag(SECRET, 8, SLICE, tag)
    assert not is_slice_tag("another secret", 7, SLICE, tag)
    moved = PlacedSlice.on(SLICE.mesh, SLICE.island, (Device(0, 0), Device(0, 2)))
    larger = msgspec.structs.replace(SLICE, mesh=msgspec.structs.replace(SLICE.mesh, shape=(1 << 40,)))
    assert not is_slice_tag(SECRET, 7, moved, tag)
    assert not is_slice_tag(SECRET, 7, larger, tag)


def test_a_token_is_no_proof_and_no_secret_is_in_them() -> None:
    token = data_token(SECRET, 7, None)
    assert not is_slice_tag(SECRET, 7, SLICE, token.partition(".")[2])
    assert SECRET not in token + slice_tag(SECRET, 7, SLICE)
