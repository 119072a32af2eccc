"""The driver of the client's core: executes its commands, and has threads wait for what it decides.

Two locks, taken in this order: `sending` makes calls leave in the order in which the core took them, whatever thread
they come from; `changing`, that of `changed`, is taken by itself: in a `Condition`, Ctrl-C may leave it taken. Events
of the connection's threads take neither, since nothing they change is looked at with `sending` held.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import call
from typing import Any

from pathways_ray import limits
from pathways_ray.client import events
from pathways_ray.client.arrivals import Arrivals
from pathways_ray.client.buffer import DELETED, PENDING, BufferRecord, Upload
from pathways_ray.client.connection import Connection
from pathways_ray.client.core import ClientCore
from pathways_ray.client.data import DataLinks
from pathways_ray.client.interrupted import check_not_mine, is_mine, new_lock
from pathways_ray.client.questions import await_there
from pathways_ray.client.suspension import Suspension
from pathways_ray.errors import (
    BufferDeleted,
    ControllerLost,
    Failure,
    SessionClosed,
    SessionSuspended,
    WaitTimeout,
    from_failure,
)
from pathways_ray.transport.messages import EarlyLaunch, Free, Message, Put, Unregister
from pathways_ray.waits import slice_s

WAIT_SLICE_S = slice_s()
"""Waits look again this often, lest a thread that died leaves another one waiting."""

CANCEL_LIMIT_S = 10.0
"""A call to cancel waits this long for the controller's word."""


