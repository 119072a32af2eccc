"""Scripts: programs with branches and loops, as plain graphs that are launched one after the other.

`passes.split` cuts such a graph where it decides. A *segment* is a graph without branches and loops, which is lowered,
planned and launched like any program; between segments, values lie in *registers*. Before a decision everything is
launched that does not depend on it, first what the decision itself depends on, in a segment by itself, so that nobody
waits for more than that. The last segment gives the results of the program.

A `Course` walks through a script for one launch: it says which segment comes next with which buffers, or whose value it
waits for. It is told what was launched, and what was decided. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence, Set

import msgspec

from pathways_ray.ir.graph import (
    Branch,
    Graph,
    Repeat,
)


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """Launch a segment on the buffers of registers, and keep its results in registers."""

    segment: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Choose(msgspec.Struct, frozen=True, array_like=True, tag="choose"):
    """Go through one of the branches, as the value of a register says; what it gives is kept in `outputs`."""

    index: int
    branches: tuple[Block, ...]
    outputs: tuple[int, ...]


class Rounds(msgspec.Struct, frozen=True, array_like=True, tag="rounds"):
    """Go through a body again and again: `times` times; with a `test`, while its result is true.

    `carried` begin as copies of `initial`, and are replaced by what the body gives. With a test, the body gives the
    next truth value as well, as its last result. `name` and `where` are those of the loop, for errors.
    """

    initial: tuple[int, ...]
    carried: tuple[int, ...]
    times: int
    test: Block | None
    body: Block
    name: str = ""
    where: str = ""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Steps, the registers of what they give, and those that they write (`made`), of nobody else's concern."""

    steps: tuple[Run | Choose | Rounds, ...]
    results: tuple[int, ...]
    made: tuple[int, ...]


Step = Run | Choose | Rounds


class Script(msgspec.Struct, frozen=True, array_like=True):
    """The steps of a program. Registers 0 to `arguments` hold what it is given; `last` is the segment that gives its
    results, on the registers of `block.results`. `segments` have the registers of the values that each decides by."""

    arguments: int
    block: Block
    last: int
    segments: tuple[tuple[int, ...], ...]


def has_control(graph: Graph) -> bool:
    """Whether a graph has branches or loops."""
    return any(isinstance(node, Branch | Repeat) for node in graph.nodes)


class Launch(msgspec.Struct, frozen=True):
    """Launch a segment on these buffers. Of the `last` one the results are those of the program."""

    segment: int
    arguments: tuple[int, ...]
    last: bool


class Await(msgspec.Struct, frozen=True):
    """Wait until the value in a register is decided."""

    register: int


