"""The compiled functions of one stage on one slice: what becomes the nodes of a step's program."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from megatron_ptdp.models.interface import Tree
from megatron_ptdp.parallel.reduce import PIECE_SPEC, Reduction
from megatron_ptdp.parallel.stage import StageMath
from megatron_ptdp.parallel.two_parts import TwoParts
from megatron_ptdp.parallel.update import Update, decide


class StageNodes:
    """One stage of one group of replicas. Names of functions show in timelines and plans: stage3_forward."""

    def __init__(
        self, number: int, slice: pw.VirtualSlice, math: StageMath, reduction: Reduction, update: Update
    ) -> None:
        self.number, self.slice, self.math, self.shapes = number, slice, math, math.shapes
        self.reduction, self.update = reduction, update
        shapes = self.shapes
        master, sums = shapes.master_specs, shapes.sum_specs
        compute = math.compute

        self.copies_parameters = math.used != math.master or shapes.zero in (1, 2)
        self.prepare = self._compiled(
            "parameters",
            lambda params: jax.tree.map(lambda array: array.astype(compute), params),
            (master,),
            shapes.used_specs,
        )
        self.zeros = self._compiled("zeros", lambda: shapes.zeros(math.master), (), sums)
        out = math.loss_spec if shapes.stage.scores else shapes.outgoing_wires
        self.forward = self._compiled(
            "forward",
            math.forward,
            (shapes.used_specs, shapes.wires, math.batch_specs(), P()),
            (out, math.kept_specs()),
        )
        self.passed = self._compiled(
            "evaluation", math.passed, (shapes.used_specs, shapes.wires, math.batch_specs(), P()), out
        )
        self._backwards: dict[tuple[bool, bool, bool], Any] = {}
        self.reduce = self._compiled("reduce", reduction.inside, (sums,), master, donate=(0,))
        pieces = [PIECE_SPEC] * reduction.pieces
        self.leave = self._compiled("leave", reduction.leave, (sums,), pieces, donate=(0,))
        self.meet = self._compiled("meet", reduction.meet, ([PIECE_SPEC] * reduction.islands,), PIECE_SPEC)
        self.arrive = self._compiled("arrive", reduction.arrive, (pieces,), master)
        slots = update.slot_specs
        self.norm = self._compiled("norm", update.norm, (master,), (P(), P()))
        self.apply = self._compiled(
            "update", update.apply, (master, slots, master, P(), P()), (master, slots), donate=(0, 1, 2)
        )
        self.begin = self._compiled("begin", update.begin, (master,), slots)
        self.copy = self._compiled(
            "copy", lambda params, slots: jax.tree.map(jnp.copy, (params, slots)), (master, slots), (master, slots)
        )

    def backward(self, again: bool, weights: bool, inputs: bool) -> Any:
        """As `StageMath.backward`. Sums are donated; what was kept too, if nobody takes it after this."""
        key = (again, weights, inputs)
        if key not in self._backwards:
            math, shapes = self.math, self.shapes
            name = "backward" if weights and inputs else "input_gradient" if inputs else "weight_gradient"
            loss = again and shapes.stage.scores and inputs
            self._backwards[key] = self._compiled(
                name,
                math.backward(again, weights, inputs),
                (
                    shapes.used_specs,
                    shapes.wires,
                    [] if again else math.kept_specs(),
                    math.batch_specs() if again else {},
                    P() if again else (),
                    math.upstream_specs(wires=True),
                    shapes.sum_specs if weights else {},
                ),
                (
                    shapes.sum_specs if weights else {},
                    math.gradient_specs(shapes.values, shapes.wires) if inputs else [],
                    math.loss_spec if loss else (),
                ),
                donate=(2, 6) if weights else (6,),
            )
        return self._backwards[key]

    @cached_property
    def parts(self) -> TwoParts:
        """The halves of the backward, traced when a schedule has them."""
        return TwoParts(self.math)

    @cached_property
    def first_part(self) -> Any:
        """I, as `TwoParts.first`. What W does not take is donated."""
        math, shapes, kept = self.math, self.shapes, self.math.kept_specs()
        return self._compiled(
            "input_gradient",
            self.parts.first(),
            (
                shapes.used_specs,
                shapes.wires,
                [kept[k] for k in self.parts.early],
                [kept[k] for k in self.parts.late],
                math.upstream_specs(wires=True),
            ),
            (math.gradient_specs(shapes.values, shapes.wires), self.parts.tap_specs()),
            donate=(2,),
        )

    @cached_property
    def second_part(self) -> Any:
        """W, as `TwoParts.second`. Sums, taps and what was kept are donated."""
        math, shapes, kept = self.math, self.shapes, self.math.kept_specs()
        return self._compiled(
            "weight_gradient",
            self.parts.second(),
            (
                shapes.used_specs,
                shapes.wires,
                [kept[k] for k in self.parts.late],
                math.upstream_specs(wires=True),
                self.parts.tap_specs(),
                shapes.sum_specs,
            ),
            shapes.sum_specs,
            donate=(2, 4, 5),
        )

    def add(self, spec: P) -> Any:
        """The sum of two arrays that lie so."""
        return self._compiled("add", lambda a, b: a + b, (spec, spec), spec)

    def total_loss(self) -> Any:
        """From the losses of all microbatches in their order, [members] each, and the scale: the loss."""
        return self._compiled(
            "loss", lambda losses, scale: jnp.sum(jnp.stack(losses)) * scale.astype(losses[0].dtype), (P(), P()), P()
        )

    def decide(self, clip: float | None) -> Any:
        """`update.decide`, here for all stages."""
        return self._compiled("decide", lambda losses, squares, bad: decide(losses, squares, bad, clip), None, None)

    def _compiled(
        self, what: str, function: Callable[..., Any], inputs: Any, outputs: Any, donate: tuple[int, ...] = ()
    ) -> Any:
        if self.math.mistakes:
            donate = ()  # some mistakes take an array a second time

        def run(*arguments: Tree) -> Any:
            return function(*arguments)

        run.__name__ = f"stage{self.number}_{what}"
        return pw.compiled(run, slice=self.slice, in_specs=inputs, out_specs=outputs, donate_argnums=donate)
