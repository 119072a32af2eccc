"""The mover of a session: carries out the steps of `moving` and `suspending`, in threads of its own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

from pathways_ray.client.array_pieces import FetchPlan
from pathways_ray.client.buffer import PENDING, BufferRecord
from pathways_ray.client.connection import Connection
from pathways_ray.client.core import ClientCore
from pathways_ray.client.driver import WAIT_SLICE_S, Driver
from pathways_ray.client.ending import ONCE
from pathways_ray.client.events import Cancelling, Placed
from pathways_ray.client.interrupted import check_not_mine, is_mine
from pathways_ray.client.moving import (
    QUIET_LIMIT_S,
    Arrive,
    Ask,
    Copy,
    Drop,
    Exchanged,
    Finish,
    Hold,
    Load,
    Pause,
    Release,
    Save,
    Step,
    Suspended,
    is_quiet,
    move,
)
from pathways_ray.client.reading import check_not_reading
from pathways_ray.client.saved import Saved, saved_at
from pathways_ray.client.slice_handles import kept_of, known, place
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.suspending import RETURN_LIMIT_S, resume, suspend
from pathways_ray.client.suspension import Part
from pathways_ray.client.unbroken import NEVER, unbroken
from pathways_ray.client.weak import living
from pathways_ray.client.why import EXPLAIN_WITHIN_S
from pathways_ray.errors import BufferLost, ControllerLost, PathwaysError, Unschedulable, UsageError, WaitTimeout
from pathways_ray.observe.why import WHY
from pathways_ray.story import Entry
from pathways_ray.transport import messages as wire

ASK_LIMIT_S = 120.0
"""The controller answers within this time; for a slice it may wait for islands, for up to 90 s for a tenant's own."""

UNDONE = Ask | Hold | Copy | Save | Load | Arrive | Pause
"""Steps in place of which what was done before may be taken back. The others note what has happened."""

ONCE_LIMIT_S = 180.0
"""It answers within this time, or is lost, where it may have done what it was asked for after the client has given up:
it waits for a resource manager for 60 s, and is killed after 30 s in which it stands still."""


