"""The loss of the controller, the way back to its successor, and the end of a session, as its client decides them.

**The loss.** What was sent and has no outcome waits for what the successor finds out; it must not run twice. What
waits in the queue has not left, and stays there, with all that is called meanwhile.

**The way back.** The successor is told what there are handles to, and what was sent (`resume_request`). It opens the
session again with that, as far as it is there; of the rest it says that it is lost. Launches have their outcome where
schedulers know it, or get it when they are over; the others fail, with `ControllerLost`. Programs are registered again
when they are next called, and the queue goes on.

**The end.** Everything fails with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pathways_ray.client import events
from pathways_ray.client.buffer import PENDING, BufferRecord
from pathways_ray.client.coalesce import Coalescer
from pathways_ray.client.donations import Donations
from pathways_ray.client.renewals import Renewals
from pathways_ray.client.suspension import Suspension
from pathways_ray.errors import Failure
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.story import Entry, Story
from pathways_ray.transport import messages as wire

WAKE: Sequence[events.Command] = (events.Wake(fetches=False),)
WAKE_ALL: Sequence[events.Command] = (events.Wake(fetches=True),)

ONCE = (wire.ExchangeSlices, wire.Suspend, wire.CloseSession)
"""Calls that may not be made twice: where the controller died with one, nobody knows what came of it."""

ANSWER_LIMIT_S = 20.0
"""The successor answers within this time: it waits for hosts first (`controller.takeover.GATHER_LIMIT_S`)."""

FORKED = "it is that of the process that this one is a fork of; use multiprocessing's 'spawn', and pw.connect there"


class Queued(NamedTuple):
    """A message in the queue, and the buffers whose uploads it waits for."""

    message: events.Call
    buffers: Sequence[BufferRecord] = ()


_HOLD = Queued(wire.Free(()))
"""Frees nothing. While it is in the queue, what is called enters the queue as well."""


class _Everything:
    """A container that has everything."""

    def __contains__(self, _: object) -> bool:
        return True


class Ending:
    """The part of `ClientCore` that loses its controller, comes back, and ends.

    `resume_tag` shows the controller's successor that the session is this client's; without it, the session ends with
    the controller. `losses` counts the controllers that it has lost. With `frees_in_turn` what is called behind a free
    waits for the upload of what is freed too: a put that takes its room in the tenant's quota must not overtake it.
    """

    session: int
    story: Story
    queue: deque[Queued]
    pending: dict[int, Sequence[BufferRecord]]
    buffers: dict[int, BufferRecord]
    freed: dict[int, BufferRecord]
    donations: Donations
    renewals: Renewals
    coalescer: Coalescer
    next_buffer: int
    _heard_at: float | None

    def __init__(self) -> None:
        self.ended: Failure | None = None
        self.closed_because = ""
        self.closing = False
        self.away = ""
        self.losses = 0
        self.resume_tag = ""
        self.frees_in_turn = False
        self.unanswered: set[int] = set()
        """Launches that were sent to a controller that died since, and have no outcome. What was donated to them is
        gone if they fail."""
        self.arrived_away: set[int] = set()
        """Uploads that have arrived while there was no controller: their hosts may have said before what they hold."""

    def _fail(
        self, launch: int, failure: Failure, now: float, consumed: Sequence[int] = (), undecided: Sequence[int] = ()
    ) -> Sequence[events.Command]:
        raise NotImplementedError

    def _completed(self, message: wire.Completed, now: float) -> Sequence[events.Command]:
        raise NotImplementedError

    def _buffers_lost(self, message: wire.BuffersLost, now: float) -> Sequence[events.Command]:
        raise NotImplementedError

    def _donations_decided(self, message: wire.DonationsDecided, now: float) -> Sequence[events.Command]:
        raise NotImplementedError

    def handle(self, event: Any, now: float) -> Sequence[events.Command]:
        raise NotImplementedError

    def received(self, messages: Iterable[Any], now: float) -> Iterator[Sequence[events.Command]]:
        """The commands for messages of the controller that came together: threads are woken once for all outcomes among
        them, before anything else is done."""
        woken: Sequence[events.Command] = ()
        for message in messages:
            commands = self.handle(message, now)
            if commands is WAKE:
                woken = WAKE
            elif commands:
                yield (*woken, *commands)
                woken = ()
        yield woken

    # --- the controller is lost ---------------------------------------------------------------------------------------

    def _disconnected(self, event: events.Disconnected, now: float) -> Sequence[events.Command]:
        if self.closing or self.ended is not None or not self.resume_tag:
            return self._end("ControllerLost", event.reason, now)
        if self.away:
            return ()
        self.losses += 1
        self.away = event.reason  # before the look: what is called from here on is not sent, or is failed here
        self.queue.append(_HOLD)
        self._note_loss(event.reason, now)
        self._note_sent(now)
        return *WAKE_ALL, events.Resume()

    def _note_sent(self, now: float) -> None:
        """Notes the launches that have left, with those that arrays were donated to and that were cancelled too late.
        Of donations that are undecided nobody will tell."""
        messages = [queued.message for queued in list(self.queue)]
        waiting = {message.launch for message in messages if isinstance(message, wire.Launch)}
        self.unanswered = {*list(self.pending), *list(self.donations.by_launch)} - waiting
        undecided = tuple(number for number, buffer in list(self.buffers.items()) if buffer.undecided)
        if undecided:
            self._donations_decided(wire.DonationsDecided(undecided, undecided), now)

    def _donated_to(self, launch: int) -> list[int]:
        """The arrays that were donated to a launch, and to those that left as it."""
        together = launch, *self.coalescer.covered_by(launch)
        return [buffer.id for one in together for buffer in self.donations.by_launch.get(one, ())]

    def resume_request(
        self, name: str, slices: Sequence[wire.KnownSlice], now: float, suspension: Suspension | None = None
    ) -> wire.ResumeSession:
        """The request to the controller's successor, with all that it has to know. Nothing is sent meanwhile.

        Args:
            slices: those of the session that there is a handle to.
            suspension: what is saved of it, where it is suspended.
        """
        self._note_sent(now)  # what has left since then went nowhere
        records = {id(record): record for record in list(self.buffers.values())}
        for queued in list(self.queue):  # its arguments may have no handle any more, and are freed behind it
            if isinstance(queued.message, wire.Launch):
                records |= {id(record): record for record in queued.buffers}
        given = {number for launch in self.unanswered for number in self._donated_to(launch)}
        groups: dict[tuple[int, ArrayType, Spec, bool, tuple[tuple[int, int], ...]], list[int]] = {}
        for record in records.values():
            if record.id in given or record.early in self.unanswered:  # the latter is named with its launch
                continue
            uploading = record.upload is not None and not record.upload.done
            arriving = uploading or record.id in self.arrived_away
            made = arriving or (record.donated or record.state) is not PENDING
            if record.kind is None or record.failure is not None or not made:
                continue
            if suspension is not None and record.id in suspension.arrays:
                continue
            kind = record.kind
            epochs = tuple(record.upload.epochs.items()) if arriving and record.upload is not None else ()
            groups.setdefault((kind.slice.id, kind.array, kind.spec, arriving, epochs), []).append(record.id)
        kept = [
            wire.KeptBuffers(slice_id, kind, spec, tuple(found), arriving, dict(epochs))
            for (slice_id, kind, spec, arriving, epochs), found in groups.items()
        ]
        sent = []
        for launch in sorted(self.unanswered - self.coalescer.covered()):
            together = launch, *self.coalescer.covered_by(launch)
            results = [result for one in together for result in self.pending.get(one, ())]
            living = _by_kind(one for one in results if id(one) in records and one.id not in given)
            sent.append(wire.Unanswered(launch, tuple(one.id for one in results), living))
        return wire.ResumeSession(
            wire.VERSION,
            self.session,
            self.resume_tag,
            name,
            tuple(slices),
            tuple(kept),
            self.next_buffer,
            suspension is not None,
            suspension is not None and suspension.gives_way,
            tuple(sent),
        )

    def _resumed(self, event: events.Resumed, now: float) -> Sequence[events.Command]:
        reply = event.reply
        self._note(now, "session resumed", f"arrays lost: {len(reply.lost)}")
        self.renewals.controller_lost()
        self.coalescer.moved(_Everything())
        text = "it was not on its hosts any more, or not known to be, when the session had another controller"
        failure, gone = Failure("BufferLost", text), set(reply.lost)
        lost = self._buffers_lost(wire.BuffersLost(reply.lost, failure), now) if gone else ()
        for queued in list(self.queue) if gone else ():  # arguments that have no handle any more, as in the request
            for record in queued.buffers:
                if record.id in gone and record.failure is None:
                    record.fail(failure)
        self._answered(reply, now)
        self.away = ""
        self.arrived_away.clear()
        hosts = *reply.hosts, *self._unknown_hosts({host.host for host in reply.hosts})
        return *(events.MoveHost(host) for host in hosts), *lost, *WAKE_ALL, events.ReleaseQueue()

    def _answered(self, reply: wire.SessionResumed, now: float) -> None:
        """Gives launches that were sent before their outcome, but for those that still run."""
        running = set(reply.running)
        self._completed(wire.Completed(tuple(launch for launch in reply.done if launch in self.unanswered)), now)
        failures = dict(reply.failed)
        text = f"{self.away}; whether the launch ran is not known. The session goes on with its arrays: call again"
        unknown = Failure("ControllerLost", text, story=self.story.lines(now, session=self.session))
        for launch in sorted(self.unanswered - running - self.coalescer.covered()):
            if launch in self.pending or launch in self.donations.by_launch:
                self._fail(launch, failures.get(launch, unknown), now, self._donated_to(launch))
        self.unanswered &= running

    def _unknown_hosts(self, known: set[int]) -> list[wire.HostAddress]:
        """Hosts that uploads go to and the successor has never heard of: nobody will say that they are gone."""
        waiting = [*list(self.freed.values()), *(buffer for queued in list(self.queue) for buffer in queued.buffers)]
        uploads = [one.upload for one in (*list(self.buffers.values()), *waiting) if one.upload and not one.upload.done]
        epochs = {host: upload.epochs.get(host, 0) for upload in uploads for host in upload.missing - known}
        return [wire.HostAddress(host, epoch, "") for host, epoch in sorted(epochs.items())]

    def _resume_failed(self, event: events.ResumeFailed, now: float) -> Sequence[events.Command]:
        return self._end("ControllerLost", event.reason, now)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _session_ended(self, message: wire.SessionEnded, now: float) -> Sequence[events.Command]:
        return self._end("SessionClosed", message.reason, now)

    def _closing(self, _event: events.Closing, now: float) -> Sequence[events.Command]:
        # Before hosts learn of it and hang up: what is under way fails with the session, and not with a lost host.
        self.closing = True
        self._fail_all(Failure("SessionClosed", "the session ended: it was shut down"), now)
        return WAKE_ALL

    def _forked(self, _event: events.Forked, _now: float) -> Sequence[events.Command]:
        self.ended = Failure("SessionClosed", f"the session ended: {FORKED}")
        self.closed_because = FORKED
        return ()

    def _end(self, kind: str, reason: str, now: float) -> Sequence[events.Command]:
        if self.ended is None:
            if self.closing:  # the connection may end before the call that ends it is answered
                kind, reason = "SessionClosed", "it was shut down"
            story: tuple[str, ...] = ()
            if kind == "ControllerLost":
                if not self.away:
                    self._note_loss(reason, now)
                story = self.story.lines(now, session=self.session)
            self.ended = Failure(kind, f"the session ended: {reason}", story=story)
            self.closed_because = reason
        self._fail_all(self.ended, now)
        return *WAKE_ALL, events.CloseData(self.ended)

    def _fail_all(self, failure: Failure, now: float) -> None:
        for launch in list(self.pending):
            self._fail(launch, failure, now)

    def _note_loss(self, reason: str, now: float) -> None:
        last = self._heard_at
        heard = "no outcome so far" if last is None else f"{now - last:.3f} s after the last outcome"
        self._note(now, "controller lost", f"launches without an outcome: {len(self.pending)}, {heard}", reason)

    def _note(self, now: float, event: str, detail: str = "", cause: str = "", host: int = -1) -> None:
        self.story.note(Entry(now, event, detail, cause, self.session, host=host))


def _by_kind(records: Iterable[BufferRecord]) -> tuple[wire.KeptBuffers, ...]:
    """Arrays that are to come, with their types."""
    groups: dict[tuple[int, ArrayType, Spec], list[int]] = {}
    for record in records:
        if record.kind is not None and record.failure is None:
            groups.setdefault((record.kind.slice.id, record.kind.array, record.kind.spec), []).append(record.id)
    return tuple(wire.KeptBuffers(*kind, tuple(found)) for kind, found in groups.items())
