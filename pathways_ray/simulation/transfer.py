"""Values from host to host: pulls that wait until the peer serves, and fail when the connection to it is reset.

The request, and the answer, are single messages. A name is served once. Reading takes a while: memory that is
overwritten meanwhile goes out as garbage. As the real transfer server does, it tries for ever to reach an address where
nobody listens, waits for ever for a peer that says nothing, and keeps for ever what is offered and not pulled, unless
its host is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pathways_ray.errors import Failure
from pathways_ray.ir.plan import launch_of, receiver_of
from pathways_ray.simulation.network import Network, Process
from pathways_ray.simulation.values import Future, when_all_ready
from pathways_ray.transport.messages import Following, Peer

LONGEST_READ_S = 0.002
LATE_S = 0.02
"""The longest time that a thread of a host waits before it tells another host what follows."""


@dataclass(eq=False, slots=True)
class Piece:
    """A part of a shard on its way: the array it is cut from, and the device. One that was cut is a copy."""

    array: Future
    device: int
    whole: bool

    def read(self) -> int:
        memory = self.array.memory() if self.whole else self.array.shards
        return memory.get(self.device, 0)


Served = list[Piece] | Failure


@dataclass(eq=False, slots=True)
class Pull:
    """Pieces that a peer was asked for."""

    answer: Callable[[list[int] | Failure], None]
    asker: Process
    transfer: Transfer


@dataclass(eq=False)
class Transfer:
    """The transfer server of one host process. `at` finds the process behind a transfer address."""

    network: Network
    process: Process
    host: int
    at: Callable[[str], tuple[Process, Transfer] | None]
    peers: dict[int, Peer] = field(default_factory=dict)
    served: dict[int, Served] = field(default_factory=dict)
    asked: dict[int, Pull] = field(default_factory=dict)
    pulls: dict[int, tuple[Process, list[Future]]] = field(default_factory=dict)
    connected: set[int] = field(default_factory=set)
    names: int = 0
    on_handed: Callable[[Following], None] = field(init=False)

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        left, self.peers = self.peers, {peer.host: peer for peer in peers}
        for name in self.served:
            before, now = left.get(receiver_of(name)), self.peers.get(receiver_of(name))
            if before is not None and (now is None or now.epoch != before.epoch):
                self.served[name] = Failure("HostLost", f"host {before.host} was lost", host=before.host)

    def hand_over(self, host: int, following: Following) -> None:
        peer = self.peers.get(host)
        found = self.at(peer.transfer_address) if peer is not None else None
        if found is not None:
            process, server = found
            late, say = LATE_S * self.network.random.random() ** 4, self.network.post
            self.network.after(self.process, late, say, self.process, process, server.on_handed, following)

    def own(self, array: Future) -> Future:
        """An array that may be overwritten: a copy, when peers may still read this one."""
        return array.copied() if array.lent else array

    def copy(self, array: Future) -> Future:
        return array.copied()

    def reaches(self, receiver: int, launch: int) -> bool:
        peer = self.peers.get(receiver)
        return peer is not None and peer.since < launch

    def is_consumed(self, array: object) -> bool:
        return isinstance(array, Future) and array.deleted

    def serve(self, name: int, pieces: Served) -> None:
        pull = self.asked.pop(name, None)
        if pull is None:
            self.served[name] = pieces
        else:
            self._answer(pull, pieces)

    def pull(self, sender: int, name: int, count: int) -> list[Future] | Failure:
        """Futures that are filled when the sender has served them, each with one shard under key 0."""
        peer = self.peers.get(sender)
        if peer is None:
            return Failure("HostLost", f"host {sender}, which holds the data, is down", host=sender)
        if launch_of(name) <= peer.since:
            return Failure("HostLost", f"host {sender}, which held the data, was lost", host=sender)
        futures = [Future() for _ in range(count)]
        found = self.at(peer.transfer_address)
        if found is None:
            return futures  # refused, again and again
        process, server = found
        self.names += 1
        number = self.names
        self.pulls[number] = (process, futures)
        pull = Pull(lambda result: self._answered(process, number, result), self.process, self)
        self.network.post(self.process, process, server.ask, name, pull)
        return futures

    def ask(self, name: int, pull: Pull) -> None:
        """A peer asks for a name."""
        pull.transfer.connected.add(self.process.number)
        pieces = self.served.pop(name, None)
        if pieces is None:
            self.asked[name] = pull
        else:
            self._answer(pull, pieces)

    def _answer(self, pull: Pull, pieces: Served) -> None:
        def send() -> None:
            result: list[int] | Failure
            if isinstance(pieces, Failure):
                result = pieces
            else:
                errors = [piece.array.error for piece in pieces if piece.array.error is not None]
                result = errors[0] if errors else [piece.read() for piece in pieces]
            if self.process.alive:
                self.network.post(self.process, pull.asker, pull.answer, result)

        def read() -> None:
            seconds = LONGEST_READ_S * self.network.random.random()
            self.network.after(self.process, seconds, send)

        when_all_ready([] if isinstance(pieces, Failure) else [p.array for p in pieces], read)

    def _answered(self, sender: Process, number: int, result: list[int] | Failure) -> None:
        _, futures = self.pulls.pop(number, (None, []))
        for k, future in enumerate(futures):
            if isinstance(result, Failure):
                future.settle({}, result)
            else:
                future.settle({0: result[k]})

    def peer_died(self, process: Process) -> None:
        """Connections to a process that is gone break; what was pulled from it fails. Where none was made yet,
        the address refuses from now on."""
        if process.number not in self.connected:
            return
        for number, (sender, futures) in list(self.pulls.items()):
            if sender is process:
                del self.pulls[number]
                self._fail_later(sender.number, futures)

    def _fail_later(self, sender: int, futures: list[Future]) -> None:
        failure = Failure("ExecutionError", f"Error while transferring: connection to {sender} broke", host=self.host)
        for future in futures:
            self.network.after(self.process, 0.001, future.settle, {}, failure)
