"""Uploads: an array on its way to the hosts of a slice, which may move meanwhile."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, cast

from pathways_ray.client import small_puts
from pathways_ray.client.argument_types import ArgumentType, extended_dtype, to_numpy
from pathways_ray.client.array import Array
from pathways_ray.client.array_pieces import ArrayPipe, Given
from pathways_ray.client.arrivals import Arrival
from pathways_ray.client.buffer import Buffer, BufferOwner, Upload
from pathways_ray.client.core import ClientCore
from pathways_ray.client.driver import Driver
from pathways_ray.client.interrupted import check_not_mine
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import Failure, UsageError, from_failure
from pathways_ray.ir.types import Spec, check_layout
from pathways_ray.jax_types import array_type

_check_layout = functools.lru_cache(maxsize=1024)(check_layout)
"""Arrays of one kind are often put again and again."""


class UploadCalls:
    """The part of a session (`client.session.Session`) that puts arrays on slices."""

    _core: ClientCore
    _driver: Driver

    def put(self, value: Any, where: VirtualSlice, spec: Spec, alone: bool = False) -> Array:
        """Uploads an array to the devices of a slice; the handle may be used at once.

        Args:
            alone: none is put with it, for which it would have to wait.
        """
        self._driver.check_active()
        if where.released:
            raise UsageError(f"{where} was released; nothing can be put there")
        array, weak = to_numpy(value)
        kind = ArgumentType.of(array_type(array), weak, where, spec, extended_dtype(value))
        _check_layout(kind.array, spec, where.type, "put")
        return self.upload(array, kind, alone)

    def upload(self, array: Given, kind: ArgumentType, alone: bool = False) -> Array:
        """Uploads an array of exactly the dtype of its type to the slice that the type names. Raises as the function
        `upload` does."""
        return Array(upload(cast(BufferOwner, self), self._core, self._driver, array, kind, alone), kind)

    def takes_pipes(self, kind: ArgumentType) -> bool:
        """Whether the hosts of arrays of a type are on this machine, and so can read an `ArrayPipe`.

        Raises:
            HostLost: one is down and does not come back in time.
        """
        assert kind.slice is not None
        return all(self._driver.data.is_near(host) for host in kind.slice.placed.hosts)


def upload(
    owner: BufferOwner, core: ClientCore, driver: Driver, array: Given, kind: ArgumentType, alone: bool = False
) -> Buffer:
    """Begins an upload; the handle may be used at once. One that is small, `alone` and soon there is waited for.

    Raises:
        HostLost: a host of the slice is down and does not come back in time; or the slice moved while an array was on
            its way by a pipe, which cannot be read again.
        NotLocal: the array comes by a pipe, of which nothing was read, and its host does not take it.
        SessionSuspended: the session is suspended, or was while the array was on its way.
    """
    where, spec = kind.slice, kind.spec
    assert where is not None
    check_not_mine(*driver.locks)
    driver.check_not_suspended()
    with driver.sending:
        (record,) = core.new_buffers(1, (kind,))
    driver.sweep()
    buffer = Buffer(owner, record)
    while True:
        placed, uploaded = where.placed, partial(driver.uploaded, record)
        one = Arrival(record, where, placed)
        begun = partial(_note, driver, one)
        try:
            what = record.id, array, kind.array, spec, placed, where.tag, uploaded, begun
            if alone and (link := small_puts.host_link(driver.data, array, placed)) is not None:
                small_puts.put(driver.data, link, *what)
            else:
                driver.data.upload(*what)
            while not _told(driver, one):  # when it is back, the slice has other devices
                driver.check_not_suspended()
        finally:  # also after Ctrl-C; the array goes with its handle
            driver.take_arrival(one)
        if one.sent or placed is where.placed:
            break  # else it has moved since the upload began
        if isinstance(array, ArrayPipe):
            raise from_failure(Failure("HostLost", f"{where} moved while an array was on its way; put it again"))
    driver.sweep()
    driver.check_not_suspended()  # it may be on devices that are not the session's any more, and goes with its handle
    return buffer


def _told(driver: Driver, one: Arrival) -> bool:
    """Tells the controller of an upload; False while the session gives way."""
    with driver.sending:
        if driver.gives_way:
            return False
        driver.send_arrival(one)
        return True


def _note(driver: Driver, one: Arrival, upload: Upload) -> None:
    """Notes an upload before its first byte: a move waits for it, and another controller hears of it."""
    one.record.upload = upload
    driver.arrivals.append(one)
