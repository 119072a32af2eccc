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

from pathways_ray.transport.messages import (
    Done,
    Drop,
    DropProgram,
    DropSession,
    Enqueued,
    FromIsland,
    HostDown,
    HostUp,
    Peers,
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


Command = ToHosts | ToController | Refuse


@dataclass
class _Outstanding:
    """A launch with the hosts: who has yet to complete it, and the first failure seen."""

    hosts: set[int]
    failed: RunFailed | None = None


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
            case Run() | Drop() | DropSession() | DropProgram():
                self.queue.append(message)
                return self._advance()

    def from_host(self, host: int, epoch: int, message: Ready | Done | RunFailed | Enqueued) -> list[Command]:
        """A message from a host; one of an older epoch is dropped, since its launches have failed already."""
        if self.epochs.get(host) != epoch:
            return []
        match message:
            case Ready() | Enqueued():
                return [ToController(message)]
            case Done():
                commands = self._completed(message.sequences, host, None)
            case RunFailed():
                commands = self._completed((message.sequence,), host, message)
        return commands + self._advance()

    def host_up(self, message: HostUp) -> list[Command]:
        """A host joins. An epoch that is not newer than the last one seen is refused."""
        if message.host not in self.hosts or message.epoch <= abs(self.epochs.get(message.host, 0)):
            return [Refuse(message.host, message.epoch)]
        lost = self.host_lost(message.host, self.epochs.get(message.host, 0), "a successor joined")
        self.epochs[message.host] = message.epoch
        return [*lost, ToController(message), *self._advance()]

    def host_lost(self, host: int, epoch: int, reason: str) -> list[Command]:
        """A host is gone: the island starts anew. The controller fails every launch it has on this island."""
        if self.epochs.get(host) != epoch or epoch == 0:
            return []
        self.epochs[host] = -epoch
        self.outstanding.clear()
        kept = [m for m in self.queue if not isinstance(m, Run)]
        self.queue.clear()
        commands: list[Command] = [ToHosts(m) for m in kept]
        return [*commands, ToController(HostDown(host, epoch, reason))]

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
            if isinstance(head, Run):
                fresh = head.sequence not in self.outstanding
                if fresh and len(self.outstanding) >= self.window:
                    break
                if fresh:
                    self.outstanding[head.sequence] = _Outstanding(set(self.hosts))
            self.queue.popleft()
            commands.append(ToHosts(head))
        return commands
