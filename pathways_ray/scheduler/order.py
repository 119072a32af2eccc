"""What the scheduler decides: which launch goes to the island's devices next, and when.

Two rules. All hosts of the island get the same launches in the same order, so that no two devices see two gangs in
different orders. At most `window` launches are with the hosts without a completion, because a device queue cannot be
taken back: what is in it is out of the policy's hands.

Launches arrive from the controller in an order that respects data dependencies and is the same for all islands; the
policy of this module keeps it (first in, first out). Drops of buffers stay behind the launches that came before them.

Events in, commands out: `handle(event) -> list[Command]`. No clock, no thread, no stream.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pathways_ray.errors import Failure, WireError
from pathways_ray.transport.messages import (
    Arrived,
    Done,
    Drop,
    DropProgram,
    DropSession,
    Enqueued,
    FromIsland,
    HostDown,
    HostUp,
    Peers,
    Proceed,
    Program,
    Ready,
    Run,
    RunFailed,
    ToHost,
)


@dataclass(frozen=True, slots=True)
class ToHosts:
    """Send to every host of the island that is up."""

    message: ToHost


@dataclass(frozen=True, slots=True)
class ToController:
    message: FromIsland


@dataclass(frozen=True, slots=True)
class Refuse:
    """Close the stream of a host that joined with an old epoch."""

    host: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Have the process of a host under `epoch` killed, so that it comes back under a new one."""

    host: int
    epoch: int


Command = ToHosts | ToController | Refuse | Kill


@dataclass
class _Outstanding:
    """A launch with the hosts: who has yet to complete it, and the first failure seen.

    `arrived` are, by gang, the hosts that have its inputs; `missed` the failure that one of them got instead.
    """

    hosts: set[int]
    failed: RunFailed | None = None
    succeeded: bool = False
    arrived: dict[int, set[int]] = field(default_factory=dict)
    missed: dict[int, Failure] = field(default_factory=dict)


@dataclass
class IslandOrder:
    """The state of one island's scheduler.

    Args:
        hosts: the ids of the island's hosts. Until all are up, and from the loss of one until its successor joins,
            launches are not dispatched.
        window: launches with the hosts at once.
    """

    island: int
    hosts: frozenset[int]
    window: int
    epochs: dict[int, int] = field(default_factory=dict)
    queue: deque[Run | Drop | DropSession | DropProgram] = field(default_factory=deque)
    outstanding: dict[int, _Outstanding] = field(default_factory=dict)

    def from_controller(self, message: ToHost) -> list[Command]:
        """A message from the controller."""
        match message:
            case Peers() | Program():
                return [ToHosts(message)]
            case Run() if message.sequence in self.outstanding:
                # A further gang: behind launches that wait for room it would wait for itself.
                return [ToHosts(message)]
            case Run() | Drop() | DropSession() | DropProgram():
                self.queue.append(message)
                return self._advance()
            case Proceed():
                raise WireError("Proceed goes from the scheduler to its hosts, never to it")

    def from_host(self, host: int, epoch: int, message: Ready | Done | RunFailed | Enqueued | Arrived) -> list[Command]:
        """A message from a host; one of an older epoch is dropped, since its launches have failed already."""
        if self.epochs.get(host) != epoch:
            return []
        match message:
            case Ready() | Enqueued():
                return [ToController(message)]
            case Arrived():
                return self._arrived(message)
            case Done():
                commands = self._completed(message.sequences, host, None)
            case RunFailed():
                commands = self._completed((message.sequence,), host, message)
        return commands + self._advance()

    def host_up(self, message: HostUp) -> list[Command]:
        """A host joins. An epoch that is not newer than the last one seen is refused."""
        known = self.epochs.get(message.host, 0)
        if message.host not in self.hosts or message.epoch <= abs(known):
            return [Refuse(message.host, message.epoch)]
        if any(self.epochs.get(member, 0) == -message.epoch for member in self.hosts):
            # The group it belongs to broke before it came. It has to start anew with the others.
            return [Refuse(message.host, message.epoch), Kill(message.host, message.epoch)]
        lost = self.host_lost(message.host, known, "a successor joined")
        self.epochs[message.host] = message.epoch
        return [*lost, ToController(message), *self._advance()]

    def host_lost(self, host: int, epoch: int, reason: str, silent: bool = False) -> list[Command]:
        """A host is gone, and with it the island's group: survivors may sit in a collective that never ends.

        So the whole island starts anew: every other host's process is killed (and this one's, when it is only
        `silent`), and the controller fails every launch it has on the island.
        """
        if self.epochs.get(host) != epoch or epoch <= 0:
            return []
        commands: list[Command] = []
        for member in sorted(self.hosts):
            known = self.epochs.get(member, 0)
            if known != epoch:
                continue
            self.epochs[member] = -known
            why = reason if member == host else f"host {host} of its island was lost: {reason}"
            commands.append(ToController(HostDown(member, known, why)))
            if member != host or silent:
                commands.append(Kill(member, known))
        self.outstanding.clear()
        kept = [m for m in self.queue if not isinstance(m, Run)]
        self.queue.clear()
        return [*commands, *(ToHosts(m) for m in kept)]

    def _arrived(self, message: Arrived) -> list[Command]:
        """Opens a gate once every host has what the gang waits for: all of them enter its collective, or none."""
        record = self.outstanding.get(message.sequence)
        if record is None:
            return []
        hosts = record.arrived.setdefault(message.gang, set())
        hosts.add(message.host)
        if message.failure is not None:
            record.missed.setdefault(message.gang, message.failure)
        if hosts != self.hosts:
            return []
        del record.arrived[message.gang]
        return [ToHosts(Proceed(message.sequence, message.gang, record.missed.pop(message.gang, None)))]

    def _completed(self, sequences: tuple[int, ...], host: int, failed: RunFailed | None) -> list[Command]:
        """Notes that `host` completed launches, and reports those that every host has completed."""
        finished: list[int] = []
        commands: list[Command] = []
        for sequence in sequences:
            record = self.outstanding.get(sequence)
            if record is None:
                continue
            record.hosts.discard(host)
            record.failed = record.failed or failed
            record.succeeded = record.succeeded or failed is None
            if record.succeeded and record.failed is not None:
                # Some devices ran a gang that others did not: what their collectives exchanged since is worthless.
                reason = f"the hosts disagree on a launch: {record.failed.failure.message}"
                commands += self.host_lost(host, self.epochs[host], reason, silent=True)
                break
            if record.hosts:
                continue
            del self.outstanding[sequence]
            if record.failed is None:
                finished.append(sequence)
            else:
                commands.append(ToController(record.failed))
        return [ToController(Done(tuple(finished))), *commands] if finished else commands

    def _advance(self) -> list[Command]:
        commands: list[Command] = []
        if any(self.epochs.get(host, 0) <= 0 for host in self.hosts):
            return commands
        while self.queue:
            head = self.queue[0]
            if isinstance(head, Run) and head.first and head.sequence not in self.outstanding:
                self.queue.popleft()  # what is left of a launch that is over here
                continue
            if isinstance(head, Run):
                fresh = head.sequence not in self.outstanding
                if fresh and len(self.outstanding) >= self.window:
                    break
                if fresh:
                    self.outstanding[head.sequence] = _Outstanding(set(self.hosts))
            self.queue.popleft()
            commands.append(ToHosts(head))
        return commands
