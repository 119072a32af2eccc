"""Small arrays that are put together, as those of a tree: what arrives, what is refused, and what ends them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pathways_ray.client import small_puts
from pathways_ray.client.buffer import Upload
from pathways_ray.client.data import DataLinks
from pathways_ray.client.data_link import UploadRequest
from pathways_ray.errors import Failure
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport.capabilities import data_token, slice_tag
from pathways_ray.transport.messages import HostAddress, PutOpen
from tests.unit.executor.data.test_server import OVER, PLACED, SECRET, SESSION, Host
from tests.waiting import until

SPEC = (("x",),)
REPLICATED = ((),)
TAG = slice_tag(SECRET, SESSION, PLACED)
FIRST = 100

ARRAYS = (
    np.arange(4, dtype=np.float32),
    np.arange(6, dtype=np.int8)[::-1],
    np.arange(24, dtype=np.float16).reshape(4, 6).T,
    np.zeros((0,), np.uint16),
    np.zeros((2, 0), np.float32),
    np.arange(8) % 3 == 0,
    np.arange(16 << 10, dtype=np.float32),
)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def data(host: Host) -> Iterator[DataLinks]:
    made = DataLinks(SESSION, data_token(SECRET, SESSION, None), (HostAddress(0, 1, host.server.address),))
    yield made
    made.close(OVER)


class Heard:
    """Uploads of arrays from number `FIRST` on, and what is told of each."""

    def __init__(self, arrays: Sequence[np.ndarray[Any, Any]], bad: frozenset[int] = frozenset()) -> None:
        self.told: dict[int, list[Failure | None]] = {n: [] for n in range(len(arrays))}
        self.begun: list[Upload] = []
        self.out = [self._one(n, array, "guessed" if n in bad else TAG) for n, array in enumerate(arrays)]

    def _one(self, n: int, array: np.ndarray[Any, Any], tag: str) -> UploadRequest:
        kind = ArrayType(array.shape, array.dtype.name)
        spec = SPEC if array.shape[0] % 2 == 0 else REPLICATED

        def told(upload: Upload, host: int, failure: Failure | None) -> None:
            self.told[n].append(failure)

        return UploadRequest(FIRST + n, array, kind, spec, PLACED, tag, told, self.begun.append)

    def until_told(self) -> list[Failure | None]:
        until(lambda: all(self.told.values()))
        assert all(len(said) == 1 for said in self.told.values())
        return [said for (said,) in self.told.values()]


def test_all_arrive_as_they_were(host: Host, data: DataLinks) -> None:
    """Of any shape and layout, more than leave in one batch; they may be changed as soon as they have left."""
    arrays = [array.copy(order="K") for array in ARRAYS for _ in range(20)]
    before = [array.copy() for array in arrays]
    heard = Heard(arrays)
    small_puts.put_together(data, heard.out)
    for array in arrays:
        array[...] = 0
    assert heard.until_told() == [None] * len(arrays)
    assert len(heard.begun) == len(arrays)
    for n, array in enumerate(before):
        stored: Any = host.store.get(SESSION, FIRST + n)
        np.testing.assert_array_equal(np.asarray(stored), array)
        assert np.asarray(stored).dtype == array.dtype
    assert not data.link_to(0).uploads
    assert not data.link_to(0)._turns._coming
    assert all(quota.is_empty for quota in host.server.quotas.values())


def test_one_that_is_refused_takes_no_other_with_it(host: Host, data: DataLinks) -> None:
    heard = Heard([ARRAYS[0]] * 9, bad=frozenset({0, 4, 8}))
    small_puts.put_together(data, heard.out)
    kinds = [failure and failure.kind for failure in heard.until_told()]
    assert kinds == [(None, "AuthenticationError")[n % 4 == 0] for n in range(9)]
    assert [host.store.get(SESSION, FIRST + n) is None for n in range(9)] == [n % 4 == 0 for n in range(9)]


def test_they_are_one_batch(data: DataLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[Any]] = []
    monkeypatch.setattr(data.link_to(0).outbox, "send_all", batches.append)
    small_puts.put_together(data, Heard(ARRAYS).out)
    (batch,) = batches
    assert [type(one) for one in batch] == [PutOpen] * len(ARRAYS)
    assert [one.buffer for one in batch] == list(range(FIRST, FIRST + len(ARRAYS)))


def test_the_end_of_the_host_ends_all(host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host stores the first ones, and says nothing of the others."""
    take, taken = host.server._upload, list[Any]()

    def first_ones(*given: Any) -> None:
        taken.append(given)
        if len(taken) <= 3:
            take(*given)

    monkeypatch.setattr(host.server, "_upload", first_ones)
    heard = Heard([ARRAYS[0]] * 7)
    small_puts.put_together(data, heard.out)
    until(lambda: len(taken) == 7)
    until(lambda: all(heard.told[n] for n in range(3)))
    data.link_to(0).end("its process was lost")
    kinds = [failure and failure.kind for failure in heard.until_told()]
    assert kinds == [None] * 3 + ["HostLost"] * 4


@pytest.mark.parametrize("where", ["before any", "amid", "before they leave"])
def test_ctrl_c_ends_all_and_none_has_left(
    host: Host, data: DataLinks, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    heard, link = Heard([ARRAYS[0]] * 5), data.link_to(0)
    noted = heard.begun

    def begun(upload: Upload) -> None:
        if len(noted) == (0 if where == "before any" else 3):
            raise KeyboardInterrupt
        noted.append(upload)

    def leave(*_: Any) -> None:
        raise KeyboardInterrupt

    if where == "before they leave":
        monkeypatch.setattr(link.outbox, "send_all", leave)
    else:
        heard.out = [one._replace(begun=begun) for one in heard.out]
    with pytest.raises(KeyboardInterrupt):
        small_puts.put_together(data, heard.out)
    assert not link.uploads
    assert not link._turns._coming
    for n in range(len(noted)):  # of those that were noted somebody is told
        (failure,) = heard.told[n]
        assert failure is not None
        assert failure.kind == "Cancelled"
    monkeypatch.undo()
    again = Heard([ARRAYS[1]] * 5)
    small_puts.put_together(data, again.out)
    assert again.until_told() == [None] * 5
    assert [np.asarray(host.store.get(SESSION, FIRST + n)).tolist() for n in range(5)] == [ARRAYS[1].tolist()] * 5


def test_threads_that_put_at_once_get_all_of_theirs(host: Host, data: DataLinks) -> None:
    many = [Heard([np.full(4, k, np.float32)] * 60) for k in range(4)]
    for k, heard in enumerate(many):
        heard.out = [one._replace(buffer=1000 * (k + 1) + n) for n, one in enumerate(heard.out)]
    threads = [threading.Thread(target=small_puts.put_together, args=(data, heard.out)) for heard in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, heard in enumerate(many):
        assert heard.until_told() == [None] * 60
        stored: Any = [host.store.get(SESSION, 1000 * (k + 1) + n) for n in range(60)]
        assert all(np.asarray(one).tolist() == [k] * 4 for one in stored)
