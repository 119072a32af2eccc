"""Programs of other libraries, unmodified, through a proxy to a cluster: alone, and as two tenants at the same time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.jax_suite.programs import PROGRAMS, doors, installed, printed


@pytest.fixture(scope="module", params=[1, 2], ids=["one host", "two hosts"])
def opened(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    with doors(request.param) as found:
        yield found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_another_library_has_the_bits_of_plain_jax(opened: list[Any], name: str) -> None:
    if not installed(name):
        pytest.skip(f"{PROGRAMS[name][0]} is not installed")
    expected, *through = printed(name, opened)
    json.loads(expected)  # and is no error
    assert through == [expected] * 3
