"""Collectives and messages: bytes by brute force, levels, contention, shape."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ptdp.planner.network import Group, all_reduce, crossed, flat_gather, gather, message, shares, spread
from tests.unit.megatron.planner.helpers import faster_network, selene

CLUSTER = selene()
NVLINK, INFINIBAND = CLUSTER.levels


def ring(parts: int) -> list[set[int]]:
    """Runs a ring all-gather of `parts` parts; what each member sent in all, as sets of parts."""
    held: list[list[int]] = [[member] for member in range(parts)]
    sent: list[set[int]] = [set() for _ in range(parts)]
    for _ in range(parts - 1):
        moving = [parts_held[-1] for parts_held in held]
        for member, part in enumerate(moving):
            sent[member].add(part)
            held[(member + 1) % parts].append(part)
    assert all(sorted(parts_held) == list(range(parts)) for parts_held in held)
    return sent


@pytest.mark.parametrize("members", [2, 3, 8])
def test_a_gather_inside_a_server_sends_what_a_ring_sends(members: int) -> None:
    size = 24e6
    for sent in ring(members):
        assert spread(CLUSTER, Group(members), size, 1)["nvlink"] == pytest.approx(len(sent) * size / members)
    seconds = (members - 1) / members * size / NVLINK.rate + (members - 1) * NVLINK.latency
    assert gather(CLUSTER, Group(members), size) == pytest.approx(seconds)
    assert all_reduce(CLUSTER, Group(members), size) == pytest.approx(2 * seconds)


@given(
    servers=st.integers(1, 64),
    inside=st.sampled_from([1, 2, 4, 8]),
    size=st.floats(1e3, 1e10),
    passes=st.integers(1, 4),
)
def test_levels_together_send_no_more_than_a_ring_over_all(servers: int, inside: int, size: float, passes: int) -> None:
    """(n - 1)/n of the bytes, however they are spread over the levels."""
    group = Group(servers * inside, stride=8 // inside)
    carried = spread(CLUSTER, group, size, passes)
    assert sum(carried.values()) == pytest.approx(passes * (group.size - 1) / group.size * size)


def test_between_servers_each_member_carries_its_piece() -> None:
    size = 8e9
    got = list(shares(CLUSTER, Group(32), size))
    assert got == [(NVLINK, 8, size), (INFINIBAND, 4, size / 8)]
    seconds = 7 / 8 * size / NVLINK.rate + 7 * NVLINK.latency
    seconds += 3 / 4 * size / 8 / INFINIBAND.rate + ceil(log2(4)) * INFINIBAND.latency
    assert gather(CLUSTER, Group(32), size) == pytest.approx(seconds)


def test_a_strided_group_uses_the_cards_of_its_members() -> None:
    """Replicas of a full server's tensor axis meet only between servers, each over its own card."""
    assert list(shares(CLUSTER, Group(6, stride=8), 1e9)) == [(INFINIBAND, 6, 1e9)]
    assert list(shares(CLUSTER, Group(6, stride=64), 1e9)) == [(INFINIBAND, 6, 1e9)]


def test_a_flat_ring_goes_at_the_rate_of_one_card() -> None:
    assert flat_gather(CLUSTER, Group(384), 1e9) == pytest.approx(383 / 384 * 1e9 / INFINIBAND.rate, rel=0.01)
    assert flat_gather(CLUSTER, Group(384), 1e9) > gather(CLUSTER, Group(384), 1e9)


def test_nothing_is_sent_by_one_member() -> None:
    assert all_reduce(CLUSTER, Group(1), 1e9) == flat_gather(CLUSTER, Group(1), 1e9) == 0


@pytest.mark.parametrize(
    ("distance", "blocks", "names"),
    [
        (1, 4, ["nvlink"] * 3),
        (4, 4, ["nvlink", "infiniband", "nvlink"]),
        (8, 3, ["infiniband"] * 2),
        (3, 3, ["infiniband"] * 2),  # blocks that lie across servers
    ],
)
def test_messages_cross_the_level_at_their_boundary(distance: int, blocks: int, names: list[str]) -> None:
    assert [level.name for level in crossed(CLUSTER, distance, blocks)] == names


def test_scatter_gather_sends_a_piece_and_gathers_it() -> None:
    size = 50e6
    whole, cut = message(CLUSTER, INFINIBAND, size), message(CLUSTER, INFINIBAND, size, senders=8)
    assert cut == pytest.approx(size / 8 / INFINIBAND.rate + INFINIBAND.latency + gather(CLUSTER, Group(8), size))
    assert cut < whole / 3


def test_an_oversubscribed_tree_is_slower() -> None:
    thin = replace(CLUSTER, levels=(NVLINK, replace(INFINIBAND, oversubscription=4.0)))
    assert gather(thin, Group(16, 8), 1e9) == pytest.approx(4 * gather(CLUSTER, Group(16, 8), 1e9), rel=0.01)


def test_a_third_level_is_used_between_data_centres() -> None:
    wide = replace(
        CLUSTER, levels=(NVLINK, replace(INFINIBAND, size=64), replace(INFINIBAND, name="wan", latency=5e-3))
    )
    assert [level.name for level, _, _ in shares(wide, Group(128), 1e9)] == ["nvlink", "infiniband", "wan"]
    assert gather(wide, Group(128), 1e9) > gather(CLUSTER, Group(128), 1e9) + 4.9e-3


@given(
    size=st.floats(1, 1e11),
    members=st.integers(1, 4096),
    stride=st.sampled_from([1, 2, 8, 64]),
    level=st.integers(0, 1),
)
def test_twice_the_bandwidth_is_never_slower(size: float, members: int, stride: int, level: int) -> None:
    group, faster = Group(members, stride), faster_network(CLUSTER, level, 2.0)
    for collective in (all_reduce, gather, flat_gather):
        assert collective(faster, group, size) <= collective(CLUSTER, group, size)
