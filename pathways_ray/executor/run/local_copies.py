"""Copies between devices of this host, several in one call.

An edge from one device of a host to another is a copy, of which the call costs as much as that of a small computation,
and a plan has one for each. Where nothing can stop a launch, copies that are asked for one behind the other are made
together: as late as their targets, and what happens to their sources, allow. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pathways_ray.errors import Failure
from pathways_ray.executor.run.parts import Computation, first_failure
from pathways_ray.executor.run.steps import Slots, failed_in
from pathways_ray.ir.plan import Execute, Receive, Send


class CopyStep:
    """Copies slots to other devices: those of one or more bundles.

    Args:
        sends: the steps in whose place it stands.
        targets: the slots of each.
        together: copies the values of all of them, in order.
        each: copies those of one, where that of all failed.
    """

    __slots__ = ("drops", "each", "host", "parts", "sources", "targets", "together")

    def __init__(
        self,
        sends: Sequence[Send],
        targets: Sequence[Sequence[int]],
        together: Computation,
        each: Sequence[Computation],
        host: int,
    ) -> None:
        self.parts = [(send.sources, to) for send, to in zip(sends, targets, strict=True)]
        self.sources = [slot for send in sends for slot in send.sources]
        self.targets = [slot for to in targets for slot in to]
        self.drops = tuple(dict.fromkeys(slot for send in sends for slot in send.drops))
        self.together, self.each, self.host = together, each, host

    def run(self, slots: Slots) -> None:
        values = slots.values
        try:
            made: Iterable[Any] = self.together(*[values[slot] for slot in self.sources])
        except Exception:  # a failure among the values, or of a copy, is that of its own bundle
            made = [one for k in range(len(self.parts)) for one in self._of(k, values)]
        for slot, value in zip(self.targets, made, strict=True):
            values[slot] = value
        for slot in self.drops:
            values[slot] = None

    def _of(self, k: int, values: Sequence[Any]) -> Sequence[Any]:
        """The copies of one bundle, or the failure in place of each."""
        sources, targets = self.parts[k]
        given = [values[slot] for slot in sources]
        if any(isinstance(value, Failure) for value in given):
            return [first_failure(given)] * len(targets)
        try:
            made: Sequence[Any] = self.each[k](*given)
        except Exception as error:
            return [failed_in("transfer", error, self.host)] * len(targets)
        return made


def with_copies_joined(
    steps: Sequence[Any],
    runnable: Sequence[Any],
    copies: Callable[[Sequence[int]], Computation | None],
    donated: Callable[[Execute], Iterable[int]],
    host: int,
) -> tuple[list[Any], frozenset[int]]:
    """The steps of a host with copies joined, and the bundles of these.

    Args:
        steps: those of the plan, without barriers.
        runnable: the same, compiled.
        copies: what copies the values of bundles; None where one of them is no copy on this host.
        donated: the slots whose memory a computation takes.
    """
    each = {step.bundle: copies([step.bundle]) for step in steps if isinstance(step, Send)}
    targets = {step.bundle: step.targets for step in steps if isinstance(step, Receive)}
    whole = frozenset(bundle for bundle, copy in each.items() if copy is not None and bundle in targets)
    made: list[Any] = []
    waiting: list[Send] = []

    def copy() -> None:
        if waiting:
            bundles = [send.bundle for send in waiting]
            together, alone = copies(bundles), [one for b in bundles if (one := each[b]) is not None]
            assert together is not None
            made.append(CopyStep(waiting, [targets[b] for b in bundles], together, alone, host))
            waiting.clear()

    for step, ready in zip(steps, runnable, strict=True):
        if isinstance(step, Send | Receive) and step.bundle in whole:
            if isinstance(step, Send):
                waiting.append(step)
            continue
        if not isinstance(step, Execute) or _concerns(step, donated(step), waiting, targets):
            copy()
        made.append(ready)
    copy()
    return made, whole


def _concerns(
    step: Execute, donated: Iterable[int], waiting: Sequence[Send], targets: dict[int, tuple[int, ...]]
) -> bool:
    """Whether a computation takes what one of these copies makes, or takes away what one reads."""
    made = {slot for send in waiting for slot in targets[send.bundle]}
    read = {slot for send in waiting for slot in send.sources}
    return not made.isdisjoint(step.inputs) or not read.isdisjoint((*step.drops, *donated))
