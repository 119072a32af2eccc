"""Loops in a stream of launches: the same programs again and again, each round fed by the one before it. Pure.

A round is one launch of each program, in order: one for `y = f(y)`, three for a training step of three programs. What a
launch takes is made in its round, was made in the round before, is the same in all rounds, or is another value in each.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from pathways_ray.ir.graph import Ref
from pathways_ray.transport.messages import Free, Launch, Message

MAX_ROUND = 8
"""Launches of one round, at most."""

MIN_ROUNDS = 2
"""Rounds that show a loop of several programs."""


class Shape(NamedTuple):
    """The form that all rounds of a loop have in common.

    `taken` has for each program what its arguments are: `Ref(-1, k)` is argument k of the round, `Ref(j, k)` result k
    of program j in the same round. `fed` pairs an argument of the round with the result of the round before that it is;
    `varied` are the arguments that are others in each round. All the rest stay the same. `outputs` are the numbers of
    results of each program.
    """

    programs: tuple[int, ...]
    taken: tuple[tuple[Ref, ...], ...]
    fed: tuple[tuple[int, Ref], ...]
    varied: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def period(self) -> int:
        """Launches of a round."""
        return len(self.programs)

    @property
    def made(self) -> list[Ref]:
        """The results of a round."""
        return [Ref(place, k) for place, count in enumerate(self.outputs) for k in range(count)]

    @property
    def places(self) -> list[tuple[int, int]]:
        """The first launch that takes each argument of the round, and the place there."""
        found: dict[int, tuple[int, int]] = {}
        for number, sources in enumerate(self.taken):
            for place, source in enumerate(sources):
                if source.node < 0:
                    found.setdefault(source.output, (number, place))
        return [found[k] for k in range(len(found))]


class LaunchLoop(NamedTuple):
    """A loop of launches: its shape, and how many rounds there are."""

    shape: Shape
    rounds: int


def find_loop(
    launches: Sequence[Launch], programs: Sequence[int], at: int, outputs: Mapping[int, int], fewest: int
) -> LaunchLoop | None:
    """The loop with the shortest rounds that begins at launch number `at`; None where no loop begins.

    Args:
        programs: those of the launches.
        outputs: the results of each program.
        fewest: launches that make a loop worth its while.
    """
    for period in range(1, min(MAX_ROUND, (len(launches) - at) // MIN_ROUNDS) + 1):
        middle = at + period
        if programs[at] != programs[middle] or programs[at:middle] != programs[middle : middle + period]:
            continue
        shape = _shape(launches[at:middle], launches[middle : middle + period], outputs)
        if shape is not None:
            rounds = _count(shape, launches, programs, at)
            if rounds * period >= fewest:
                return LaunchLoop(shape, rounds)
        if period == 1 and len(set(programs[at : at + 2 * MAX_ROUND])) == 1:
            return None  # of one program, whose launches do not feed each other
    return None


def _shape(first: Sequence[Launch], second: Sequence[Launch], outputs: Mapping[int, int]) -> Shape | None:
    """The shape of a loop whose first two rounds are these; None where they differ or do not feed each other."""
    made: dict[int, Ref] = {}
    before: dict[int, Ref] = {}
    numbers: dict[tuple[Ref | None, int, int, int], int] = {}
    alone = len(first) == 1
    taken: list[tuple[Ref, ...]] = []
    fed: dict[int, Ref] = {}
    varied: list[int] = []
    for place, launch in enumerate(first):
        before.update((launch.results + k, Ref(place, k)) for k in range(outputs[launch.program]))
    known: dict[int, Ref] = {}
    for place, (launch, again) in enumerate(zip(first, second, strict=True)):
        sources: list[Ref] = []
        for number, (buffer, following) in enumerate(zip(launch.arguments, again.arguments, strict=True)):
            inside, source = made.get(following), before.get(following)
            if inside != known.get(buffer) or (inside is None and buffer in before):
                return None  # the rounds differ, or the first one takes what comes after it
            if inside is not None:
                sources.append(inside)
                continue
            # One program keeps its arguments as they are. Of several, what is the same array is the same argument.
            number = numbers.setdefault((source, buffer, following, number if alone else 0), len(numbers))
            sources.append(Ref(-1, number))
            if source is not None:
                fed[number] = source
            elif buffer != following and number not in varied:
                varied.append(number)
        taken.append(tuple(sources))
        count = outputs[launch.program]
        known.update((launch.results + k, Ref(place, k)) for k in range(count))
        made.update((again.results + k, Ref(place, k)) for k in range(count))
    programs = tuple(launch.program for launch in first)
    counts = tuple(outputs[program] for program in programs)
    return Shape(programs, tuple(taken), tuple(sorted(fed.items())), tuple(varied), counts) if fed else None


def _count(shape: Shape, launches: Sequence[Launch], programs: Sequence[int], at: int) -> int:
    """The rounds of a loop whose first two are known."""
    period = shape.period
    wanted, fed, varied = list(shape.programs), dict(shape.fed), set(shape.varied)
    born = min(launch.results for launch in launches[at : at + period] if launch.results)
    rounds, start = MIN_ROUNDS, at + MIN_ROUNDS * period
    while programs[start : start + period] == wanted:
        arguments: dict[int, int] = {}
        for place, sources in enumerate(shape.taken):
            launch, earlier = launches[start + place], launches[start + place - period]
            for source, buffer, previous in zip(sources, launch.arguments, earlier.arguments, strict=True):
                number = source.output
                if source.node >= 0:
                    same = buffer == launches[start + source.node].results + number
                elif number in fed:
                    result = fed[number]
                    same = buffer == launches[start - period + result.node].results + result.output
                elif number in varied:
                    same = buffer < born and arguments.setdefault(number, buffer) == buffer
                else:
                    same = buffer == previous
                if not same:
                    return rounds
        rounds, start = rounds + 1, start + period
    return rounds


def kept_of(shape: Shape, launches: Sequence[Launch], gone: Container[int]) -> list[Ref]:
    """The results of a round to which a handle is left."""
    return [ref for ref in shape.made if launches[ref.node].results + ref.output not in gone]


def needs_all(segment: Sequence[Launch], shape: Shape) -> bool:
    """Whether the last launch of whole rounds takes what all others make, by way of each other."""
    needed = set(segment[-1].arguments)
    for number in reversed(range(len(segment) - 1)):
        launch = segment[number]
        if needed.isdisjoint(range(launch.results, launch.results + shape.outputs[number % shape.period])):
            return False
        needed.update(launch.arguments)
    return True


def freed_behind(messages: Sequence[Message]) -> dict[int, list[int]]:
    """The buffers that are freed behind each of several launches, and before the next one. The first message is one."""
    found: dict[int, list[int]] = {}
    for message in messages:
        if isinstance(message, Launch):
            freed = found.setdefault(message.launch, [])
        elif isinstance(message, Free):
            freed += message.buffers
    return found


def first_of(last: Sequence[Launch], given: Sequence[Ref]) -> int:
    """The number of the first of the results `given` by a round; 0 where these have no consecutive numbers."""
    numbers = [last[ref.node].results + ref.output for ref in given]
    return numbers[0] if numbers == list(range(numbers[0], numbers[0] + len(given))) else 0
