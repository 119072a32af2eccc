"""Rings keep the last records in their order, histograms count durations."""

from __future__ import annotations

import functools
import operator

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
