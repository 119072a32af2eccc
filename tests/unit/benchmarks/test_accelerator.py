"""The benchmark of accelerators, as far as it needs none."""

from __future__ import annotations

import pytest

from benchmarks.accelerator import Settings


@pytest.mark.parametrize(("stream", "products"), [(1, 1), (3, 1), (4, 1), (2000, 500)])
def test_a_short_stream_has_a_product(stream: int, products: int) -> None:
    assert Settings(stream=stream).products == products
