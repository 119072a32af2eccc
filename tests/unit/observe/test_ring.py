"""Rings keep the last records in their order, histograms count durations."""

from __future__ import annotations

import functools
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.observe.ring import LATENCIES_S, Histogram, Ring


@given(st.integers(0, 40))
def test_a_ring_has_the_last_records_in_order(count: int) -> None:
    ring = Ring("qd", 16)
    for number in range(count):
        ring.add(number, number / 2)
    assert ring.records() == [(number, number / 2) for number in range(max(0, count - 16), count)]


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_counts_each_duration_in_all_buckets_that_hold_it(seconds: list[float]) -> None:
    histogram = Histogram()
    for one in seconds:
        histogram.observe(one)
    found = dict(histogram.cumulated())
    assert found["+Inf"] == len(seconds)
    assert [found[repr(bound)] for bound in LATENCIES_S] == [sum(s <= bound for s in seconds) for bound in LATENCIES_S]
    assert histogram.total == functools.reduce(operator.add, seconds, 0.0)  # `sum` of Python 3.12 rounds otherwise


@pytest.mark.parametrize("added", [0, 3, 16, 17, 20, 32, 40])
def test_the_last_records_are_the_end_of_all(added: int) -> None:
    ring = Ring("qd", 16)
    for number in range(added):
        ring.add(number, number / 2)
    found = ring.records()
    for count in (0, 1, 5, 15, 16, 17, 100):
        assert ring.last(count) == (found[-count:] if count else [])


def test_what_is_read_of_a_ring_is_what_is_asked_for() -> None:
    """The controller counts what is new at each look, on its loop."""
    ring = Ring("q", 16)
    for number in range(20):
        ring.add(number)
    unpacked = []

    class Packer:
        def iter_unpack(self, found: bytes) -> list[bytes]:
            unpacked.append(len(found))
            return [found]

    ring._packer = Packer()  # type: ignore[assignment]
    ring.last(2)
    assert unpacked == [2 * 8]
