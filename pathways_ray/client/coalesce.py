"""Recognising runs of repeated small launches: `y = f(y)` called again and again, each value dropped after its use.

Launches that gather while earlier ones are under way leave the client together. Where a launch of a program takes what
the launch before it gave, and nobody holds that any more (its `Free` is among the same messages), the launches are
a run, and pieces of it leave as one launch of one program: the same calls one behind the other, as in a `@pw.program`.
So a run costs controller, scheduler and hosts what one launch costs, and the hosts may execute it as one computation.

The programs of pieces are registered while launches go on one by one, and used once the cluster says that they are
prepared. Messages in, messages out; no thread, no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pathways_ray.errors import GraphError, TooLarge
from pathways_ray.ir.graph import Graph
from pathways_ray.ir.repeat import Feeds, repeated
from pathways_ray.transport.messages import Free, Launch, Message, Prepared, Register, encode

LENGTHS = (128, 32, 8)
"""Launches that leave as one, longest first. Hosts compile each, and more to choose from would win little. Shorter ones
measure longer, for each launch: next to a limit they would stay."""

SIGHTINGS = 8
"""A length is asked for once so many pieces could have been of it."""

SAMPLED = 8
"""Of launches that leave one by one, the time of each so-manieth is looked at."""

ALONE_MICROS = 100_000
"""What leaves as one may take this long on its devices while no other session has launches under way: half of what
the scheduler lets be with the hosts then (`scheduler.order.ALONE_S`)."""

SHARED_MICROS = 5_000
"""The same while others have: they wait behind it."""

FALLING, RISING = 0.5, 0.01
"""How far the estimate of what a launch takes goes towards a shorter time, and for each launch of which a longer one is
the mean: those are of cold caches, or of hosts that compile beside it."""

MOST_NODES = 512
"""Nodes of a program that stands for a run."""

MOST_PROGRAMS = 256
"""Programs that stand for runs, of one session: each is kept by the controller and compiled by hosts."""


@dataclass
class Repeat:
    """A program called again and again with the same feeds: how often each length was seen, and the programs there are.

    `device_us` is what one launch takes on its devices; 0 while unknown.
    """

    program: int
    feeds: Feeds
    seen: dict[int, int] = field(default_factory=dict)
    prepared: dict[int, int] = field(default_factory=dict)
    device_us: float = 0.0

    def measure(self, device_us: float, launches: int) -> None:
        """Notes what each of so many launches took."""
        if not self.device_us:
            self.device_us = device_us
            return
        weight = FALLING if device_us < self.device_us else min(RISING * launches, FALLING)
        self.device_us += weight * (min(device_us, 2 * self.device_us) - self.device_us)


class Left(NamedTuple):
    """What left as one launch: the others that end with it."""

    others: tuple[int, ...]
    repeat: Repeat


class Runs:
    """The runs of one session.

    Args:
        number: makes the number of a further program.
        sightings: see `SIGHTINGS`.
        lengths: see `LENGTHS`.
    """

    def __init__(
        self, number: Callable[[], int], sightings: int = SIGHTINGS, lengths: tuple[int, ...] = LENGTHS
    ) -> None:
        self._number = number
        self._sightings = sightings
        self._lengths = lengths
        self._graphs: dict[int, Graph] = {}
        self._repeats: dict[tuple[int, Feeds], Repeat] = {}
        self._asked: dict[int, tuple[Repeat, int]] = {}
        self._left: dict[int, Left] = {}
        self._longest_micros = ALONE_MICROS
        self._made = 0

    def add(self, number: int, graph: Graph) -> None:
        """A program that was registered. One on several slices is left alone: its launches overlap as they are."""
        if len(graph.slices) == 1:
            self._graphs[number] = graph

    def prepared(self, message: Prepared) -> None:
        """The cluster has compiled a program of ours. Any thread may say so."""
        repeat, length = self._asked.pop(message.program, (None, 0))
        if repeat is not None:
            repeat.prepared[length] = message.program

    def ended(self, launches: Sequence[int], device_us: Sequence[int], shared: bool) -> None:
        """What launches have taken, in microseconds, and whether other sessions have launches under way. Any thread may
        say so, before it asks what they covered."""
        self._longest_micros = SHARED_MICROS if shared else ALONE_MICROS
        for launch, taken in zip(launches, device_us, strict=False):
            if (left := self._left.get(launch)) is not None:
                length = 1 + len(left.others)
                left.repeat.measure(taken / length, length)

    def covered(self, launch: int) -> tuple[int, ...]:
        """The other launches that left as this one, which end with it. Asked once, when it ends."""
        left = self._left.pop(launch, None)
        return left.others if left is not None else ()

    def composed(self, messages: list[Message]) -> list[Message]:
        """The same messages with pieces of runs as one launch each, in an order with the same effect."""
        if len(messages) < 2 * self._lengths[-1]:
            return messages
        found: list[Message] = []
        at = 0
        while at < len(messages):
            first = messages[at]
            graph = self._graphs.get(first.program) if type(first) is Launch else None
            if graph is None:
                found.append(first)
                at += 1
                continue
            assert isinstance(first, Launch)
            outputs = len(graph.result.inputs)
            run = _run_from(messages, at, first, outputs)
            at = run.end
            gone: set[int] = set()
            for piece in _unseen(run.launches, set(run.freed), outputs):
                found += self._pieces(piece, run.feeds, outputs, gone)
            if left := tuple(buffer for buffer in run.freed if buffer not in gone):
                found.append(Free(left))
        return found

    def _pieces(self, run: Sequence[Launch], feeds: Feeds, outputs: int, gone: set[int]) -> Iterator[Message]:
        """A run as launches of the longest pieces there are. Adds results that never come to be to `gone`."""
        least = self._lengths[-1]
        if len(run) < least:
            yield from run
            return
        repeat = self._repeats.get((run[0].program, feeds))
        if repeat is None:
            repeat = self._repeats[run[0].program, feeds] = Repeat(run[0].program, feeds)
        while len(run) >= least:
            length, asked = self._longest(repeat, len(run))
            yield from asked
            if not length:
                break
            piece, run = run[:length], run[length:]
            last = piece[-1]
            self._left[last.launch] = Left(tuple(launch.launch for launch in piece[:-1]), repeat)
            gone.update(launch.results + k for launch in piece[:-1] for k in range(outputs))
            yield Launch(last.launch, repeat.prepared[length], piece[0].arguments, last.results)
        self._left.update((launch.launch, Left((), repeat)) for launch in run[SAMPLED - 1 :: SAMPLED])
        yield from run

    def _longest(self, repeat: Repeat, most: int) -> tuple[int, list[Message]]:
        """The longest piece of at most `most` launches that may leave as one now, and requests for longer ones."""
        asked: list[Message] = []
        for length in self._lengths:
            if length <= most and 0 < length * repeat.device_us <= self._longest_micros:
                if length in repeat.prepared:
                    return length, asked
                before = repeat.seen.get(length, 0)
                seen = repeat.seen[length] = before + most // length
                if before < self._sightings <= seen:
                    asked += self._request(repeat, length)
        return 0, asked

    def _request(self, repeat: Repeat, length: int) -> list[Message]:
        graph = self._graphs[repeat.program]
        if self._made == MOST_PROGRAMS or length * len(graph.nodes) > MOST_NODES:
            return []
        try:
            encoded = encode(repeated(graph, length, repeat.feeds))
        except (GraphError, TooLarge):  # it is an economy: launches go on one by one
            return []
        self._made += 1
        number = self._number()
        self._asked[number] = (repeat, length)
        return [Register(number, encoded, {}, repeat.program)]


class _Run(NamedTuple):
    """Launches that feed each other, the buffers freed between them, and the place of the first message behind."""

    launches: list[Launch]
    freed: list[int]
    feeds: Feeds
    end: int


def _run_from(messages: Sequence[Message], at: int, first: Launch, outputs: int) -> _Run:
    launches = [first]
    freed: list[int] = []
    feeds: Feeds = ()
    for message in itertools.islice(messages, at + 1, None):
        at += 1
        if type(message) is Free:
            freed += message.buffers
            continue
        if type(message) is not Launch or message.program != first.program:
            return _Run(launches, freed, feeds, at)
        found = _feeds(launches[-1], message, outputs)
        if not found or (feeds and found != feeds):
            return _Run(launches, freed, feeds, at)
        feeds = found
        launches.append(message)
    return _Run(launches, freed, feeds, at + 1)


def _feeds(before: Launch, launch: Launch, outputs: int) -> Feeds:
    """What `launch` takes from the one before it; empty when it is no repetition of it."""
    found = []
    for position, (buffer, previous) in enumerate(zip(launch.arguments, before.arguments, strict=True)):
        if before.results <= buffer < before.results + outputs:
            found.append((position, buffer - before.results))
        elif buffer != previous:
            return ()
    return tuple(found)


def _unseen(launches: Sequence[Launch], freed: set[int], outputs: int) -> Iterator[Sequence[Launch]]:
    """The launches in pieces of which nobody sees a result but that of the last one."""
    start = 0
    for number, launch in enumerate(launches, 1):
        if any(launch.results + k not in freed for k in range(outputs)):
            yield launches[start:number]
            start = number
    if start < len(launches):
        yield launches[start:]
