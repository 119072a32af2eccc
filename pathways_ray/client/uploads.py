"""Uploads: an array on its way to the hosts of a slice, which may move meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

from pathways_ray.client import small_puts
from pathways_ray.client.argument_types import ArgumentType, extended_dtype, to_numpy
from pathways_ray.client.array import Array
from pathways_ray.client.array_pieces import ArrayPipe, Given
from pathways_ray.client.arrivals import Arrival
from pathways_ray.client.buffer import Buffer, BufferOwner, BufferRecord, Upload
from pathways_ray.client.core import ClientCore
from pathways_ray.client.data_link import UploadRequest
from pathways_ray.client.driver import Driver
from pathways_ray.client.interrupted import check_not_mine
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import Failure, UsageError, from_failure
from pathways_ray.ir.types import Spec, check_layout
from pathways_ray.jax_types import array_type

Unsent = tuple[BufferRecord, Given]
"""An array that is to be uploaded, and its record."""

_check_layout = functools.lru_cache(maxsize=1024)(check_layout)
"""Arrays of one kind are often put again and again."""


class UploadCalls:
    """The part of a session (`client.session.Session`) that puts arrays on slices."""

    _core: ClientCore
    _driver: Driver

    def put(self, value: Any, where: VirtualSlice, spec: Spec) -> Array:
        """Uploads an array to the devices of a slice; the handle may be used at once. Raises as `to_put` and the
        function `upload` do."""
        return self.upload(*self.to_put(value, where, spec))

    def to_put(self, value: Any, where: VirtualSlice, spec: Spec) -> tuple[Given, ArgumentType]:
        """A value as `upload` takes it, with its type on a slice.

        Raises:
            InvalidArray: it is no array.
            SpecError: the spec does not fit.
            UsageError: the slice was released.
        """
        self._driver.check_active()
        if where.released:
            raise UsageError(f"{where} was released; nothing can be put there")
        array, weak = to_numpy(value)
        kind = ArgumentType.of(array_type(array), weak, where, spec, extended_dtype(value))
        _check_layout(kind.array, spec, where.type, "put")
        return array, kind

    def upload(self, array: Given, kind: ArgumentType) -> Array:
        """Uploads an array of exactly the dtype of its type to the slice that the type names. Raises as the function
        `upload` does."""
        (made,) = self.upload_all([(array, kind)])
        return made

    def upload_all(self, given: Sequence[tuple[Given, ArgumentType]], alone: bool = False) -> list[Array]:
        """Uploads arrays, each as `upload` does; those that are small leave together.

        Args:
            alone: one that nothing is put with, for which it would have to wait.
        """
        made = upload(cast(BufferOwner, self), self._core, self._driver, given, alone)
        return [Array(buffer, kind) for buffer, (_, kind) in zip(made, given, strict=True)]

    def takes_pipes(self, kind: ArgumentType) -> bool:
        """Whether the hosts of arrays of a type are on this machine, and so can read an `ArrayPipe`.

        Raises:
            HostLost: one is down and does not come back in time.
        """
        assert kind.slice is not None
        return all(self._driver.data.is_near(host) for host in kind.slice.placed.hosts)


def upload(
    owner: BufferOwner, core: ClientCore, driver: Driver, given: Sequence[tuple[Given, ArgumentType]], alone: bool
) -> list[Buffer]:
    """Begins uploads; the handles may be used at once. One that is small, `alone` and soon there is waited for.

    Raises:
        HostLost: a host of a slice is down and does not come back in time; or the slice moved while an array was on
            its way by a pipe, which cannot be read again.
        NotLocal: an array comes by a pipe, of which nothing was read, and its host does not take it.
        SessionSuspended: the session is suspended, or was while an array was on its way.
    """
    check_not_mine(*driver.locks)
    driver.check_not_suspended()
    with driver.sending:
        first = core.next_buffer
        try:
            records = core.new_buffers(len(given), [kind for _, kind in given])
            buffers = [Buffer(owner, record) for record in records]
        except BaseException:  # as Ctrl-C: nobody has handles to them
            for number in range(first, first + len(given)):
                core.buffers.pop(number, None)
            raise
    driver.sweep()
    for group in _groups(driver, [(record, array) for record, (array, _) in zip(records, given, strict=True)]):
        while group:
            group = _begin(driver, group, alone)
    driver.sweep()
    driver.check_not_suspended()  # some may be on devices that are lost to the session: they go with their handles
    return buffers


def _groups(driver: Driver, some: Sequence[Unsent]) -> Iterator[list[Unsent]]:
    """Arrays that leave together: so many small ones, and then each other one by itself."""
    small: list[Unsent] = []
    others: list[Unsent] = []
    for one in some:
        (small if small_puts.is_small(driver.data, one[1]) else others).append(one)
    for first in range(0, len(small), small_puts.MAX_TOGETHER):
        yield small[first : first + small_puts.MAX_TOGETHER]
    yield from ([one] for one in others)


def _begin(driver: Driver, group: list[Unsent], alone: bool) -> list[Unsent]:
    """Begins uploads to where their slices are. Returns those whose slices moved before the controller was told."""
    arrivals: list[Arrival] = []
    leaving: list[UploadRequest] = []
    for record, array in group:
        where, kind = record.kind.slice, record.kind
        one = Arrival(record, where, where.placed)
        uploaded, begun = partial(driver.uploaded, record), partial(_note, driver, one)
        arrivals.append(one)
        leaving.append(UploadRequest(record.id, array, kind.array, kind.spec, one.placed, where.tag, uploaded, begun))
    first = leaving[0]
    link = small_puts.host_link(driver.data, first.array, first.placed) if alone else None
    try:
        if link is not None:
            small_puts.put(driver.data, link, *first)
        elif len(leaving) > 1:
            small_puts.put_together(driver.data, leaving)
        else:
            driver.data.upload(*first)
        while not _told(driver, arrivals):  # when it is back, the slices have other devices
            driver.check_not_suspended()
        if link is None:  # else a call follows at once, with which that goes
            driver.connection.outbox.hurry()
    finally:  # also after Ctrl-C; the arrays go with their handles
        for one in arrivals:
            driver.take_arrival(one)
    moved = [n for n, one in enumerate(arrivals) if not one.sent and one.placed is not one.where.placed]
    if moved and isinstance(first.array, ArrayPipe):
        where = arrivals[0].where
        raise from_failure(Failure("HostLost", f"{where} moved while an array was on its way; put it again"))
    return [group[n] for n in moved]


def _told(driver: Driver, arrivals: Sequence[Arrival]) -> bool:
    """Tells the controller of uploads; False while the session gives way."""
    with driver.sending:
        if driver.gives_way:
            return False
        driver.tell_of(arrivals)
        return True


def _note(driver: Driver, one: Arrival, upload: Upload) -> None:
    """Notes an upload before its first byte: a move waits for it, and another controller hears of it."""
    one.record.upload = upload
    driver.arrivals.append(one)
