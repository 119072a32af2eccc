"""A step whose stages update their weights while microbatches are under way, as `schedules.stale` has it.

A call of such a step is a stream of microbatches through one pipeline: it fills once and drains once, and each stage
updates as often as its schedule says, with the mean of the gradients since. An update does not take the memory of the
weights before it, as backwards may still need them; the runtime frees each version after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_ptdp.errors import ConfigError
from megatron_ptdp.models.interface import Tree
from megatron_ptdp.parallel.nodes import StageNodes
from megatron_ptdp.parallel.options import Options
from megatron_ptdp.parallel.sizes import Sizes
from megatron_ptdp.parallel.step_trace import StepTrace
from megatron_ptdp.schedules import Action, Schedule, versions


def check(schedule: Schedule, sizes: Sizes, options: Options, tied: Sequence[Any]) -> None:
    """Makes sure that a schedule can be trained with these, if it has updates on the way.

    Raises:
        ConfigError: something needs all gradients of a step at once.
        ScheduleError: a stage would need weights that it does not have yet.
    """
    if schedule.updates is None:
        return
    versions(schedule)
    name = schedule.name
    if schedule.microbatches % _every(schedule):
        raise ConfigError(f"{name} updates every {_every(schedule)} microbatches, which do not divide {sizes}")
    if sizes.expert_slices:
        raise ConfigError(
            f"{name} updates each stage on the way, but with expert_slices {sizes.expert_slices} all is updated at "
            "once, at the end; choose another schedule, or leave expert_slices out"
        )
    if options.clip is not None:
        raise ConfigError(
            f"{name} has no norm of the whole gradient, by which clip={options.clip} could scale it; set clip to 0"
        )
    if options.zero:
        raise ConfigError(f"{name} keeps versions of whole parameters; it takes zero 0, not {options.zero}")
    if sizes.islands > 1:
        raise ConfigError(f"{name} is for replicas inside of slices; here are {sizes.islands} groups of replicas")
    if tied:
        raise ConfigError(
            f"{name} cannot update an array that two stages share: {', '.join('/'.join(p) for p in tied)}; set tied to "
            "false"
        )


class Versions:
    """The weights of all stages while a stream of microbatches is traced.

    Args:
        schedule: with its updates
        nodes: of each stage
        params, slots: of each stage, master parameters and optimizer state at first
        used: of each stage, parameters as forward takes them
    """

    def __init__(
        self,
        schedule: Schedule,
        nodes: Sequence[StageNodes],
        params: Sequence[Tree],
        slots: Sequence[Any],
        used: Sequence[Tree],
    ) -> None:
        self.schedule, self.nodes = schedule, nodes
        self.params, self.slots = list(params), list(slots)
        self.used = [[one] for one in used]
        self.version_of = versions(schedule)
        self.ended = [0] * len(nodes)

    def train(self, trace: StepTrace, actions: Sequence[Action], losses: Callable[[], list[Any]]) -> dict[str, Any]:
        """Traces all actions, with the updates between them. Of the metrics of the step the norm is that of the last
        update of each stage; what was not finite is counted over all of them."""
        final = len(self.nodes) - 1
        found: list[list[tuple[Any, Any]]] = [[] for _ in self.nodes]
        every = _every(self.schedule)
        for k in range(self.schedule.microbatches):
            # Of the mean of one update's microbatches; the scale is that of the mean of all.
            trace.upstream[final, k] = [trace.scale * (self.schedule.microbatches / every)]
        for stage, kind, k in actions:
            params = list(trace.params)
            params[stage] = self.used[stage][self.version_of[stage, k]]
            trace.params = params
            trace.act(Action(stage, kind, k))
            if kind in "BW":
                self.ended[stage] += 1
                if self.ended[stage] % every == 0:
                    found[stage].append(self._update(trace, stage))
        squares = [updates[-1][0] for updates in found]
        bad = [here.total([one[1] for one in updates]) for here, updates in zip(self.nodes, found, strict=True)]
        decided = self.nodes[-1].decide(None)(losses(), squares, bad)
        return {name: decided[name] for name in ("loss", "norm", "applied")} | {"bad": bad}

    def _update(self, trace: StepTrace, stage: int) -> tuple[Any, Any]:
        here = self.nodes[stage]
        gradients = here.reduce(trace.sums[stage])
        trace.sums[stage] = here.zeros()
        norm = here.norm(gradients)
        one = np.ones((), "float64" if here.math.master == "float64" else "float32")
        made = here.renew(self.params[stage], self.slots[stage], gradients, one, np.bool_(True))
        self.params[stage], self.slots[stage] = made
        self.used[stage].append(here.prepare(made[0]) if here.copies_parameters else made[0])
        return norm[0], norm[1]


def _every(schedule: Schedule) -> int:
    assert schedule.updates is not None
    return schedule.updates.every
