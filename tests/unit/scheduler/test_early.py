"""Whose clients may hand launches to the host of an island themselves."""

from __future__ import annotations

from pathways_ray.scheduler.early import ALONE_S, EarlyRight
from pathways_ray.scheduler.events import ToHosts
from pathways_ray.transport.capabilities import tenant_mark
from pathways_ray.transport.messages import AllowEarly


def test_a_tenant_that_is_alone_for_a_while_may() -> None:
    right = EarlyRight()
    assert right.tick(True, 1, 0.0) == []
    assert right.entered("a", 1.0) == []
    assert right.tick(True, 1, 1.0 + ALONE_S / 2) == []
    assert right.tick(True, 1, 1.0 + 2 * ALONE_S) == [ToHosts(AllowEarly(tenant_mark("a")))]
    assert right.tick(True, 1, 2.0) == right.entered("a", 2.0) == []


def test_the_launch_of_another_one_ends_it() -> None:
    right = EarlyRight()
    right.entered("a", 0.0)
    right.tick(True, 1, ALONE_S)
    assert right.entered("b", 1.0) == [ToHosts(AllowEarly(""))]
    assert right.tick(True, 1, 1.0 + ALONE_S / 2) == []
    assert right.tick(True, 1, 1.0 + 2 * ALONE_S) == [ToHosts(AllowEarly(tenant_mark("b")))]


def test_an_island_that_is_not_whole_or_serves_several_ends_it() -> None:
    right = EarlyRight()
    right.entered("a", 0.0)
    right.tick(True, 1, ALONE_S)
    assert right.tick(False, 1, 1.0) == [ToHosts(AllowEarly(""))]
    assert right.tick(False, 1, 1.1) == []


def test_of_several_hosts_one_leads_in_terms_with_numbers() -> None:
    right = EarlyRight()
    right.entered("a", 0.0)
    mark = tenant_mark("a")
    assert right.tick(True, 2, ALONE_S) == [ToHosts(AllowEarly(mark, 1))]
    assert right.end() == [ToHosts(AllowEarly(""))]
    assert right.tick(True, 2, 2 * ALONE_S) == [ToHosts(AllowEarly(mark, 2))]
