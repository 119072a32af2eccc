"""The mapping of virtual slices to devices."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.errors import Unschedulable
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.resource_manager.allocation import Inventory, IslandState, SliceRecord
from pathways_ray.resource_manager.choosing import HostRecord
from pathways_ray.resource_manager.slice_requests import SliceRequest
from pathways_ray.transport.messages import HeldSlice
from tests.unit.strategies import repeatable


def island(number: int, *devices: int, platform: str = "cpu") -> list[HostRecord]:
    """The hosts of an island, with their devices; host ids are 10 * island and up."""
    return [
        HostRecord(10 * number + k, number, platform, count, f"node-{number}", 1000 + k)
        for k, count in enumerate(devices)
    ]


def inventory(*islands: list[HostRecord]) -> Inventory:
    made = Inventory()
    for hosts in islands:
        made.join(hosts)
    return made


def request(*shape: int, **options: object) -> SliceRequest:
    return SliceRequest(shape, ("x", "y", "z")[: max(len(shape), 1)], **options)  # type: ignore[arg-type]


def devices(placed: PlacedSlice) -> list[str]:
    return [str(device) for device in placed.devices]


# --- where a slice goes -----------------------------------------------------------------------------------------------


def test_a_slice_is_a_mesh_on_devices_of_one_island() -> None:
    made = inventory(island(0, 2, 2))
    placed = made.create(1, request(2, 2))
    assert (placed.island, placed.mesh.shape, placed.mesh.axes) == (0, (2, 2), ("x", "y"))
    assert devices(placed) == ["0.0", "0.1", "1.0", "1.1"]


def test_slices_spread_over_the_least_loaded_devices_then_share() -> None:
    """
    1. Two slices of two fill the four devices of the island.
    2. A third one of two shares with the first, a fourth with the second.
    """
    made = inventory(island(0, 2, 2))
    placed = [devices(made.create(1, request(2))) for _ in range(4)]
    assert placed == [["0.0", "0.1"], ["1.0", "1.1"]] * 2
    assert set(made.load().values()) == {2}


def test_islands_are_filled_in_turn() -> None:
    made = inventory(island(0, 2), island(1, 2))
    assert [made.create(1, request(2)).island for _ in range(4)] == [0, 1, 0, 1]


def test_a_free_island_is_better_than_a_shared_one_however_small() -> None:
    made = inventory(island(0, 8), island(1, 2))
    made.create(1, request(8))
    assert made.create(1, request(2)).island == 1


def test_a_slice_that_has_nowhere_else_to_go_is_told_where_it_is() -> None:
    made = inventory(island(0, 2), island(1, 1))
    placed = made.create(1, request(2))
    with pytest.raises(Unschedulable, match="no island beside island 0, where it is, can hold a slice of shape"):
        made.create(1, request(2, instead=placed.mesh.id))
    with pytest.raises(Unschedulable, match=r"no island can hold a slice .* on island 1;"):
        made.create(1, request(2, instead=placed.mesh.id, island=1))


def test_a_slice_may_go_to_the_island_of_the_one_that_it_replaces_if_that_is_named() -> None:
    made = inventory(island(0, 2), island(1, 2))
    placed = made.create(1, request(2))
    assert made.create(1, request(2, instead=placed.mesh.id, island=placed.island)).island == placed.island


def test_islands_of_different_size_are_compared_by_the_load_of_a_device() -> None:
    """
    1. Two slices fill the island of two devices twice, one slice the island of eight once.
    2. The next one that takes a whole island goes to the larger: four loads in all there against eight here, yet its
       devices carry one each, the others two.
    """
    made = inventory(island(0, 2), island(1, 8))
    for number in (0, 0, 1):
        made.create(1, request(island=number))
    assert made.create(1, request()).island == 1


def test_without_a_shape_a_slice_is_a_whole_island() -> None:
    made = inventory(island(0, 2), island(1, 2, 2))
    first, second = made.create(1, request()), made.create(1, request())
    assert (first.island, first.mesh.shape, first.mesh.axes) == (0, (2,), ("x",))
    assert (second.island, second.mesh.shape) == (1, (4,))


def test_island_and_platform_are_kept_to() -> None:
    made = inventory(island(0, 4), island(1, 4, platform="gpu"), island(2, 4, platform="gpu"))
    assert made.create(1, request(2, platform="gpu")).island == 1
    assert made.create(1, request(2, island=2)).island == 2
    assert made.create(1, request(2, platform="cpu")).island == 0
    assert [made.create(1, request(4, island=0)).island for _ in range(3)] == [0, 0, 0], "asked for, it is shared"


def test_the_same_requests_give_the_same_mapping() -> None:
    requests = [request(2), request(1), request(2, 2), request(), request(3)]
    one, other = (inventory(island(0, 2, 2), island(1, 4)) for _ in range(2))
    assert [one.create(1, r) for r in requests] == [other.create(1, r) for r in requests]


@repeatable(60)
@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=12))
def test_devices_are_evenly_used(requests: list[tuple[int, bool]]) -> None:
    """On one island no device ever carries two slices more than another one, unless slices were released."""
    made = inventory(island(0, 3, 3))
    for size, released in requests:
        before = made.load()
        placed = made.create(1, request(size))
        assert len(set(placed.devices)) == size
        chosen = max(before[device] for device in placed.devices)
        assert chosen == sorted(before.values())[size - 1], "a slice without so loaded a device was possible"
        if released:
            assert made.release(1, placed.mesh.id)
            assert made.load() == before


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_a_slice_that_is_too_big_is_refused_with_what_exists() -> None:
    made = inventory(island(0, 2, 2), island(1, 4, platform="gpu"))
    exists = r"there is island 0 with 4 cpu devices on 2 host\(s\), island 1 with 4 gpu devices on 1 host\(s\)"
    with pytest.raises(Unschedulable, match=rf"hold a slice of shape \(5,\) \(5 devices\); {exists}"):
        made.create(1, request(5))
    with pytest.raises(Unschedulable, match=r"of shape \(2, 2\) \(4 devices\) on island 7; there is"):
        made.create(1, request(2, 2, island=7))
    with pytest.raises(Unschedulable, match="a slice of platform 'tpu'; there is"):
        made.create(1, request(platform="tpu"))
    with pytest.raises(Unschedulable, match="on island 0 of platform 'gpu'"):
        made.create(1, request(2, island=0, platform="gpu"))
    assert made.slices == {}


def test_an_empty_cluster_says_so() -> None:
    with pytest.raises(Unschedulable, match="there is nothing"):
        Inventory().create(1, request(1))
    with pytest.raises(Unschedulable, match="there is island 0 with 0 cpu devices"):
        inventory(island(0, 0)).create(1, request())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (SliceRequest((1, 1, 1, 1), ("a", "b", "c", "d")), r"a slice has 1 to 3 axes, \(1, 1, 1, 1\) has 4"),
        (request(0), r"\(0,\) has a size below 1"),
        (request(2, -1), r"\(2, -1\) has a size below 1"),
        (SliceRequest((2, 2), ("x",)), r"slice shape \(2, 2\) and axis names \('x',\) differ in number"),
        (SliceRequest((), ()), "differ in number"),
        (SliceRequest((2, 2), ("x", "x")), "must be different and not empty"),
        (SliceRequest((2,), ("",)), "must be different and not empty"),
        (SliceRequest((), ("x" * 65,)), "have up to 64 characters"),
        (SliceRequest((1, 1), ("x" * 65, "y")), "have up to 64 characters"),
    ],
)
def test_shapes_no_mesh_can_have_are_refused(bad: SliceRequest, message: str) -> None:
    with pytest.raises(Unschedulable, match=message):
        inventory(island(0, 8)).create(1, bad)


# --- release ----------------------------------------------------------------------------------------------------------


def test_released_devices_are_taken_first() -> None:
    made = inventory(island(0, 2))
    first, second = made.create(1, request(1)), made.create(1, request(1))
    assert made.release(1, first.mesh.id)
    assert not made.release(1, first.mesh.id)
    assert not made.release(2, second.mesh.id), "another session's slice"
    assert made.create(1, request(1)).devices == first.devices


def test_a_session_gives_back_all_it_holds() -> None:
    made = inventory(island(0, 4))
    for session in (1, 2, 1):
        made.create(session, request(2))
    assert made.release_session(1) == 2
    assert made.release_session(1) == 0
    assert {record.session for record in made.slices.values()} == {2}
    assert Counter(made.load().values()) == {0: 2, 1: 2}


def test_slice_ids_are_not_used_again() -> None:
    made = inventory(island(0, 4))
    first = made.create(1, request(1)).mesh.id
    made.release(1, first)
    assert made.create(1, request(1)).mesh.id > first


def test_a_session_that_comes_back_leaves_the_numbers_of_slices_taken() -> None:
    """Its controller has heard of one, where there are three: the next one has a number of its own all the same."""
    made = inventory(island(0, 2))
    assert [made.create(1, request(1)).mesh.id for _ in range(3)] == [1, 2, 3]
    assert made.hold(2, [], 1)
    assert made.create(1, request(1)).mesh.id == 4


# --- hosts ------------------------------------------------------------------------------------------------------------


def test_hosts_that_come_again_get_a_newer_epoch_together() -> None:
    made = Inventory()
    assert made.join(island(0, 2, 2)) == 1
    assert made.join(island(1, 2)) == 1
    assert made.join(island(0, 2, 2)) == 2
    assert [made.hosts[host].epoch for host in (0, 1, 10)] == [2, 2, 1]


def test_news_of_an_older_epoch_do_not_take_a_host_down() -> None:
    made = inventory(island(0, 2))
    made.leave(0, 1)
    assert not made.hosts[0].up
    made.join(island(0, 2))
    assert made.hosts[0].up
    made.leave(0, 1)
    assert made.hosts[0].up
    made.leave(99, 1)


def test_a_host_may_come_back_with_fewer_devices() -> None:
    """Slices on a device that is gone stay mapped to it, and count for nothing."""
    made = inventory(island(0, 4))
    made.create(1, request(4))
    made.join(island(0, 2))
    assert made.load() == {Device(0, 0): 1, Device(0, 1): 1}
    assert devices(made.create(1, request(2))) == ["0.0", "0.1"]
    with pytest.raises(Unschedulable, match="island 0 with 2 cpu devices"):
        made.create(1, request(4))


# --- parts of slices --------------------------------------------------------------------------------------------------


def part(
    whole: PlacedSlice, shape: tuple[int, ...], *places: int, axes: tuple[str, ...] = ("a", "b", "c", "d")
) -> SliceRequest:
    return SliceRequest(shape, axes[: len(shape)], within=whole.mesh.id, places=places)


def test_a_part_has_the_devices_that_it_names_in_their_order_and_is_no_load() -> None:
    """A part of devices 3, 1 of a slice; then a further slice takes a device as if the part were not there."""
    made = inventory(island(0, 4), island(1, 1))
    whole = made.create(1, request(4))
    before = made.load()
    assert devices(made.create(1, part(whole, (2,), 3, 1))) == ["0.3", "0.1"]
    assert made.load() == before
    four_axes = made.create(1, part(whole, (2, 1, 1, 2), 0, 1, 2, 3))
    assert four_axes.mesh.shape == (2, 1, 1, 2)


def test_a_part_goes_with_the_whole_and_devices_are_given_back_once() -> None:
    made = inventory(island(0, 2))
    whole = made.create(1, request(2))
    small = made.create(1, part(whole, (1,), 1))
    made.create(1, part(small, (1,), 0))
    assert made.release(1, whole.mesh.id)
    assert set(made.load().values()) == {0}
    assert made.slices == {}
    assert not made.release(1, small.mesh.id)


def test_a_part_that_is_not_exchanged_goes_with_its_devices() -> None:
    """
    1. Two slices with two parts each are exchanged, with one part of either. The others stay where they are, as parts
       of the slice that has their devices.
    2. A call that comes again, since its answer was lost, changes nothing.
    3. What was exchanged once more is as it was.
    4. Each part is released with its slice.
    """
    made = inventory(island(0, 2), island(1, 2))
    one, other = made.create(1, request(2)), made.create(1, request(2))
    parts = [made.create(1, part(whole, (1,), place)).mesh.id for whole in (one, other) for place in (0, 1)]
    before = {number: (record.placed, record.within) for (_, number), record in made.slices.items()}
    pairs = ((one.mesh.id, other.mesh.id), (parts[0], parts[2]))

    def lie() -> dict[int, tuple[int, int]]:
        return {n: (made.slices[1, n].placed.island, made.slices[1, n].within) for n in parts}

    assert made.exchange(1, pairs, 1)
    here, there = (made.slices[1, whole].placed.island for whole in pairs[0])
    assert (here, there) == (other.island, one.island)
    mine, others = (here, one.mesh.id), (there, other.mesh.id)
    for _ in range(2):
        assert lie() == dict(zip(parts, (mine, others, others, mine), strict=True))
        assert made.exchange(1, pairs, 1)
    assert made.exchange(1, pairs, 2)
    assert before == {number: (record.placed, record.within) for (_, number), record in made.slices.items()}
    assert made.exchange(1, pairs, 3)
    assert made.release(1, other.mesh.id)
    assert made.slices.keys() == {(1, one.mesh.id), (1, parts[0]), (1, parts[3])}
    assert set(made.load().values()) == {0, 1}


def test_calls_of_another_controller_may_have_the_same_number() -> None:
    """The session has come back to one: its first exchange is made, though one before had its number."""
    made = inventory(island(0, 2), island(1, 2))
    one, other = made.create(1, request(2)), made.create(1, request(2))
    pairs = ((one.mesh.id, other.mesh.id),)
    assert made.exchange(1, pairs, 1)
    assert made.slices[1, one.mesh.id].placed.island == other.island
    held = [HeldSlice(1, made.slices[1, each.mesh.id].placed, "", 0) for each in (one, other)]
    assert made.hold(1, held, other.mesh.id)
    assert made.exchange(1, pairs, 1)
    assert made.slices[1, one.mesh.id].placed.island == one.island


def test_a_slice_that_another_controller_asks_for_is_a_new_one_whatever_its_call() -> None:
    made = inventory(island(0, 2))
    first = made.create(1, request(2, call=5))
    assert made.create(1, request(2, call=5)) == first, "its answer was lost"
    made.new_controller()
    assert made.create(1, request(2, call=5)).mesh.id != first.mesh.id


def test_an_island_that_was_back_meanwhile_has_all_its_time_again() -> None:
    made = inventory(island(0, 2))
    made.lost_after_s = 10.0
    states = []
    for now, up in ((0.0, False), (5.0, False), (9.0, True), (12.0, False), (22.0, False), (23.0, False)):
        made.now, made.hosts[0].up = now, up
        states.append(made.state_of(0))
    away, lost = IslandState.AWAY, IslandState.LOST
    assert states == [away, away, IslandState.UP, away, away, lost]


def test_parts_of_a_slice_that_went_come_back_with_it() -> None:
    """1. The first slice of a pair went with its island, and its part too. 2. A part alone may have gone."""
    made = inventory(island(0, 2), island(1, 2))
    one, other = made.create(1, request(2)), made.create(1, request(2))
    first, second = (made.create(1, part(whole, (1,), 0)).mesh.id for whole in (one, other))
    pairs = ((one.mesh.id, other.mesh.id), (first, second))
    made.release(1, one.mesh.id)
    assert made.exchange(1, pairs, 4)
    assert {n: made.slices[1, n].within for n in (first, second)} == {first: one.mesh.id, second: other.mesh.id}
    made.release(1, first)
    assert made.exchange(1, pairs, 5)
    assert {n: made.slices[1, n].within for n in (first, second)} == dict.fromkeys((first, second), one.mesh.id)
    assert made.release(1, one.mesh.id)
    assert made.release(1, other.mesh.id)
    assert set(made.load().values()) == {0}


@pytest.mark.parametrize(
    ("session", "shape", "places", "axes", "message"),
    [
        (2, (1,), (0,), ("a",), "has no slice"),
        (1, (2,), (0,), ("a",), "as many devices"),
        (1, (), (), (), "as many devices"),
        (1, (-1, -1), (0,), ("a", "b"), "as many devices"),
        (1, (2,), (0, 0), ("a",), "not different devices of a slice of 2"),
        (1, (1,), (2,), ("a",), "not different devices of a slice of 2"),
        (1, (1,), (-1,), ("a",), "not different devices of a slice of 2"),
        (1, (1, 1), (0,), ("a", "a"), "axis names"),
        (1, (1,), (0,), ("",), "axis names"),
        (1, (1, 1), (0,), ("a",), "differ in number"),
        (1, (1,), (0,), ("a" * 65,), "have up to 64 characters"),
    ],
)
def test_parts_that_cannot_be_are_refused(
    session: int, shape: tuple[int, ...], places: tuple[int, ...], axes: tuple[str, ...], message: str
) -> None:
    made = inventory(island(0, 2))
    whole = made.create(1, request(2))
    with pytest.raises(Unschedulable, match=message):
        made.create(session, part(whole, shape, *places, axes=axes))


def test_a_slice_is_released_without_a_look_at_those_of_others() -> None:
    """Sessions with many slices that end would keep the resource manager for seconds."""

    class Unlisted(dict[tuple[int, int], SliceRecord]):
        def items(self) -> NoReturn:
            raise AssertionError("all slices are listed")

    made = inventory(island(0, 4))
    made.slices = Unlisted()
    whole = made.create(1, request(4)).mesh.id
    part = made.create(1, SliceRequest((2,), ("x",), within=whole, places=(0, 1))).mesh.id
    made.create(1, SliceRequest((1,), ("x",), within=part, places=(0,)))
    other = made.create(2, request(1)).mesh.id
    assert made.release(1, whole)
    assert list(made.slices) == [(2, other)]
    assert made.of_session[1] == set()
