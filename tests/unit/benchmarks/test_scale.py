"""The scale benchmark: its control plane works launches off, and nothing of a launch or a plan grows with devices."""

from __future__ import annotations

import asyncio
import io
import resource

import pytest
from rich.console import Console

from benchmarks.scale import benchmark as scale
from benchmarks.scale import fanout, plans
from benchmarks.scale.controlplane import ControlPlane, Costs, Shape


def launched(shape: Shape, *counts: int) -> list[Costs]:
    async def story() -> list[Costs]:
        plane = ControlPlane(shape)
        costs = [await plane.launch(count) for count in counts]
        plane.close()
        return costs

    return asyncio.run(story())


@pytest.mark.parametrize("shape", [Shape(4, 4), Shape(4, 2), Shape(6, 2, cross_island=True)], ids=str)
def test_every_launch_gets_its_outcome(shape: Shape) -> None:
    """`launch` itself asserts that nothing is left in flight; all five links and three processes were in use."""
    for costs in launched(shape, 1, 5, 70 if not shape.cross_island else 60):
        assert {"controller", "scheduler", "hosts"} == set(costs.seconds)
        assert all(costs.bytes.values())
        assert len(costs.bytes) == 6


def test_a_program_of_many_islands_is_planned_beside_the_controller() -> None:
    (cost,) = launched(Shape(256, 1, devices_per_host=1, cross_island=True), 2)
    assert cost.bytes["controller to island"] > 0


def test_hosts_that_there_are_too_few_open_files_for_are_refused_before_the_measurement() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(900, before[1]), before[1]))
    try:
        fanout.check_descriptors((2, 16, 256))
        with pytest.raises(RuntimeError, match=r"connections to 850 hosts take some 978 open files, and .* have 900"):
            scale.run(scale.Settings(parts=("streams",)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_bytes_to_a_host_do_not_depend_on_how_many_there_are() -> None:
    few, many = (launched(Shape(hosts, hosts), 8)[0] for hosts in (2, 32))
    assert few.bytes["island to host"] / 2 == many.bytes["island to host"] / 32
    assert few.bytes["controller to island"] == many.bytes["controller to island"]
    assert many.bytes["island to host"] / 32 / 8 < 100, "the limit for a launch on the wire"


def test_a_cross_island_launch_is_one_message_to_each_island_and_no_more() -> None:
    (two,), (eight,) = (launched(Shape(4 * n, 4, cross_island=True), 4) for n in (2, 8))
    assert two.bytes["controller to island"] / 2 == eight.bytes["controller to island"] / 8


def test_plans_do_not_grow_with_devices() -> None:
    """But for the digits of their number."""
    few, many = (plans.planning(devices, "shard by shard", rounds=1) for devices in (16, 4096))
    assert many["graph_bytes"] - few["graph_bytes"] < 32
    assert many["plan_bytes"] - few["plan_bytes"] < 32
    assert many["plan_bytes_with_lists"] > 8 * 4096


def test_islands_of_16_are_of_hosts_that_fill_them() -> None:
    clusters = scale.shapes((2, 16, 24, 32))
    assert [shape.hosts for shape in clusters[scale.ONE]] == [2, 16, 24, 32]
    assert [(shape.hosts, shape.islands) for shape in clusters["of 16, one"]] == [(32, 2)]
    assert [(shape.hosts, shape.islands) for shape in clusters["of 16, all"]] == [(32, 2)]


def test_the_whole_benchmark_but_its_streams_runs_and_shows() -> None:
    settings = scale.Settings(hosts=(2, 16, 32), batches=(1, 3), devices=(2, 8), rounds=1, parts=("launches", "plans"))
    result = scale.BENCHMARK.measured(settings)
    assert [one["name"] for one in result["ratios"]] == [
        "scheduler cost per launch and host, 32 / 16 hosts, 1 at once",
        "scheduler cost per launch and host, 32 / 16 hosts, 3 at once",
    ]
    clusters = {(one["islands_are"], one["hosts"]) for one in result["launches"]}
    assert ("of 16, all", 32) in clusters
    text = io.StringIO()
    scale.show(result, Console(file=text, width=200))
    assert "planning ms" in " ".join(text.getvalue().split())
