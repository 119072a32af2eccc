"""Processes and what is between them, as gRPC over TCP, Ray's calls and the data plane behave.

A *stream* keeps its order whatever happens to packets: a lost or late one holds up those behind it (retransmission,
reassembly), a doubled one is thrown away. A partition holds everything up; one that lasts longer than gRPC's pings
allow breaks the streams across it, and each end learns of it. When a process dies, what it had sent last may be lost,
and then its peers learn of the end. Of a machine that vanishes they learn nothing but its silence. *Posts* are single
messages without order between them: Ray's calls, pulls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pathways_ray.simulation.clock import Act, Clock
from pathways_ray.transport.links import SILENCE_S

RETRANSMIT_S = 0.2
"""TCP sends a lost packet again after about this time, and twice as late each further time."""

RETRANSMIT_LIMIT_S = 5.0
"""No longer than this is waited to send again, while packets get through now and then; all waits take twice as long."""

GATHER_S = 0.0005
"""What is sent within this time leaves as one batch; the pause of a stream under load is 1 ms (`transport/streams`)."""


class Process:
    """One incarnation of a process. A dead one never runs again; a paused one runs later what it missed."""

    def __init__(self, name: str, node: str, number: int) -> None:
        self.name, self.node, self.number = name, node, number
        self.alive = True
        self.paused = False
        self.vanished = False
        self.missed: deque[tuple[Act, tuple[Any, ...]]] = deque()
        self.ends: list[End] = []

    def run(self, act: Act, *arguments: Any) -> None:
        if not self.alive:
            return
        if self.paused:
            self.missed.append((act, arguments))
        else:
            act(*arguments)

    def __repr__(self) -> str:
        return f"{self.name}#{self.number}"


class End:
    """One end of a stream. `receive` gets batches, `ended` is called once, when the stream is over for this end;
    `given_up` says then that it is for the other one's silence. `composed` says the same in fewer messages, before they
    leave."""

    def __init__(
        self,
        network: Network,
        owner: Process,
        receive: Callable[[list[Any]], None],
        ended: Callable[[], None],
        composed: Callable[[list[Any]], list[Any]] = lambda messages: messages,
    ) -> None:
        self.network, self.owner = network, owner
        self.composed = composed
        self.receive, self.ended = receive, ended
        self.peer: End = self
        self.open = True
        self.given_up = False
        self._batch: list[Any] = []
        self._leaves = -1.0
        self._arrives = 0.0
        self._held: list[list[Any] | None] = []
        self._lost_after = float("inf")
        owner.ends.append(self)

    def send(self, message: Any, linger_s: float = 0.0) -> None:
        """Sends a message with those that follow soon: within `linger_s`, where it is not urgent."""
        if not self.open:
            return
        now = self.network.clock.now
        if now < self._leaves:
            self._batch.append(message)
            return
        self._batch = [message]
        self._leaves = now + max(GATHER_S, linger_s)
        self._arrive_later(self._batch)

    def _arrive_later(self, batch: list[Any] | None) -> None:
        network = self.network
        start = max(self._leaves, network.clock.now)
        self._arrives = max(self._arrives, start + network.packet_delay(self.owner, self.peer.owner))
        network.clock.at(self._arrives, self._arrive, batch)

    def _arrive(self, batch: list[Any] | None) -> None:
        if batch is not None:
            batch = self.composed(batch)
        if self._held or self.network.parted(self.owner, self.peer.owner):
            self._held.append(batch)
        else:
            self._hand_over(batch)

    def healed(self) -> None:
        """The partition is over: what was held up arrives, in order."""
        held, self._held = self._held, []
        for batch in held:
            self._hand_over(batch)

    def _hand_over(self, batch: list[Any] | None) -> None:
        if batch is None:
            self.peer.finish()
        elif self.network.clock.now <= self._lost_after:
            self.peer.owner.run(self.peer._take, batch)

    def _take(self, batch: list[Any]) -> None:
        if self.open:
            self.network.note(f"{self.peer.owner} -> {self.owner}", batch)
            self.receive(batch)

    def finish(self, given_up: bool = False) -> None:
        """The stream is over for this end; it learns of it when it runs."""
        self.owner.run(self._finish, given_up)

    def _finish(self, given_up: bool) -> None:
        if self.open:
            self.open, self.given_up = False, given_up
            self.ended()

    def close(self) -> None:
        """Ends the stream from here; the other end gets what was sent before, and then its end."""
        if self.open:
            self.open = False
            self._arrive_later(None)

    def die(self) -> None:
        """The owner's process is gone. What it sent last may not have left."""
        if self.open:
            self.open = False
            now = self.network.clock.now
            if self.network.random.random() < 0.5:
                self._lost_after = now
            self._arrive_later(None)


@dataclass
class Weather:
    """Disturbances of a link between two nodes while they last: chances for each packet, and a delay for all."""

    until: float = 0.0
    drop: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0


