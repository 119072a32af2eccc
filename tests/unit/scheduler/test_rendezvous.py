"""Hosts that enqueue their common gangs in different orders are found, and no others."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.scheduler.rendezvous import OrderCheck
from pathways_ray.transport.messages import Gang
from tests.unit.strategies import repeatable

BOTH = 0b11
A, B, C = (Gang(number, 0, BOTH) for number in (1, 2, 3))


def test_the_same_order_is_right_however_the_news_come() -> None:
    check = OrderCheck()
    for host, gangs in ((0, [A]), (1, [A, B]), (0, [B, C]), (1, [C])):
        assert check.add(host, gangs) is None
    assert not any(check.unmatched.values()), "what all have reported is forgotten"


def test_two_gangs_in_different_orders_are_named() -> None:
    check = OrderCheck()
    assert check.add(0, [C, A, B]) is None
    assert check.add(1, [C, B]) == ((0, A), (1, B))


def test_gangs_of_one_host_have_no_order_for_others() -> None:
    check = OrderCheck()
    alone = Gang(9, 0, 0b01)
    assert check.add(0, [alone, A]) is None
    assert check.add(1, [A, Gang(8, 0, 0b10)]) is None
    assert not any(check.unmatched.values())


HOSTS = 3
GANGS = st.lists(st.integers(1, 2**HOSTS - 1), min_size=2, max_size=12)


@repeatable(200)
@given(masks=GANGS, data=st.data())
def test_one_exchange_of_common_gangs_is_found_and_one_order_is_not(masks: list[int], data: st.DataObject) -> None:
    gangs = [Gang(number, 0, mask) for number, mask in enumerate(masks)]
    orders = {host: [g for g in gangs if g.hosts >> host & 1] for host in range(HOSTS)}
    pairs = [
        (host, k)
        for host, order in orders.items()
        for k, (a, b) in enumerate(itertools.pairwise(order))
        if a.hosts & b.hosts & ~(1 << host)
    ]
    exchanged = data.draw(st.sampled_from([None, *pairs]))
    if exchanged is not None:
        host, k = exchanged
        orders[host][k], orders[host][k + 1] = orders[host][k + 1], orders[host][k]
    check, clashes = OrderCheck(), []
    news = data.draw(st.permutations([host for host, order in orders.items() for _ in order]))
    for host in news:
        clashes.append(check.add(host, [orders[host].pop(0)]))
    assert any(clashes) == (exchanged is not None)


def test_what_some_hosts_have_reported_to_the_scheduler_before_is_not_compared() -> None:
    check = OrderCheck(since=1)
    assert check.add(0, [A, B]) is None
    assert check.add(1, [B, C]) is None
    assert check.add(0, [C]) is None
