"""The devices that a slice gets on one island: whole hosts before parts, neighbours before strangers."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.errors import Unschedulable
from pathways_ray.ir.links import Hardware, declared_places, factors, grid_of, pairs
from pathways_ray.ir.plan import Device
from pathways_ray.resource_manager.allocation import Inventory
from pathways_ray.resource_manager.choosing import HostRecord, choose, links_of, places_of
from pathways_ray.resource_manager.laying import lay
from tests.unit.resource_manager.test_allocation import devices, inventory, island, request
from tests.unit.strategies import repeatable


def linked(sides: tuple[int, ...], per_host: int, torus: bool = True, **hardware: object) -> list[HostRecord]:
    """The hosts of an island 0 whose devices are a grid."""
    return [
        HostRecord(
            k,
            0,
            "tpu",
            per_host,
            "node",
            1,
            hardware=Hardware(
                grid=sides,
                torus=torus,
                places=declared_places(sides, k, per_host),
                **hardware,  # type: ignore[arg-type]
            ),
        )
        for k in range(math.prod(sides) // per_host)
    ]


def is_sub_grid(places: list[tuple[int, ...]], sides: tuple[int, ...]) -> bool:
    """Whether places are contiguous along each dimension of a torus, and all of their combinations."""
    along = [sorted(set(one)) for one in zip(*places, strict=True)]
    runs = all(
        sum((b - a) % side != 1 for a, b in zip(one, [*one[1:], one[0]], strict=True)) <= 1 or len(one) == 1
        for one, side in zip(along, sides, strict=True)
    )
    return runs and len(set(places)) == len(places) == math.prod(map(len, along))


# --- on hosts ---------------------------------------------------------------------------------------------------------


def test_a_slice_gets_a_whole_host_before_parts_of_two() -> None:
    """1. One device of the first host is taken. 2. A slice of four goes to the second one, whole. 3. A slice of two
    goes to the host that is broken already."""
    made = inventory(island(0, 4, 4, 4))
    assert devices(made.create(1, request(1))) == ["0.0"]
    assert devices(made.create(1, request(4))) == ["1.0", "1.1", "1.2", "1.3"]
    assert devices(made.create(1, request(2))) == ["0.1", "0.2"]
    assert devices(made.create(1, request(4))) == ["2.0", "2.1", "2.2", "2.3"]


def test_a_slice_of_a_host_and_a_half_has_one_whole_host() -> None:
    made = inventory(island(0, 4, 4))
    made.create(1, request(1))
    assert devices(made.create(1, request(6))) == ["0.1", "0.2", "1.0", "1.1", "1.2", "1.3"]


@repeatable(60)
@given(st.lists(st.integers(0, 2), min_size=6, max_size=6), st.integers(1, 6))
def test_no_devices_carry_less_or_are_parts_of_fewer_hosts(carried: list[int], size: int) -> None:
    hosts = island(0, 2, 2, 2)
    there = [Device(host.host, k) for host in hosts for k in range(2)]
    load = dict(zip(there, carried, strict=True))

    def rated(chosen: tuple[Device, ...]) -> tuple[int, int]:
        return max(load[d] for d in chosen), sum(n == 1 for n in Counter(d.host for d in chosen).values())

    found = choose(hosts, load, (size,))
    assert found is not None
    assert rated(found.devices) == min(map(rated, itertools.combinations(there, size)))


def test_a_device_that_computes_carries_more_than_one_that_is_held() -> None:
    """1. Two slices on the first device do nothing, the one on the second computes half of the time. 2. The next slice
    goes to the first. 3. It computes too, all of the time: the one after that goes to the second."""
    made = inventory(island(0, 1, 1))
    made.held.update([Device(0, 0), Device(0, 0), Device(1, 0)])
    made.busy = {Device(1, 0): 0.5}
    assert devices(made.create(1, request(1))) == ["0.0"]
    made.busy = {Device(0, 0): 1.0, Device(1, 0): 0.5}
    assert devices(made.create(1, request(1))) == ["1.0"]


# --- on a grid --------------------------------------------------------------------------------------------------------


def test_a_slice_on_a_torus_is_a_sub_grid_of_whole_hosts_along_its_links() -> None:
    made = Inventory()
    made.join(linked((4, 4), 4))
    first = made.create(1, request(2, 2))
    assert {device.host for device in first.devices} == {0}
    second = made.create(1, request(8))
    at = places_of(list(made.hosts.values()), grid_of((4, 4), True))
    assert is_sub_grid([at[device] for device in second.devices], (4, 4))
    assert len({device.host for device in second.devices}) == 2
    found = choose(list(made.hosts.values()), made.load(), (4, 4))
    assert found is not None
    assert found.cost == pairs((4, 4)), "along the rings"


@repeatable(40)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=8), st.data())
def test_slices_of_a_torus_are_sub_grids_whatever_came_and_went(sizes: list[int], data: st.DataObject) -> None:
    sides = (4, 6)
    made = Inventory()
    made.join(linked(sides, 2))
    at = places_of(list(made.hosts.values()), grid_of(sides, True))
    for size in sizes:
        placed = made.create(1, request(size))
        assert is_sub_grid([at[device] for device in placed.devices], sides)
        if data.draw(st.booleans()):
            made.release(1, placed.mesh.id)


@repeatable(60)
@given(st.data())
def test_no_sub_grid_is_better_than_the_one_that_is_chosen(data: st.DataObject) -> None:
    """One device after the other, by the rules of `choosing`; some hosts are missing."""
    sides, torus = data.draw(st.sampled_from([(4, 4), (2, 6), (2, 2, 4)])), data.draw(st.booleans())
    hosts = [host for host in linked(sides, 2, torus) if data.draw(st.integers(0, 5))]
    at = {place: device for host in hosts for device, place in host.at()}
    load = {device: data.draw(st.integers(0, 1)) for device in at.values()}
    unused = [host.host for host in hosts if not any(load[Device(host.host, k)] for k in range(2))]
    shape = data.draw(st.sampled_from([(1,), (2,), (4,), (2, 2), (8,), (3,)]))
    expected = []
    for sub_grid in [one for one in factors(math.prod(shape), len(sides)) if all(map(int.__le__, one, sides))]:
        laying = lay(shape, sub_grid, grid_of(sides, torus))
        for corner in itertools.product(*map(range, sides)):
            places = [tuple(map(sum, zip(corner, place, strict=True))) for place in laying.places]
            ring = [torus and most > 2 and side < most for side, most in zip(sub_grid, sides, strict=True)]
            if any(max(c) >= n and not r for c, n, r in zip(zip(*places, strict=True), sides, ring, strict=True)):
                continue
            there = [at.get(tuple(p % n for p, n in zip(place, sides, strict=True))) for place in places]
            if None not in there:
                taken = [device for device in there if device is not None]
                split = [host for host, count in Counter(device.host for device in taken).items() if count < 2]
                broken = sum(host in unused for host in split)
                loads = [load[device] for device in taken]
                expected.append((max(loads), len(split), broken, laying.cost, sum(loads), tuple(taken)))
    found = choose(hosts, load, shape)
    if expected:
        assert found == min(expected)


def test_a_choice_among_thousands_of_devices_takes_few_steps() -> None:
    """The resource manager answers nothing else meanwhile. It took 1.2 million calls of functions, and 1 to 3 s."""
    hosts = linked((16, 16, 16), 8)
    load = {Device(host.host, k): 0 for host in hosts for k in range(8)}
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = choose(hosts, load, (8, 8))
    finally:
        sys.setprofile(before)
    assert found is not None
    assert len({device.host for device in found.devices}) == 8
    assert calls < 200_000


def test_a_sub_grid_may_go_over_the_edge_of_a_torus() -> None:
    """The two middle columns are taken; what is left of each row is together over the edge."""
    for torus, expected in ((True, 0), (False, 1)):
        hosts = linked((4,), 1, torus)
        found = choose(hosts, {Device(k, 0): int(k in (1, 2)) for k in range(4)}, (2,))
        assert found is not None
        assert (found.busiest, found.cost) == (expected, 1)


def test_a_size_that_is_no_sub_grid_gets_devices_all_the_same() -> None:
    made = Inventory()
    made.join(linked((2, 4), 2))
    assert len(made.create(1, request(5)).devices) == 5
    assert len(made.create(1, request(7)).devices) == 7


def test_a_sub_grid_can_be_asked_for_by_its_sides_in_any_order() -> None:
    hosts = linked((4, 4), 4)
    made = Inventory()
    made.join(hosts)
    at = places_of(hosts, links_of(hosts))
    row = made.create(1, request(4, topology=(4, 1)))
    assert len({at[device][0] for device in row.devices}) == 1 or len({at[device][1] for device in row.devices}) == 1
    whole = made.create(1, request(topology=(2, 4)))
    assert len(whole.devices) == 8
    with pytest.raises(Unschedulable, match=r"in a sub-grid 8x2; there is island 0 with 16 tpu .* \(a 4x4 torus\)"):
        made.create(1, request(16, topology=(8, 2)))
    with pytest.raises(Unschedulable, match=r"a sub-grid 2x2 has not as many devices as slice shape \(8,\)"):
        made.create(1, request(8, topology=(2, 2)))
    with pytest.raises(Unschedulable, match="up to 3 sides of at least 1"):
        made.create(1, request(topology=(0, 1)))


def test_without_places_no_sub_grid_can_be_promised() -> None:
    with pytest.raises(Unschedulable, match=r"a slice of shape \(4,\) \(4 devices\) in a sub-grid 2x2"):
        inventory(island(0, 4)).create(1, request(4, topology=(2, 2)))


def test_memory_and_generation_are_kept_to() -> None:
    made = Inventory()
    made.join(linked((2, 2), 4, memory=8 << 30, generation="v4"))
    big = island(1, 4)
    big[0].hardware = Hardware(memory=95 << 30, generation="v5p")
    made.join(big)
    assert made.create(1, request(2, memory=16 << 30)).island == 1
    assert made.create(1, request(2, generation="v4")).island == 0
    with pytest.raises(Unschedulable, match=r"with 103079215104 bytes .* island 1 .* \(v5p, 102005473280 bytes each\)"):
        made.create(1, request(1, memory=96 << 30))
    with pytest.raises(Unschedulable, match="of generation 'v9'"):
        made.create(1, request(1, generation="v9"))


def test_an_island_on_which_neighbours_are_linked_is_better_than_one_of_strangers() -> None:
    made = Inventory()
    made.join(island(0, 1, 1, 1, 1))
    made.join([HostRecord(10 + h.host, 1, "cpu", 4, "n", 1, hardware=h.hardware) for h in linked((2, 2), 4)])
    assert made.create(1, request(4)).island == 1


def test_a_torus_of_thousands_is_looked_at_in_part() -> None:
    hosts = linked((16, 16, 16), 8)
    found = choose(hosts, Counter(), (8, 16))
    assert found is not None
    assert (found.parts, found.cost, len(set(found.devices))) == (0, pairs((8, 16)), 128)


def test_a_host_that_comes_again_keeps_what_was_known_of_its_devices() -> None:
    made = Inventory()
    made.join(island(0, 2))
    made.describe_host(0, 1, Hardware(memory=7, generation="v4"))
    made.describe_host(0, 9, Hardware(memory=1))
    made.join(island(0, 2))
    assert made.hosts[0].hardware == Hardware(memory=7, generation="v4")
