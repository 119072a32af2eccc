"""Slices that say how they lie, and what is asked of their devices."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_ray.client.slice_text import lie_of
from pathways_ray.client.wanted import ANY, Wanted, wanted_of
from pathways_ray.errors import UsageError
from pathways_ray.ir.types import SliceType
from pathways_ray.transport.messages import CreateSlice

GRID: dict[str, Any] = {
    "island": 0,
    "links": [[2, "line", 1], [2, "line", 1]],
    "hosts": [{"host": 0, "devices": [{"device": f"0.{k}", "place": [k // 2, k % 2]} for k in range(4)]}],
}


def test_a_slice_says_what_each_axis_costs() -> None:
    text = lie_of(SliceType(1, (2, 2), ("x", "y")), "slice a (x=2, y=2)", 0, ["0.0", "0.1", "0.2", "0.3"], [GRID])
    assert text.splitlines() == [
        "slice a (x=2, y=2) on island 0: 4 of its devices, in a 2x2 grid",
        "  hosts: 1, of which whole: 1",
        "  axis x (2): 1.00 hops between neighbours, at most 1",
        "  axis y (2): 1.00 hops between neighbours, at most 1",
        "  cost: 4 hops for 4 pairs of neighbours",
        "  x=0, y=0 0.0 at (0, 0)",
        "  x=0, y=1 0.1 at (0, 1)",
        "  x=1, y=0 0.2 at (1, 0)",
        "  x=1, y=1 0.3 at (1, 1)",
    ]


def test_hosts_without_places_and_an_island_that_is_away() -> None:
    flat = {
        "island": 1,
        "links": [[2, "switch", 4], [1, "switch", 1]],
        "hosts": [{"host": h, "devices": [{"device": f"{h}.0", "place": [h, 0]}]} for h in range(2)],
    }
    text = lie_of(SliceType(1, (2,), ("x",)), "s", 1, ["0.0", "1.0"], [flat])
    assert "hosts and their devices, 2x1: hosts are 4 hops apart, devices of one 1" in text
    assert "axis x (2): 4.00 hops between neighbours, at most 4" in text
    assert lie_of(SliceType(1, (1,), ("x",)), "s", 2, ["7.0"], [flat]) == "s on island 2, which is away: 7.0"
    assert "no neighbours" in lie_of(SliceType(1, (1,), ("x",)), "s", 1, ["0.0"], [flat])


def test_a_request_names_what_is_wanted_and_nothing_else() -> None:
    asked = CreateSlice(1, (8,), ("x",), -1, "", "")
    assert ANY.added_to(asked) is asked
    found = wanted_of("tpu", "n", topology=[2, 4], memory=1 << 30, generation="v4").added_to(asked)
    assert (found.platform, found.topology, found.memory, found.generation) == ("tpu", (2, 4), 1 << 30, "v4")
    assert wanted_of(None, "") == Wanted()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"topology": ()}, r"one to three sides of a sub-grid of devices, not \(\)"),
        ({"topology": (1, 1, 1, 1)}, "one to three sides"),
        ({"topology": (2, 0)}, "one to three sides"),
        ({"topology": 4}, "one to three sides"),
        ({"topology": (2.0,)}, "one to three sides"),
        ({"memory": -1}, "whole number, not -1"),
        ({"memory": 1.5}, r"whole number, not 1\.5"),
        ({"memory": True}, "whole number, not True"),
        ({"generation": 4}, "generation= of a slice is a text, not 4"),
    ],
)
def test_what_nothing_can_have_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        wanted_of(None, "", **given)
