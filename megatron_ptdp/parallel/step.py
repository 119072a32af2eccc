"""The training step: a program of the runtime, made of a schedule and the nodes of all stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from megatron_ptdp.errors import BadSizes
from megatron_ptdp.models import split
from megatron_ptdp.models.interface import Model, Tree
from megatron_ptdp.parallel import action_order, evaluation, stale, transfer_bytes
from megatron_ptdp.parallel.batch_feed import BatchFeed, Fed
from megatron_ptdp.parallel.layout import Layout
from megatron_ptdp.parallel.nodes import StageNodes
from megatron_ptdp.parallel.options import Options
from megatron_ptdp.parallel.reduce import Reduction
from megatron_ptdp.parallel.shapes import StageShapes, tied_arrays
from megatron_ptdp.parallel.split_backward.residuals import AXES
from megatron_ptdp.parallel.stage import StageMath
from megatron_ptdp.parallel.step_state import State, StatefulStep
from megatron_ptdp.parallel.step_trace import StepTrace
from megatron_ptdp.parallel.update import Optimizer, Update
from megatron_ptdp.schedules import Schedule

Numbers: TypeAlias = Sequence[Sequence[Sequence[Any]]]
"""The numbers of the microbatches, as arrays on the slice of each pipeline device of each group of replicas."""


class Step(StatefulStep):
    """A training step for one model, one optimizer and one schedule. `build_step` makes it."""

    def __init__(
        self, model: Model, optimizer: Optimizer, layout: Layout, schedule: Schedule, options: Options
    ) -> None:
        self.layout, self.schedule, self.sizes = layout, schedule, layout.sizes
        self.keep_input = options.keep == "input"
        self.actions = action_order.enqueued(schedule)
        self.completing = action_order.completing(self.actions)
        # With one stage there is no other schedule whose bits it could differ from. Where layers are recomputed, all
        # schedules that keep the order of the microbatches fuse, and have the same bits.
        recomputed = getattr(getattr(model, "compute", None), "recompute", "none") == "full"
        fused = options.join or schedule.stages == 1 or recomputed
        self.fused_last_stage = action_order.fused_last_stage(schedule, recomputed) if fused else frozenset()
        self.model, self.options = model, options
        self.shapes = self._stage_shapes()
        self.tied = tied_arrays([shapes.parameters for shapes in self.shapes])
        self.nodes = self._nodes(optimizer)
        super().__init__(model, options, self.nodes)
        scales = "float64" if options.master == "float64" else "float32"
        self.feed = BatchFeed(model, self.sizes, self._wanted(), scales)
        self.renew()
        stale.check(schedule, self.sizes, options, list(self.tied))
        train = self._train if schedule.updates is None else self._train_on_the_way
        self._step = pw.program(train, name="training_step")
        self._gradients = pw.program(self._differentiate, name="gradients")
        self._evaluation = pw.program(self._evaluate, name="evaluation")

    def take(self, number: int, whole: Tree) -> Tree:
        """The tree of a stage."""
        return split.take(self.model, self.layout.stages[number], whole)

    def join(self, parts: Sequence[Tree]) -> Tree:
        """The tree of the whole model from those of the stages."""
        return split.join(self.model, self.layout.stages, parts)

    def renew(self) -> None:
        """Places the numbers of the microbatches on all slices: at the beginning, and after the loss of a host."""
        self.numbers = [
            [[pw.put(np.int32(k), slice, P()) for k in range(self.sizes.microbatches)] for slice in row]
            for row in self.layout.slices
        ]

    # --- for users ----------------------------------------------------------------------------------------------------

    def __call__(self, state: State, batch: Mapping[str, np.ndarray] | Fed) -> tuple[State, dict[str, Any]]:
        """The next state and the metrics, as futures; the state is donated. A batch may lie on the slices already.

        Raises:
            BatchError: the batch has other arrays or shapes than the model and the sizes ask for.
        """
        made: tuple[State, dict[str, Any]] = self._step(state, self.numbers, *self.feed(batch))
        return made

    def gradients(self, state: State, batch: Mapping[str, np.ndarray]) -> tuple[float, Tree]:
        """The loss, and its gradient as the whole model's tree of NumPy arrays. Waits; the state stays."""
        loss, parts = self._gradients(state, self.numbers, *self.feed(batch))
        return float(loss), self.join(jax.tree.map(np.asarray, parts))

    def evaluate(self, state: State, batch: Mapping[str, np.ndarray]) -> Any:
        """The loss of a batch of a step's shapes, as a future: forwards only. The state stays."""
        return self._evaluation(state, self.numbers, *self.feed(batch))

    def explain(self) -> str:
        """Bytes between stages, with scatter/gather and without, and parameters that ZeRO cannot shard, as text."""
        slices = [self.layout.slices[0][device] for device in self.schedule.placement]
        text = transfer_bytes.explained(self.shapes, slices, self.sizes.microbatches)
        whole = [f"  stage {number}: {name}" for number, name in transfer_bytes.unshared(self.shapes)]
        return "\n".join([text, *(["held whole by every replica, as no dimension divides:", *whole] if whole else [])])

    # --- building -----------------------------------------------------------------------------------------------------

    def _stage_shapes(self) -> list[StageShapes]:
        placement = self.schedule.placement
        moves = [here != there for here, there in pairwise(placement)]
        stages = self.layout.stages
        return [StageShapes.of(self.model, stages, k, self.sizes, self.options, moves) for k in range(len(stages))]

    def _nodes(self, optimizer: Optimizer) -> list[list[StageNodes]]:
        sizes, options, direct = self.sizes, self.options, self.layout.direct
        mesh = AbstractMesh((sizes.members, sizes.tensor), AXES)
        made: list[list[StageNodes]] = [[] for _ in self.layout.slices]
        for number, shapes in enumerate(self.shapes):
            math = StageMath(
                self.model,
                shapes,
                sizes.microbatches,
                mesh,
                self.keep_input,
                options.compute,
                options.master,
                direct,
            )
            reduction = Reduction(shapes, mesh, sizes.islands, sizes.islands * options.pieces, direct)
            update = Update(shapes, optimizer, self._counted(number), options.master)
            for row, slices in zip(made, self.layout.slices, strict=True):
                slice = slices[self.schedule.placement[number]]
                row.append(StageNodes(number, slice, math, reduction, update))
        return made

    def _counted(self, number: int) -> Tree:
        """A tree of bool: whether a parameter of a stage counts in the global norm. A tied one counts on one stage."""
        return jax.tree_util.tree_map_with_path(
            lambda path, _: number == self.tied.get(tuple(entry.key for entry in path), (number,))[0],
            self.shapes[number].parameters,
        )

    def _wanted(self) -> list[frozenset[str]]:
        """The arrays of the batch that each pipeline device looks at."""
        wanted: list[frozenset[str]] = [frozenset()] * self.schedule.devices
        for nodes in self.nodes[0]:
            wanted[self.schedule.placement[nodes.number]] |= frozenset(nodes.math.wanted)
        return wanted

    # --- traced -------------------------------------------------------------------------------------------------------

    def _traced(
        self, state: State, numbers: Numbers, batch: Any, scale: Any
    ) -> tuple[list[StepTrace], list[list[Tree]]]:
        """The trace of each group, and for each group the gradients of each stage, summed over all groups."""
        groups = range(len(self.nodes))
        traces = [self._trace_of(group, state, numbers[group], batch[group], scale[group]) for group in groups]
        gradients: list[list[Tree]] = [[None] * len(self.shapes) for _ in traces]
        crossing: dict[int, list[list[Any]]] = {}
        for action in self.actions:
            for trace in traces:
                trace.act(action)
            if action not in self.completing:
                continue
            stage = action.stage
            sums = [trace.sums[stage] for trace in traces]
            if len(traces) == 1:
                gradients[0][stage] = self.nodes[0][stage].reduce(sums[0])
            else:
                crossing[stage] = [row[stage].reduce_scatter(own) for row, own in zip(self.nodes, sums, strict=True)]
        # After all actions: on a host, the nodes behind one that waits for another island wait too. The buckets
        # themselves have been on their way since their stage was complete.
        for stage, buckets in crossing.items():
            for group, own in enumerate(self._sum_over_islands(stage, buckets)):
                gradients[group][stage] = own
        for row, of_row in zip(self.nodes, gradients, strict=True):
            self._tie(row, of_row)
        return traces, gradients

    def _trace_of(self, group: int, state: State, numbers: Any, batch: Any, scale: Any) -> StepTrace:
        row, placement = self.nodes[group], self.schedule.placement
        return StepTrace(
            row,
            self._used(group, state),
            [{name: batch[placement[n.number]][name] for name in n.math.wanted} for n in row],
            scale,
            [numbers[device] for device in placement],
            self.fused_last_stage,
            self.keep_input,
        )

    def _sum_over_islands(self, stage: int, buckets: list[list[Any]]) -> list[Tree]:
        """Gradients of a stage for each group, from the buckets of each group."""
        summed = [
            self.nodes[c % len(buckets)][stage].cross_island_sum(list(same))
            for c, same in enumerate(zip(*buckets, strict=True))
        ]
        return [row[stage].all_gather(summed) for row in self.nodes]

    def _tie(self, row: list[StageNodes], gradients: list[Tree]) -> None:
        """Gives all stages that hold an array the sum of its gradients, added in the same order everywhere."""
        for path, stages in self.tied.items():
            parts = [_at(gradients[stage], path) for stage in stages]
            for stage in stages:
                total, add = parts[0], row[stage].add(_at(row[stage].shapes.master_specs, path))
                for part in parts[1:]:
                    total = add(total, part)
                gradients[stage] = _with(gradients[stage], path, total)

    def _loss(self, traces: list[StepTrace]) -> list[Any]:
        return [
            row[-1].total_loss()([each.losses[k] for k in range(self.sizes.microbatches)], each.scale)
            for row, each in zip(self.nodes, traces, strict=True)
        ]

    def _train(self, state: State, numbers: Numbers, batch: Any, scale: Any) -> tuple[State, dict[str, Any]]:
        traces, gradients = self._traced(state, numbers, batch, scale)
        return self.updated(state, gradients, self._loss(traces))

    def _train_on_the_way(self, state: State, numbers: Numbers, batch: Any, scale: Any) -> tuple[State, dict[str, Any]]:
        """Trains as `_train` does, with updates between the actions; norm and what was not finite are the last ones."""
        trace = self._trace_of(0, state, numbers[0], batch[0], scale[0])
        weights = stale.Versions(self.schedule, self.nodes[0], state.params[0], state.slots[0], trace.params)
        metrics = weights.train(trace, self.actions, lambda: self._loss([trace]))
        return State((tuple(weights.params),), (tuple(weights.slots),)), metrics

    def _differentiate(self, state: State, numbers: Numbers, batch: Any, scale: Any) -> tuple[Any, list[Tree]]:
        traces, gradients = self._traced(state, numbers, batch, scale)
        return self._sum_of_losses(self._loss(traces)), gradients[0]

    def _evaluate(self, state: State, numbers: Numbers, batch: Any, scale: Any) -> Any:
        made = []
        for group, row in enumerate(self.nodes):
            own = self._used(group, state)
            found = evaluation.losses(row, own, batch[group], numbers[group], self.schedule.placement)
            made.append(row[-1].total_loss()(found, scale[group]))
        return self._sum_of_losses(made)

    def _used(self, group: int, state: State) -> list[Tree]:
        """The parameters of each stage as forward and backward take them."""
        return [
            nodes.prepare(master) if nodes.copies_parameters else master
            for nodes, master in zip(self.nodes[group], state.params[group], strict=True)
        ]

    def _sum_of_losses(self, losses: list[Any]) -> Any:
        """The sum of the losses of all groups, on the first group's slice."""
        total, *others = losses
        for other in others:
            total = self.nodes[0][-1].add(P())(total, other)
        return total


