"""Scripts of programs with branches and loops, launched segment by segment in this process, as a controller does it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from pathways_ray.ir.graph import Graph
from pathways_ray.ir.passes.split import split
from pathways_ray.ir.script import Await, Course, Launch, has_control
from pathways_ray.ir.verify import verify

MAX_ROUNDS = 10_000
"""More rounds than the nested loops of any program of these tests have: one without an end fails."""


def run_course(
    graph: Graph, arguments: Sequence[Any], late: random.Random, run: Callable[[Graph, list[Any]], Sequence[Any]]
) -> tuple[list[Any], list[int]]:
    """The results of a graph by its script, and the buffers that were never freed.

    Decisions come as late as they may. A buffer that is used after it was freed or given away is an error.

    Args:
        run: gives the results of a segment.
    """
    script, segments = split(graph)
    for segment in segments:
        verify(segment)
        assert not has_control(segment)
    memory = dict(enumerate(arguments))
    gone: set[int] = set()
    course = Course(script, list(memory))
    told: list[tuple[int, list[int]]] = []
    results: list[Any] = []
    first = 0
    while (step := course.now) is not None:
        assert course.rounds < MAX_ROUNDS
        if isinstance(step, Await):
            assert told, "it waits for a value that no segment says"
            course.decide(*told.pop(0))
            continue
        assert isinstance(step, Launch)
        assert all(buffer in memory for buffer in step.arguments), "a buffer was freed or given away too early"
        segment = segments[step.segment]
        made = run(segment, [memory[buffer] for buffer in step.arguments])
        for buffer in (step.arguments[number] for number in segment.donated_arguments):
            assert buffer not in gone, "a buffer was given away twice"
            del memory[buffer]
            gone.add(buffer)
        if step.last:
            results = list(made)
            course.launched(())
        else:
            first -= len(made)
            memory.update(zip(range(first, first + len(made)), made, strict=True))
            course.launched(range(first, first + len(made)))
            if segment.decides:
                told.append((step.segment, [int(made[k]) for k in segment.decides]))
        while told and late.random() < 0.5:
            course.decide(*told.pop(0))
        for buffer in course.freed:
            assert buffer in memory or buffer in gone, "a buffer was freed twice"
            memory.pop(buffer, None)
            gone.discard(buffer)
        course.freed.clear()
    return results, sorted(buffer for buffer in memory if buffer < 0)
