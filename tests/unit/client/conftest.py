"""A session without processes, and slices of it, for tests of what a client decides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pathways_ray as pw
from tests.unit.client.local import LocalSession, opened


@pytest.fixture
def session() -> Iterator[LocalSession]:
    found = opened()
    yield found
    found.close()


@pytest.fixture
def a4(session: LocalSession) -> pw.VirtualSlice:
    return session.virtual_slice((4,), ("x",), name="a4")


@pytest.fixture
def b22(session: LocalSession) -> pw.VirtualSlice:
    return session.virtual_slice((2, 2), ("x", "y"), name="b22")