class Mover:
    """Moves slices of one session, one at a time; suspends and resumes the session."""

    def __init__(self, core: ClientCore, connection: Connection, driver: Driver) -> None:
        self._core, self._connection, self._driver = core, connection, driver
        self._slices: weakref.WeakValueDictionary[int, VirtualSlice] = weakref.WeakValueDictionary()
        self._turn, self._vacating = threading.Lock(), threading.Lock()
        self._has_to_move = False
        self._left = threading.Event()
        """Set once the caller of what is carried out was interrupted."""
        self._saved: Saved | None = None
        self.return_limit_s = RETURN_LIMIT_S
        driver.vacate = self.vacate
        driver.make_way = self.make_way

    def made(self, asked: wire.CreateSlice, handle: Callable[[wire.SliceCreated], VirtualSlice]) -> VirtualSlice:
        """Makes a slice, and notes it while a handle to it is left; gives it back where its caller is interrupted."""
        return unbroken(partial(self._made, asked, handle), self._driver.sending)

    def _made(
        self, asked: wire.CreateSlice, handle: Callable[[wire.SliceCreated], VirtualSlice], left: threading.Event
    ) -> VirtualSlice:
        """Takes the turn: a session that was suspended meanwhile would not know of the slice."""
        while not left.is_set():
            self._driver.check_active()
            with self._turn:
                if self._driver.suspension is None:
                    losses = self._core.losses
                    reply = self._connection.call(asked, ASK_LIMIT_S)
                    assert isinstance(reply, wire.SliceCreated)
                    found = self._slices[reply.placed.mesh.id] = handle(reply)
                    if self._core.losses == losses and not left.is_set():
                        return found
                    # In case of a loss, the successor may have heard which slices there are before this one was noted.
                    found.released = True
                    with contextlib.suppress(PathwaysError):
                        self._connection.call(wire.ReleaseSlice(self._core.session, found.id), ASK_LIMIT_S)
        raise WaitTimeout("the slice was not made: its caller was interrupted")

    def vacate(self, slices: Sequence[int]) -> None:
        """Moves slices in a thread of its own, unless one is at it: the controller says again what has to move."""
        self._has_to_move = True
        with self._driver.changing:
            self._driver.changed.notify_all()  # a session that gives way lets its calls go on
        if self._vacating.acquire(blocking=False):
            self._start(lambda: list(map(self._vacate_one, slices)))

    def _start(self, work: Callable[..., object], *given: Any) -> None:
        """Does work in a thread of its own. The caller has taken `_vacating`, which is let go of behind it."""

        def run() -> None:
            try:
                work(*given)
            finally:
                self._vacating.release()

        try:
            threading.Thread(target=run, name="pathways-mover", daemon=True).start()
        except RuntimeError as error:  # the process can have no further thread
            self._vacating.release()
            self._core.story.note(Entry(time.monotonic(), "no mover", str(error), session=self._core.session))

    def _vacate_one(self, number: int) -> None:
        """Moves one slice, away from those from which it stays apart; where that fails, others move all the same."""
        try:
            with self._turn:  # one that is being made, or that takes the place of another one, has no handle yet
                where = self._slices.get(number)
                if where is None:  # nothing can be on it any more
                    self._connection.call(wire.ReleaseSlice(self._core.session, number), ASK_LIMIT_S)
            if where is not None and not where.released:
                for island in where.refuges():
                    with contextlib.suppress(Unschedulable):
                        return self._move(where, island)
                self._move(where, -1)
        except PathwaysError as error:
            self._core.story.note(Entry(time.monotonic(), "slice not moved", str(error), session=self._core.session))

    def _unbroken(self, work: Callable[[threading.Event], None]) -> None:
        check_not_reading(self._driver)
        unbroken(work, self._driver.sending)

    def move(self, where: VirtualSlice, island: int) -> None:
        """See `VirtualSlice.move`."""
        self._unbroken(partial(self._move, where, island))

    def _move(self, where: VirtualSlice, island: int, left: threading.Event = NEVER) -> None:
        with self._turn:
            self._left = left
            self._driver.check_open()
            self._driver.check_not_suspended_by_user()
            if where.released:
                raise UsageError(f"{where} was released; there is nothing to move")
            parts = [part for part in living(where.parts) if not part.released]
            moving = [Part(part.type, part.places) for part in parts]
            steps = move(self._core, where.type, where.name, moving, island, where.wanted)
            self._carry_out(steps, f"{where} was not moved", {one.id: one for one in (where, *parts)})

    # --- giving way ---------------------------------------------------------------------------------------------------

    def make_way(self, back: bool) -> None:
        """Suspends the session for another one, or resumes it, in a thread of its own, unless one is at it."""
        if self._vacating.acquire(blocking=False):
            self._has_to_move = False
            self._start(self._make_way, back)

    def _make_way(self, back: bool) -> None:
        driver = self._driver
        try:
            if back and driver.gives_way:
                self._resume(None)
            elif not back and driver.suspension is None:
                self._suspend(None, True)
        except PathwaysError as error:
            self._core.story.note(Entry(time.monotonic(), "did not give way", str(error), session=self._core.session))

    # --- suspending ---------------------------------------------------------------------------------------------------

    def suspend(self, path: str | os.PathLike[str] | None, gives_way: bool = False) -> None:
        """See `Session.suspend`; `gives_way` where the controller asked for it."""
        self._unbroken(partial(self._suspend, path, gives_way))

    def _suspend(self, path: str | os.PathLike[str] | None, gives_way: bool, left: threading.Event = NEVER) -> None:
        with self._turn:
            self._left = left
            self._driver.check_open()
            self._driver.check_not_suspended_by_user()
            self._saved = saved_at(path)
            slices = self._handles()  # none goes meanwhile
            kept = [kept_of(one) for one in slices.values() if one.whole is None]
            try:
                self._carry_out(suspend(self._core, kept, gives_way), "the session was not suspended", slices)
            finally:
                if self._driver.suspension is None:
                    self._forget_saved()

    def resume(self, path: str | os.PathLike[str] | None) -> None:
        """See `Session.resume`."""
        self._unbroken(partial(self._resume, path))

    def _resume(self, path: str | os.PathLike[str] | None, left: threading.Event = NEVER) -> None:
        with self._turn:
            self._left = left
            self._driver.check_open()
            suspension = self._driver.suspension
            if suspension is None or self._saved is None:
                raise UsageError("there is nothing to resume: the session is not suspended")
            self._saved.check(path)
            slices = self._handles()
            named = {one.id for kept in suspension.slices for one in (kept.mesh, *(part.mesh for part in kept.parts))}
            released = {number for number in named if number not in slices or slices[number].released}
            try:
                steps = resume(self._core, suspension, released, time.monotonic(), self.return_limit_s)
                self._carry_out(steps, "the session was not resumed", slices)
            finally:
                if self._driver.suspension is None:
                    self._forget_saved()

    def close(self) -> None:
        """The session is over, and what it saved of no use."""
        self._forget_saved()

    def _forget(self, number: int) -> None:
        """The last handle to a saved array is gone. Safe in a destructor. In a fork the files are its parent's."""
        if (saved := self._saved) is not None and self._core.ended is None:
            saved.forget(number)

    def _forget_saved(self) -> None:
        saved, self._saved = self._saved, None
        if saved is not None:
            saved.remove()

    # --- steps --------------------------------------------------------------------------------------------------------

    def _carry_out(self, steps: Generator[Step, Any, None], what: str, slices: Mapping[int, VirtualSlice]) -> None:
        """Carries out steps; `what` did not happen when they fail."""
        sending = self._driver.sending
        check_not_mine(sending)  # so a thread that has it from here on has it for `Hold`, wherever Ctrl-C comes
        can_be_taken_back = True
        try:
            step = next(steps)
            while True:
                try:
                    can_be_taken_back &= not isinstance(step, Release)
                    if can_be_taken_back and isinstance(step, UNDONE):
                        self._check_not_left(what)
                    if isinstance(step, Hold):
                        sending.acquire()
                        self._hold(what, step.gives_way)
                    elif isinstance(step, Release):
                        self._driver.end_hold()
                        if is_mine(sending):
                            sending.release()
                            self._driver.sweep()
                    reply = self._do(step, slices, is_mine(sending))
                except Exception as error:  # of the process too, as where it has no memory or no thread left
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration:
            pass
        finally:
            if is_mine(sending):
                self._driver.end_hold()
                sending.release()
                self._driver.sweep()

    def _check_not_left(self, what: str) -> None:
        """Raises `WaitTimeout` where nobody waits for what is carried out."""
        if self._left.is_set():
            raise WaitTimeout(f"{what}: its caller was interrupted")

    def _hold(self, what: str, gives_way: bool) -> None:
        """Waits until nothing is under way. The caller has `sending`, so nothing new is called."""
        deadline = time.monotonic() + QUIET_LIMIT_S
        driver = self._driver
        while not is_quiet(self._core):
            driver.check_open()
            self._check_not_left(what)
            if self._core.away:
                raise ControllerLost(f"{what}: {self._core.away}")
            if gives_way and self._has_to_move:
                raise WaitTimeout(f"{what}: a slice of it has to move first")
            if time.monotonic() > deadline:
                error = WaitTimeout(f"{what}: the session had calls under way for {QUIET_LIMIT_S:.0f} s")
                self._explain(error)
                raise error
            driver.release_queue()
            # Nobody else releases the queue while `sending` is taken.
            driver.wait_until(
                lambda: is_quiet(self._core) or self._core.may_leave or (gives_way and self._has_to_move), WAIT_SLICE_S
            )
        driver.hold_readers(deadline)

    def _explain(self, error: WaitTimeout) -> None:
        """Adds what the oldest call of the session waits for."""
        with contextlib.suppress(PathwaysError):
            session = self._core.session
            reply = self._connection.call(wire.Look(session, "session", 0, session), EXPLAIN_WITHIN_S)
            if isinstance(reply, wire.StatusReply):
                error.add_note(str(WHY.decode(reply.text)))

    def _do(self, step: Step, slices: Mapping[int, VirtualSlice], held: bool) -> Any:
        match step:
            case Ask(request):  # the session comes back when what is held is let go
                limit_s = ONCE_LIMIT_S if isinstance(request, ONCE) else ASK_LIMIT_S
                return self._connection.call(request, limit_s, patient=not held)
            case Copy():
                self._copy(step)
            case Save():
                self._save(step, slices)
            case Load():
                self._load(step, slices[step.held.slice])
            case Finish():
                assert self._saved is not None
                self._saved.finish()
            case Arrive(record):
                self._driver.wait(record)
            case Pause(seconds):
                if held:
                    self._driver.send_arrivals()
                self._driver.wait_until(lambda: False, seconds)
            case Suspended(suspension):
                self._driver.suspend(suspension, self._forget)
            case Exchanged(created):
                place(slices, created)
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
        elif self._core.away:  # it entered the queue, which nobody releases before this is over
            self._driver.handle(Cancelling(step.results[0]))
            raise ControllerLost(self._core.away)
        self._await_copies(step.results)
        self._connection.outbox.send(wire.Unregister(step.program.program))  # it names slices, which else are kept
        for record in step.results:
            try:
                self._driver.wait(record)
            except PathwaysError:
                if record.failure is None:
                    raise

    def _await_copies(self, records: Sequence[BufferRecord]) -> None:
        """Waits until copies have their outcome. Where the controller is lost, its successor knows of them once the
        session is back, and that waits for the end of this."""
        core, driver = self._core, self._driver

        def there() -> bool:
            return all(record.state is not PENDING for record in records)

        while not there():
            driver.check_not_ended()
            driver.check_connected()
            driver.wait_until(lambda: core.away or there(), WAIT_SLICE_S)

    def _save(self, step: Save, slices: Mapping[int, VirtualSlice]) -> None:
        assert self._saved is not None
        where = slices.get(step.held.slice)
        if where is None:
            raise BufferLost(f"array {step.held.number} lies on slice {step.held.slice}, which has no handle any more")
        plan = FetchPlan.of_array(step.held.type, step.held.spec, where.placed)

        def check() -> None:
            self._driver.check_fetch(step.record)
            self._driver.check_connected()  # its successor would say where a host is, once this is over

        self._saved.save(step.number, self._driver.data.fetch_to_keep(step.held.number, plan, check))

    def _load(self, step: Load, where: VirtualSlice) -> None:
        assert self._saved is not None
        driver, held, record = self._driver, step.held, step.record
        value, uploaded = self._saved.load(step.number, held.type), partial(driver.uploaded, record)
        begun = partial(setattr, record, "upload")
        upload = driver.data.upload(record.id, value, held.type, held.spec, where.placed, where.tag, uploaded, begun)
        with driver.sending:
            driver.handle(Placed((wire.Put(record.id, where.id, held.type, held.spec, upload.epochs),)))
        driver.sweep()

    def _handles(self) -> dict[int, VirtualSlice]:
        """The slices that there is a handle to. Other threads may make some meanwhile, and let go of some."""
        return {one.id: one for one in living(self._slices)}

    def slices_held(self, suspended: bool) -> list[wire.KnownSlice]:
        """The slices that there is a handle to, without those that were given back; with them where the session is
        `suspended`, since arrays of theirs may be saved."""
        return [known(one) for one in self._handles().values() if suspended or not one.released]

    def place(self, slices: Sequence[wire.SliceCreated]) -> None:
        """Gives handles the devices that their slices have at another controller."""
        place(self._handles(), slices)