class Course:
    """One launch on its way through a script.

    `now` is what it does next; None once its last segment is launched. Buffers that it makes are its own, and are gone
    when nothing on its way can need them: `freed` has those, for the caller to take. `choices` are the first launches
    of the branches between which the segment that was launched last decides, as far as they are known by then. `rounds`
    counts those of all loops, `loops` has the loops that it is in, the outermost first.
    """

    def __init__(self, script: Script, arguments: Sequence[int]) -> None:
        self.script = script
        self.given = frozenset(arguments)
        self.buffers = dict(enumerate(arguments))
        self.held = Counter(arguments)
        self.decided: dict[int, int] = {}
        self.freed: list[int] = []
        self.choices: tuple[Launch | None, ...] = ()
        self.rounds = 0
        self.loops: list[Rounds] = []
        self._way = self._whole()
        self.now: Launch | Await | None = next(self._way)

    def launched(self, results: Sequence[int]) -> None:
        """The segment that is `now` is launched, and makes these buffers."""
        assert isinstance(self.now, Launch)
        self._go_on(results)

    def abandon(self) -> None:
        """The launch has failed: it goes no further, and all that it made is freed."""
        self._way.close()
        self.now = None
        for register in list(self.buffers):
            self._clear(register)

    def decide(self, segment: int, values: Sequence[int]) -> None:
        """The scalars by which a segment decides are known."""
        self.decided.update(zip(self.script.segments[segment], values, strict=True))
        if isinstance(self.now, Await) and self.now.register in self.decided:
            self._go_on(())

    def _go_on(self, results: Sequence[int]) -> None:
        try:
            self.now = self._way.send(results)
        except StopIteration:
            self.now = None
            for register in list(self.buffers):
                self._clear(register)

    def _whole(self) -> Generator[Launch | Await, Sequence[int], None]:
        block = self.script.block
        yield from self._steps(block)
        yield Launch(self.script.last, tuple(self.buffers[register] for register in block.results), True)

    def _steps(self, block: Block) -> Generator[Launch | Await, Sequence[int], None]:
        for number, step in enumerate(block.steps, 1):
            match step:
                case Run():
                    for register in self.script.segments[step.segment]:
                        self.decided.pop(register, None)
                    made = yield Launch(step.segment, tuple(self.buffers[r] for r in step.inputs), False)
                    self._write(dict(zip(step.outputs, made, strict=True)))
                    self.choices = self._choices(self.script.segments[step.segment], block.steps[number:])
                case Choose():
                    value = yield from self._value(step.index)
                    branch = step.branches[min(max(value, 0), len(step.branches) - 1)]
                    yield from self._steps(branch)
                    self._copy(step.outputs, branch)
                case Rounds():
                    self.loops.append(step)
                    yield from self._repeat(step)
                    self.loops.pop()

    def _choices(self, deciding: Sequence[int], rest: Sequence[Step]) -> tuple[Launch | None, ...]:
        """The first launches of the branches that a value chooses between, before which only `Run`s come."""
        coming: set[int] = set()
        for step in rest if deciding else ():
            if isinstance(step, Run):
                coming.update(step.outputs)
            elif isinstance(step, Choose) and step.index in deciding:
                return tuple(self._first(branch, coming) for branch in step.branches)
            else:
                break
        return ()

    def _first(self, branch: Block, coming: Set[int]) -> Launch | None:
        first = branch.steps[0] if branch.steps else None
        if not isinstance(first, Run) or self.script.segments[first.segment] or not coming.isdisjoint(first.inputs):
            return None
        return Launch(first.segment, tuple(self.buffers[register] for register in first.inputs), False)

    def _repeat(self, step: Rounds) -> Generator[Launch | Await, Sequence[int], None]:
        self._write({new: self.buffers[old] for new, old in zip(step.carried, step.initial, strict=True)})
        if step.test is None:
            for _ in range(step.times):
                self.rounds += 1
                yield from self._steps(step.body)
                self._copy(step.carried, step.body)
            return
        yield from self._steps(step.test)
        goes_on = yield from self._value(step.test.results[0])
        self._copy((), step.test)
        while goes_on:
            self.rounds += 1
            yield from self._steps(step.body)
            goes_on = yield from self._value(step.body.results[-1])
            self._copy(step.carried, step.body)

    def _value(self, register: int) -> Generator[Launch | Await, Sequence[int], int]:
        if register not in self.decided:
            yield Await(register)
        return self.decided[register]

    def _copy(self, outputs: tuple[int, ...], block: Block) -> None:
        """Keeps the first results of a block under these registers, and lets go of its own."""
        self._write({new: self.buffers[old] for new, old in zip(outputs, block.results, strict=False)})
        for register in block.made:
            self._clear(register)

    def _write(self, values: Mapping[int, int]) -> None:
        for buffer in values.values():
            self.held[buffer] += 1
        for register, buffer in values.items():
            self._clear(register)
            self.buffers[register] = buffer

    def _clear(self, register: int) -> None:
        buffer = self.buffers.pop(register, None)
        if buffer is None:
            return
        self.held[buffer] -= 1
        if not self.held[buffer]:
            del self.held[buffer]
            if buffer not in self.given:
                self.freed.append(buffer)
