"""Values as numbers: a hash of the function and its inputs, so a wrong or old value shows in all that follow from it.

A logical array is one number on every device that holds a shard of it. Where devices that should agree do not, the
result is a number that nothing else gives.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pathways_ray.errors import Failure
from pathways_ray.ir.evaluate import evaluate, evaluate_control
from pathways_ray.ir.graph import (
    Argument,
    Branch,
    Compute,
    Control,
    Graph,
    Part,
    Recipe,
    Ref,
    Regroup,
    Repeat,
    Result,
    Transfer,
    functions_in,
    inputs_of,
)
from pathways_ray.ir.passes.prune import prune
from pathways_ray.ir.script import has_control

_MASK = (1 << 61) - 1

POISON = "poison"
"""A function with this in its name fails on the devices."""

ENDLESS = "endless"
"""A function with this in its name never ends on its devices."""

UNCOMPILED = "uncompiled"
"""The compiler never comes to the end of a function with this in its name."""

DEADLY = "deadly"
"""A host dies as it compiles a function with this in its name."""

DIVERGENT = "divergent"
"""The last host of its slice enters no collective of a function with this in its name. That host alone refuses to
compile it: those that hold parts of a program need not find the same."""

FLAWS = (ENDLESS, UNCOMPILED, DEADLY)
"""What a program may have that keeps its hosts from others."""


def is_flawed(program: str) -> bool:
    """Whether a program of this name has a flaw."""
    return any(flaw in program for flaw in FLAWS)


LOOP = "loop"
"""A function with this in its name is called again and again, with what it gave."""


PICK = "pick"
"""A function with this in its name gives a small number, by which a program decides."""

CHOICES = 3
"""The numbers that such a function may give: 0, 1 and 2."""


def mixed(*values: int) -> int:
    found = 0x9E3779B97F4A7C15
    for value in values:
        found = ((found ^ value) * 0x100000001B3 + (found >> 29)) & _MASK
    return found


def bytes_of(value: int, size: int) -> bytes:
    """A value in as many bytes as an array takes."""
    return value.to_bytes(size)


def value_in(data: bytes) -> int:
    """The value that these bytes are."""
    return int.from_bytes(data)


@functools.cache
def named(text: str) -> int:
    """A number for a name; the same in every process."""
    return zlib.crc32(text.encode())


GARBAGE = named("overwritten")


def agreed(values: Iterable[int]) -> int:
    """The value that all of these have, or one that nothing else has."""
    distinct = set(values)
    if len(distinct) == 1:
        return distinct.pop()
    return mixed(named("disagreement"), *sorted(distinct))


def run_recipe(recipe: Recipe, inputs: Sequence[int]) -> list[int]:
    def call(part: Part, taken: list[int]) -> Callable[[int], int]:
        if PICK in part.function:
            return lambda output: mixed(named(part.function), *taken) % CHOICES
        return functools.partial(mixed, mixed(named(part.function), *taken))

    return evaluate(recipe, inputs, call)


def is_poisoned(recipe: Recipe) -> bool:
    return any(POISON in part.function for part in functions_in(recipe.parts))


def is_divergent(recipe: Recipe) -> bool:
    return any(DIVERGENT in part.function for part in functions_in(recipe.parts))


def flaw_of(recipe: Recipe) -> str:
    """The one of `FLAWS` that a function of the recipe has; "" if none has one."""
    return next((flaw for part in functions_in(recipe.parts) for flaw in FLAWS if flaw in part.function), "")


Outcome = int | Failure
"""The expected content of a buffer: a value, or the failure of the poisoned call it comes from."""


def made_alone(graph: Graph, arguments: Sequence[Outcome]) -> tuple[list[Outcome], Failure | None]:
    """Each result of a program that runs alone, without a fault, as hosts make it, and the failure with which one that
    decides fails whole: some of its results may be made by then."""
    failures: list[Failure] = []
    made = _run(prune(graph), arguments, failures)
    return made, failures[0] if failures and has_control(graph) else None


def _run(graph: Graph, arguments: Sequence[Outcome], failures: list[Failure]) -> list[Outcome]:
    values: dict[Ref, Outcome] = {}
    for index, node in enumerate(graph.nodes):
        match node:
            case Argument():
                values[Ref(index)] = arguments[node.index]
            case Transfer():
                values[Ref(index)] = values[node.input]
            case Regroup():
                made = [values[ref] for ref in node.inputs]
                numbers = [value for value in made if not isinstance(value, Failure)]
                values[Ref(index)] = next((v for v in made if isinstance(v, Failure)), None) or agreed(numbers)
            case Compute():
                outputs: list[Outcome] = []
                inputs: list[int] = []
                failed: Failure | None = None
                for ref in node.inputs:
                    value = values[ref]
                    if isinstance(value, Failure):
                        failed = failed or value
                    else:
                        inputs.append(value)
                recipe = graph.recipes[node.recipe]
                if failed is None and flaw_of(recipe):
                    failed = Failure("ExecutionError", "it never ends", node.name, node.where)
                if failed is None and is_divergent(recipe):
                    failed = Failure("ProgramRefused", "a device may miss its collectives", node.name, node.where)
                if failed is None and is_poisoned(recipe):
                    failed = Failure("ExecutionError", POISON, node.name, node.where)
                if failed is not None:
                    failures.append(failed)
                outputs = [failed] * len(node.outputs) if failed is not None else [*run_recipe(recipe, inputs)]
                values.update({Ref(index, k): output for k, output in enumerate(outputs)})
            case Branch() | Repeat():
                taken = [values[ref] for ref in inputs_of(node)]
                values.update({Ref(index, k): made for k, made in enumerate(_decided(graph, node, taken, failures))})
            case Result():
                return [values[ref] for ref in node.inputs]
    raise AssertionError("the graph has no result")


def _decided(graph: Graph, node: Control, inputs: list[Outcome], failures: list[Failure]) -> list[Outcome]:
    """The outputs of a branch or a loop. Where the value that decides has failed, nothing comes of it."""

    def value(found: Outcome) -> int:
        if isinstance(found, Failure):
            raise _Undecided(found)
        return found

    def run(body: Graph, given: Sequence[Outcome]) -> list[Outcome]:
        return _run(prune(body), given, failures)

    try:
        return evaluate_control(graph, node, inputs, run, value)
    except _Undecided as undecided:
        return [undecided.failure] * len(node.outputs)


class _Undecided(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Future:
    """The shards of an array on one host, by device: values once they are there, or the failure that took their place.

    `deleted` once the array was donated, `overwritten` once its memory was; `lent` when peers read that memory;
    `remote` when it is put together from what peers send before all of that is there.
    """

    __slots__ = ("deleted", "error", "lent", "misfit", "overwritten", "ready", "remote", "shards", "waiting")

    def __init__(self) -> None:
        self.ready = False
        self.shards: dict[int, int] = {}
        self.error: Failure | None = None
        self.waiting: list[Callable[[], None]] = []
        self.deleted = False
        self.overwritten = False
        self.lent = False
        self.remote = False
        self.misfit = False

    @classmethod
    def of(cls, shards: dict[int, int]) -> Future:
        made = cls()
        made.settle(shards)
        return made

    def settle(self, shards: dict[int, int], error: Failure | None = None) -> None:
        if self.ready:
            return
        self.ready, self.shards, self.error = True, shards, error
        waiting, self.waiting = self.waiting, []
        for act in waiting:
            act()

    def when_ready(self, act: Callable[[], None]) -> None:
        if self.ready:
            act()
        else:
            self.waiting.append(act)

    def copied(self, places: Mapping[int, int] | None = None) -> Future:
        """Another array with the same values, in memory of its own: on the same devices, or on others, each of which
        `places` has the one for whose shard it takes."""
        made = Future()

        def settle() -> None:
            there = self.memory()
            moved = there if places is None else {to: there[of] for to, of in places.items() if of in there}
            made.settle(moved, self.error)

        self.when_ready(settle)
        return made

    def memory(self) -> dict[int, int]:
        """The values that a reader of the memory finds there now."""
        return dict.fromkeys(self.shards, GARBAGE) if self.overwritten else self.shards


def when_all_ready(values: Iterable[object], act: Callable[[], None]) -> None:
    """Calls `act` once all futures among `values` are ready; at once when they are."""
    left = [value for value in values if isinstance(value, Future) and not value.ready]
    if not left:
        act()
        return
    count = len(left)

    def one_more() -> None:
        nonlocal count
        count -= 1
        if count == 0:
            act()

    for value in left:
        value.when_ready(one_more)


def failure_of(values: list[Any]) -> Failure | None:
    """The first failure among values that have arrived."""
    for value in values:
        if isinstance(value, Failure):
            return value
        if value.error is not None:
            error: Failure = value.error
            return error
    return None
