"""Recognising runs of repeated small launches: `y = f(y)` called again and again, each value dropped after its use.

The scheduler's stream brings many launches in one batch. Where a launch of a program feeds the next launch of the same
program, and nobody keeps the value in between (its drop is in the same batch), the launches form a chain that the host
may execute as one computation. Each launch keeps its own outcome. Pure: messages in, groups out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from pathways_ray.transport.messages import Drop, Run, ToHost

Feeds = tuple[tuple[int, int], ...]
"""(argument position, output of the launch before) pairs; all other arguments stay the same along a chain."""


class Chain(msgspec.Struct, frozen=True):
    """Launches that may run as one: each takes from the one before what `feeds` says."""

    runs: tuple[Run, ...]
    feeds: Feeds


def grouped(messages: Sequence[ToHost], outputs_of: Callable[[int], int]) -> Iterator[ToHost | Chain]:
    """The same messages in an order with the same effect, chains put together.

    Args:
        outputs_of: how many outputs a program has if it may be part of a chain, else 0.
    """
    at = 0
    while at < len(messages):
        first = messages[at]
        outputs = outputs_of(first.program) if isinstance(first, Run) and not first.gangs else 0
        if not outputs:
            yield first
            at += 1
            continue
        assert isinstance(first, Run)
        runs, feeds, drops, at = _scan(messages, at, first, outputs)
        length = _kept(runs, drops, outputs)
        if length > 1:
            yield Chain(tuple(runs[:length]), feeds)
            yield from runs[length:]
        else:
            yield from runs
        yield from drops


def _scan(messages: Sequence[ToHost], at: int, first: Run, outputs: int) -> tuple[list[Run], Feeds, list[Drop], int]:
    """The launches from `at` on that feed each other, the drops between them, and where the scan ended."""
    runs, drops = [first], []
    feeds: Feeds = ()
    at += 1
    while at < len(messages):
        message = messages[at]
        if isinstance(message, Drop) and message.session == first.session:
            drops.append(message)
        elif isinstance(message, Run) and (found := _feeds(runs[-1], message, outputs)):
            if len(runs) > 1 and found != feeds:
                break
            feeds = found
            runs.append(message)
        else:
            break
        at += 1
    return runs, feeds, drops, at


def _feeds(before: Run, run: Run, outputs: int) -> Feeds:
    """What `run` takes from `before`; empty when it is no repetition of it."""
    if run.program != before.program or run.session != before.session or run.gangs:
        return ()
    found = []
    for position, (buffer, previous) in enumerate(zip(run.arguments, before.arguments, strict=True)):
        if before.results <= buffer < before.results + outputs:
            found.append((position, buffer - before.results))
        elif buffer != previous:
            return ()
    return tuple(found)


def _kept(runs: list[Run], drops: list[Drop], outputs: int) -> int:
    """How many launches from the first on may be one: until the first whose results somebody keeps."""
    dropped = {buffer for drop in drops for buffer in drop.buffers}
    for number, run in enumerate(runs):
        if any(run.results + k not in dropped for k in range(outputs)):
            return number + 1
    return len(runs)
