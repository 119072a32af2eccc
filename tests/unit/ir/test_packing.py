"""Packs of a bundle: what is cut, laid end to end, sent and put together again is the arrays."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.ir import packing
from pathways_ray.ir.exchange import exchange
from pathways_ray.ir.packing import AS_IT_IS, Packing, pack, pieces_in_place
from pathways_ray.ir.plan import Edge, PlacedSlice
from pathways_ray.ir.regions import box_shape, shard_shape
from pathways_ray.ir.types import ArrayType, Layout, Spec
from tests.unit.helpers import placed, spec
from tests.unit.interpreters import Sharded, Value, cut, gather, sample, shard
from tests.unit.ir.test_exchange import placements
from tests.unit.strategies import repeatable, specs

Bundled = tuple[list[Edge], PlacedSlice, PlacedSlice]


@st.composite
def bundles(draw: st.DrawFn) -> Bundled:
    source, target = draw(placements(1)), draw(placements(2))
    edges = []
    for _ in range(draw(st.integers(1, 4))):
        array = ArrayType(tuple(draw(st.lists(st.sampled_from([0, 1, 6, 12]), max_size=3))), "uint64")
        edges.append(
            Edge(array, Layout(1, draw(specs(array, source.mesh))), Layout(2, draw(specs(array, target.mesh))))
        )
    return edges, source, target


def packed(edges: list[Edge], source: PlacedSlice, target: PlacedSlice, host: int | None = None) -> Packing:
    return pack(edges, [exchange(edge, source, target, host) for edge in edges], source, target)


def sent(
    made: Packing, values: list[Sharded], edges: list[Edge], source: PlacedSlice
) -> dict[tuple[int, int], list[Value]]:
    """The arrays that travel."""
    boxes = [exchange(edge, source, source).source_boxes for edge in edges]
    found: dict[tuple[int, int], list[Value]] = {}
    for pair, packs in made.packs.items():
        for one in packs:
            pieces = []
            for edge, box in one.parcels:
                inside = tuple((a - p, b - p) for (a, b), (p, _) in zip(box, boxes[edge][one.source], strict=True))
                pieces.append(cut(values[edge].shards[one.source], inside))
            as_rows = all(piece.ndim and piece.shape[1:] == pieces[0].shape[1:] for piece in pieces)
            ends = pieces if as_rows else [piece.reshape(-1) for piece in pieces]
            array = pieces[0] if len(pieces) == 1 else np.concatenate(ends)
            assert array.shape == one.shape
            found.setdefault(pair, []).append(array)
    return found


def joined(
    made: Packing, edges: list[Edge], target: PlacedSlice, came: dict[tuple[int, int], list[Value]]
) -> list[Sharded]:
    found = []
    for number, edge in enumerate(edges):
        shards = []
        for k, (device, box) in enumerate(
            zip(target.devices, exchange(edge, target, target).source_boxes, strict=True)
        ):
            shards.append(np.full(box_shape(box), 0xDEAD, np.uint64))
            for piece in made.assembly[k][number] if k in made.assembly else ():
                array = came[piece.sender, device.host][piece.pack]
                size = math.prod(box_shape(piece.box))
                part = array if piece.start == AS_IT_IS else array.reshape(-1)[piece.start : piece.start + size]
                cut(shards[k], piece.box)[...] = part.reshape(box_shape(piece.box))
        found.append(Sharded(edge.type, edge.target, shards))
    return found


@repeatable(150)
@given(bundles(), st.sampled_from([0, 40, 1 << 20]))
def test_what_is_packed_and_unpacked_is_the_arrays(case: Bundled, most: int) -> None:
    edges, source, target = case
    before, packing.PACKED_BYTES = packing.PACKED_BYTES, most
    try:
        made = packed(edges, source, target)
    finally:
        packing.PACKED_BYTES = before
    values = [sample(edge.type, k) for k, edge in enumerate(edges)]
    shards = [shard(value, edge.type, edge.source, source) for value, edge in zip(values, edges, strict=True)]
    targets = [Edge(edge.type, edge.target, edge.target) for edge in edges]
    sources = [Edge(edge.type, edge.source, edge.source) for edge in edges]
    arrived = joined(made, targets, target, sent(made, shards, sources, source))
    for one, value in zip(arrived, values, strict=True):
        assert np.array_equal(gather(one, target), value)


@repeatable(150)
@given(bundles())
def test_what_lies_in_one_piece_in_the_shards_can_be_laid_there_at_once(case: Bundled) -> None:
    edges, source, target = case
    made = packed(edges, source, target)
    values = [sample(edge.type, k) for k, edge in enumerate(edges)]
    shards = [shard(value, edge.type, edge.source, source) for value, edge in zip(values, edges, strict=True)]
    came = sent(made, shards, [Edge(edge.type, edge.source, edge.source) for edge in edges], source)
    for (sender, host), packs in made.packs.items():
        here = [k for k, device in enumerate(target.devices) if device.host == host]
        kinds = {
            k: ArrayType(shard_shape(edge.type, edge.target.spec, target.mesh), "uint64")
            for k, edge in enumerate(edges)
        }
        assembly = [made.assembly.get(k, ()) for k in here]
        if {piece.sender for parts in assembly for edge in parts for piece in edge} != {sender}:
            continue
        pieces = pieces_in_place(packs, kinds, assembly)
        if pieces is None:
            continue
        rooms = [[np.full(kind.shape, 0xDEAD, np.uint64) for kind in kinds.values()] for _ in here]
        whole = np.concatenate([array.reshape(-1) for array in came[sender, host]])
        for edge, place, first, count in pieces:
            rooms[place][edge].reshape(-1)[first : first + count], whole = whole[:count], whole[count:]
        assert whole.size == 0
        for k, room in zip(here, rooms, strict=True):
            for one, value, found in zip(edges, values, room, strict=True):
                assert np.array_equal(found, shard(value, one.type, one.target, target).shards[k])


def test_where_shards_are_put_together_of_what_is_not_in_one_piece_nothing_is_laid_there() -> None:
    source, target = placed(1, ["0.0", "0.1"]), placed(2, ["1.0", "1.1"])
    rows, columns = spec("x"), spec("- x")

    def laid(before: Spec, after: Spec) -> list[tuple[int, int, int, int]] | None:
        edge = Edge(ArrayType((4, 6), "float32"), Layout(1, before), Layout(2, after))
        made = packed([edge], source, target)
        kinds = {0: ArrayType(shard_shape(edge.type, after, target.mesh), "float32")}
        return pieces_in_place(made.packs[0, 1], kinds, [made.assembly[0], made.assembly[1]])

    assert laid(rows, columns) == [(0, 0, 0, 6), (0, 0, 6, 6), (0, 1, 0, 6), (0, 1, 6, 6)]
    assert laid(columns, rows) is None, "its pieces are columns"
    assert laid(rows, ()) is None, "two devices take each"


@repeatable(100)
@given(bundles())
def test_each_host_derives_its_own_part_of_the_same_packs(case: Bundled) -> None:
    edges, source, target = case
    whole = packed(edges, source, target)
    for host in {*source.hosts, *target.hosts}:
        mine = packed(edges, source, target, host)
        assert mine.packs == {pair: packs for pair, packs in whole.packs.items() if host in pair}
        here = [k for k, device in enumerate(target.devices) if device.host == host]
        assert mine.assembly == {k: parts for k, parts in whole.assembly.items() if k in here}


def test_a_tree_of_small_leaves_is_one_array_for_each_way() -> None:
    """From two devices of one host to two of another: each device of the target gets its half from one of them, and
    what both need, the replicated leaf, comes once."""
    source, target = placed(1, ["0.0", "0.1"]), placed(2, ["1.0", "1.1"])
    kinds = [ArrayType((8, k + 1), "float32") for k in range(20)]
    halves = [Edge(kind, Layout(1, spec("x")), Layout(2, spec("x"))) for kind in kinds]
    ((pair, packs),) = packed(halves, source, target).packs.items()
    assert pair == (0, 1)
    assert [(one.source, one.landing, len(one.parcels)) for one in packs] == [(0, 0, 20), (1, 1, 20)]
    both = Edge(kinds[0], Layout(1, ()), Layout(2, ()))
    (packs,) = packed([*halves, both], source, target).packs.values()
    assert [len(one.parcels) for one in packs] == [20, 20, 1], "nobody gets what it does not need"


def test_large_parcels_and_other_types_are_not_packed_together() -> None:
    source, target = placed(1, ["0.0"]), placed(2, ["1.0"])
    kinds = [ArrayType((8,), "float32"), ArrayType((1 << 20,), "float32"), ArrayType((8,), "int8")]
    edges = [Edge(kind, Layout(1, ()), Layout(2, ())) for kind in [*kinds, *kinds]]
    (packs,) = packed(edges, source, target).packs.values()
    assert [(one.dtype, one.shape) for one in packs] == [
        ("float32", (16,)),
        ("int8", (16,)),
        ("float32", (1 << 20,)),
        ("float32", (1 << 20,)),
    ]
