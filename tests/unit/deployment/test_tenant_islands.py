"""The numbers of the islands that tenants have for themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from pathways_ray import limits
from pathways_ray.deployment import detached
from pathways_ray.deployment.tenant_islands import Places, TenantIslands

MEMBERS = {0: [0, 1], 1: [2]}


def test_numbers_of_islands_never_come_again_and_those_of_hosts_do() -> None:
    """The tag of a slice names its island, and stays good when that has ended."""
    places = Places(MEMBERS)
    assert places.take("alice") == {0: (2, [3, 4]), 1: (3, [5])}
    assert places.take("bob") == {0: (4, [6, 7]), 1: (5, [8])}
    places.give_back("alice")
    assert places.take("carol") == {0: (6, [3, 4]), 1: (7, [5])}
    places.give_back("carol")
    assert places.take("alice") == {0: (8, [3, 4]), 1: (9, [5])}


def test_an_actor_that_starts_again_goes_on_above_the_numbers_before() -> None:
    assert Places(MEMBERS, last=100).take("alice") == {0: (202, [3, 4]), 1: (203, [5])}


def test_tenants_have_no_more_hosts_than_there_are_numbers() -> None:
    """One that did not get any takes no place; one that ends leaves its own."""
    places = Places({0: list(range(limits.MAX_HOSTS // 2))})
    places.take("alice")
    with pytest.raises(RuntimeError, match="2 tenants have islands"):
        places.take("bob")
    places.give_back("bob")
    places.give_back("alice")
    assert places.take("bob")[0][0] == 2


def test_an_actor_that_ends_while_it_is_looked_for_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an actor before this one had started may be on its way to its end."""

    def get_actor(name: str, _: str) -> Any:
        raise ValueError(f"no actor {name}")

    removed: list[int] = []
    islands: Any = SimpleNamespace(
        topology=SimpleNamespace(members=lambda: MEMBERS, hosts=3),
        processes=SimpleNamespace(runtime="see"),
        _of_manager=lambda method, *numbers: removed.extend(numbers) or (),
    )
    there = ["see-host-3", "see-scheduler-0", "see-scheduler-2"]
    monkeypatch.setattr(detached, "actors", lambda name: there)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    TenantIslands._end_all(islands)
    assert removed == [2]
