"""An operator's wait for an island to be empty, and numbers that no island has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pathways_ray.client import islands
from pathways_ray.errors import PathwaysError, UsageError
from pathways_ray.transport import messages


def test_a_drain_that_somebody_takes_back_is_no_empty_island(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [{"island": 1, "slice": 7}]
    looks = iter([("draining", held), ("up", [])])

    def call(url: str, token: str, request: Any, ca: str) -> messages.Reply:
        if isinstance(request, messages.DrainIsland):
            return messages.Accepted()
        state, slices = next(looks)
        return messages.StatusReply(json.dumps({"islands": [{"island": 1, "state": state}], "slices": slices}))

    monkeypatch.setattr(islands, "call", call)
    with pytest.raises(PathwaysError, match="island 1 takes slices again: its drain was taken back"):
        islands.drain("grpc://h:1", "t", 1, 60.0)


def test_a_number_that_no_island_has_is_refused() -> None:
    for number in (-1, 1 << 70, True):
        with pytest.raises(UsageError, match="an island is named by its number"):
            islands.checked(number)
