"""Uploads ask for memory before they get it; what is gone again does not count."""

from __future__ import annotations

import gc
import weakref

import pytest

from pathways_ray import limits
from pathways_ray.errors import GraphError, QuotaExceeded, TooLarge, WireError
from pathways_ray.executor.data.awaited_frees import FreesAwaited
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.data.upload_quota import Name, UploadQuota, check_type, device_bytes
from pathways_ray.ir.types import ArrayType


class Stored:
    """A quota, and the store to which its uploads come."""

    def __init__(self) -> None:
        self.quota, self.store = UploadQuota(), BufferStore()

    def put(self, name: Name, size: int, allowed: int | None) -> None:
        self.quota.reserve(name, size, allowed)
        self.keep(name)

    def keep(self, name: Name) -> None:
        assert self.store.add(*name, object(), self.quota.reserved[name], self.quota.gone)
        self.quota.keep(name)


def test_uploads_count_from_their_first_message_until_their_buffer_goes() -> None:
    """
    1. 60 of 100 bytes are on their way, and 50 more do not fit; 40 do.
    2. One fails: its 40 are free. The other arrives: its 60 are not.
    3. The buffer leaves the store: all is free.
    """
    stored = Stored()
    quota, store = stored.quota, stored.store
    quota.reserve((7, 1), 60, 100)
    with pytest.raises(QuotaExceeded, match=r"asks for 50 bytes .* uploads of the tenant hold 60; 100 are allowed"):
        quota.reserve((7, 2), 50, 100)
    quota.reserve((7, 2), 40, 100)
    quota.release((7, 2))
    stored.keep((7, 1))
    with pytest.raises(QuotaExceeded, match="hold 60"):
        quota.reserve((7, 3), 50, 100)
    store.drop(7, (1,))
    quota.reserve((7, 3), 100, 100)


def test_an_upload_that_fits_beside_what_lives_waits_for_the_rest() -> None:
    """
    1. 60 of 100 bytes are stored, and 20 of another session. 50 more wait where the client has freed the 60.
    2. They are refused where it holds 40 of them, or says nothing.
    3. What fits waits for those before it.
    4. The 60 have gone: the 50 are taken.
    """
    stored = Stored()
    quota, store = stored.quota, stored.store
    for name, size in (((7, 1), 60), ((8, 1), 20)):
        stored.put(name, size, 100)
    with pytest.raises(FreesAwaited, match=r"asks for 50 bytes .* hold 80; 100 are allowed"):
        quota.reserve((7, 2), 50, 100, 0)
    for living in (40, -1):
        with pytest.raises(QuotaExceeded, match="hold 80"):
            quota.reserve((7, 2), 50, 100, living)
    with pytest.raises(FreesAwaited):
        quota.reserve((7, 3), 1, 100, 0, behind=True)
    store.drop(7, (1,))
    quota.reserve((7, 2), 50, 100, 0)


@pytest.mark.parametrize("living", [-1, 0])
def test_a_refusal_goes_with_what_it_refused(living: int) -> None:
    """An error that kept itself would keep the pipe of the upload open, at which the client waits."""
    gc.disable()
    try:
        quota = UploadQuota()
        quota.reserve((7, 1), 60, 100)
        try:
            quota.reserve((7, 2), 50, 100, living)
        except (QuotaExceeded, FreesAwaited) as error:
            found = weakref.ref(error)
        assert found() is None
    finally:
        gc.enable()


def test_without_a_quota_the_runtime_has_a_limit_for_what_is_under_way() -> None:
    quota = UploadQuota()
    quota.reserve((7, 1), limits.MAX_UPLOAD_BYTES, None)
    with pytest.raises(QuotaExceeded, match=r"an upload asks for 1 bytes on a host, and .* are on their way"):
        quota.reserve((7, 2), 1, None)
    quota.keep((7, 1))
    quota.reserve((7, 2), 1, None)


