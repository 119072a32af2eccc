"""Connections of threads: how long one waits for the other end."""

from __future__ import annotations

import pytest

from pathways_ray.transport import sockets


def test_the_load_is_looked_at_behind_a_silence_and_not_before_each_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts all threads of the machine for who looks, which takes longer than a small message."""
    looked = list[float]()
    monkeypatch.setattr(sockets, "slowness", lambda: looked.append(2.5) or 2.5)
    waited = sockets.silences()
    assert next(waited) == 0
    assert not looked
    assert list(waited) == [1, 2], "on a machine that is slow by 2.5, three silences in all"
