"""Which piece goes from which host to which, and how the target's shards come out of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.ir import exchange as exchange_module
from pathways_ray.ir.exchange import Exchange, Parcel, exchange
from pathways_ray.ir.plan import Device, Edge, PlacedSlice
from pathways_ray.ir.regions import intersect
from pathways_ray.ir.types import ArrayType, Layout, SliceType
from tests.unit.helpers import placed, spec
from tests.unit.interpreters import assemble, cut_parcels, gather, sample, shard
from tests.unit.strategies import repeatable, specs

Move = tuple[Edge, PlacedSlice, PlacedSlice]


@st.composite
def placements(draw: st.DrawFn, number: int) -> PlacedSlice:
    """A mesh of 1 to 3 axes on devices of up to three hosts, in any order."""
    sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3)))
    count = math.prod(sizes)
    hosts = draw(st.integers(1, 3))
    all_devices = [Device(host, index) for host in range(hosts) for index in range(-(-count // hosts))]
    chosen = draw(st.permutations(all_devices))[:count]
    return PlacedSlice.on(SliceType(number, sizes, ("x", "y", "z")[: len(sizes)]), 0, tuple(chosen))


@st.composite
def moves(draw: st.DrawFn) -> Move:
    source, target = draw(placements(1)), draw(placements(2))
    array = ArrayType(tuple(draw(st.lists(st.sampled_from([0, 1, 6, 12]), max_size=3))), "uint64")
    edge = Edge(array, Layout(1, draw(specs(array, source.mesh))), Layout(2, draw(specs(array, target.mesh))))
    return edge, source, target


@repeatable(100)
@given(moves())
def test_what_is_cut_sent_and_put_together_is_the_array(move: Move) -> None:
    edge, source, target = move
    value = sample(edge.type, 1)
    made = exchange(edge, source, target)
    sent = cut_parcels(made, shard(value, edge.type, edge.source, source).shards)
    arrived = assemble(made, edge, target, sent)
    assert np.array_equal(gather(arrived, target), value)


@repeatable(100)
@given(moves())
def test_no_host_gets_a_piece_twice(move: Move) -> None:
    """From other hosts, that is: what a host has itself it may copy from several of its devices."""
    edge, source, target = move
    made = exchange(edge, source, target)
    for receiver in target.hosts:
        boxes = [
            parcel.box
            for (sender, to), parcels in made.parcels.items()
            if to == receiver and sender != receiver
            for parcel in parcels
        ]
        elements = sum(math.prod(stop - start for start, stop in box) for box in boxes)
        assert len(boxes) == len(set(boxes))
        assert elements <= math.prod(edge.type.shape), "pieces overlap: some element comes twice"


@repeatable(100)
@given(moves())
def test_parcels_leave_from_holders_and_land_where_they_are_needed(move: Move) -> None:
    edge, source, target = move
    made = exchange(edge, source, target)
    for (sender, receiver), parcels in made.parcels.items():
        assert parcels, "a pair of hosts with nothing to send is left out"
        for parcel in parcels:
            assert source.devices[parcel.source].host == sender
            assert target.devices[parcel.landing].host == receiver
            assert math.prod(parcel.shape), "an empty parcel"
            assert _inside(parcel, made)
    for k, parts in made.assembly.items():
        host = target.devices[k].host
        assert all(number < len(made.parcels[sender, host]) for sender, number, _ in parts)


def _inside(parcel: Parcel, made: Exchange) -> bool:
    def holds(outer: tuple[tuple[int, int], ...]) -> bool:
        return all(o[0] <= p[0] and p[1] <= o[1] for o, p in zip(outer, parcel.box, strict=True))

    return holds(made.source_boxes[parcel.source]) and holds(made.target_boxes[parcel.landing])


@repeatable(60)
@given(moves())
def test_both_sides_derive_the_same_lists(move: Move) -> None:
    """Sender and receiver compute the exchange apart from each other and name pieces by their place in the list."""
    edge, source, target = move
    assert exchange(edge, source, target) == exchange(edge, source, target)


@repeatable(60)
@given(moves())
def test_data_that_is_on_the_host_does_not_cross_the_network(move: Move) -> None:
    edge, source, target = move
    made = exchange(edge, source, target)
    for (sender, receiver), parcels in made.parcels.items():
        if sender == receiver:
            continue
        mine = {made.source_boxes[k] for k, device in enumerate(source.devices) if device.host == receiver}
        assert not any(made.source_boxes[parcel.source] in mine for parcel in parcels)


@repeatable(100)
@given(moves())
def test_each_host_derives_its_own_part_of_the_whole(move: Move) -> None:
    """What it sends and what it receives, in the same order, and how its own devices are put together."""
    edge, source, target = move
    whole = exchange(edge, source, target)
    for host in {*source.hosts, *target.hosts, 99}:
        part = exchange(edge, source, target, host)
        assert part.parcels == {pair: parcels for pair, parcels in whole.parcels.items() if host in pair}
        mine = {k for k, device in enumerate(target.devices) if device.host == host}
        assert part.assembly == {k: parts for k, parts in whole.assembly.items() if k in mine}


@repeatable(100)
@given(moves())
def test_a_piece_leaves_the_nearest_of_its_holders(move: Move) -> None:
    """The device itself, then one on its host, then the next one in the order of devices: replicas share the work."""
    edge, source, target = move
    made = exchange(edge, source, target)
    for parcels in made.parcels.values():
        for parcel in parcels:
            k, device = parcel.landing, target.devices[parcel.landing]
            holders = [s for s, box in enumerate(made.source_boxes) if intersect(box, parcel.box) == parcel.box]
            assert parcel.source == min(
                holders,
                key=lambda s, k=k, device=device: (  # type: ignore[misc]
                    source.devices[s] != device,
                    source.devices[s].host != device.host,
                    (s - k) % len(source.devices),
                ),
            )


@pytest.mark.parametrize(("cut", "looks"), [("x", 1), ("- x", 64)])
def test_the_work_of_a_host_does_not_grow_with_pairs_of_devices(
    cut: str, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. 64 devices on 64 hosts give an array to 64 others, shard by shard, or cut along the other dimension.
    2. A host that sends looks at the one shard it hands on, or at its part of the 64 that others want.
    """
    source = placed(1, [f"{host}.0" for host in range(64)])
    target = placed(2, [f"{host}.0" for host in range(64, 128)])
    found = []
    monkeypatch.setattr(exchange_module, "intersect", lambda a, b: found.append(a) or intersect(a, b))
    edge = Edge(ArrayType((64, 64), "uint64"), Layout(1, spec("x")), Layout(2, spec(cut)))
    made = exchange(edge, source, target, host=5)
    assert len(found) == looks
    assert sum(map(len, made.parcels.values())) == looks


