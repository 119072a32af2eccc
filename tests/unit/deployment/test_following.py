"""Islands that follow Ray's nodes, as looks come and commands go."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from pathways_ray.deployment.following import (
    GONE,
    MARGIN_S,
    RETRY_S,
    Add,
    Command,
    Drain,
    Following,
    IslandSeen,
    Looked,
    NodeSeen,
    Remove,
    Started,
    crowded,
)
from pathways_ray.deployment.topology import Auto, Island
from pathways_ray.errors import Unschedulable, UsageError

CPUS = {"CPU": 4.0}
TWO = Island("cpu", 1, 2)


def node(name: str, leaves_in_s: float | None = None, **resources: float) -> NodeSeen:
    return NodeSeen(name, resources or CPUS, leaves_in_s)


def island(number: int, *nodes: str, state: str = "up", slices: int = 0) -> IslandSeen:
    return IslandSeen(number, nodes, state, slices, TWO)


def look(core: Following, nodes: Iterable[NodeSeen], islands: Iterable[IslandSeen], now: float = 0.0) -> list[Command]:
    return core.handle(Looked(list(nodes), list(islands)), now)


# --- a node that is drained -------------------------------------------------------------------------------------------


def test_the_islands_of_a_drained_node_are_replaced_drained_and_removed() -> None:
    """1. Both are well. 2. Ray drains the node of island 1: another one like it is started, and it is drained until
    shortly before. 3. It has a slice, and stays. 4. The slice has moved: it is removed, once the other one is up."""
    core = Following()
    assert look(core, [node("a"), node("b")], [island(0, "a"), island(1, "b", slices=1)]) == []
    leaving = [node("a"), node("b", 30.0)]
    reason = "its node is drained by Ray, and ends in 30 s"
    assert look(core, leaving, [island(0, "a"), island(1, "b", slices=1)], 2.0) == [
        Add("in place of island 1", TWO, ""),
        Drain(1, 30.0 - MARGIN_S, reason),
    ]
    drained = island(1, "b", state="draining", slices=1)
    assert look(core, leaving, [island(0, "a"), drained], 4.0) == []
    assert core.handle(Started("in place of island 1", 2), 9.0) == []
    empty = island(1, "b", state="draining")
    assert look(core, leaving, [island(0, "a"), empty, island(2, "a")], 10.0) == [Remove(1)]
    assert look(core, [node("a")], [island(0, "a"), island(2, "a")], 12.0) == []


def test_an_island_with_slices_is_removed_when_its_node_is_about_to_end() -> None:
    core = Following()
    full = island(0, "a", slices=3)
    look(core, [node("a", 10.0), node("b")], [full, island(1, "b")], 0.0)
    drained = full._replace(state="draining")
    assert look(core, [node("a", 4.0), node("b")], [drained, island(1, "b")], 6.9) == []
    assert look(core, [node("a", 2.0), node("b")], [drained, island(1, "b")], 7.1) == [Remove(0)]


def test_the_last_island_is_asked_to_go_again_and_again_until_another_one_is_up() -> None:
    """A drain that is refused is seen by the island's state, which stays as it was."""
    core = Following()
    leaving = [node("a", math.inf), node("b")]
    first, again = (look(core, leaving, [island(0, "a")], now) for now in (0.0, 2.0))
    assert [type(command) for command in first] == [Add, Drain]
    assert again == [Drain(0, math.inf, "its node is drained by Ray")]


def test_an_island_that_could_not_be_started_is_tried_again_later() -> None:
    core = Following()
    leaving, islands = [node("a", 90.0)], [island(0, "a", state="draining", slices=1)]
    assert [type(command) for command in look(core, leaving, islands, 0.0)] == [Add]
    core.handle(Started("in place of island 0", -1), 5.0)
    assert look(core, leaving, islands, 5.0 + RETRY_S - 1.0) == []
    assert [type(command) for command in look(core, leaving, islands, 5.0 + RETRY_S)] == [Add]


def test_an_island_that_is_lost_while_it_is_drained_is_removed_at_its_time() -> None:
    core = Following()
    lost = island(0, state="lost", slices=1)
    look(core, [node("a", 10.0), node("b")], [island(0, "a", slices=1), island(1, "b")], 0.0)
    assert Remove(0) not in look(core, [node("a", 5.0), node("b")], [lost, island(1, "b")], 5.0)
    assert Remove(0) in look(core, [node("b"), node("a", 1.0)], [lost, island(1, "b")], 9.0)


def test_a_keeper_that_starts_again_goes_on_with_a_drain() -> None:
    core = Following()
    assert look(core, [node("a", 20.0), node("b")], [island(0, "a", state="draining"), island(1, "b")])[-1] == Remove(0)


def test_what_the_operator_drains_is_the_operators() -> None:
    core = Following(Auto())
    islands = [island(0, "a", state="draining"), island(1, "b")]
    assert look(core, [node("a"), node("b")], islands) == []
    assert look(core, [node("a"), node("b")], islands, 100.0) == []