def test_a_buffer_comes_once_at_a_time() -> None:
    quota = UploadQuota()
    quota.reserve((7, 1), 1, None)
    with pytest.raises(WireError, match="buffer 1 is on its way already"):
        quota.reserve((7, 1), 1, None)


def test_a_buffer_that_is_put_again_counts_once_it_is_free() -> None:
    """A client that puts the same number over and over gets no more than one that does not."""
    stored = Stored()
    stored.put((7, 1), 50, 100)
    stored.quota.reserve((7, 1), 50, 100)
    assert not stored.store.add(7, 1, object(), 50, stored.quota.gone)
    with pytest.raises(QuotaExceeded, match="hold 100"):
        stored.quota.reserve((7, 2), 1, 100)
    stored.store.drop(7, (1,))
    stored.keep((7, 1))
    with pytest.raises(QuotaExceeded, match="hold 50"):
        stored.quota.reserve((7, 2), 51, 100)
    stored.store.drop(7, (1, 1))
    assert stored.quota.is_empty


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
    stored = Stored()
    quota, store = stored.quota, stored.store
    for session in (7, 8):
        stored.put((session, 1), 50, 100)
    with pytest.raises(QuotaExceeded, match="uploads of the tenant hold 100"):
        quota.reserve((9, 1), 1, 100)
    store.drop_session(7)
    quota.reserve((9, 1), 50, 100)
    quota.release((9, 1))
    assert not quota.is_empty
    store.drop_session(8)
    assert quota.is_empty


def test_small_arrays_that_have_left_are_not_kept() -> None:
    """They never need room: who puts one for each step would fill the host, or be looked at for longer each time."""
    stored, number = Stored(), 5000
    for buffer in range(number):
        stored.put((7, buffer), 4, 1 << 40)
        stored.store.drop(7, (buffer,))
    assert len(stored.quota.gone) <= 1
    assert stored.quota.is_empty
    for buffer in range(number):
        stored.put((8, buffer), 4, 1 << 40)
    with pytest.raises(QuotaExceeded, match=f"hold {4 * number}"):
        stored.quota.reserve((9, 1), 1, 4 * number)


def test_a_refused_upload_looks_at_none_of_those_that_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that has very many would keep the host from all others with each one that does not fit."""
    stored = Stored()
    for buffer in range(5):
        stored.put((7, buffer), 20, 100)

    def looked(*_: object) -> None:
        raise AssertionError("the store was looked through")

    for name in ("get", "of_session", "held"):
        monkeypatch.setattr(stored.store, name, looked)
    with pytest.raises(QuotaExceeded, match="hold 100"):
        stored.quota.reserve((7, 9), 1, 100)


def test_uploads_that_are_dropped_before_they_are_counted_are_not_counted() -> None:
    """
    1. An upload leaves as soon as it is in the store: its bytes are free.
    2. Uploads of a session that has ended come into the store: so are theirs.
    3. The tenant's quota was given up meanwhile, as no stream of its was there: the new one counts.
    """
    stored = Stored()
    stored.quota.reserve((7, 1), 60, 100)
    assert stored.store.add(7, 1, object(), 60, stored.quota.gone)
    stored.store.drop(7, (1,))
    stored.quota.keep((7, 1))
    assert stored.quota.is_empty
    stored.store.drop_session(8)
    stored.put((8, 1), 100, 100)
    assert stored.quota.is_empty
    stored.quota = UploadQuota()
    stored.put((7, 2), 100, 100)
    with pytest.raises(QuotaExceeded, match="hold 100"):
        stored.quota.reserve((7, 3), 1, 100)
    stored.store.drop(7, (2,))
    assert stored.quota.is_empty


def test_what_has_failed_is_not_on_its_way_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UPLOAD_BYTES", 100)
    quota = UploadQuota()
    for buffer in range(3):
        quota.reserve((7, buffer), 60, None)
        quota.release((7, buffer))
