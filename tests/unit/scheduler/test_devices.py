"""Device queues: what holds for sets of devices holds for each device."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.ir.plan import Device
from pathways_ray.limits import MAX_DEVICE_COMPUTATIONS
from pathways_ray.scheduler.devices import REFILLED_AT, DeviceSet, DeviceTable
from pathways_ray.scheduler.estimates import MovingAverage
from tests.unit.scheduler.island import devices

SETS = st.sets(st.integers(0, 5), min_size=1)


@given(st.lists(st.tuples(SETS, st.booleans()), max_size=30))
def test_every_device_counts_the_launches_of_all_sets_that_have_it(steps: list[tuple[set[int], bool]]) -> None:
    """Sets come while launches of others are under way, and groups split under them."""
    table = DeviceTable()
    running: list[DeviceSet] = []
    for numbers, start in steps:
        if start or not running:
            running.append(table.set_of(Device(0, k) for k in numbers))
            running[-1].add(1.0, 2)
        else:
            running.pop(len(numbers) % len(running)).remove(1.0, 2)
        counts = Counter(device for one in running for device in one.devices)
        grouped = [device for group in table.groups for device in group.devices]
        assert len(grouped) == len(set(grouped))
        for group in table.groups:
            assert {counts[device] for device in group.devices} == {group.launches}
            assert (group.seconds, group.computations) == (group.launches, 2 * group.launches)
        for one in running:
            assert {device for group in one.groups for device in group.devices} == one.devices


def test_programs_on_the_same_devices_share_a_set_and_big_sets_are_one_group() -> None:
    table = DeviceTable()
    many = [Device(host, k) for host in range(256) for k in range(8)]
    whole = table.set_of(many)
    assert table.set_of(reversed(many)) is whole
    assert len(whole.groups) == 1
    half = table.set_of(many[:1024])
    assert [len(one.groups) for one in (whole, half)] == [2, 1]


def test_a_launch_of_unknown_length_goes_alone_where_several_tenants_have_launches() -> None:
    unknown, known = MovingAverage(), MovingAverage(0.001)
    here = DeviceTable().set_of(devices("0.0"))
    assert here.has_room(unknown, 1, contended=True)
    here.add(0.001, 1)
    assert not here.has_room(unknown, 1, contended=True)
    assert here.has_room(known, 1, contended=True)
    assert here.has_room(unknown, 1, contended=False)


def test_a_full_device_takes_launches_of_several_tenants_as_others_end() -> None:
    """Where a tenant is alone they leave in numbers; where others wait each of them goes as soon as it can."""
    known = MovingAverage(0.0001)
    table = DeviceTable()
    here = table.set_of(devices("0.0", "0.1"))
    for _ in range(MAX_DEVICE_COMPUTATIONS):
        here.add(0.0001, 1)
    here.remove(0.0001, 1)
    part = table.set_of(devices("0.1"))
    assert here.has_room(known, 1, contended=True)
    assert not here.has_room(known, 1, contended=False)
    assert not part.has_room(known, 1, contended=False)
    table.clear()
    assert part.has_room(known, 1, contended=False)


def test_a_full_device_does_not_run_dry_behind_one_long_launch() -> None:
    """The launch that is left has more computations than those at which a queue is filled again."""
    known = MovingAverage(0.0001)
    here = DeviceTable().set_of(devices("0.0"))
    for computations in [1] * (REFILLED_AT - 1) + [REFILLED_AT + 1]:
        here.add(0.0001, computations)
    for _ in range(REFILLED_AT - 2):
        here.remove(0.0001, 1)
    assert not here.has_room(known, 1, contended=False)
    here.remove(0.0001, 1)
    assert here.has_room(known, 1, contended=False)


@pytest.mark.parametrize(("seconds", "refilled"), [(0.0001, False), (0.007, True)])
def test_a_full_device_gathers_room_only_for_short_launches(seconds: float, refilled: bool) -> None:
    here = DeviceTable().set_of(devices("0.0"))
    for _ in range(MAX_DEVICE_COMPUTATIONS):
        here.add(seconds, 1)
    here.remove(seconds, 1)
    assert here.has_room(MovingAverage(seconds), 1, contended=False) is refilled
