"""What a runtime consists of, as the caller and the Ray nodes say it."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_ray import names
from pathways_ray.deployment.topology import (
    Island,
    Topology,
    fits_one_node,
    have_devices,
    parse_island,
    platform_of,
    shape_of_nodes,
    topology_on,
)
from pathways_ray.errors import Unschedulable, UsageError
from pathways_ray.ir.links import Hardware

CPUS = {"CPU": 4.0, "memory": 1e9, "node:10.0.0.1": 1.0}
GPUS = {"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 1.0}
TPUS = {"CPU": 96.0, "TPU": 8.0}
HEAD = {"memory": 1e9}  # a head that is to run nothing


def islands(found: Topology) -> list[tuple[str, int, int]]:
    return [(island.platform, island.hosts, island.devices) for island in found.islands]


def test_hosts_are_numbered_through_the_islands() -> None:
    made = Topology((Island("cpu", 2, 4), Island("gpu", 1, 8), Island("cpu", 2, 1)))
    assert made.members() == {0: [0, 1], 1: [2], 2: [3, 4]}
    assert (made.hosts, made.devices) == (5, 18)


def test_a_number_of_islands_are_alike_and_of_the_platform_that_is_there() -> None:
    assert islands(topology_on([CPUS], 2, 1, 4)) == [("cpu", 1, 4), ("cpu", 1, 4)]
    assert islands(topology_on([CPUS, GPUS], 2, 1, 2)) == [("gpu", 1, 2), ("gpu", 1, 2)]
    assert islands(topology_on([GPUS], 1, 2, 3, "cpu")) == [("cpu", 2, 3)]
    assert [platform_of(nodes) for nodes in ([], [CPUS, HEAD], [CPUS, GPUS], [GPUS, TPUS])] == [
        *("cpu", "cpu", "gpu", "tpu")
    ]


def test_devices_left_out_are_those_of_the_nodes_split_between_their_hosts() -> None:
    assert islands(topology_on([GPUS, GPUS], 2, 1, None)) == [("gpu", 1, 4), ("gpu", 1, 4)]
    assert islands(topology_on([GPUS], 2, 1, None)) == [("gpu", 1, 2), ("gpu", 1, 2)]
    assert islands(topology_on([GPUS, {**GPUS, "GPU": 2.0}, HEAD], 2, 1, None)) == [("gpu", 1, 2), ("gpu", 1, 2)]
    assert islands(topology_on([CPUS], 8, 1, None)) == [("cpu", 1, 1)] * 8


def test_islands_one_by_one_may_differ() -> None:
    listed = [Island("cpu", 2, 4), Island(hosts=1, devices=8)]
    assert islands(topology_on([TPUS, CPUS], listed)) == [("cpu", 2, 4), ("tpu", 1, 8)]


def test_without_a_word_every_node_is_a_host_and_alike_nodes_form_an_island() -> None:
    assert islands(shape_of_nodes([HEAD, GPUS, GPUS, CPUS, TPUS])) == [("cpu", 1, 4), ("gpu", 2, 4), ("tpu", 1, 8)]
    assert islands(shape_of_nodes([GPUS, {**GPUS, "GPU": 2.0}])) == [("gpu", 1, 2), ("gpu", 1, 4)]
    with pytest.raises(Unschedulable, match="no Ray node has CPUs, GPUs or TPUs to give"):
        shape_of_nodes([HEAD])


def test_a_platform_and_devices_leave_every_node_a_host() -> None:
    assert islands(shape_of_nodes([GPUS, GPUS, CPUS], "gpu")) == [("gpu", 2, 4)]
    assert islands(shape_of_nodes([GPUS, CPUS], "cpu", 2)) == [("cpu", 2, 2)]
    assert islands(shape_of_nodes([GPUS, {**GPUS, "GPU": 2.0}], devices=2)) == [("gpu", 2, 2)]
    assert islands(shape_of_nodes([CPUS, GPUS], "tpu")) == [("tpu", 1, 1)], "an autoscaler may bring such a node"
    assert islands(shape_of_nodes([HEAD], devices=2)) == [("cpu", 1, 2)]
    with pytest.raises(UsageError, match="platform must be one of cpu, gpu, tpu or auto, not 'npu'"):
        shape_of_nodes([CPUS], "npu")


def test_an_island_takes_whole_accelerators_and_a_trace_of_cpu() -> None:
    assert Island("cpu", 1, 64).bundle() == {"CPU": 0.01}
    assert Island("gpu", 2, 4).bundle() == {"CPU": 0.01, "GPU": 4}
    assert Island("tpu", 2, 4).bundle() == {"CPU": 0.01, "TPU": 4}
    assert fits_one_node([CPUS, GPUS], Island("gpu", 2, 2))
    assert not fits_one_node([CPUS, GPUS, GPUS], Island("gpu", 2, 4))
    assert fits_one_node([CPUS], Island("cpu", 100, 8))


@pytest.mark.parametrize(
    ("text", "island"),
    [
        ("cpu:hosts=2,devices=4", Island("cpu", 2, 4)),
        ("gpu:devices=8", Island("gpu", 1, 8)),
        ("tpu", Island("tpu", 1, 1)),
        (":hosts=3", Island("auto", 3, 1)),
    ],
)
def test_an_island_as_text(text: str, island: Island) -> None:
    assert parse_island(text) == island


@pytest.mark.parametrize(
    "text", ["cpu:host=2", "cpu:hosts", "cpu:hosts=", "cpu:hosts=-1", "cpu:hosts=1,hosts=2", "cpu:hosts=2;devices=1"]
)
def test_text_that_is_no_island(text: str) -> None:
    with pytest.raises(UsageError, match=r"an island is written like cpu:hosts=2,devices=4,topology=2x4,torus, not"):
        parse_island(text)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: topology_on([CPUS], 0), "islands must be a whole number of at least 1, not 0"),
        (lambda: topology_on([CPUS], 2.0), "islands must be a whole number of at least 1, not 2.0"),  # type: ignore[arg-type]
        (lambda: topology_on([CPUS], True), "islands must be a whole number of at least 1, not True"),
        (lambda: topology_on([CPUS], []), "a runtime needs at least one island"),
        (lambda: topology_on([CPUS], ["cpu"]), "islands must be a whole number or a list of pw.Island"),  # type: ignore[list-item]
        (lambda: topology_on([CPUS], 1, 1, 1, "npu"), "platform must be one of cpu, gpu, tpu or auto, not 'npu'"),
        (lambda: Island("npu"), "platform must be one of cpu, gpu, tpu or auto, not 'npu'"),
        (lambda: Island("cpu", 0), "hosts must be a whole number of at least 1, not 0"),
        (lambda: Topology((Island("cpu", 4097),)), "4097 hosts are more than the 4096"),
        (lambda: Topology((Island("cpu"), Island("cpu", 513))), "an island has 1 to 512 hosts, not 513"),
        (lambda: topology_on([CPUS], 1, 513), "an island has 1 to 512 hosts, not 513"),
        (lambda: topology_on([CPUS], 1, 1, 10**9), "a host has at most 4096 devices, not 1000000000"),
    ],
)
def test_what_no_runtime_can_be(make, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def test_what_belongs_to_a_runtime_is_known_by_its_name() -> None:
    mine = [names.resource_manager("a"), names.controller("a"), names.scheduler("a", 3), names.host("a", 12)]
    assert all(names.belongs(name, "a") for name in [*mine, names.group("a", 0)])
    others = [
        names.controller("a-b"),
        names.controller("b"),
        names.host("a-host-1", 2),
        "a-",
        "a",
        "a-host-",
        "my-a-host-1",
    ]
    assert not any(names.belongs(name, "a") for name in others)


@pytest.mark.parametrize("name", ["a", "0", "my-runtime-2", "a" * 40])
def test_names(name: str) -> None:
    names.check_name(name)


@pytest.mark.parametrize("name", ["", "-", "a-", "-a", "A", "a b", "a.b", "ä", "a" * 41, "a\n"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(UsageError, match="a runtime's name has 1 to 40 lower-case letters"):
        names.check_name(name)


def test_an_island_may_say_how_its_devices_are_linked() -> None:
    made = parse_island("cpu:hosts=2,devices=4,topology=2x4,torus,generation=v4")
    assert made == Island("cpu", 2, 4, topology=(2, 4), torus=True, generation="v4")
    assert made.hardware(1) == Hardware(0, "v4", (2, 4), True, ((0, 2), (0, 3), (1, 2), (1, 3)))
    assert Island("cpu", 1, 2).hardware(0) == Hardware()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"topology": (2, 2)}, r"a grid of 2x2 has 4 devices; 1 host\(s\) with 2 each have 2"),
        ({"topology": (0,)}, "a side of topology must be a whole number of at least 1, not 0"),
        ({"topology": (1, 1, 1, 2)}, "one to three dimensions"),
        ({"topology": "2"}, "one to three dimensions, not '2'"),
        ({"torus": 1}, "torus True or False"),
        ({"generation": 4}, "generation is a text"),
    ],
)
def test_grids_that_cannot_be_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Island(**{"platform": "cpu", "devices": 2, **fields})


def test_nodes_have_the_accelerators_of_all_islands_together_or_not() -> None:
    assert have_devices([GPUS, GPUS], Topology((Island("gpu", 2, 4),)))
    assert have_devices([GPUS, GPUS], Topology((Island("gpu", 1, 4), Island("gpu", 1, 3), Island("cpu", 9, 99))))
    assert not have_devices([GPUS], Topology((Island("gpu", 1, 4), Island("gpu", 1, 1))))
    assert not have_devices([CPUS], Topology((Island("tpu", 1, 1),)))
    assert have_devices([], Topology((Island("cpu", 4, 4),)))
