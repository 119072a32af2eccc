"""The decisions of a host: which launch goes on, up to which step, and when buffers are freed.

A launch that arrives takes its arguments and posts its pulls at once, then its steps run in order. It stops at three
places: at an argument that an earlier launch has yet to make, at an input barrier (see `barriers`), and, where gangs
are dispatched one at a time, at the gang that it may not reach yet. Meanwhile later launches go on; the results of a
launch can be named before they exist.

`handle` takes one event and returns instructions, in the order in which they are to be carried out. Both are values
(see `instructions`), and no decision reads anything but events: no array, no clock. So the same events give the same
instructions, on a real host, in the simulator, and when a recorded run is replayed. A step whose inputs are futures
already is enqueued by the driver as it meets the instruction; a launch that nothing stops costs one of them, and no
trip through another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pathways_ray.errors import Failure
from pathways_ray.executor.run import instructions as do
from pathways_ray.executor.run.active_launch import (
    AT_BARRIER,
    DONE,
    ENQUEUED,
    WAITING_FOR_GANG,
    WAITING_FOR_INPUTS,
    ActiveLaunch,
)
from pathways_ray.executor.run.barriers import InputBarrier
from pathways_ray.executor.run.copies import copies_for
from pathways_ray.executor.run.early import EarlyLaunches, refusal
from pathways_ray.executor.run.forwarding import Producers, hand_over, resolve
from pathways_ray.executor.run.host_plan import NO_LIMIT
from pathways_ray.executor.run.journal import Journal
from pathways_ray.executor.run.leading import Follower, Leader
from pathways_ray.executor.run.preparation import Preparation
from pathways_ray.executor.run.rejoining import Rejoining
from pathways_ray.executor.run.senders import lost_sender
from pathways_ray.story import Entry, Story
from pathways_ray.transport import messages as wire

HEARTBEAT_S = 1.0
"""A host lets its scheduler hear from it this often."""

GROUP_LIMIT_S = 30
"""Seconds for the hosts of an island to find each other; after that the process ends and Ray restarts it."""


class HostCore:
    """The launches and programs of one host.

    Args:
        members: the hosts of the island. Where there are several, they have rendezvous, and the first one leads.
    """

    def __init__(self, host: int, members: tuple[int, ...]) -> None:
        self.host = host
        self.members = members
        self.multi_host = len(members) > 1
        self.story = Story(f"host {host}")
        self.preparation = Preparation(host, self.story)
        self.programs, self.wanted = self.preparation.programs, self.preparation.wanted
        self.active: dict[int, ActiveLaunch] = {}
        self.peers: dict[int, wire.Peer] = {}
        self.producers = Producers()
        self.early = EarlyLaunches()
        self.journal = Journal()
        self.leader = Leader(self.journal) if self.multi_host and host == min(members) else None
        self.follower = Follower(self.journal) if self.multi_host and host != min(members) else None
        self.rejoining = Rejoining(
            host, self.multi_host, self.active, self.preparation, self.journal, self.early, self.story
        )
        self._now = 0.0
        self._handlers: dict[type, Callable[[Any], list[do.Instruction]]] = {
            **dict.fromkeys(self.preparation.handlers, self._of_program),
            wire.IslandLaunch: self._launch,
            wire.Drop: self._free,
            wire.BarrierReleased: self._released,
            wire.Abort: self._aborted,
            wire.Peers: self._peers,
            wire.DropSession: self._session_ended,
            do.Joined: self._joined,
            do.InputsArrived: self._arrived,
            do.SchedulerFound: self._scheduler_found,
            wire.Recount: lambda message: self.rejoining.recount(message, self._now),
            wire.CatchUp: self._catch_up,
            do.CatchingUp: lambda rest: self._catch_up(rest.message),
            wire.AllowEarly: lambda message: self.early.allow(message.tenant) if self.follower is None else [],
            wire.Led: self._follow,
            do.LookedAt: self._looked_at,
            do.Called: self._called,
            wire.Dismissed: lambda _: [do.End("there is no controller that knows what it holds")],
        }

    @property
    def leads(self) -> bool:
        """Whether this host takes launches of clients for all hosts of its island, and that pays."""
        return self.leader is not None and self.leader.leads

    def announce(self, events: Sequence[do.Event]) -> list[do.Instruction]:
        """The instructions that come before these events are handled, with no others between them."""
        return self.leader.announce(events) if self.leader is not None else []

    def handle(self, event: do.Event, now: float) -> list[do.Instruction]:
        """The instructions that follow from an event at time `now`, in seconds. Those that follow another host handle
        messages in its order, one by one."""
        follower = self.follower
        if follower is None or follower.lets_pass(event):
            self._now = now
            return self._handlers[type(event)](event)
        first = follower.take(event)
        if first is None:
            return []
        made = self._handle(first, now)
        # The rest of what it lacks comes before anything else.
        if follower.has_more and not (made and type(made[-1]) is do.GoOn):
            return [*made, do.GoOn(do.Next())]
        return made

    def _handle(self, event: do.Event, now: float) -> list[do.Instruction]:
        self._now = now
        return self._handlers[type(event)](event)

    def _of_program(self, event: do.Event) -> list[do.Instruction]:
        if self.multi_host and type(event) is wire.Program:
            self.journal.add_program(event)
        return self.preparation.handle(event, self._now)

    # --- peers --------------------------------------------------------------------------------------------------------

    def _joined(self, event: do.Joined) -> list[do.Instruction]:
        self.story.note(Entry(self._now, "joined", f"epoch {event.epoch}", host=self.host))
        return []

    def _scheduler_found(self, _: do.SchedulerFound) -> list[do.Instruction]:
        """The controller has failed what the scheduler had when it died, and what its islands have for each other may
        never come. Hosts of an island of several hear so once all of them have the same launches."""
        closed = self.leader.close() if self.leader is not None else []
        made = closed + self.rejoining.scheduler_found(self._now)
        if self.multi_host or not self.active:
            return made
        waiting = tuple((sequence, active.launch.program) for sequence, active in self.active.items())
        return made + self._abort(wire.Abort(waiting, Failure("HostLost", "its island's scheduler ended")))

    def _peers(self, message: wire.Peers) -> list[do.Instruction]:
        present = ", ".join(f"{peer.host} (epoch {peer.epoch})" for peer in message.peers)
        self.story.note(Entry(self._now, "peers changed", present, host=self.host))
        self.peers = {peer.host: peer for peer in message.peers}
        if (itself := self.peers.get(self.host)) is not None:
            self.journal.since = itself.since
        made: list[do.Instruction] = [do.SetPeers(message.peers)]
        for active in list(self.active.values()):
            if (lost := lost_sender(active, self.host, self.peers)) is not None:
                text = f"host {lost}, which holds the data, was lost"
                made += self._give_up(active, Failure("HostLost", text, host=lost))
        return made

    # --- a launch arrives ---------------------------------------------------------------------------------------------

    def _launch(self, launch: wire.IslandLaunch) -> list[do.Instruction]:
        sequence, journal = launch.sequence, self.journal
        if sequence > journal.last_sequence:
            journal.last_sequence = sequence
        if self.multi_host:
            journal.add(launch)
        active = self.active.get(sequence)
        if active is not None:
            active.limit = launch.first + launch.gangs
            return self._advance(active) if active.phase is WAITING_FOR_GANG else []
        if launch.first:
            return []  # a later gang of a launch that has ended
        made, begun = self.early.sent(launch, self.programs)
        if begun:
            return made
        if launch.follows and (prepared := self.programs.get(launch.program)) and prepared.plan.decides:
            self.early.following[sequence] = launch.follows
        return [*made, *self._begin(launch)]

    def _begin(self, launch: wire.IslandLaunch) -> list[do.Instruction]:
        sequence = launch.sequence
        prepared = self.programs.get(launch.program)
        if prepared is None:
            return [self._lost(launch)]
        plan, producers = prepared.plan, self.producers.sessions.get(launch.session)
        if plan.offers:
            self.journal.offered.append((sequence, launch.program))
        if producers is None:
            if plan.is_unobstructed and not launch.gangs and not (plan.overwritten and self.active):
                # Most launches: nothing can stop it, so it ends here and now, and is never active.
                return [do.Run(launch)]
            active = self.active[sequence] = ActiveLaunch(launch, plan)
            return [do.Start(launch, ()), *self._advance(active)]
        active = self.active[sequence] = ActiveLaunch(launch, plan)
        made = resolve(active, producers)
        if not active.unresolved:
            return made + self._advance(active)
        self._note(active, "waits for inputs", f"buffers {sorted(active.unresolved)}")
        active.enter(WAITING_FOR_INPUTS)
        self.producers.announce(active)
        return made

    def _called(self, called: do.Called) -> list[do.Instruction]:
        if self.multi_host:  # all hosts of the island would have to
            return [do.LeaveCall(called)]
        return self.early.called(called, self.programs, self.active)

    def _looked_at(self, looked: do.LookedAt) -> list[do.Instruction]:
        """A client hands over a call: it is taken, or refused, at once. Where nothing is active, nothing of its session
        has yet to be made, and what may be early stops at nothing of its own: so it begins and ends now."""
        message = looked.handed.message
        prepared = self.programs.get(message.program)
        if prepared is None or self.active or (message.results < 0 and self.multi_host):
            return refusal(looked.handed)  # what follows a value begins early on lone hosts only
        launch = self.early.take(looked, prepared)
        if launch is None:
            return refusal(looked.handed)
        return [do.Run(launch)] if self.leader is None else [self.leader.led(launch), do.Run(launch)]

    def _follow(self, led: wire.Led) -> list[do.Instruction]:
        """The leader has taken a call, and all hosts of the island begin it."""
        prepared = self.programs.get(led.launch.program)
        if prepared is None:
            return [do.End(f"the leader began a launch of program {led.launch.program}, which is not compiled here")]
        self.early.follow(led.launch, prepared.plan)
        return self._begin(led.launch)

    def _catch_up(self, message: wire.CatchUp) -> list[do.Instruction]:
        """Takes what this host lacks, and begins between the same messages what the leader has begun there."""
        return self.rejoining.catch_up(message, self._handle_with_late, self._now)

    def _handle_with_late(self, event: do.Event, now: float) -> list[do.Instruction]:
        made = self._handle(event, now)
        while self.follower is not None and (led := self.follower.next_late()) is not None:
            made += self._follow(led)
        return made

    def _lost(self, launch: wire.IslandLaunch) -> do.Instruction:
        text = f"host {self.host} restarted before the launch reached it"
        concerned = frozenset({self.host})
        story = self.story.lines(self._now, session=launch.session, launch=launch.sequence, hosts=concerned)
        failure = Failure("HostLost", text, host=self.host, story=story)
        return do.Send(wire.IslandLaunchFailed(launch.sequence, failure, self.members))

    # --- a launch goes on ---------------------------------------------------------------------------------------------

    def _advance(self, active: ActiveLaunch, failure: Failure | None = None) -> list[do.Instruction]:
        """Enqueues as much of a launch as possible.

        Args:
            failure: came in place of what it waited for at the barrier that it has just passed.
        """
        launch, plan, route, first = active.launch, active.plan, active.route, active.position
        made: list[do.Instruction] = []
        if plan.overwritten and first == 0 and len(self.active) > 1:
            made += copies_for(active, self.active.values(), self.multi_host)
        last = active.position = route.barriers[first] if active.limit == NO_LIMIT else route.stop(first, active.limit)
        if last > first:
            made.append(do.Enqueue(launch.sequence, first, last, failure))
        through = last == len(route.steps)
        if not through:
            stop = route.steps[last]
            if isinstance(stop, InputBarrier) and stop.gang < active.limit:
                return made + self._stop_at(active, stop, first)
        if launch.gangs and active.reported < active.limit - 1:
            active.reported = active.limit - 1
            made.append(do.Send(wire.Enqueued(launch.sequence, active.reported)))
        # All hosts of the island agree at which message a launch ends, also those without a part in its last gangs.
        if through and active.limit > plan.last_gang:
            return made + self._finish(active)
        active.enter(WAITING_FOR_GANG)
        self.producers.announce(active)
        return made

    def _stop_at(self, active: ActiveLaunch, barrier: InputBarrier, first: int) -> list[do.Instruction]:
        """Waits at a barrier, behind steps that were enqueued from `first` on."""
        sequence, position = active.launch.sequence, active.position
        made: list[do.Instruction] = []
        if position > first:
            made.append(do.Measure(sequence, first, position))
        made.append(do.AwaitInputs(sequence, position, barrier.number, active.failure))
        self.producers.announce(active)
        if position < len(active.route.steps) - 1:
            self._note(active, "waits at barrier", str(barrier.number))
            active.enter(AT_BARRIER)
            return made
        self._note(active, "enqueued, waits for the other hosts")
        active.enter(ENQUEUED)
        forwards, ready = hand_over(active, only_early=True)
        return [*made, *forwards, *(one for waiting in ready for one in self._advance(waiting))]

    def _arrived(self, event: do.InputsArrived) -> list[do.Instruction]:
        """The inputs of a launch at a barrier are here, or failed."""
        active = self.active.get(event.sequence)
        barrier = active.barrier if active is not None else None
        if active is None or barrier is None or event.barrier != barrier.number or barrier.number == active.arrived:
            return []
        active.arrived = barrier.number
        active.brought = failure = event.failure or active.failure
        if barrier.rendezvous:
            return [do.Send(wire.BarrierReached(self.host, event.sequence, event.barrier, failure))]
        return self._pass(active, failure)

    def _aborted(self, message: wire.Abort) -> list[do.Instruction]:
        if self.multi_host:
            self.journal.add(message)
        return self._abort(message)

    def _abort(self, message: wire.Abort) -> list[do.Instruction]:
        """Launches have ended elsewhere. Those that are active here run to their end on the failure, so that all hosts
        of the island still agree on what they enqueue."""
        made: list[do.Instruction] = []
        for sequence, program in message.launches:
            made.append(do.Abandon(sequence, program, message.failure))
            active = self.active.get(sequence)
            if active is not None:
                active.failure = message.failure
                self._note(active, "aborted", cause=message.failure.message)
                if active.limit != NO_LIMIT:
                    active.limit = active.plan.last_gang + 1  # who would send the others may be gone
                if active.phase is WAITING_FOR_GANG:
                    made += self._advance(active)
                else:
                    made += self._give_up(active, message.failure)
        return made

    def _give_up(self, active: ActiveLaunch, failure: Failure) -> list[do.Instruction]:
        """Has the inputs for which a launch waits at a barrier fail."""
        barrier = active.barrier
        return self._arrived(do.InputsArrived(active.launch.sequence, barrier.number, failure)) if barrier else []

    def _released(self, message: wire.BarrierReleased) -> list[do.Instruction]:
        """All hosts of the island have reached a rendezvous, with their inputs or a failure."""
        self.journal.add(message)
        active = self.active.get(message.sequence)
        barrier = active.barrier if active is not None else None
        if active is None or barrier is None or barrier.number != message.barrier:
            return []
        return self._pass(active, message.failure)

    def _pass(self, active: ActiveLaunch, failure: Failure | None) -> list[do.Instruction]:
        self._note(active, "passes the barrier", cause=failure.message if failure is not None else "")
        active.position += 1
        return self._advance(active, failure)

    # --- a launch is through ------------------------------------------------------------------------------------------

    def _finish(self, active: ActiveLaunch) -> list[do.Instruction]:
        """Stores the results of a launch that is all enqueued, and lets those go on that waited for them."""
        launch = active.launch
        active.enter(DONE)
        del self.active[launch.sequence]
        if active.pending is None:
            return [do.Complete(launch.sequence)]
        self._note(active, "is all enqueued")  # there is no story of launches that nothing stops
        self.producers.forget(active)
        made, ready = hand_over(active, only_early=False)
        made.append(do.Complete(launch.sequence))
        if active.pending.freed:
            made.append(do.Free(launch.session, tuple(active.pending.freed)))
        for waiting in ready:
            made += self._advance(waiting)
        return made

    # --- buffers ------------------------------------------------------------------------------------------------------

    def _free(self, message: wire.Drop) -> list[do.Instruction]:
        """Frees buffers; those that a launch has yet to store go as soon as it has."""
        session, buffers = message.session, message.buffers
        if self.producers.sessions:
            self.producers.free(session, buffers)
        made = self.early.dropped(session, buffers)
        made.append(do.Free(session, buffers))
        return made

    def _session_ended(self, message: wire.DropSession) -> list[do.Instruction]:
        self.story.note(Entry(self._now, "session ended", session=message.session))
        return [*self.early.session_ended(message.session), do.FreeSession(message.session)]

    def _note(self, active: ActiveLaunch, event: str, detail: str = "", cause: str = "") -> None:
        launch = active.launch
        self.story.note_launch(Entry(self._now, event, detail, cause, launch.session, launch.sequence))
