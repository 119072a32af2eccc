"""Measurements become a cluster file that loads, gives back what was measured, and predicts other steps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ptdp.config import load
from megatron_ptdp.config.cluster import Cluster
from megatron_ptdp.errors import PlanningError
from megatron_ptdp.planner.calibration.file import cluster_text
from megatron_ptdp.planner.calibration.fit import (
    Measured,
    MeasuredLevel,
    Reference,
    cluster_of,
    line,
    nonnegative,
    rate_of,
    step_seconds,
    tile_depth,
)
from megatron_ptdp.planner.network import Group, all_reduce, crossed, message
from megatron_ptdp.planner.operations import Product, copy_seconds, product_seconds

REFERENCES = [
    Reference(1, 64, 2, 32, 1, 1),
    Reference(1, 64, 2, 32, 1, 12),
    Reference(6, 64, 2, 64, 2, 4),
    Reference(2, 96, 4, 128, 4, 2),
    Reference(4, 192, 6, 32, 8, 2),
    Reference(2, 256, 8, 64, 4, 2),
]
OTHERS = [Reference(8, 128, 4, 64, 4, 8), Reference(4, 160, 5, 64, 2, 4), Reference(3, 320, 8, 96, 2, 1)]
SOFTWARE = load.software("xla-f32")


@given(latency=st.floats(1e-6, 1e-2), rate=st.floats(1e6, 1e12))
def test_a_line_is_found_again(latency: float, rate: float) -> None:
    points = [(size, latency + size / rate) for size in (1e3, 1e5, 1e7, 1e9)]
    found = line(points)
    assert found[0] == pytest.approx(latency, rel=1e-3, abs=1e-9)
    assert found[1] == pytest.approx(rate, rel=1e-3)


def test_noise_that_hides_the_line_is_refused() -> None:
    with pytest.raises(PlanningError, match="the machine is too noisy"):
        line([(1e3, 2.0), (1e6, 1.0)])
    with pytest.raises(PlanningError, match="it took no time"):
        line([(1e3, 0.0), (1e6, 1.0)])
    with pytest.raises(PlanningError, match="messages of two sizes or more"):
        line([(1e3, 2.0)])


def test_work_that_took_no_time_has_no_rate() -> None:
    assert rate_of(6.0, 2.0, "a product") == 3.0
    with pytest.raises(PlanningError, match=r"a product took no time: the machine is too noisy, .* more --rounds"):
        rate_of(6.0, 0.0, "a product")


def test_the_depth_of_a_tile_is_found_again() -> None:
    flops = {size: 1e12 * size / (size + 200) for size in (128, 512, 4096)}
    assert tile_depth(flops) == pytest.approx(200, abs=1)
    assert tile_depth({128: 2.0, 256: 1.0}) == 0  # larger is slower: no depth explains that


@given(st.lists(st.floats(0.0, 5.0), min_size=3, max_size=3))
def test_amounts_are_found_again_and_none_is_below_its_least(amounts: list[float]) -> None:
    columns = [[1.0, 0.2, 0.1, 0.3], [0.1, 1.0, 0.4, 0.2], [0.0, 0.3, 1.0, 0.9]]
    wanted = [sum(x * column[row] for x, column in zip(amounts, columns, strict=True)) for row in range(4)]
    assert nonnegative(columns, wanted, [0.0] * 3) == pytest.approx(amounts, abs=1e-6)
    assert min(nonnegative(columns, [-x for x in wanted], [0.5] * 3)) >= 0.5


def measured(devices: int = 4) -> Measured:
    """An island of one host with these devices, and a second one."""
    reductions = [(size, 6 * 10e-6 + 1.5 * size / 5e9) for size in (1e4, 1e6, 1e8)]
    inside = [(size, 2e-4 + size / 8e9) for size in (1e4, 1e6, 1e8)]
    between = [(size, 1e-3 + size / 1e9) for size in (1e4, 1e6, 1e8)]
    return Measured(
        name="some device",
        flops={256: 50e9, 1024: 80e9},
        copy_rate=20e9,
        launch=1e-3,
        action=2e-4,
        levels=[
            MeasuredLevel("host", devices, reductions, inside, 1e-4, 19),
            MeasuredLevel("dcn", 0, [], between, 5e-4, 19),
        ],
        steps={},
    )


def written(seen: Measured, path: Path) -> Cluster:
    path.write_text(cluster_text(cluster_of(seen, 8e9, SOFTWARE)))
    return load.cluster(str(path))


def test_the_file_gives_back_what_was_measured(tmp_path: Path) -> None:
    cluster = written(measured(), tmp_path / "here.toml")
    host, dcn = cluster.levels
    assert all_reduce(cluster, Group(4), 1e6) == pytest.approx(6 * 10e-6 + 1.5 * 1e6 / 5e9, rel=0.01)
    assert message(cluster, host, 1e6) == pytest.approx(2e-4 + 1e6 / 8e9, rel=0.01)
    assert message(cluster, dcn, 1e6) == pytest.approx(1e-3 + 1e6 / 1e9, rel=0.01)
    assert dcn.message_share == pytest.approx(5e-4 / 2e-3, rel=0.01)
    assert crossed(cluster, 4, 2) == (dcn,)
    assert (host.size, host.collectives, dcn.collectives) == (4, 19, 1)
    assert copy_seconds(cluster.device, 20e9) == pytest.approx(1.0)
    assert product_seconds(cluster.device, Product(1024, 1024, 1024)) == pytest.approx(2 * 1024**3 / 80e9, rel=0.01)
    assert cluster.device.action == 2e-4


def test_messages_whose_bytes_are_lost_in_noise_have_a_latency_alone() -> None:
    noisy = MeasuredLevel("dcn", 0, [], [(1e4, 3e-4), (1e5, 0.0), (1e6, 2e-4)], 1e-4, 1)
    level = noisy.level(2, 5e9)
    assert 5e-5 < level.message_latency < 2e-4
    assert 1e9 < level.message_bandwidth <= 5e9
    assert 0 < level.message_share <= 1


def test_gradients_are_summed_array_by_array_where_the_file_says_so(tmp_path: Path) -> None:
    cluster = written(measured(), tmp_path / "here.toml")
    more = all_reduce(cluster, Group(4), 1e6, cut=True) - all_reduce(cluster, Group(4), 1e6)
    assert more == pytest.approx(18 * 6 * 10e-6, rel=0.01)


def test_hosts_in_an_island_are_a_level_of_their_own(tmp_path: Path) -> None:
    """Two hosts of two devices each: an all-reduce of all four, above one of the two of a host."""
    inner = MeasuredLevel("host", 2, [(1e4, 1e-4), (1e6, 2e-3)], [(1e4, 1e-4), (1e6, 1e-3)], 0.0, 19)
    outer = MeasuredLevel("island", 4, [(1e4, 1e-3), (1e6, 4e-3)], [(1e4, 1e-3), (1e6, 4e-3)], 0.0, 19)
    cluster = written(replace(measured(), levels=[inner, outer]), tmp_path / "here.toml")
    assert [level.size for level in cluster.levels] == [2, 4]
    assert crossed(cluster, 1, 4) == (cluster.levels[0], cluster.levels[1], cluster.levels[0])


def test_one_island_of_one_device_is_a_cluster_too(tmp_path: Path) -> None:
    alone = replace(measured(), levels=[])
    cluster = written(alone, tmp_path / "here.toml")
    assert cluster.limit == 1


@pytest.mark.parametrize(
    ("matrix", "memory", "kernel", "action", "step"),
    [(0.6, 0.3, 2e-6, 1e-4, 5e-3), (1.0, 0.05, 0.0, 0.0, 0.0), (0.3, 1.0, 2e-5, 1e-3, 1e-2)],
)
def test_the_constants_that_have_no_probe_are_found_from_the_reference_steps(
    matrix: float, memory: float, kernel: float, action: float, step: float, tmp_path: Path
) -> None:
    """A machine that is as the model says: steps of other models, which were not measured, come out within 2 %."""
    seen = replace(measured(), action=action)
    device = replace(
        cluster_of(seen, 8e9, SOFTWARE).device,
        matrix_efficiency=matrix,
        memory_efficiency=memory,
        kernel_overhead=kernel,
        step=step,
    )
    truth = replace(cluster_of(seen, 8e9, SOFTWARE), device=device)
    found = written(
        replace(seen, steps={one: step_seconds(truth, one, SOFTWARE) for one in REFERENCES}), tmp_path / "here.toml"
    )
    for other in OTHERS:
        assert step_seconds(found, other, SOFTWARE) == pytest.approx(step_seconds(truth, other, SOFTWARE), rel=0.02)


def test_a_tenth_of_noise_in_the_steps_is_not_multiplied(tmp_path: Path) -> None:
    seen = measured()
    device = replace(cluster_of(seen, 8e9, SOFTWARE).device, matrix_efficiency=0.5, memory_efficiency=0.2, step=5e-3)
    truth = replace(cluster_of(seen, 8e9, SOFTWARE), device=device)
    noisy = {
        one: step_seconds(truth, one, SOFTWARE) * (1 + 0.1 * math.sin(7 * number))
        for number, one in enumerate(REFERENCES)
    }
    found = written(replace(seen, steps=noisy), tmp_path / "here.toml")
    for other in OTHERS:
        assert step_seconds(found, other, SOFTWARE) == pytest.approx(step_seconds(truth, other, SOFTWARE), rel=0.12)
