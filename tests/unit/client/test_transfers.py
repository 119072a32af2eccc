"""`pw.transfer_bytes` on slices of eight devices a host, without a cluster."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.errors import SpecError
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import SliceType

ROWS = jax.ShapeDtypeStruct((8, 16), "float32")  # 512 bytes


def slice_of(size: int, number: int, host: int) -> pw.VirtualSlice:
    devices = tuple(Device(host + k // 8, k % 8) for k in range(size))
    placed = PlacedSlice.on(SliceType(number, (size,), ("x",)), number, devices)
    return pw.VirtualSlice(None, placed, "")  # type: ignore[arg-type]


A, B, WIDE = slice_of(4, 0, host=0), slice_of(4, 1, host=1), slice_of(16, 2, host=2)


@pytest.mark.parametrize(
    ("source", "target", "spec", "target_spec", "to_devices", "between_hosts"),
    [
        (A, B, P("x"), None, 512, 512),
        (A, B, None, None, 4 * 512, 512),  # to each device all of it, to the host once
        (A, B, P("x"), P(), 4 * 512, 512),
        (A, B, P("x"), P(None, "x"), 512, 512),
        (A, WIDE, P(), P(None, "x"), 512, 512),
        (A, WIDE, P("x"), P(), 16 * 512, 2 * 512),  # to each of two hosts
        (A, A, P("x"), P(), 4 * 512, 0),
        (A, A, P("x"), None, 0, 0),
    ],
)
def test_bytes_follow_from_the_layouts(
    source: pw.VirtualSlice,
    target: pw.VirtualSlice,
    spec: P | None,
    target_spec: P | None,
    to_devices: int,
    between_hosts: int,
) -> None:
    found = pw.transfer_bytes(ROWS, source, target, spec, target_spec)
    assert found == pw.TransferBytes(to_devices, between_hosts)


def test_bytes_are_those_of_the_dtype_and_add_up() -> None:
    one = pw.transfer_bytes(np.zeros(8, "int8"), A, B, P("x"))
    two = pw.transfer_bytes(jax.ShapeDtypeStruct((8,), "bfloat16"), A, B, P("x"))
    assert (one, two, one + two) == (pw.TransferBytes(8, 8), pw.TransferBytes(16, 16), pw.TransferBytes(24, 24))


def test_bytes_of_typed_keys_are_those_of_their_data() -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    for array in (keys, jax.ShapeDtypeStruct(keys.shape, keys.dtype)):
        assert pw.transfer_bytes(array, A, B, P("x")) == pw.TransferBytes(64, 64)


@pytest.mark.parametrize(
    ("spec", "target_spec", "text"),
    [
        (P("y"), None, "axis 'y' .* is not an axis of the mesh; it has"),
        (P(), P("y"), "axis 'y' .* is not an axis of the mesh; it has"),
        (P(None, None, "x"), None, "the array on the source: .* has 2 dimensions"),
        (P(), P("x"), "the array on the target: dimension 0 .* does not divide into 16 parts"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(spec: P, target_spec: P | None, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        pw.transfer_bytes(ROWS, A, WIDE, spec, target_spec)
