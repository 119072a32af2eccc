"""The programs of a proxy's client as the runtime has them."""

from __future__ import annotations

from functools import partial

import pytest

from pathways_ray.ir.graph import Graph
from pathways_ray.proxy import loaded
from tests.unit.helpers import Sketch


class Registry:
    """The programs of a session, by number."""

    def __init__(self) -> None:
        self.made = 0
        self.programs: dict[int, str] = {}

    def register(self, graph: Graph, encoded: bytes, functions: dict[str, bytes]) -> int:
        self.made += 1
        self.programs[self.made] = graph.name
        return self.made

    def unregister(self, program: int) -> None:
        del self.programs[program]


def moving(name: str) -> Graph:
    sketch = Sketch(name)
    return sketch.graph(sketch.argument(1))


def test_an_endless_variety_of_moves_keeps_a_bounded_number_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is given back for a further one, and registered again where it is needed again."""
    monkeypatch.setattr(loaded, "MAX_GRAPHS", 3)
    registry = Registry()
    graphs = loaded.MovingGraphs(registry)
    for key in ("a", "b", "a", "c", "d"):
        number = graphs.number(key, partial(moving, key))
        assert registry.programs[number] == key
    assert sorted(registry.programs.values()) == ["b", "c", "d"]
    assert registry.programs[graphs.number("a", partial(moving, "a"))] == "a"
    assert sorted(registry.programs.values()) == ["a", "c", "d"]
    assert registry.made == 5