def build_step(
    model: Model,
    optimizer: Optimizer,
    layout: Layout,
    schedule: Schedule,
    options: Options | None = None,
) -> Step:
    """The step for these; its program is traced and compiled at its first call.

    Args:
        model: as `models.interface` has it
        optimizer: makes the optax transformation of a tree of parameters, given which of them decay
        layout: of the model on slices
        schedule: of p devices, p·v stages and m microbatches
        options: see `Options`

    Raises:
        BadSizes: the schedule is for other sizes than the layout.
        ConfigError: an option cannot be, or does not fit the sizes.
    """
    options = options or Options()
    sizes = layout.sizes
    options.check(sizes)
    asked = (sizes.pipeline, sizes.stages, sizes.microbatches)
    if (schedule.devices, schedule.stages, schedule.microbatches) != asked:
        raise BadSizes(
            f"the schedule {schedule.name} has {schedule.devices} devices, {schedule.stages} stages and "
            f"{schedule.microbatches} microbatches, but the sizes have {asked[0]}, {asked[1]} and {asked[2]}"
        )
    return Step(model, optimizer, layout, schedule, options)


def _at(tree: Tree, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _with(tree: Tree, path: tuple[str, ...], value: Any) -> Tree:
    if not path:
        return value
    return {**tree, path[0]: _with(tree[path[0]], path[1:], value)}
