"""Programs of other libraries, unmodified, through a proxy to a cluster: alone, and as two tenants at the same time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.jax_suite.programs import PROGRAMS, doors, installed, printed

SUMS = {"nnx", "equinox", "grain"}
"""Programs that sum over all devices: those of two hosts are added in another order than those of one process."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one host", "two hosts"])
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[int, list[Any]]]:
    with doors(request.param) as found:
        yield request.param, found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_another_library_has_the_bits_of_plain_jax(opened: tuple[int, list[Any]], name: str) -> None:
    """Sums over two hosts agree to rounding, and have the same bits for two tenants at the same time as alone."""
    if not installed(name):
        pytest.skip(f"{PROGRAMS[name][0]} is not installed")
    hosts, proxies = opened
    expected, *through = printed(name, proxies)
    wanted = json.loads(expected)  # and is no error
    if hosts > 1 and name in SUMS:
        np.testing.assert_allclose(json.loads(through[0])[0], wanted[0], rtol=1e-4)
        expected = through[0]
    assert through == [expected] * 3
