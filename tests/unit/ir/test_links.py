"""Links between devices, and the cost of a mesh that lies on them."""

from __future__ import annotations

import pytest

from pathways_ray.ir.links import axis_cost, cost, declared_places, factors, grid_of, hops, hosts_of, pairs

LINE, TORUS, HOSTS = grid_of((4, 4), False), grid_of((4, 4), True), hosts_of(2, 4)


def test_hops_are_those_along_each_dimension_and_round_a_ring() -> None:
    assert hops(LINE, (0, 0), (3, 1)) == 4
    assert hops(TORUS, (0, 0), (3, 1)) == 2
    assert hops(HOSTS, (0, 0), (0, 3)) == 1
    assert hops(HOSTS, (0, 0), (1, 3)) == 4, "a switch between hosts, and none inside"


def test_a_mesh_along_the_links_costs_a_hop_for_each_pair_of_neighbours() -> None:
    rows = [(i, j) for i in range(4) for j in range(4)]
    assert (cost(TORUS, (4, 4), rows), pairs((4, 4))) == (32, 32)
    assert axis_cost(LINE, (4, 4), rows, 0) == (4 * (1 + 1 + 1 + 3), 3), "a line does not close"
    assert (pairs((2,)), pairs((1, 5)), pairs((2, 2, 2))) == (1, 5, 12)


def test_each_host_has_a_block_of_a_declared_grid() -> None:
    found = [declared_places((4, 4), host, 4) for host in range(4)]
    assert found[1] == ((0, 2), (0, 3), (1, 2), (1, 3)), "2x2 and not 1x4"
    assert len({place for places in found for place in places}) == 16
    assert declared_places((8,), 1, 2) == ((2,), (3,))
    assert declared_places((2, 6), 1, 3) == ((0, 3), (0, 4), (0, 5))
    with pytest.raises(ValueError, match="hosts of 4 devices do not divide a grid of 2x3"):
        declared_places((2, 3), 0, 4)


def test_factors_are_all_in_order() -> None:
    assert factors(4, 2) == [(1, 4), (2, 2), (4, 1)]
    assert len(factors(64, 3)) == 28