class Driver(Arrivals):
    """Joins the core with the connection and the data streams of one session."""

    def __init__(self, core: ClientCore, connection: Connection, data: DataLinks) -> None:
        self.core, self.connection, self.data = core, connection, data
        self.sending, self.changing = new_lock(), threading.RLock()
        self.changed = threading.Condition(self.changing)
        self.locks = self.sending, self.changing, data.changing  # the threads that read want them, too
        self.arrivals = []
        self.watchers: list[Callable[[], None]] = []
        """Called whenever an array may have got its outcome, by threads that must not wait."""
        self.siblings = data.ahead.siblings
        self.vacate: Callable[[Sequence[int]], None] = lambda slices: None
        self.make_way: Callable[[bool], None] = lambda back: None
        self.reading_now: list[int] = []
        """The threads that read."""
        self.asked, self.held = 0, False
        self.suspension: Suspension | None = None
        self.forget_saved: Callable[[int], None] = lambda number: None
        self.resume: Callable[[], None] = lambda: None
        connection.refused = core.renewals.refused
        data.early, data.living.records, data.answers_soon = self, core.buffers, core.early.answers_soon
        core.early.awaited, self.early_allowed = lambda: self.readers, core.early.allowed
        data.ahead.ignored, data.ahead.buffers = core.early.ignored, core.buffers

    # --- events and commands ------------------------------------------------------------------------------------------

    def handle(self, event: Any) -> None:
        """Takes an event of a thread of the connection."""
        self.do(self.core.handle(event, time.monotonic()))

    def received(self, messages: Iterable[Any]) -> None:
        """Takes messages of the controller that came together."""
        for commands in self.core.received(messages, time.monotonic()):
            self.do(commands)

    def call(self, event: Any) -> None:
        """Takes an event that may send or release messages of the queue."""
        check_not_mine(*self.locks)
        with self.sending:
            self.handle(event)
        self.sweep()

    def cancel(self, record: BufferRecord) -> bool:
        """Cancels the launch that makes a buffer; returns whether it had not begun."""
        if record.shown is not PENDING or self.core.ended is not None:  # a fork waits for no lock of its parent
            return False
        self.call(events.Cancelling(record))
        self.wait_until(lambda: record.state is not PENDING, CANCEL_LIMIT_S)
        return record.failure is not None and record.failure.kind == "Cancelled" and not record.late

    def delete(self, record: BufferRecord) -> None:
        """Takes the deletion of a buffer that other threads may wait for."""
        self.free(record)
        self.wake_all()

    def wake_all(self) -> None:
        """Has all threads that wait look at what has become of their buffers."""
        self.do((events.Wake(fetches=True),))

    def free(self, record: BufferRecord) -> None:
        """Takes the end of a handle. Safe in a destructor: waits for no lock."""
        message = self.core.free(record)
        if self.siblings.values:
            self.siblings.forget(record.id)
        if record.id in self.data.ahead.asked:
            self.data.ahead.drop(record.id)
        if self.suspension is not None and (saved := self.suspension.arrays.pop(record.id, None)) is not None:
            self.forget_saved(saved[0])
        if message is not None:
            self.connection.outbox.send_later(message)
        else:
            self.sweep()

    def sweep(self) -> None:
        """Sends what a destructor put into the queue behind the thread that has just emptied it. Who has `sending` does
        this after giving it back, so one of the two sends it."""
        while self.core.may_leave and not is_mine(self.sending):
            taken: list[bool] = []
            try:
                taken.extend(map(self.sending.acquire, (False,)))  # see `LocalReader.wait`
                if True not in taken:
                    return
                self.release_queue()
            finally:
                if True in taken:
                    self.sending.release()

    def uploaded(self, record: BufferRecord, upload: Upload, host: int, failure: Failure | None) -> None:
        """Takes a host's answer to an upload. Waits for no lock: who has `sending` may wait for this."""
        found = self.core.handle(events.Uploaded(record, upload, host, failure), time.monotonic())
        self.do([command for command in found if not isinstance(command, events.ReleaseQueue)])
        self.sweep()

    def disconnected(self, reason: str) -> None:
        """Takes the end of the connection."""
        self.handle(events.Disconnected(reason))

    def do(self, commands: Sequence[events.Command], are_put: bool = False) -> None:
        """Executes commands; the messages among them `are_put` into the outbox, or not yet. The caller has `sending`
        where the event was a call."""
        for command in commands:
            if isinstance(command, Message):
                outbox = self.connection.outbox
                if not are_put:
                    outbox.put(command)
                if isinstance(command, EarlyLaunch | Free | Put | Unregister):  # goes with the next message
                    outbox.linger()
                elif are_put:
                    outbox.hurry()  # another call's, which would not know that Ctrl-C amid a write here lost it
                else:
                    outbox.leave()
                if type(command) is EarlyLaunch:
                    self._hand(command)
                continue
            match command:
                case events.Wake():
                    with self.changing:
                        self.changed.notify_all()
                    if command.fetches:
                        self.data.wake()
                    else:
                        self.data.look()
                    for watcher in tuple(self.watchers):  # one may take itself away
                        watcher()
                case events.ReleaseQueue():
                    self.release_queue()
                case events.MoveHost():
                    self.data.host_changed(command.address)
                case events.MoveSlices(slices):
                    self.vacate(slices)
                case events.MakeWay(back):
                    self.make_way(back)
                case events.Resume():
                    self.connection.unsettle()
                    self.resume()
                case events.CloseData():
                    self.data.close(command.failure)

    def release_queue(self) -> None:
        """Sends what may leave the queue. The caller has `sending`."""
        core, outbox = self.core, self.connection.outbox
        try:
            while (commands := core.head(time.monotonic())) is not None:
                put = [partial(outbox.put, one) for one in commands if isinstance(one, Message)]
                steps: list[Callable[[], object]] = [*put, core.remove_head]
                deque(map(call, steps), maxlen=0)  # one call of the interpreter: Ctrl-C comes before all, or behind
                self.do(commands, are_put=True)
        except BaseException:
            core.renewals.not_left(core.queue[0].message if core.queue else None)
            outbox.hurry()  # what was put, and is not on its way
            raise
        if not core.queue:
            with self.changing:
                self.changed.notify_all()

    # --- early launches -----------------------------------------------------------------------------------------------

    def hand_over(self, message: EarlyLaunch) -> None:
        """Sends a launch that its host is to have before. The caller has `sending`."""
        self.connection.outbox.send_later(message)  # first: should Ctrl-C come, it has been sent
        self._hand(message)

    def _hand(self, message: EarlyLaunch) -> None:
        early = self.core.early
        host, early_call = early.message(message)
        record = early.expected_of(message, self.core.pending.get(message.launch, ()))
        if not self.data.launch_early(host, early_call, record, message.program):
            early.not_handed(message.launch)
            self.hurry()

    def hurry(self) -> None:
        """Has launches that were handed over leave for the controller now, since somebody waits for their outcome."""
        if self.core.early.handed:
            self.connection.outbox.hurry()

    def early_refused(self, results: int) -> None:
        """A host has left the call to its scheduler that makes this buffer first."""
        record = self.core.buffers.get(results)
        if record is not None:
            self.core.early.refused(record.early)
        self.hurry()

    # --- fetches and moves --------------------------------------------------------------------------------------------

    @property
    def readers(self) -> int:
        """The values that threads read, or have asked for."""
        return len(self.reading_now) + self.asked

    def wait_to_read(self) -> None:
        """Waits while arrays are exchanged."""
        with self.changing:
            while (self.held or self.gives_way) and self.core.ended is None:
                self.changed.wait(WAIT_SLICE_S)
            if self.gives_way:
                self.check_open()
            self.check_not_suspended_by_user()

    def begin_read(self) -> bool:
        """Has arrays stay where they are until `end_read`; False where that would need a wait."""
        with self.changing:
            if self.held or self.suspension is not None or self.core.ended is not None:
                return False
            self.asked += 1
            return True

    def end_read(self, asked: int = 1) -> None:
        """Ends what `begin_read` began; with 0, a reader has ended for whom somebody may wait."""
        with self.changing:
            self.asked -= asked
            self.changed.notify_all()

    def hold_readers(self, deadline: float) -> None:
        """Lets no fetch begin, and waits for those that have.

        Raises:
            WaitTimeout: some have not ended by `deadline`.
            ControllerLost: the controller is gone, and a fetch may wait for its successor, which waits for the caller.
        """
        with self.changing:
            self.held = True
            self.changed.wait_for(lambda: not self.readers or self.core.away, max(0.0, deadline - time.monotonic()))
            if self.readers:
                self.check_connected()
                raise WaitTimeout(f"{self.readers} fetches of the session did not end in time")

    def end_hold(self) -> None:
        """Lets fetches go on."""
        with self.changing:
            self.held = False
            self.changed.notify_all()

    def suspend(self, suspension: Suspension | None, forget: Callable[[int], None]) -> None:
        """The session is suspended from now on, or, with None, is not any more.

        Args:
            forget: lets go of a saved array, by its number.
        """
        with self.changing:
            self.suspension, self.forget_saved = suspension, forget
            self.changed.notify_all()

    @property
    def gives_way(self) -> bool:
        """Whether the session is suspended for another one, and not by its user: calls wait until it comes back."""
        return self.suspension is not None and self.suspension.gives_way

    def hold_text(self) -> str:
        """The reason for which nothing of the session goes on, for `why`; "" while it does."""
        if self.suspension is not None:
            return "the session is suspended, and the array kept outside of the devices until its resume()"
        return "a slice of the session moves, and reading waits until it is elsewhere" if self.held else ""

    def check_not_suspended(self) -> None:
        """Raises `SessionSuspended` while it is suspended; waits while it gives way. The caller has no lock."""
        with self.changing:
            while self.gives_way:
                self.check_open()
                self.changed.wait(WAIT_SLICE_S)
        self.check_not_suspended_by_user()

    def check_not_suspended_by_user(self) -> None:
        """Raises `SessionSuspended` while the session is suspended, for whomever."""
        if (found := self.suspension) is not None:
            what = f"{len(found.arrays)} arrays and {len(found.slices)} slices"
            text = f"the session is suspended with {what}: call its resume() before you use it"
            why = f"; it gave way to another session, and could not come back: {found.stuck}" if found.stuck else ""
            raise SessionSuspended(text + why)

    def check_active(self) -> None:
        """Raises `SessionClosed` once the session has ended, `SessionSuspended` while it is suspended."""
        self.check_open()
        self.check_not_suspended()

    # --- waiting ------------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises `SessionClosed` once the session has ended."""
        if self.core.ended is not None:
            raise SessionClosed(f"the session is closed: {self.core.closed_because}")

    def check_not_ended(self) -> None:
        """Raises the failure that the session ended with, which took its arrays with it: those that were ready too."""
        if self.core.ended is not None:
            raise from_failure(self.core.ended)

    def check_connected(self) -> None:
        """Raises `ControllerLost` while there is no controller."""
        if self.core.away:
            raise ControllerLost(self.core.away)

    def check_fetch(self, record: BufferRecord) -> None:
        """Raises once a fetch of a buffer has nothing to wait for."""
        if record.failure is not None:
            raise from_failure(record.failure)
        if record.state is DELETED:
            raise BufferDeleted(f"the array was deleted while it was fetched: {record.why_deleted}")
        if self.core.ended is not None:
            self.check_not_ended()

    def wait_until(self, condition: Callable[[], object], limit_s: float) -> None:
        """Waits for a condition, the end of the session or the limit, whichever comes first."""
        with self.changing:
            self.changed.wait_for(lambda: condition() or self.core.ended is not None, limit_s)

    def wait(self, record: BufferRecord, timeout: float | None = None, there: bool = False) -> None:
        """Waits until a buffer has an outcome, or, with `there`, until its hosts have it; raises its failure.

        Once the session has ended nothing is left to wait for, not even what was ready before.
        """
        self.check_not_ended()
        deadline = None if timeout is None else time.monotonic() + timeout
        if record.state is PENDING and (there or record.early):
            if (there and record.fetched and record.failure is None) or self.wait_there(record, deadline):
                return
            if record.early:
                self.hurry()
        with self.changing:
            while record.state is PENDING:
                self.check_not_ended()
                left = WAIT_SLICE_S if deadline is None else min(WAIT_SLICE_S, deadline - time.monotonic())
                if left <= 0:
                    raise WaitTimeout(f"the array was not ready within {timeout} s")
                self.changed.wait(left)
        if record.failure is not None:
            raise from_failure(record.failure)
        if record.state is DELETED:
            raise BufferDeleted(f"the array was deleted while it was waited for: {record.why_deleted}")

    def wait_there(self, record: BufferRecord, until: float | None) -> bool:
        """See `await_there`. False once the session has ended: a fork has its records, and no streams of its own."""
        return self.core.ended is None and await_there(self.data, self.core, record, self.check_fetch, until)

    def wait_for_room(self) -> None:
        """Waits until a further launch may leave."""
        while not self.core.has_room and self.core.ended is None:
            self.wait_until(lambda: self.core.has_room, WAIT_SLICE_S)
        self.check_open()

    def flush(self, timeout: float = limits.DEFAULT_TIMEOUT_S) -> None:
        """Waits until everything that was called before is on its way."""
        check_not_mine(*self.locks)
        deadline = time.monotonic() + timeout
        while self.core.queue:
            self.check_open()
            if (left := deadline - time.monotonic()) <= 0:
                away = f"{self.core.away}, and what was called was not sent"
                raise WaitTimeout(f"{away if self.core.away else 'uploads did not finish'} within {timeout:g} s")
            with self.sending:  # a destructor may have queued something when this was done last
                self.release_queue()
            self.wait_until(lambda: not self.core.queue, min(WAIT_SLICE_S, left))
        self.connection.outbox.hurry()
