"""Uploads ask for memory before they get it; what is gone again does not count."""

from __future__ import annotations

import gc
import weakref

import pytest

from pathways_ray import limits
from pathways_ray.errors import GraphError, QuotaExceeded, TooLarge, WireError
from pathways_ray.executor.data.awaited_frees import FreesAwaited
from pathways_ray.executor.data.upload_quota import LOOK_AT, UploadQuota, check_type, device_bytes
from pathways_ray.ir.types import ArrayType


def there(_: tuple[int, int]) -> bool:
    return True


def test_uploads_count_from_their_first_message_until_their_buffer_goes() -> None:
    """
    1. 60 of 100 bytes are on their way, and 50 more do not fit; 40 do.
    2. One fails: its 40 are free. The other arrives: its 60 are not.
    3. The buffer leaves the store: all is free.
    """
    quota, store = UploadQuota(), {(7, 1)}
    quota.reserve((7, 1), 60, 100, store.__contains__)
    with pytest.raises(QuotaExceeded, match=r"asks for 50 bytes .* uploads of the tenant hold 60; 100 are allowed"):
        quota.reserve((7, 2), 50, 100, store.__contains__)
    quota.reserve((7, 2), 40, 100, store.__contains__)
    quota.release((7, 2))
    quota.keep((7, 1))
    with pytest.raises(QuotaExceeded, match="hold 60"):
        quota.reserve((7, 3), 50, 100, store.__contains__)
    store.clear()
    quota.reserve((7, 3), 100, 100, store.__contains__)


def test_an_upload_that_fits_beside_what_lives_waits_for_the_rest() -> None:
    """
    1. 60 of 100 bytes are stored, and 20 of another session. 50 more wait where the client has freed the 60.
    2. They are refused where it holds 40 of them, or says nothing.
    3. What fits waits for those before it.
    4. The 60 have gone: the 50 are taken.
    """
    quota, store = UploadQuota(), {(7, 1), (8, 1)}
    for name, size in (((7, 1), 60), ((8, 1), 20)):
        quota.reserve(name, size, 100, store.__contains__)
        quota.keep(name)
    with pytest.raises(FreesAwaited, match=r"asks for 50 bytes .* hold 80; 100 are allowed"):
        quota.reserve((7, 2), 50, 100, store.__contains__, 0)
    for living in (40, -1):
        with pytest.raises(QuotaExceeded, match="hold 80"):
            quota.reserve((7, 2), 50, 100, store.__contains__, living)
    with pytest.raises(FreesAwaited):
        quota.reserve((7, 3), 1, 100, store.__contains__, 0, behind=True)
    store.remove((7, 1))
    quota.reserve((7, 2), 50, 100, store.__contains__, 0)


@pytest.mark.parametrize("living", [-1, 0])
def test_a_refusal_goes_with_what_it_refused(living: int) -> None:
    """An error that kept itself would keep the pipe of the upload open, at which the client waits."""
    gc.disable()
    try:
        quota = UploadQuota()
        quota.reserve((7, 1), 60, 100, there)
        try:
            quota.reserve((7, 2), 50, 100, there, living)
        except (QuotaExceeded, FreesAwaited) as error:
            found = weakref.ref(error)
        assert found() is None
    finally:
        gc.enable()


def test_without_a_quota_the_runtime_has_a_limit_for_what_is_under_way() -> None:
    quota = UploadQuota()
    quota.reserve((7, 1), limits.MAX_UPLOAD_BYTES, None, there)
    with pytest.raises(QuotaExceeded, match=r"an upload asks for 1 bytes on a host, and .* are on their way"):
        quota.reserve((7, 2), 1, None, there)
    quota.keep((7, 1))
    quota.reserve((7, 2), 1, None, there)


def test_a_buffer_comes_once_at_a_time() -> None:
    quota = UploadQuota()
    quota.reserve((7, 1), 1, None, there)
    with pytest.raises(WireError, match="buffer 1 is on its way already"):
        quota.reserve((7, 1), 1, None, there)


def test_a_buffer_that_is_put_again_counts_twice_until_it_is_looked_for() -> None:
    """A client that puts the same number over and over gets no more than one that does not."""
    quota = UploadQuota()
    for _ in range(2):
        quota.reserve((7, 1), 50, 100, there)
        quota.keep((7, 1))
    with pytest.raises(QuotaExceeded):
        quota.reserve((7, 1), 1, 100, there)


@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [
        ((1 << 62, 1 << 62), "float32", TooLarge),
        ((0, 1 << 62), "float32", TooLarge),
        ((1,) * (limits.MAX_DIMENSIONS + 1), "float32", TooLarge),
        ((2,), "object", GraphError),
    ],
)
def test_shapes_that_nobody_could_allocate(shape: tuple[int, ...], dtype: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_type(ArrayType(shape, dtype))


def test_bytes_count_for_every_device_that_holds_them() -> None:
    assert device_bytes([((0, 4), (0, 2)), ((0, 4), (0, 2))], "float64") == 128
    assert device_bytes([()], "float32") == 4
    assert device_bytes([((3, 3),)], "float32") == 0


def test_sessions_of_a_tenant_share_its_quota() -> None:
    """Each of them has a buffer 1, and what is left when one of them ends is the others'."""
    quota, store = UploadQuota(), {(7, 1), (8, 1)}
    for session in (7, 8):
        quota.reserve((session, 1), 50, 100, store.__contains__)
        quota.keep((session, 1))
    with pytest.raises(QuotaExceeded, match="uploads of the tenant hold 100"):
        quota.reserve((9, 1), 1, 100, store.__contains__)
    store.remove((7, 1))
    quota.reserve((9, 1), 50, 100, store.__contains__)
    quota.release((9, 1))
    store.clear()
    quota.forget(store.__contains__)
    assert quota.is_empty


def test_small_arrays_that_have_left_are_not_kept() -> None:
    """They never need room: who puts one for each step would be looked at for longer each time, and others wait."""
    quota = UploadQuota()
    for number in range(5 * LOOK_AT):
        quota.reserve((7, number), 4, 1 << 40, lambda name: False)
        quota.keep((7, number))
    assert len(quota.stored) <= LOOK_AT
    there = dict(quota.stored)
    for number in range(5 * LOOK_AT):
        quota.reserve((8, number), 4, 1 << 40, lambda name: True)
        quota.keep((8, number))
    assert len(quota.stored) == len(there) + 5 * LOOK_AT
    with pytest.raises(QuotaExceeded, match=f"hold {4 * len(quota.stored)}"):
        quota.reserve((9, 1), 1, 4 * len(quota.stored), lambda name: True)