def test_an_unchanged_layout_moves_shard_by_shard() -> None:
    source, target = placed(1, ["0.0", "0.1"]), placed(2, ["1.0", "1.1"])
    edge = Edge(ArrayType((8,), "uint64"), Layout(1, spec("x")), Layout(2, spec("x")))
    made = exchange(edge, source, target)
    assert made.parcels == {(0, 1): [Parcel(0, ((0, 4),), 0), Parcel(1, ((4, 8),), 1)]}
    assert made.assembly == {0: [(0, 0, ((0, 4),))], 1: [(0, 1, ((0, 4),))]}
    assert made.bytes_between_hosts(8) == 64


def test_replicas_of_a_host_share_what_arrives() -> None:
    """
    1. One device holds the array, four devices on two other hosts want all of it.
    2. Each host gets it once; its second device is put together from the same parcel.
    """
    source, target = placed(1, ["0.0"]), placed(2, ["1.0", "1.1", "2.0", "2.1"])
    edge = Edge(ArrayType((8,), "uint64"), Layout(1, ()), Layout(2, ()))
    made = exchange(edge, source, target)
    whole = ((0, 8),)
    assert made.parcels == {(0, 1): [Parcel(0, whole, 0)], (0, 2): [Parcel(0, whole, 2)]}
    assert made.assembly[1] == made.assembly[0] == [(0, 0, whole)]
    assert made.bytes_between_hosts(8) == 2 * 64


def test_replicated_sources_share_the_work_of_sending() -> None:
    source, target = placed(1, ["0.0", "1.0"]), placed(2, ["2.0", "3.0"])
    edge = Edge(ArrayType((8,), "uint64"), Layout(1, ()), Layout(2, ()))
    assert sorted(exchange(edge, source, target).parcels) == [(0, 2), (1, 3)]


def test_a_device_keeps_what_it_has() -> None:
    """Two devices hold the whole array and want it: each takes its own copy, none its neighbour's."""
    source, target = placed(1, ["0.0", "0.1"]), placed(2, ["0.1", "0.0"])
    made = exchange(Edge(ArrayType((8,), "uint64"), Layout(1, ()), Layout(2, ())), source, target)
    whole = ((0, 8),)
    assert made.parcels == {(0, 0): [Parcel(1, whole, 0), Parcel(0, whole, 1)]}
    assert made.bytes_between_hosts(8) == 0


def test_a_scalar_is_one_parcel_without_dimensions() -> None:
    source, target = placed(1, ["0.0", "0.1"]), placed(2, ["1.0", "1.1"])
    made = exchange(Edge(ArrayType((), "uint64"), Layout(1, ()), Layout(2, ())), source, target)
    assert made.parcels == {(0, 1): [Parcel(0, (), 0)]}
    assert made.assembly == {0: [(0, 0, ())], 1: [(0, 0, ())]}


def test_an_array_without_elements_has_no_parcels() -> None:
    source, target = placed(1, ["0.0", "0.1"]), placed(2, ["1.0", "1.1"])
    made = exchange(Edge(ArrayType((0, 4), "uint64"), Layout(1, spec("- x")), Layout(2, spec("x"))), source, target)
    assert made.parcels == {}
    assert made.assembly == {}
    assert made.target_boxes == [((0, 0), (0, 4))] * 2
