"""The part of an array that each host has: one block, or none that a host function can take."""

from __future__ import annotations

import jax
import pytest

from pathways_ray.errors import CompileError
from pathways_ray.executor.calls.local import LocalPart
from pathways_ray.ir.types import ArrayType
from tests.unit.executor.data.test_server import failing_later
from tests.unit.helpers import placed, spec

ROWS = ArrayType((8, 6), "float32")


@pytest.mark.parametrize(
    ("devices", "shape", "layout", "host", "box"),
    [
        (("0.0", "0.1"), (2,), "x", 0, ((0, 8), (0, 6))),
        (("0.0", "0.1", "1.0", "1.1"), (4,), "x", 1, ((4, 8), (0, 6))),
        (("0.0", "0.1", "1.0", "1.1"), (4,), "", 1, ((0, 8), (0, 6))),
        (("0.0", "0.1", "1.0", "1.1"), (2, 2), "x y", 1, ((4, 8), (0, 6))),
        (("0.0", "1.0", "0.1", "1.1"), (2, 2), "x y", 1, ((0, 8), (3, 6))),
        (("0.0", "1.0", "0.1", "1.1"), (2, 2), "y", 0, ((0, 4), (0, 6))),
    ],
)
def test_a_host_has_the_block_of_its_shards(
    devices: tuple[str, ...], shape: tuple[int, ...], layout: str, host: int, box: tuple[tuple[int, int], ...]
) -> None:
    assert LocalPart(ROWS, spec(layout), placed(1, devices, shape), host).box == box


def test_rows_with_others_between_them_are_no_block() -> None:
    with pytest.raises(CompileError, match="host 0 has parts of input 0 of h that are no block"):
        LocalPart(ROWS, spec("x"), placed(1, ("0.0", "1.0", "0.1", "1.1")), 0, "input 0 of h")


def test_a_scalar_is_whole_everywhere() -> None:
    assert LocalPart(ArrayType((), "int32"), (), placed(1, ("0.0", "1.0")), 1).shape == ()


@pytest.mark.parametrize("wait", [False, True], ids=["at once", "once it has failed"])
def test_an_array_that_failed_is_not_read(wait: bool) -> None:
    """NumPy would wait for it for good, or end the process."""
    array = failing_later()
    if wait:
        with pytest.raises(jax.errors.JaxRuntimeError):
            array.block_until_ready()
    part = LocalPart(ArrayType(array.shape, "float32"), spec(""), placed(1, ("0.0",)), 0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        part.gather(array)