@pytest.mark.parametrize("restarted", [(), ("a",)], ids=["it is away", "Ray has restarted its host elsewhere"])
def test_a_keeper_that_starts_again_knows_whose_node_is_gone(restarted: tuple[str, ...]) -> None:
    """It has not seen the island there: that it was started for this node is kept with it."""
    core = Following(Auto(devices=2))
    seen = [island(0, "a")._replace(node="a"), island(1, *restarted, slices=1)._replace(node="b")]
    assert look(core, [node("a")], seen) == [Drain(1, 0.0, GONE)]
    seen[1] = seen[1]._replace(state="draining")
    assert look(core, [node("a")], seen, 2.0) == [Remove(1)]
    assert look(core, [node("a"), node("b")], seen[:1], 4.0) == [Add("for node b", TWO, "b")]


# --- an island for each node ------------------------------------------------------------------------------------------


def test_a_node_that_comes_gets_an_island_and_one_that_goes_takes_it_along() -> None:
    core = Following(Auto(devices=2))
    assert look(core, [node("head", CPU=0.0), node("a")], [island(0, "a")]) == []
    came = [node("a"), node("b")]
    assert look(core, came, [island(0, "a")]) == [Add("for node b", TWO, "b")]
    assert look(core, came, [island(0, "a"), island(1, state="away")]) == [], "it is being started"
    core.handle(Started("for node b", 1), 8.0)
    assert look(core, came, [island(0, "a"), island(1, "b")], 8.0) == []
    gone = island(1, state="away", slices=1)
    assert look(core, [node("a")], [island(0, "a"), gone], 20.0) == [Drain(1, 0.0, GONE)]
    assert look(core, [node("a")], [island(0, "a"), gone._replace(state="draining")], 22.0) == [Remove(1)]
    assert look(core, [node("a")], [island(0, "a")], 24.0) == []
    assert look(core, [node("a"), node("c")], [island(0, "a")], 26.0) == [Add("for node c", TWO, "c")]


def test_an_island_whose_host_ray_restarts_on_the_node_of_another_one_goes_with_its_own() -> None:
    """Between two looks the node is taken for dead, and the island is up elsewhere."""
    core = Following(Auto("cpu"))
    assert look(core, [node("a"), node("b")], [island(0, "a"), island(1, "b")]) == []
    assert look(core, [node("a"), node("b")], [island(0, "a"), IslandSeen(1, (), "away", 1, TWO)], 2.0) == []
    moved = island(1, "a", slices=1)
    assert look(core, [node("a")], [island(0, "a"), moved], 4.0) == [Drain(1, 0.0, GONE)]
    assert look(core, [node("a")], [island(0, "a"), island(1, "a", state="draining")], 6.0) == [Remove(1)]
    # With islands that the operator has named it stays.
    named = Following()
    assert look(named, [node("a"), node("b")], [island(0, "a"), island(1, "b")]) == []
    assert look(named, [node("a")], [island(0, "a"), moved], 4.0) == []


def test_a_drained_node_gets_no_island_and_its_own_gets_no_other_in_its_place() -> None:
    core = Following(Auto())
    look(core, [node("a"), node("b")], [island(0, "a"), island(1, "b")])
    found = look(core, [node("a", 60.0), node("b"), node("c", 60.0)], [island(0, "a"), island(1, "b")])
    assert [type(command) for command in found] == [Drain]


def test_while_an_island_has_not_been_seen_none_is_added() -> None:
    """Its node may be the one that seems to have none; one that is lost will not say so."""
    core = Following(Auto())
    assert look(core, [node("a"), node("b")], [island(0, "a"), island(1, state="away")]) == []
    found = look(core, [node("a"), node("b")], [island(0, "a"), island(1, state="lost")])
    assert [command.node for command in found if isinstance(command, Add)] == ["b"]


def test_the_island_of_a_node_is_what_it_has() -> None:
    gpus = {"CPU": 8.0, "GPU": 4.0}
    assert Auto().island_of(gpus) == Island("gpu", 1, 4)
    assert Auto("cpu").island_of(gpus) is None
    assert Auto("cpu", 3).island_of(CPUS) == Island("cpu", 1, 3)
    made = Auto().topology({"head": {}, "a": CPUS, "b": gpus})
    assert (made.nodes, made.islands) == (("a", "b"), (Island("cpu", 1, 4), Island("gpu", 1, 4)))
    with pytest.raises(Unschedulable, match="no Ray node has what an island takes"):
        Auto("tpu").topology({"a": CPUS})
    with pytest.raises(UsageError, match="devices must be a whole number"):
        Auto("cpu", 0)


# --- spreading --------------------------------------------------------------------------------------------------------


def test_islands_that_share_a_node_are_spread_over_those_that_have_fewer() -> None:
    """Three on one node, none on one that has come back, one on a third: one of the three goes, the youngest."""
    nodes = [node("a"), node("b"), node("c")]
    islands = [island(0, "a"), island(1, "a"), island(2, "a"), island(3, "c")]
    assert crowded(nodes, islands) == [(islands[2], "b")]
    assert crowded(nodes, [island(0, "a"), island(1, "b")]) == []
    assert crowded(nodes[:2], [island(k, "a") for k in range(4)]) == [(island(3, "a"), "b"), (island(2, "a"), "b")]


def test_what_fits_no_other_node_and_what_is_drained_stays() -> None:
    small = node("b", CPU=0.001)
    assert crowded([node("a"), small], [island(0, "a"), island(1, "a")]) == []
    assert crowded([node("a"), node("b", 60.0)], [island(0, "a"), island(1, "a")]) == []
    assert crowded([node("a"), node("b")], [island(0, "a", state="draining"), island(1, "a", "a")]) == [
        (island(1, "a", "a"), "b")
    ]
