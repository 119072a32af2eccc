"""Options of a training step beside its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax

from megatron_ptdp.config.parallel import ZERO
from megatron_ptdp.errors import ConfigError
from megatron_ptdp.parallel.sizes import Sizes

Keep: TypeAlias = Literal["input", "residuals"]
"""Arrays that a forward keeps for its backward: the input of the stage, from which the backward computes all again; or
the residuals of autodiff, which is as much as the model's own recomputation leaves."""

_TYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Options:
    """Settings of the computation of a step.

    Attributes:
        clip: the largest global norm of the gradient; a larger one is scaled down to it. None: no clipping.
        zero: 0, replicas hold everything; 1, they share the optimizer state and the master parameters of an island;
            2, the sums of gradients too, which are then reduced with each microbatch; 3, the parameters too, gathered
            layer by layer for each use (only with one pipeline stage).
        scatter_gather: members of TENSOR that hold the same value each send a part of it to the next stage.
        keep: "residuals", or "input": a backward computes its whole forward again, whatever the model recomputes
            inside it, so with recompute "full" a layer's forward runs three times in a step, not two.
        join: on the last stage, a forward that is followed at once by its backward becomes one computation with it.
            Less is kept; but XLA rounds otherwise, so bits differ from schedules where another action stands between.
            A pipeline of one stage always does. Where the model recomputes "full", so do microbatches whose backward is
            one computation and comes before that of any later forward, also if other forwards stand between: all of
            gpipe, 1f1b and interleaved, some of dualpipe-v, the last of looped-bfs, none where all backwards are split.
        master: dtype of parameters, optimizer state and sums of gradients
        compute: dtype of the copy of the parameters that forward and backward use
        pieces: into how many pieces per island the gradients of a stage are cut to cross islands
    """

    clip: float | None = None
    zero: int = 0
    scatter_gather: bool = True
    keep: Keep = "residuals"
    join: bool = False
    master: str = "float32"
    compute: str = "float32"
    pieces: int = 1

    def check(self, sizes: Sizes) -> None:
        """Makes sure that the options can be, and fit the sizes.

        Raises:
            ConfigError: with the option and its value.
        """
        if self.zero not in ZERO:
            raise ConfigError(f"zero is 0, 1, 2 or 3, not {self.zero!r}")
        if self.zero == 3 and sizes.stages > 1:
            raise ConfigError(
                f"zero 3 gathers the parameters for each use, which is for one stage; here are pipeline "
                f"{sizes.pipeline} × chunks {sizes.chunks}. Use zero 2 or less, or pipeline 1"
            )
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip is a norm above 0, or None, not {self.clip!r}")
        if self.keep not in ("input", "residuals"):
            raise ConfigError(f"keep is 'input' or 'residuals', not {self.keep!r}")
        if isinstance(self.pieces, bool) or not isinstance(self.pieces, int) or self.pieces < 1:
            raise ConfigError(f"pieces is a whole number of at least 1, not {self.pieces!r}")
        for name, dtype in (("master", self.master), ("compute", self.compute)):
            if dtype not in _TYPES:
                raise ConfigError(f"{name} is one of {', '.join(_TYPES)}, not {dtype!r}")
        if "float64" in (self.master, self.compute) and not jax.config.read("jax_enable_x64"):
            raise ConfigError("float64 needs jax.config.update('jax_enable_x64', True) before the first array is made")
