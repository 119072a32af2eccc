"""Coalescing of repeated small launches: `y = f(y)` called again and again, each value dropped after its use.

Launches that gather while earlier ones are under way leave the client in one batch. They form a loop where each round,
of one program or of several in turn, takes what the one before it gave (`launch_loops`), and no handle to that is left
(its `Free` is in the same batch) or it was donated. A segment of a loop leaves as one launch of a composed program: the
same calls one after the other, as in a `@pw.program`. So it costs controller, scheduler and hosts what one launch
costs, and hosts may execute it as one computation.

Composed programs are registered while launches go on one by one, and used once the cluster has prepared them. Messages
in, messages out; no thread, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple

from pathways_ray.client.launch_loops import MIN_ROUNDS, Shape, find_loop, first_of, freed_behind, kept_of, needs_all
from pathways_ray.errors import GraphError, TooLarge
from pathways_ray.ir.graph import Graph, Ref, host_part
from pathways_ray.ir.repeat import joined, repeated
from pathways_ray.transport.messages import EarlyLaunch, Free, Launch, Message, Register, encode

LENGTHS = (128, 32, 8)
"""Launches of a segment, longest first; with several launches in a round, as many whole rounds. Hosts compile each, and
more to choose from would win little. Shorter segments measure longer, for each launch: next to a limit they would
stay."""

MIN_OCCURRENCES = 8
"""A length is registered after this many segments that could have had it."""

SAMPLE_EVERY = 8
"""Rounds that leave one by one, for each one whose time is measured."""

MAX_UNCONTENDED_US = 100_000
"""A segment may take this long on its devices while no other session has launches under way: half of what the scheduler
lets hosts have then."""

MAX_CONTENDED_US = 5_000
"""The same while others have: they wait behind it."""

WEIGHT_DOWN, WEIGHT_UP = 0.5, 0.01
"""Weights of a new measurement in the estimate of a round's time, when it is shorter; and, for each round that it is
the mean of, when it is longer: those are of cold caches, or of hosts that compile at the same time."""

MAX_NODES = 512
"""Nodes of a composed program."""

MAX_PROGRAMS = 256
"""Composed programs of one session: each is kept by the controller and compiled by hosts."""


@dataclass
class Repetition:
    """A round of launches that is repeated, of which the results `given` are kept in the end.

    `occurrences` counts segments by their rounds, `composed` has the prepared programs by theirs. `device_us` is the
    time of a round on its devices; 0 while unknown. `sampled` has the times of the launches of one that is measured.
    """

    shape: Shape
    given: tuple[Ref, ...]
    occurrences: dict[int, int] = field(default_factory=dict)
    composed: dict[int, int] = field(default_factory=dict)
    device_us: float = 0.0
    sampled: dict[int, int] = field(default_factory=dict)

    def measure(self, device_us: float, rounds: int) -> None:
        """Updates the estimate with the mean time of `rounds` rounds."""
        if not self.device_us:
            self.device_us = device_us
            return
        weight = WEIGHT_DOWN if device_us < self.device_us else min(WEIGHT_UP * rounds, WEIGHT_DOWN)
        self.device_us += weight * (min(device_us, 2 * self.device_us) - self.device_us)

    def sample(self, place: int, device_us: int) -> None:
        """Notes the time of a launch that left by itself, by its place in its round."""
        self.sampled[place] = device_us
        if len(self.sampled) == self.shape.period:
            self.measure(sum(self.sampled.values()), 1)
            self.sampled.clear()


class CoalescedLaunch(NamedTuple):
    """A launch that left for others too (`covered`), as so many `rounds`; or one by itself that is measured, with its
    place in its round."""

    covered: tuple[int, ...]
    repetition: Repetition
    rounds: int
    place: int = 0


class Known(NamedTuple):
    """A program that is launched: the results that it gives, and the arguments that it donates."""

    graph: Graph
    outputs: int
    donated: tuple[int, ...]


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
        self._programs: dict[int, Known] = {}
        self._repetitions: dict[tuple[Shape, tuple[Ref, ...]], Repetition] = {}
        self._registered: dict[int, tuple[Repetition, int]] = {}
        self._coalesced: dict[int, CoalescedLaunch] = {}
        self._cancelled: set[int] = set()
        self._max_us = MAX_UNCONTENDED_US

    def register(self, number: int, graph: Graph) -> None:
        """Adds a program. Not coalesced are those on several slices, which overlap as they are, and host functions."""
        if len(graph.slices) == 1 and not any(map(host_part, graph.recipes)):
            self._programs[number] = Known(graph, len(graph.result.inputs), graph.donated_arguments)

    def unregister(self, number: int) -> tuple[int, ...]:
        """Drops a program. Returns the composed ones of loops with it, which are launched no more either."""
        if self._programs.pop(number, None) is None:
            return ()
        found: list[int] = []
        for key, repetition in list(self._repetitions.items()):
            if number in repetition.shape.programs:
                del self._repetitions[key]  # what a batch that leaves now has of it stays as it is
                found += repetition.composed.values()
                found += [one for one, (other, _) in list(self._registered.items()) if other is repetition]
        for one in found:
            self._registered.pop(one, None)
        return tuple(found)

    def moved(self, slices: Container[int]) -> None:
        """Slices have other devices: the controller has forgotten the programs on them, composed ones too."""
        there = {number for number, program in self._programs.items() if program.graph.slices[0].id in slices}
        for repetition in self._repetitions.values():
            if repetition.shape.programs[0] in there:
                repetition.composed.clear()
                repetition.occurrences.clear()
                repetition.device_us = 0.0
        for number, (repetition, _) in list(self._registered.items()):
            if repetition.shape.programs[0] in there:
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
        for launch, taken in zip(launches, device_us, strict=False) if self._coalesced else ():
            if (coalesced := self._coalesced.get(launch)) is not None:
                if coalesced.rounds:
                    coalesced.repetition.measure(taken / coalesced.rounds, coalesced.rounds)
                else:
                    coalesced.repetition.sample(coalesced.place, taken)

    def take_covered(self, launch: int) -> tuple[int, ...]:
        """The other launches that left as this one, and have their outcome with it. A second call returns ()."""
        if not (self._coalesced or self._cancelled):  # nearly always
            return ()
        coalesced = self._coalesced.pop(launch, None)
        covered = coalesced.covered if coalesced is not None else ()
        self._cancelled.difference_update((launch, *covered))
        return covered

    def cancel(self, launch: int) -> bool:
        """Whether a launch can be cancelled: not once it has left as one with others whose results are given too. One
        that has not left will leave by itself."""
        self._cancelled.add(launch)  # before the look: `_segment` looks here after it has entered what it coalesces
        coalesced = self._coalesced.get(launch)
        if coalesced is None or not coalesced.rounds:
            return True
        last = coalesced.repetition.shape.period - 1
        return all(ref.node == last for ref in coalesced.repetition.given)

    def covered(self) -> set[int]:
        """The launches that have left as other ones."""
        return {launch for coalesced in list(self._coalesced.values()) for launch in coalesced.covered}

    def covered_by(self, launch: int) -> tuple[int, ...]:
        """The launches that have left as this one."""
        coalesced = self._coalesced.get(launch)
        return coalesced.covered if coalesced is not None else ()

    def leader_of(self, launch: int) -> int:
        """The launch as which one left: another one that covers it, or itself."""
        covering = list(self._coalesced.items())
        return next((number for number, coalesced in covering if launch in coalesced.covered), launch)

    def coalesce(
        self, messages: list[Message], is_begun: Callable[[EarlyLaunch], bool] = lambda launch: False
    ) -> list[Message]:
        """The same batch with segments of loops as one launch each, in an order with the same effect.

        Args:
            is_begun: whether the host of an early launch has begun it, as far as is known. Others leave one by one.
        """
        fewest = self._lengths[-1]
        if len(messages) < fewest or not self._enabled:
            return messages
        kinds = list(map(type, messages))
        if kinds.count(Launch) < fewest and kinds.count(EarlyLaunch) < fewest:
            return messages  # most often the other half are frees
        found: list[Message] = []
        known: dict[int, Known] = {}
        at = 0
        while at < len(messages):
            end = self._stretch_end(messages, at, is_begun, known)
            found += self._stretch(messages[at:end], known)
            at = end
        return found

    def _stretch_end(
        self, messages: Sequence[Message], at: int, is_begun: Callable[[EarlyLaunch], bool], known: dict[int, Known]
    ) -> int:
        """The end of the launches of one type on one slice, and frees between them, that begin at a message; or the
        next one. Adds their programs to `known`: others may be dropped at any time."""
        first: tuple[type, int] | None = None
        for number in range(at, len(messages)):
            message = messages[number]
            leaves = type(message) is Launch or (type(message) is EarlyLaunch and is_begun(message))
            if leaves and isinstance(message, Launch) and (found := self._programs.get(message.program)) is not None:
                known[message.program] = found
                this = type(message), found.graph.slices[0].id
                if first not in (None, this):
                    return number
                first = this
            elif type(message) is not Free:
                return max(number, at + 1)
        return len(messages)

    def _stretch(self, messages: Sequence[Message], known: Mapping[int, Known]) -> Iterator[Message]:
        """Launches on one slice and frees, with their loops as segments."""
        places = [k for k, message in enumerate(messages) if isinstance(message, Launch)]
        fewest = self._lengths[-1]
        if len(places) < fewest:
            yield from messages
            return
        launches = [message for message in messages if isinstance(message, Launch)]
        programs = [launch.program for launch in launches]
        outputs = {number: program.outputs for number, program in known.items()}
        places.append(len(messages))
        yield from messages[: places[0]]
        at = 0
        while at < len(launches):
            loop = find_loop(launches, programs, at, outputs, fewest)
            if loop is None:
                yield from messages[places[at] : places[at + 1]]
                at += 1
                continue
            end = at + loop.rounds * loop.shape.period
            yield from self._loop(loop.shape, messages[places[at] : places[end]], known)
            at = end

    def _loop(self, shape: Shape, messages: Sequence[Message], known: Mapping[int, Known]) -> Iterator[Message]:
        """The whole rounds of a loop as segments. What is freed behind a launch is freed behind what that leaves as:
        behind all of them, those that leave one by one would need the memory of all."""
        launches = [message for message in messages if isinstance(message, Launch)]
        behind = freed_behind(messages)
        gone = {buffer for freed in behind.values() for buffer in freed}
        gone.update(launch.arguments[k] for launch in launches for k in known[launch.program].donated)
        absorbed: set[int] = set()
        start, period = 0, shape.period
        for end in range(period, len(launches) + 1, period):
            kept = kept_of(shape, launches[end - period : end], gone)
            if kept or end == len(launches):  # within a part, only what the last round gives is kept
                for message in self._part(shape, launches[start:end], kept, absorbed):
                    yield message
                    these = (*self.covered_by(message.launch), message.launch) if isinstance(message, Launch) else ()
                    if freed := [buffer for one in these for buffer in behind.get(one, ()) if buffer not in absorbed]:
                        yield Free(tuple(freed))
                start = end

    def _given(self, shape: Shape, last: Sequence[Launch], kept: Sequence[Ref]) -> tuple[Ref, ...]:
        """The results that a segment gives: those that are kept or that the next round takes, with all between them;
        empty where these have no consecutive numbers. A round of one launch gives all that it makes."""
        every = shape.made
        if shape.period == 1:
            return tuple(every)
        needed = [every.index(ref) for ref in (*kept, *(ref for _, ref in shape.fed))]
        given = every[min(needed) : max(needed) + 1]
        return tuple(given) if first_of(last, given) else ()

    def _part(
        self, shape: Shape, launches: Sequence[Launch], kept: Sequence[Ref], absorbed: set[int]
    ) -> Iterator[Message]:
        """Rounds of which only the last one's results are kept, as launches of the longest segments that are prepared.
        Adds results that are never made to `absorbed`."""
        period = shape.period
        given = self._given(shape, launches[-period:], kept) if len(launches) >= self._lengths[-1] else ()
        if not given:
            yield from launches
            return
        repetition = self._repetitions.get((shape, given))
        if repetition is None:
            repetition = self._repetitions[shape, given] = Repetition(shape, given)
        while launches:
            rounds, registrations = self._choose_rounds(repetition, len(launches) // period)
            yield from registrations
            if not rounds:
                break
            segment, launches = launches[: rounds * period], launches[rounds * period :]
            yield from self._segment(repetition, segment, rounds, absorbed)
        skipped = min((SAMPLE_EVERY - 1) * period, len(launches) - period)
        sampled = range(skipped, len(launches), SAMPLE_EVERY * period) if len(launches) >= self._lengths[-1] else ()
        for first in sampled:
            for place, launch in enumerate(launches[first : first + period]):
                self._coalesced[launch.launch] = CoalescedLaunch((), repetition, 0, place)
        yield from launches

    def _segment(
        self, repetition: Repetition, segment: Sequence[Launch], rounds: int, absorbed: set[int]
    ) -> Iterator[Launch]:
        """Rounds as one launch, which gives what the last one gives; as they are where that has no consecutive numbers,
        where the last launch is cancelled, or where it is an early one that does not need all the others."""
        shape, given = repetition.shape, repetition.given
        last, end = segment[-shape.period :], segment[-1]
        covered = tuple(launch.launch for launch in segment[:-1])
        first_made = first_of(last, given)
        if type(end) is EarlyLaunch and shape.period > 1 and not needs_all(segment, shape):
            first_made = 0  # it would not fail with them
        if first_made:
            self._coalesced[end.launch] = CoalescedLaunch(covered, repetition, rounds)
        if not first_made or end.launch in self._cancelled:
            self._coalesced.pop(end.launch, None)
            yield from segment
            return
        made = range(first_made, first_made + len(given))
        all_results = (launch.results + k for launch, n in zip(segment, cycle(shape.outputs)) for k in range(n))
        absorbed.update(buffer for buffer in all_results if buffer not in made)
        places = shape.places
        arguments = [segment[number].arguments[place] for number, place in places]
        for first in range(shape.period, len(segment), shape.period) if shape.varied else ():
            arguments += [segment[first + places[k][0]].arguments[places[k][1]] for k in shape.varied]
        what = end.launch, repetition.composed[rounds], tuple(arguments), first_made
        covers = tuple(launch.results for launch in segment)
        yield EarlyLaunch(*what, covers=covers) if type(end) is EarlyLaunch else Launch(*what)

    def _choose_rounds(self, repetition: Repetition, longest: int) -> tuple[int, list[Message]]:
        """The rounds of the longest segment, of at most `longest`, that may leave now, 0 for none; and registrations
        of longer ones."""
        registrations: list[Message] = []
        period = repetition.shape.period
        for length in self._lengths:
            rounds = length if period == 1 else max(length // period, MIN_ROUNDS)
            if rounds <= longest and 0 < rounds * repetition.device_us <= self._max_us:
                if rounds in repetition.composed:
                    return rounds, registrations
                before = repetition.occurrences.get(rounds, 0)
                after = repetition.occurrences[rounds] = before + longest // rounds
                if before < self._min_occurrences <= after:
                    registrations += self._compose(repetition, rounds)
        return 0, registrations

    def _compose(self, repetition: Repetition, rounds: int) -> list[Message]:
        """The registration of a composed program; empty when it would exceed the limits or cannot be composed."""
        shape = repetition.shape
        graphs = [found.graph for program in shape.programs if (found := self._programs.get(program)) is not None]
        if len(graphs) < shape.period:  # one was dropped while its last launches wait to leave
            return []
        made = len(self._registered) + sum(len(other.composed) for other in list(self._repetitions.values()))
        if made >= MAX_PROGRAMS or rounds * sum(len(graph.nodes) for graph in graphs) > MAX_NODES:
            return []
        results = {ref: k for k, ref in enumerate(repetition.given)}
        feeds = tuple((argument, results[ref]) for argument, ref in shape.fed)
        try:
            one = graphs[0] if shape.period == 1 else joined(graphs, shape.taken, repetition.given)
            encoded = encode(repeated(one, rounds, feeds, self._fusion, shape.varied))
        except (GraphError, TooLarge):  # coalescing only saves time: launches go on one by one
            return []
        number = self._new_program()
        self._registered[number] = (repetition, rounds)
        return [Register(number, encoded, {})]
