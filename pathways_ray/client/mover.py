"""The mover of a session: carries out the steps of `moving.move`, in the thread of the user or in one of its own."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Generator, Sequence
from typing import Any

from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.connection import Connection
from pathways_ray.client.core import ClientCore
from pathways_ray.client.driver import WAIT_SLICE_S, Driver
from pathways_ray.client.moving import Ask, Copy, Drop, Exchanged, Hold, Part, Release, Step, is_quiet, move
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import PathwaysError, UsageError, WaitTimeout
from pathways_ray.story import Entry
from pathways_ray.transport import messages as wire

QUIET_LIMIT_S = 120.0
"""A move waits this long for what the session has under way; then the slice stays where it is."""

ASK_LIMIT_S = 60.0
"""The controller answers within this time; for a slice it may wait for islands."""


class Mover:
    """Moves slices of one session, one at a time."""

    def __init__(self, core: ClientCore, connection: Connection, driver: Driver) -> None:
        self._core, self._connection, self._driver = core, connection, driver
        self._slices: weakref.WeakValueDictionary[int, VirtualSlice] = weakref.WeakValueDictionary()
        self._turn = threading.Lock()
        self._vacating = threading.Lock()
        driver.vacate = self.vacate

    def known(self, made: VirtualSlice) -> VirtualSlice:
        """Notes a slice of the session, while a handle to it is left."""
        self._slices[made.id] = made
        return made

    def vacate(self, slices: Sequence[int]) -> None:
        """Moves slices in a thread of its own, unless one is at it: the controller says again what has to move."""
        if self._vacating.acquire(blocking=False):
            threading.Thread(target=self._vacate, args=(slices,), name="pathways-mover", daemon=True).start()

    def _vacate(self, slices: Sequence[int]) -> None:
        try:
            for number in slices:
                where = self._slices.get(number)
                if where is None:  # nothing can be on it any more
                    self._connection.call(wire.ReleaseSlice(self._core.session, number), ASK_LIMIT_S)
                elif not where.released:
                    self.move(where, -1)
        except PathwaysError as error:
            self._core.story.note(Entry(time.monotonic(), "slice not moved", str(error), session=self._core.session))
        finally:
            self._vacating.release()

    def move(self, where: VirtualSlice, island: int) -> None:
        """See `VirtualSlice.move`."""
        with self._turn:
            self._driver.check_open()
            if where.released:
                raise UsageError(f"{where} was released; there is nothing to move")
            parts = [Part(part.type, part.places) for part in where.parts if not part.released]
            self._carry_out(move(self._core, where.type, where.name, parts, island), where)

    def _carry_out(self, steps: Generator[Step, Any, None], where: VirtualSlice) -> None:
        sending, held = self._driver.sending, False
        try:
            step = next(steps)
            while True:
                try:
                    if isinstance(step, Hold):
                        sending.acquire()
                        held = True
                        self._hold(where)
                    elif isinstance(step, Release):
                        self._driver.end_hold()
                        if held:
                            sending.release()
                            held = False
                            self._driver.sweep()
                    reply = self._do(step, where)
                except PathwaysError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration:
            pass
        finally:  # also at Ctrl-C
            if held:
                self._driver.end_hold()
                sending.release()
                self._driver.sweep()

    def _hold(self, where: VirtualSlice) -> None:
        """Waits until nothing is under way. The caller has `sending`, so nothing new is called."""
        deadline = time.monotonic() + QUIET_LIMIT_S
        driver = self._driver
        while not is_quiet(self._core):
            driver.check_open()
            if time.monotonic() > deadline:
                raise WaitTimeout(f"{where} was not moved: the session had calls under way for {QUIET_LIMIT_S:.0f} s")
            driver.release_queue()
            driver.wait_until(lambda: is_quiet(self._core), WAIT_SLICE_S)
        driver.hold_readers(deadline)

    def _do(self, step: Step, where: VirtualSlice) -> Any:
        match step:
            case Ask(request):
                return self._connection.call(request, ASK_LIMIT_S)
            case Copy():
                self._copy(step)
            case Exchanged(slices):
                self._place(where, slices)
            case Drop(buffers):
                for record in buffers:
                    record.dropped = True
                    self._driver.free(record)
        return None

    def _copy(self, step: Copy) -> None:
        self._connection.outbox.send(step.program)
        launch = self._core.launch(step.program.program, step.arguments, step.results)
        if launch is not None:
            self._connection.outbox.send(launch)
        for record in step.results:
            try:
                self._driver.wait(record)
            except PathwaysError:
                if record.failure is None:
                    raise

    def _place(self, where: VirtualSlice, slices: Sequence[wire.SliceCreated]) -> None:
        """Gives handles of slices their new devices."""
        by_number = {where.id: where} | {part.id: part for part in where.parts}
        for created in slices:
            one = by_number[created.placed.mesh.id]
            one.placed, one.tag = created.placed, created.slice_tag
            ArgumentType.forget_covers(one)