@dataclass
class Network:
    """All processes that are or were, and the state of the links between their nodes."""

    clock: Clock
    random: Random
    note: Callable[[str, list[Any]], None]
    made: int = 0
    parted_until: dict[tuple[str, str], float] = field(default_factory=dict)
    weather: dict[tuple[str, str], Weather] = field(default_factory=dict)
    alive: dict[int, Process] = field(default_factory=dict)
    broken: int = 0
    _last_post: dict[tuple[int, int], float] = field(default_factory=dict)

    # --- processes ----------------------------------------------------------------------------------------------------

    def process(self, name: str, node: str) -> Process:
        self.made += 1
        made = self.alive[self.made] = Process(name, node, self.made)
        return made

    def after(self, process: Process, delay: float, act: Act, *arguments: Any) -> None:
        """A timer of a process."""
        self.clock.after(delay, process.run, act, *arguments)

    def kill(self, process: Process) -> None:
        """SIGKILL, or an exit: from here on nothing of it runs."""
        if not process.alive:
            return
        process.alive = False
        process.missed.clear()
        del self.alive[process.number]
        for end in process.ends:
            end.die()

    def vanish(self, process: Process) -> None:
        """Its machine loses its power: nothing of it runs, and no reset leaves it. Peers miss its pings in the end."""
        process.alive, process.vanished = False, True
        process.missed.clear()
        del self.alive[process.number]
        for end in process.ends:
            end.open = False
            self.clock.after(SILENCE_S, end.peer.finish, True)

    def pause(self, process: Process, seconds: float) -> None:
        """SIGSTOP for a while. Pings are not answered meanwhile."""
        if not process.alive or process.paused:
            return
        process.paused = True
        self.clock.after(seconds, self._resume, process)
        if seconds > SILENCE_S:
            self.clock.after(SILENCE_S, self._break_paused, process)

    def _resume(self, process: Process) -> None:
        process.paused = False
        while process.missed and process.alive and not process.paused:
            act, arguments = process.missed.popleft()
            act(*arguments)

    def _break_paused(self, process: Process) -> None:
        if process.alive and process.paused:
            for end in list(process.ends):
                self._break(end)

    # --- streams ------------------------------------------------------------------------------------------------------

    def stream(self, near: End, far: End) -> None:
        """Joins two ends; the nearer one asked for it."""
        near.peer, far.peer = far, near
        near.owner.ends = [end for end in near.owner.ends if end.open]
        far.owner.ends = [end for end in far.owner.ends if end.open]
        until = self.parted_until.get(_link(near.owner, far.owner), 0.0)
        if until - self.clock.now > SILENCE_S:
            self.clock.after(SILENCE_S, self._break_if_parted, near)

    def packet_delay(self, a: Process, b: Process) -> float:
        """Seconds that a batch takes, with what the weather does to it."""
        random = self.random.random
        delay = 0.0001 + 0.0004 * random()
        weather = self.weather.get(_link(a, b))
        if weather is not None and self.clock.now < weather.until:
            delay += weather.delay * random()
            wait = RETRANSMIT_S
            while random() < weather.drop and wait < RETRANSMIT_LIMIT_S:
                delay, wait = delay + wait, 2 * wait
            if random() < weather.reorder:
                delay += 0.02 * random()
        return delay

    # --- posts --------------------------------------------------------------------------------------------------------

    def post(
        self,
        source: Process,
        target: Process,
        act: Act,
        *arguments: Any,
        twice: bool = False,
        in_order: bool = False,
    ) -> None:
        """One message that overtakes others or is overtaken. It is lost with its target.

        Args:
            twice: it may come a second time.
            in_order: behind all that `source` sent to `target` in order before, as Ray's calls of one actor to another.
        """
        time = self.clock.now + self.packet_delay(source, target)
        if in_order:
            key = (source.number, target.number)
            time = self._last_post[key] = max(time, self._last_post.get(key, 0.0))
        self.clock.at(time, self._post_arrives, source, target, in_order, act, arguments)
        weather = self.weather.get(_link(source, target))
        if twice and weather is not None and self.random.random() < weather.duplicate:
            later = time + 0.05 * self.random.random()
            self.clock.at(later, self._post_arrives, source, target, in_order, act, arguments)

    def _post_arrives(self, source: Process, target: Process, call: bool, act: Act, arguments: tuple[Any, ...]) -> None:
        until = self.parted_until.get(_link(source, target), 0.0)
        if until <= self.clock.now:
            target.run(act, *arguments)
        elif source.alive or not call:
            # Sent again after the partition; the calls of a process that is gone are not.
            self.clock.at(until + 0.1, self._post_arrives, source, target, call, act, arguments)

    # --- partitions ---------------------------------------------------------------------------------------------------

    def parted(self, a: Process, b: Process) -> bool:
        return self.parted_until.get(_link(a, b), 0.0) > self.clock.now

    def part(self, a: str, b: str, seconds: float) -> None:
        """No packet passes between two nodes for a while."""
        link = (min(a, b), max(a, b))
        self.parted_until[link] = max(self.parted_until.get(link, 0.0), self.clock.now + seconds)
        self.clock.after(seconds, self._heal, link)
        if seconds > SILENCE_S:
            for end in self._ends_on(link):
                self.clock.after(SILENCE_S, self._break_if_parted, end)

    def _heal(self, link: tuple[str, str]) -> None:
        if self.parted_until.get(link, 0.0) > self.clock.now:
            return
        for end in self._ends_on(link, dead=True):
            end.healed()

    def _ends_on(self, link: tuple[str, str], dead: bool = False) -> list[End]:
        found: dict[int, End] = {}
        for process in self.alive.values():
            if process.node in link:
                for end in process.ends:
                    for one in (end, end.peer):
                        if _link(one.owner, one.peer.owner) == link and (one.open or dead):
                            found[id(one)] = one
        return list(found.values())

    def _break_if_parted(self, end: End) -> None:
        if self.parted(end.owner, end.peer.owner):
            self._break(end)

    def _break(self, end: End) -> None:
        self.broken += 1
        end.finish(given_up=True)
        end.peer.finish(given_up=True)


def _link(a: Process, b: Process) -> tuple[str, str]:
    return (a.node, b.node) if a.node < b.node else (b.node, a.node)
