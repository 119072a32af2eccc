"""Measurements become a cluster file that loads and gives back what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ptdp.planner import load
from megatron_ptdp.planner.calibrate import Measured, cluster_text, line, tile_depth
from megatron_ptdp.planner.errors import PlanningError
from megatron_ptdp.planner.network import Group, all_reduce, crossed, message
from megatron_ptdp.planner.operations import Product, copy_seconds, product_seconds


@given(latency=st.floats(1e-6, 1e-2), rate=st.floats(1e6, 1e12))
def test_a_line_is_found_again(latency: float, rate: float) -> None:
    points = [(size, latency + size / rate) for size in (1e3, 1e5, 1e7, 1e9)]
    found = line(points)
    assert found[0] == pytest.approx(latency, rel=1e-3, abs=1e-9)
    assert found[1] == pytest.approx(rate, rel=1e-3)


def test_noise_that_hides_the_line_is_refused() -> None:
    with pytest.raises(PlanningError, match="the machine is too noisy"):
        line([(1e3, 2.0), (1e6, 1.0)])
    with pytest.raises(PlanningError, match="messages of two sizes or more"):
        line([(1e3, 2.0)])


def test_the_depth_of_a_tile_is_found_again() -> None:
    flops = {size: 1e12 * size / (size + 200) for size in (128, 512, 4096)}
    assert tile_depth(flops) == pytest.approx(200, abs=1)
    assert tile_depth({128: 2.0, 256: 1.0}) == 0  # larger is slower: no depth explains that


def measured() -> Measured:
    return Measured(
        name="some device",
        devices=4,
        flops={256: 50e9, 1024: 80e9},
        copy_rate=20e9,
        reductions=[(size, 6 * 10e-6 + 1.5 * size / 5e9) for size in (1e4, 1e6, 1e8)],
        messages=[(size, 1e-3 + size / 1e9) for size in (1e4, 1e6, 1e8)],
        launch=1e-4,
    )


def test_the_file_gives_back_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text(cluster_text(measured(), 8e9, "xla-f32"))
    cluster = load.cluster(str(path))
    island, dcn = cluster.levels
    assert all_reduce(cluster, Group(4), 1e6) == pytest.approx(6 * 10e-6 + 1.5 * 1e6 / 5e9, rel=0.01)
    assert message(cluster, dcn, 1e6) == pytest.approx(1e-3 + 1e6 / 1e9, rel=0.01)
    assert crossed(cluster, 4, 2) == (dcn,)
    assert island.size == 4
    assert copy_seconds(cluster.device, 20e9) == pytest.approx(1.0)
    assert product_seconds(cluster.device, Product(1024, 1024, 1024)) == pytest.approx(2 * 1024**3 / 80e9, rel=0.01)


def test_one_island_of_one_device_is_a_cluster_too(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    alone = Measured("d", 1, {256: 1e9, 512: 1.1e9}, 1e9, [], [], 1e-4)
    path.write_text(cluster_text(alone, 1e9, "xla-f32"))
    assert len(load.cluster(str(path)).levels) == 1
