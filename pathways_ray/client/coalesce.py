"""Coalescing of repeated small launches: `y = f(y)` called again and again, each value dropped after its use.

Launches that gather while earlier ones are under way leave the client in one batch. They form a chain where each takes
what the one before it gave, and no handle to that is left (its `Free` is in the same batch) or it was donated. A
segment of a chain leaves as one launch of a composed program: the same calls one after the other, as in a
`@pw.program`. So a chain costs controller, scheduler and hosts what one launch costs, and hosts may execute it as one
computation.

Composed programs are registered while launches go on one by one, and used once the cluster has prepared them. Messages
in, messages out; no thread, no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pathways_ray.errors import GraphError, TooLarge
from pathways_ray.ir.graph import Graph
from pathways_ray.ir.repeat import Feeds, repeated
from pathways_ray.transport.messages import Free, Launch, Message, Register, encode

LENGTHS = (128, 32, 8)
"""Launches of a segment, longest first. Hosts compile each, and more to choose from would win little. Shorter segments
measure longer, for each launch: next to a limit they would stay."""

MIN_OCCURRENCES = 8
"""A length is registered after this many segments that could have had it."""

SAMPLE_EVERY = 8
"""Launches that leave one by one, for each one whose time is measured."""

MAX_UNCONTENDED_US = 100_000
"""A segment may take this long on its devices while no other session has launches under way: half of what the scheduler
lets hosts have then."""

MAX_CONTENDED_US = 5_000
"""The same while others have: they wait behind it."""

WEIGHT_DOWN, WEIGHT_UP = 0.5, 0.01
"""Weights of a new measurement in the estimate of a launch's time, when it is shorter; and, for each launch that it is
the mean of, when it is longer: those are of cold caches, or of hosts that compile at the same time."""

MAX_NODES = 512
"""Nodes of a composed program."""

MAX_PROGRAMS = 256
"""Composed programs of one session: each is kept by the controller and compiled by hosts."""


@dataclass
class Repetition:
    """A program called again and again with the same feeds.

    `occurrences` counts segments by length, `composed` has the prepared programs by length. `device_us` is the time of
    one launch on its devices; 0 while unknown.
    """

    program: int
    feeds: Feeds
    occurrences: dict[int, int] = field(default_factory=dict)
    composed: dict[int, int] = field(default_factory=dict)
    device_us: float = 0.0

    def measure(self, device_us: float, launches: int) -> None:
        """Updates the estimate with the mean time of `launches` launches."""
        if not self.device_us:
            self.device_us = device_us
            return
        weight = WEIGHT_DOWN if device_us < self.device_us else min(WEIGHT_UP * launches, WEIGHT_DOWN)
        self.device_us += weight * (min(device_us, 2 * self.device_us) - self.device_us)


class CoalescedLaunch(NamedTuple):
    """A launch that left for others too (`covered`), or a single one that is measured."""

    covered: tuple[int, ...]
    repetition: Repetition


class Coalescer:
    """The coalesced launches of one session. Each method may be called by any thread.

    Args:
        new_program: makes the number of a further program.
        min_occurrences: see `MIN_OCCURRENCES`.
        lengths: see `LENGTHS`.
        fusion: whether hosts compose nodes into one computation; else composed programs have no loops.
        enabled: whether launches are coalesced at all.
    """

    def __init__(
        self,
        new_program: Callable[[], int],
        min_occurrences: int = MIN_OCCURRENCES,
        lengths: tuple[int, ...] = LENGTHS,
        fusion: bool = True,
        enabled: bool = True,
    ) -> None:
        self._enabled = enabled
        self._new_program = new_program
        self._min_occurrences = min_occurrences
        self._lengths = lengths
        self._fusion = fusion
        self._graphs: dict[int, Graph] = {}
        self._donated: dict[int, tuple[int, ...]] = {}
        self._repetitions: dict[tuple[int, Feeds], Repetition] = {}
        self._registered: dict[int, tuple[Repetition, int]] = {}
        self._coalesced: dict[int, CoalescedLaunch] = {}
        self._max_us = MAX_UNCONTENDED_US
        self._made = 0

    def register(self, number: int, graph: Graph) -> None:
        """Adds a program. Launches of one on several slices are not coalesced: they overlap as they are."""
        if len(graph.slices) == 1:
            self._graphs[number] = graph
            self._donated[number] = graph.donated_arguments

    def moved(self, slices: Container[int]) -> None:
        """Slices have other devices: the controller has forgotten the programs on them, composed ones too."""
        there = {number for number, graph in self._graphs.items() if graph.slices[0].id in slices}
        for repetition in self._repetitions.values():
            if repetition.program in there:
                self._made -= len(repetition.composed)
                repetition.composed.clear()
                repetition.occurrences.clear()
                repetition.device_us = 0.0
        for number, (repetition, _) in list(self._registered.items()):
            if repetition.program in there:
                del self._registered[number]

    def prepared(self, program: int) -> None:
        """Notes that the cluster has compiled a program; one that is not composed is ignored."""
        repetition, length = self._registered.pop(program, (None, 0))
        if repetition is not None:
            repetition.composed[length] = program

    def measure(self, launches: Sequence[int], device_us: Sequence[int], contended: bool) -> None:
        """Notes the device time of completed launches, and whether other sessions have launches under way. To be called
        before `take_covered`."""
        self._max_us = MAX_CONTENDED_US if contended else MAX_UNCONTENDED_US
        for launch, taken in zip(launches, device_us, strict=False):
            if (coalesced := self._coalesced.get(launch)) is not None:
                length = 1 + len(coalesced.covered)
                coalesced.repetition.measure(taken / length, length)

    def take_covered(self, launch: int) -> tuple[int, ...]:
        """The other launches that left as this one, and have their outcome with it. A second call returns ()."""
        coalesced = self._coalesced.pop(launch, None)
        return coalesced.covered if coalesced is not None else ()

    def leader_of(self, launch: int) -> int:
        """The launch as which one left: another one that covers it, or itself."""
        covering = list(self._coalesced.items())
        return next((number for number, coalesced in covering if launch in coalesced.covered), launch)

    def coalesce(self, messages: list[Message]) -> list[Message]:
        """The same batch with segments of chains as one launch each, in an order with the same effect."""
        if len(messages) < self._lengths[-1] or not self._enabled:
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
            chain = _chain_from(messages, at, first, outputs)
            at = chain.end
            absorbed: set[int] = set()
            donated = {launch.arguments[k] for launch in chain.launches for k in self._donated[first.program]}
            for launches in _unobserved(chain.launches, donated.union(chain.freed), outputs):
                found += self._segments(launches, chain.feeds, outputs, absorbed)
            if freed := tuple(buffer for buffer in chain.freed if buffer not in absorbed):
                found.append(Free(freed))
        return found

    def _segments(self, chain: Sequence[Launch], feeds: Feeds, outputs: int, absorbed: set[int]) -> Iterator[Message]:
        """A chain as launches of the longest segments that are prepared. Adds results that are never made to
        `absorbed`."""
        shortest = self._lengths[-1]
        if len(chain) < shortest:
            yield from chain
            return
        repetition = self._repetitions.get((chain[0].program, feeds))
        if repetition is None:
            repetition = Repetition(chain[0].program, feeds)
            self._repetitions[chain[0].program, feeds] = repetition
        while len(chain) >= shortest:
            length, registrations = self._choose_length(repetition, len(chain))
            yield from registrations
            if not length:
                break
            segment, chain = chain[:length], chain[length:]
            last = segment[-1]
            covered = tuple(launch.launch for launch in segment[:-1])
            self._coalesced[last.launch] = CoalescedLaunch(covered, repetition)
            absorbed.update(launch.results + k for launch in segment[:-1] for k in range(outputs))
            yield Launch(last.launch, repetition.composed[length], segment[0].arguments, last.results)
        sampled = chain[SAMPLE_EVERY - 1 :: SAMPLE_EVERY]
        self._coalesced.update((launch.launch, CoalescedLaunch((), repetition)) for launch in sampled)
        yield from chain

    def _choose_length(self, repetition: Repetition, longest: int) -> tuple[int, list[Message]]:
        """The longest segment of at most `longest` launches that may leave now, 0 for none; and registrations of longer
        ones."""
        registrations: list[Message] = []
        for length in self._lengths:
            if length <= longest and 0 < length * repetition.device_us <= self._max_us:
                if length in repetition.composed:
                    return length, registrations
                before = repetition.occurrences.get(length, 0)
                after = repetition.occurrences[length] = before + longest // length
                if before < self._min_occurrences <= after:
                    registrations += self._compose(repetition, length)
        return 0, registrations

    def _compose(self, repetition: Repetition, length: int) -> list[Message]:
        """The registration of a composed program; empty when it would exceed the limits or cannot be composed."""
        graph = self._graphs[repetition.program]
        if self._made == MAX_PROGRAMS or length * len(graph.nodes) > MAX_NODES:
            return []
        try:
            encoded = encode(repeated(graph, length, repetition.feeds, self._fusion))
        except (GraphError, TooLarge):  # coalescing only saves time: launches go on one by one
            return []
        self._made += 1
        number = self._new_program()
        self._registered[number] = (repetition, length)
        return [Register(number, encoded, {})]


class _Chain(NamedTuple):
    """Launches of one program that feed each other, the buffers freed between them, and the index of the first message
    after them."""

    launches: list[Launch]
    freed: list[int]
    feeds: Feeds
    end: int


def _chain_from(messages: Sequence[Message], at: int, first: Launch, outputs: int) -> _Chain:
    launches = [first]
    freed: list[int] = []
    feeds: Feeds = ()
    for message in itertools.islice(messages, at + 1, None):
        at += 1
        if type(message) is Free:
            freed += message.buffers
            continue
        if type(message) is not Launch or message.program != first.program:
            return _Chain(launches, freed, feeds, at)
        found = _feeds_between(launches[-1], message, outputs)
        if not found or (feeds and found != feeds):
            return _Chain(launches, freed, feeds, at)
        feeds = found
        launches.append(message)
    return _Chain(launches, freed, feeds, at + 1)


def _feeds_between(before: Launch, launch: Launch, outputs: int) -> Feeds:
    """The results of `before` that `launch` takes; empty when it does not repeat it."""
    found = []
    for position, (buffer, previous) in enumerate(zip(launch.arguments, before.arguments, strict=True)):
        if before.results <= buffer < before.results + outputs:
            found.append((position, buffer - before.results))
        elif buffer != previous:
            return ()
    return tuple(found)


def _unobserved(launches: Sequence[Launch], freed: set[int], outputs: int) -> Iterator[Sequence[Launch]]:
    """The launches, split where a handle to a result is left: within a part, only the last one's results are kept."""
    start = 0
    for number, launch in enumerate(launches, 1):
        if any(launch.results + k not in freed for k in range(outputs)):
            yield launches[start:number]
            start = number
    if start < len(launches):
        yield launches[start:]
