"""Bytes between stages, counted from layouts: one microbatch of a tiny GPT on two slices, without a cluster."""

from __future__ import annotations

import pytest

import pathways_ray as pw
from megatron_ptdp.models import DATA, TENSOR, Compute, Gpt, ModelConfig
from megatron_ptdp.parallel import Options, Sizes, cut, transfer_bytes
from megatron_ptdp.parallel.shapes import StageShapes
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import SliceType

CONFIG = ModelConfig("gpt", layers=4, hidden=8, heads=2, sequence=6, vocabulary=13)
VALUE = 2 * 6 * 8 * 4
"""Bytes of [examples, sequence, hidden] in float32."""


def slice_on(host: int) -> pw.VirtualSlice:
    """A slice of 1 × 2 devices of a host."""
    placed = PlacedSlice.on(SliceType(host, (1, 2), (DATA, TENSOR)), 0, (Device(host, 0), Device(host, 1)))
    return pw.VirtualSlice(None, placed, "")  # type: ignore[arg-type]


def shapes_of(number: int, zero: int = 0) -> StageShapes:
    sizes = Sizes(pipeline=2, tensor=2, data=1, microbatches=2, examples=2)
    return StageShapes.of(Gpt(CONFIG, Compute(tensor=2)), cut(4, 2), number, sizes, Options(zero=zero), [True])


@pytest.mark.parametrize(("scatter", "to_devices"), [(True, VALUE), (False, 2 * VALUE)])
def test_scatter_gather_halves_what_two_members_are_sent(scatter: bool, to_devices: int) -> None:
    """There and back. A host is sent each value once, whether it is in parts or not."""
    found = transfer_bytes.boundary(shapes_of(0), slice_on(0), slice_on(1), scatter)
    assert found == pw.TransferBytes(2 * to_devices, 2 * VALUE)


def test_stages_on_one_slice_move_nothing() -> None:
    here = slice_on(0)
    assert transfer_bytes.boundary(shapes_of(0), here, here, scatter=True) == pw.TransferBytes()


def test_text_has_the_bytes_of_all_microbatches() -> None:
    text = transfer_bytes.explained([shapes_of(0), shapes_of(1)], [slice_on(0), slice_on(1)], microbatches=3)
    assert f"all: to devices {6 * VALUE:,}; {12 * VALUE:,}, between hosts {6 * VALUE:,}; {6 * VALUE:,}" in text


def test_parameters_that_cannot_be_sharded_are_named() -> None:
    assert transfer_bytes.unshared([shapes_of(0)]) == []
    three = Sizes(pipeline=2, tensor=2, data=3, microbatches=2, examples=2)
    shapes = StageShapes.of(Gpt(CONFIG, Compute(tensor=2)), cut(4, 2), 1, three, Options(zero=1), [True])
    assert (0, "final/scale") in transfer_bytes.unshared([shapes])  # 8 values, 3 members
