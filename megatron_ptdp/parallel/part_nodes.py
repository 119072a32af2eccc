"""The compiled functions that update one part of a model on its slice: the norm, the decision, the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from megatron_ptdp.parallel.stage_specs import Signature
from megatron_ptdp.parallel.update import PartShapes, Update, decide


class PartNodes:
    """One part of one group of replicas. Names of functions show in timelines and plans: stage3_update."""

    def __init__(self, number: int, slice: pw.VirtualSlice, shapes: PartShapes, update: Update) -> None:
        self.number, self.slice, self.part, self.update = number, slice, shapes, update
        master, slots = shapes.master_specs, update.slot_specs
        self.norm = self._compiled("norm", update.norm, Signature((master,), (P(), P())))
        self.apply = self._compiled(
            "update",
            update.apply,
            Signature((master, slots, master, P(), P()), (master, slots)),
            donate=(0, 1, 2),
        )
        self.begin = self._compiled("begin", update.begin, Signature((master,), slots))
        self.copy = self._compiled(
            "copy",
            lambda params, slots: jax.tree.map(jnp.copy, (params, slots)),
            Signature((master, slots), (master, slots)),
        )

    @cached_property
    def renew(self) -> Any:
        """The update, which leaves the parameters before it: backwards may still need them."""
        master, slots = self.part.master_specs, self.update.slot_specs
        signature = Signature((master, slots, master, P(), P()), (master, slots))
        return self._compiled("update", self.update.apply, signature, donate=(1, 2))

    def decide(self, clip: float | None) -> Any:
        """`update.decide` for all parts, on this one's slice."""
        return self._compiled(
            "decide", lambda losses, squares, bad: decide(losses, squares, bad, clip), Signature(None, None)
        )

    @cached_property
    def total(self) -> Any:
        """The sum of losses, or of other arrays of one shape, on this part's slice."""
        return self._compiled("total", lambda arrays: sum(arrays[1:], start=arrays[0]), Signature(None, None))

    def _compiled(
        self, what: str, function: Callable[..., Any], signature: Signature, donate: tuple[int, ...] = ()
    ) -> Any:
        return pw.compiled(
            named(f"stage{self.number}_{what}", function),
            slice=self.slice,
            in_specs=signature.inputs,
            out_specs=signature.output,
            donate_argnums=donate,
        )


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a name, as timelines and plans show it."""

    def run(*arguments: Any) -> Any:
        return function(*arguments)

    run.__name__ = name
    return run
