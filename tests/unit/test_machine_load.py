"""The load of the machine, as the kernel counts it."""

from __future__ import annotations

import io
from typing import Any

import pytest

from pathways_ray import machine_load


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.50 0.40 0.30 3/900 1234\n", 1.0), ("9.0 9.0 9.0 301/900 1234\n", 15.05), ("", 1.0), ("a b c d e", 1.0)],
)
def test_slowness_follows_the_threads_that_want_to_run(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: float
) -> None:
    """On two cores. What cannot be read says nothing."""

    def read(*_: Any, **__: Any) -> io.StringIO:
        return io.StringIO(text)

    monkeypatch.setattr(machine_load, "_cores", lambda: 2)
    monkeypatch.setattr("builtins.open", read)
    assert machine_load.slowness() == pytest.approx(expected)


def test_a_machine_without_such_a_count_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    assert machine_load.slowness() == 1.0
