"""Uploads: on the devices in memory that is not copied again; what they say of parts that other hosts hold as well."""

from __future__ import annotations

import gc
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest

from pathways_ray.executor.data import upload as upload_module
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.data.upload import Upload
from pathways_ray.executor.data.upload_plan import UploadPlan
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.jax_arrays import letting_go
from pathways_ray.transport.messages import PutOpen, PutPart
from tests.unit.executor.data.uploads import MAPPED, compiler, uploaded
from tests.unit.helpers import placed

WHERE = placed(1, ["0.0", "0.1", "1.0", "1.1"], (2, 2))
"""The first axis goes over hosts 0 and 1, the second over the devices of each."""

KIND = ArrayType((4,), "uint8")


def digests(host: int, spec: Spec, *parts: bytes, secret: str = "the data secret") -> dict[int, bytes]:
    message = PutOpen(1, 2, KIND, spec, WHERE, "")
    upload = Upload(message, UploadPlan(KIND, spec, WHERE, host))
    for box, data in enumerate(parts):
        upload.add(PutPart(1, box, 0, data))
    assert not upload.missing
    return upload.digests(secret)


def test_hosts_that_hold_a_whole_array_agree_exactly_when_its_bytes_do() -> None:
    assert digests(0, (), b"abcd") == digests(1, (), b"abcd")
    assert digests(0, (), b"abcd").keys() == digests(1, (), b"abce").keys() == {0}
    assert digests(0, (), b"abcd") != digests(1, (), b"abce")


def test_parts_that_several_hosts_hold_are_named_by_where_they_come_first() -> None:
    cut_on_each = (("y",),)
    assert digests(0, cut_on_each, b"ab", b"cd") == digests(1, cut_on_each, b"ab", b"cd")
    first, second = digests(0, cut_on_each, b"ab", b"cd"), digests(1, cut_on_each, b"ab", b"ce")
    assert first.keys() == second.keys() == {0, 1}
    assert (first[0] == second[0], first[1] == second[1]) == (True, False)


def test_a_part_of_one_host_alone_has_no_digest() -> None:
    assert digests(0, (("x",),), b"ab") == {}
    assert digests(1, (("x", "y"),), b"a", b"b") == {}


def test_who_does_not_know_the_secret_cannot_make_a_digest() -> None:
    assert digests(0, (), b"abcd") != digests(0, (), b"abcd", secret="another")


# --- on the devices ---------------------------------------------------------------------------------------------------


BIG = np.arange(1 << 18, dtype=np.float32)


@pytest.mark.parametrize("shared", [False, True], ids=["in parts", "in a file"])
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int64", "float64", "complex128", "bfloat16", "float8_e4m3fn"]
)
def test_each_dtype_comes_to_the_devices(dtype: str, shared: bool) -> None:
    value = np.arange(64).astype(getattr(ml_dtypes, dtype, dtype))
    _, array = uploaded(value, shared)
    assert array.dtype == value.dtype
    assert np.asarray(array).tobytes() == value.tobytes()


@pytest.mark.parametrize("shared", [False, True], ids=["in parts", "in a file"])
def test_a_big_array_is_not_copied_again(shared: bool) -> None:
    upload, array = uploaded(BIG, shared)
    assert array.unsafe_buffer_pointer() == upload.buffers[0].ctypes.data


def test_memory_of_a_file_outlives_the_upload_and_is_not_written_to() -> None:
    """It may be read only: a computation to which it is donated works on a copy."""
    _, array = uploaded(BIG, shared=True)
    kept = jax.device_put(array, compiler().devices[0])
    step = jax.jit(lambda v: v.at[3].set(-1.0), donate_argnums=0)
    changed = np.asarray(step(array))
    assert changed[3] == -1
    np.testing.assert_array_equal(kept if not kept.is_deleted() else BIG, BIG)
    np.testing.assert_array_equal(changed[4:], BIG[4:])


@pytest.mark.parametrize("how", ["deleted", "the session ends"])
def test_memory_goes_with_the_last_array_on_it(how: str) -> None:
    """On a host that does nothing else, at its next heartbeat: a big array would stay for as long as it is idle."""
    store, before = BufferStore(), set(MAPPED)
    store.put(7, 1, uploaded(BIG, shared=True)[1])
    mapping = weakref.ref((set(MAPPED) - before).pop())
    if how == "deleted":
        store.drop(7, (1,))
    else:
        store.drop_session(7)
    letting_go()()
    assert mapping() is None


def test_files_beyond_some_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may map only so many: who puts very small arrays in files takes its heap and threads from a host."""
    monkeypatch.setattr(upload_module, "MAX_MAPPED", len(MAPPED) + 2)
    made = [uploaded(BIG[k : k + 64], shared=True) for k in range(4)]
    assert len(MAPPED) == upload_module.MAX_MAPPED
    for k, (_, array) in enumerate(made):
        np.testing.assert_array_equal(array, BIG[k : k + 64])
    del made, array, _
    gc.collect()  # JAX lets go of what is no array any more
    assert len(MAPPED) < upload_module.MAX_MAPPED
