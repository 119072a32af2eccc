"""The client's decisions: which message leaves when, what each launch came to, and how the session ends.

Events go in, commands come out: the outcome of an upload and a message of the controller are events, and commands are
for the driver, which has the connection and the threads. The two calls that users make most, `launch` and `free`, give
the one message that may leave: they are all that a launch costs here, and an event and a command would double that.

**Order.** Messages leave in the order of the user's calls. A launch leaves once the arrays that are uploaded for it
have arrived, so that a slow client delays its own calls only; what is called later waits behind it in `queue`. The
session removes the head of the queue as it puts it (`head`, `remove_head`), and no sooner: a call that finds the queue
empty passes it by, so everything before it must be on its way, or have failed. A free waits in `freed` for its upload.

**One outcome.** A launch is in `pending` from its call to its outcome: `Completed`, `LaunchFailed`, the failure of an
upload that it waited for, or the end of the session. Its results get that outcome when it leaves the table.

**Threads.** Any thread may hand in an event, and a destructor may do so in the middle of another event of its own
thread. Hence no lock is needed or taken: every step on a table that two events share is one operation of a `dict` or a
`deque`, and what sends is handed in one at a time (`launch`, `Placed`, `Registered`, `Uploaded`, and the queue).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count, repeat
from typing import Any

from pathways_ray import limits
from pathways_ray.client import events
from pathways_ray.client.buffer import DELETED, FAILURE_OF, ID_OF, PENDING, READY, STATE_OF, UPLOAD_OF, BufferRecord
from pathways_ray.client.cancelling import Cancelling
from pathways_ray.client.coalesce import Coalescer
from pathways_ray.client.donations import Donations, with_donations_untaken
from pathways_ray.client.early import NO_HOST, EarlyCalls
from pathways_ray.client.ending import WAKE, WAKE_ALL, Queued
from pathways_ray.client.frees import with_frees_joined
from pathways_ray.client.renewals import Renewals
from pathways_ray.client.siblings import Results
from pathways_ray.errors import Failure
from pathways_ray.observe.client_trace import ClientTrace
from pathways_ray.story import Entry, Story
from pathways_ray.transport import messages as wire

_RELEASE: Sequence[events.Command] = (events.ReleaseQueue(),)


class ClientCore(Cancelling):
    """The state of one session in its client.

    Args:
        session: its number.
        max_launches: launches without an outcome that the controller allows.
        fusion: whether hosts compose nodes into one computation.
        coalesce: whether launches that repeat each other leave as one.

    The session has `coalescer` coalesce the messages that leave in one batch. `ended` is the failure that everything
    gets once the session has ended, and `closed_because` its reason. `away` is why there is no controller for now, ""
    while there is one: nothing leaves the queue meanwhile.
    """

    def __init__(self, session: int, max_launches: int, fusion: bool = True, coalesce: bool = True) -> None:
        super().__init__()
        self.session = session
        self.max_launches = max_launches
        self.coalescer = Coalescer(self.new_program, fusion=fusion, enabled=coalesce)
        self.story = Story(f"client of session {session}")
        self.queue: deque[Queued] = deque()
        self.remove_head: Callable[[], object] = self.queue.popleft
        """Removes the first message in the step in which it is put: it must not leave twice. A function of the
        interpreter, so that Ctrl-C cannot come at its first step."""
        self.pending: dict[int, Sequence[BufferRecord]] = {}
        self.buffers: dict[int, BufferRecord] = {}
        self.freed: dict[int, BufferRecord] = {}
        self.donations = Donations(self.buffers)
        self.trace: ClientTrace | None = None
        self.renewals, self.early = Renewals(), EarlyCalls()
        self.dropped: deque[int] = deque()
        """Programs that are called no more, which the next registration says."""
        self._launches, self._programs = count(1), count(1)
        self.next_buffer, self._now = 1, 0.0
        self._heard_at: float | None = None

    # --- numbers ------------------------------------------------------------------------------------------------------

    def new_program(self) -> int:
        return next(self._programs)

    def new_buffers(self, size: int, kinds: Sequence[Any] = (), program: int = 0) -> list[BufferRecord]:
        """Records of these types with consecutive numbers: a launch, of `program`, names its results by the first."""
        first = self.next_buffer
        self.next_buffer = first + size
        results = Results(program, first, kinds) if size > 1 and program else None
        made = list(map(BufferRecord, count(first), repeat(PENDING), kinds or repeat(None, size), repeat(results)))
        self.buffers.update(zip(count(first), made, strict=False))
        return made

    @property
    def is_full(self) -> bool:
        """Whether a further launch must wait for outcomes."""
        return len(self.pending) >= self.max_launches

    def are_some_there(self) -> bool:
        """Whether a launch has no outcome yet of which a result is there."""
        return any(record.fetched for results in list(self.pending.values()) for record in results)

    def under_way(self) -> int:
        """Launches without an outcome, but for those whose values have come."""
        return len(self.pending) - len(self.early.over)

    def carries(self, program: int, priority: int = 0) -> int:
        """Bytes of arguments that the next call of a program carries at most: more where its host gets it at once."""
        direct = self.early.hosts and not self.queue and not priority
        handed = direct and self.early.may_hand(program, len(self.pending) + 1, further=1)
        return limits.MAX_INLINE_BYTES if handed else limits.MAX_SENT_INLINE_BYTES

    def composed(self, messages: list[wire.Message]) -> list[wire.Message]:
        """The messages of a batch that leaves now, said in fewer, or shorter ones."""
        return with_frees_joined(self.coalescer.coalesce(self.early.lightened(messages), self.early.is_begun))

    @property
    def has_room(self) -> bool:
        """Whether launches that waited for room go on: with an eighth of it, lest they leave one by one."""
        return len(self.pending) < self.max_launches - self.max_launches // 8

    # --- calls --------------------------------------------------------------------------------------------------------

    def launch(
        self,
        program: int,
        arguments: Sequence[BufferRecord],
        results: Sequence[BufferRecord],
        donated: Sequence[BufferRecord] = (),
        why: str = "",
        priority: int = 0,
        inline: tuple[wire.InlineArgument, ...] = (),
    ) -> wire.Launch | None:
        """Takes a launch of a registered program whose results are to be `results`, from `new_buffers`.

        Args:
            donated: those of the arguments whose memory it may take. They count as deleted from here on, with the
                reason `why`, and live again if the launch fails before it takes them.
            inline: values of arguments that go with it; `INLINE` is in their places.

        Returns: the message to send; an `EarlyLaunch` is to be handed to its host as well. None when it entered the
            queue, which is to be released; or when it failed at once, as an argument of it or the session has.
        """
        uploading = any(map(UPLOAD_OF, arguments)) and any(not one.done for one in map(UPLOAD_OF, arguments) if one)
        bad = any(map(FAILURE_OF, arguments)) or DELETED in map(STATE_OF, arguments)
        if bad and (failure := next(filter(None, (one.refusal for one in arguments)), None)) is not None:
            for result in results:
                result.fail(failure)
            return None
        number = self.early.called = next(self._launches)
        for result in results:
            result.launch = number
        self.pending[number] = results
        if self.trace is not None:
            self.trace.called(number)
        names, first = tuple(map(ID_OF, arguments)), results[0].id if results else 0
        if donated:
            self.donations.give(number, donated, why)
        if self.ended is not None:  # looked at after the table has the launch: the end fails what is in the table
            self._fail(number, self.ended, self._now)
            return None
        if uploading or self.queue or program in self.renewals.stale:  # which its first launch to leave registers
            self.queue.append(Queued(wire.launch_of(number, program, names, first, priority, inline), arguments))
            return None
        if priority or (host := self.early.host_of(program, arguments, len(self.pending))) < 0:
            return wire.launch_of(number, program, names, first, priority, inline)
        return self.early.hand(wire.EarlyLaunch(number, program, names, first, inline), results, host)

    def _handed(self, message: wire.Launch, arguments: Sequence[BufferRecord]) -> wire.Launch:
        """A launch that was in the queue, as it leaves: as an `EarlyLaunch` where it is to be handed to its host."""
        if type(message) is wire.PrioritizedLaunch:
            return message
        host = self.early.host_of(message.program, arguments, len(self.pending))
        return message if host < 0 else self.early.hand(wire.early_of(message), self.pending[message.launch], host)

    def interrupted(self, results: Sequence[BufferRecord]) -> Sequence[events.Command]:
        """Ends the launch that makes `results`, where Ctrl-C ended its call: nobody has a handle to them.

        It may have left, or not. So what was donated to it counts as taken, and what is heard of it finds nothing.
        """
        commands: list[events.Command] = []
        for number in [number for number, made in list(self.pending.items()) if made is results]:
            donated = [one.id for one in self.donations.by_launch.get(number, ()) if one.donated is not None]
            failure = Failure("Cancelled", "the call was interrupted")
            commands += self._fail(number, failure, self._now, donated)
            if donated:
                commands.append(wire.Free(tuple(donated)))
        for record in results:
            self.buffers.pop(record.id, None)
        return commands

    def free(self, buffer: BufferRecord) -> wire.Free | None:
        """Takes the end of the last handle of a buffer, or its deletion. Returns the message to send, with the next one
        or later; None when it entered the queue, or the session has ended."""
        self.buffers.pop(buffer.id, None)
        if self.ended is not None:
            return None
        if buffer.upload is None and not self.queue:
            return wire.Free((buffer.id,))
        if buffer.upload is not None and not self.frees_in_turn:
            self.freed[buffer.id] = buffer  # before the look: who ends the upload looks here behind it
            if not buffer.upload.done or self.freed.pop(buffer.id, None) is None:
                return None
        message = wire.Free((buffer.id,))
        if self.queue or (buffer.upload is not None and not buffer.upload.done):
            self.queue.append(Queued(message, (buffer,) if self.frees_in_turn else ()))
            return None
        return message

    # --- events -------------------------------------------------------------------------------------------------------

    def handle(self, event: Any, now: float) -> Sequence[events.Command]:
        """Takes one of the `events`, or a message of the controller (`ToClient`), at time `now` in seconds."""
        self._now = now
        return _HANDLERS[type(event)](self, event, now)

    def _placed(self, event: events.Placed, _now: float) -> Sequence[events.Command]:
        return self._in_turn(*event.messages)

    def _registered(self, event: events.Registered, _now: float) -> Sequence[events.Command]:
        while self.dropped:
            program = self.dropped.popleft()
            for number in (program, *self.coalescer.unregister(program)):
                self.early.forget(number)
                self.queue.append(Queued(wire.Unregister(number)))
        self.coalescer.register(event.program, event.graph)
        return self._in_turn(self.renewals.registered(event))

    def _renewing(self, event: events.Renewing, _now: float) -> Sequence[events.Command]:
        return self._in_turn(self.renewals.message(event.program)) if event.program in self.renewals.stale else ()

    def _in_turn(self, *messages: events.Call) -> Sequence[events.Command]:
        """Through the queue even when it is empty, so that Ctrl-C on the way loses nothing."""
        self.queue.extend(map(Queued, messages))
        return _RELEASE

    # --- the queue ----------------------------------------------------------------------------------------------------

    @property
    def may_leave(self) -> bool:
        """Whether the first message of the queue waits for nothing but somebody to send it."""
        try:
            buffers = self.queue[0].buffers
        except IndexError:
            return False
        return not self.away and all(buffer.upload is None or buffer.upload.done for buffer in buffers)

    def head(self, now: float) -> Sequence[events.Command] | None:
        """The commands for the first message of the queue; None while it waits, or the queue is empty."""
        if not self.queue or self.away:
            return None
        message, buffers = self.queue[0]
        uploads = [buffer.upload for buffer in buffers if buffer.upload is not None]
        if not all(upload.done for upload in uploads):
            return None
        if isinstance(message, wire.Launch):
            if message.launch not in self.pending:
                return ()  # it was cancelled
            failures = *(upload.failure for upload in uploads), *(buffer.failure for buffer in buffers)
            if (failure := next(filter(None, failures), None)) is not None:
                return self._fail(message.launch, failure, now)
            if message.program in self.renewals.stale:  # the controller is another one than when it was called
                return self._registering(self.renewals.message(message.program), message.launch), message
            return (self._handed(message, buffers),)
        if isinstance(message, wire.Register):
            return (self._registering(message),) if message.program in self.renewals.stale else ()
        if isinstance(message, wire.Unregister):
            return (self.renewals.unregistered(message.program),)
        return (message,)

    def _registering(self, message: wire.Register, launch: int = 0) -> wire.Register:
        """The registration that leaves now; hosts know the program by another number from here on."""
        self.early.prepared(message.program, 0, NO_HOST)
        return self.renewals.filled(message, launch)

    def _uploaded(self, event: events.Uploaded, now: float) -> Sequence[events.Command]:
        buffer, upload = event.buffer, event.upload
        upload.missing.discard(event.host)
        if event.failure is not None and (upload.failure is not None or not upload.done):  # else it was stored before
            upload.failure = upload.failure or event.failure
            self._note(now, "upload failed", event.failure.message, host=event.host)
        elif upload.missing:
            return ()
        upload.done = True
        if buffer.id in self.freed:
            self.queue.append(Queued(wire.Free((buffer.id,))))
            self.freed.pop(buffer.id, None)  # last: a free may be said twice, and not be lost at Ctrl-C
        if upload.failure is not None:
            buffer.fail(upload.failure)
            return *WAKE_ALL, *_RELEASE
        buffer.become_ready()
        if self.away:
            self.arrived_away.add(buffer.id)
        return *WAKE, *_RELEASE

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def _completed(self, message: wire.Completed, now: float) -> Sequence[events.Command]:
        self._heard_at = now
        if self.trace is not None:
            self.trace.ended(message.launches, now)
        self.coalescer.measure(message.launches, message.device_us, message.contended)
        for launch in message.launches:
            for buffer in self._results_of(launch):
                if buffer.state is PENDING:
                    buffer.state = READY
                elif buffer.donated is not None:
                    buffer.become_ready()
            if self.donations.by_launch:
                self.donations.taken(launch)
        return WAKE

    def _failed(self, message: wire.LaunchFailed, now: float) -> Sequence[events.Command]:
        self._heard_at = now
        consumed: Sequence[int] = message.consumed
        self.renewals.refused(message.again, message.launch)
        if message.launch in self.unanswered:  # the controller does not know what was donated to it
            self.unanswered.discard(message.launch)
            consumed = self._donated_to(message.launch)
        return self._fail(message.launch, message.failure, now, consumed, message.undecided)

    def _fail(
        self, launch: int, failure: Failure, now: float, consumed: Sequence[int] = (), undecided: Sequence[int] = ()
    ) -> Sequence[events.Command]:
        self.story.note_launch(Entry(now, "launch failed", failure.message, failure.kind, self.session, launch))
        if self.trace is not None:
            self.trace.ended((launch,), now)
        results = self._results_of(launch)
        donated = self.donations.by_launch.pop(launch, ())
        if donated and not consumed and not undecided:
            failure = with_donations_untaken(failure)
        for buffer in results:
            if buffer.state is PENDING or buffer.state is DELETED or buffer.early:  # deleted: calls before take it
                buffer.fail(failure)
        return *WAKE_ALL, *self._unused(self.donations.failed(donated, failure, consumed, undecided))

    def _unused(self, living: Sequence[BufferRecord]) -> Sequence[events.Command]:
        """Frees buffers that have come back from a donation, and that no handle is left to."""
        return [message for buffer in living if buffer.dropped and (message := self.free(buffer)) is not None]

    def _donations_decided(self, message: wire.DonationsDecided, now: float) -> Sequence[events.Command]:
        return *WAKE_ALL, *self._unused(self.donations.decided(message))

    def _results_of(self, launch: int) -> Sequence[BufferRecord]:
        """The results of a launch that has its outcome now, and of those that left with it and have theirs too. Of the
        latter no handle is left, or they were donated to the next one."""
        results = self.pending.pop(launch, ())
        if self.early.handed:
            self.early.ended(launch)
        for other in self.coalescer.take_covered(launch):
            results = [*self.pending.pop(other, ()), *results]
            self.early.ended(other)
            if other in self.donations.by_launch:
                self.donations.join(other, launch)
        return results

    def _buffers_lost(self, message: wire.BuffersLost, now: float) -> Sequence[events.Command]:
        self._note(now, "buffers lost", f"{len(message.buffers)} in all", message.failure.message)
        for number in message.buffers:
            buffer = self.buffers.get(number)
            if buffer is not None and (buffer.state in (PENDING, READY) or buffer.donated is not None):
                buffer.fail(message.failure)
        return WAKE_ALL

    def _host_moved(self, message: wire.HostAddress, now: float) -> Sequence[events.Command]:
        what = f"up at {message.address}, epoch {message.epoch}" if message.address else "down"
        self._note(now, "host moved", what, host=message.host)
        return (events.MoveHost(message),)

    def _prepared(self, message: wire.Prepared, _now: float) -> Sequence[events.Command]:
        self.coalescer.prepared(message.program)
        self.early.prepared(message.program, message.key, message.host)
        return ()


_HANDLERS: dict[type, Callable[[ClientCore, Any, float], Sequence[events.Command]]] = {
    events.Placed: ClientCore._placed,
    events.Registered: ClientCore._registered,
    events.Renewing: ClientCore._renewing,
    events.Uploaded: ClientCore._uploaded,
    events.Cancelling: ClientCore._cancelling,
    wire.CancelRefused: ClientCore._cancel_refused,
    wire.Completed: ClientCore._completed,
    wire.LaunchFailed: ClientCore._failed,
    wire.DonationsDecided: ClientCore._donations_decided,
    wire.BuffersLost: ClientCore._buffers_lost,
    wire.HostAddress: ClientCore._host_moved,
    wire.Prepared: ClientCore._prepared,
    wire.Vacate: lambda _self, message, _now: (events.MoveSlices(message.slices),),
    wire.GiveWay: lambda _self, message, _now: (events.MakeWay(message.back),),
    wire.SessionEnded: ClientCore._session_ended,
    events.Disconnected: ClientCore._disconnected,
    events.Resumed: ClientCore._resumed,
    events.ResumeFailed: ClientCore._resume_failed,
    events.Closing: ClientCore._closing,
    events.Forked: ClientCore._forked,
}
