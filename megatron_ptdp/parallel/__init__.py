"""The training step: pipeline, tensor and data parallel, as one program of the runtime per step.

    sizes = Sizes(pipeline=2, tensor=2, data=2, microbatches=4, examples=2)
    layout = Layout.of(model, sizes)                             # splits the model into stages, takes the slices
    schedule = schedules.build("1f1b", sizes.pipeline, sizes.microbatches)
    step = build_step(model, lambda decay: optax.adamw(1e-3, mask=decay), layout, schedule, Options(clip=1.0))

    state = step.initial(whole)                                  # whole: NumPy parameters of the whole model
    state, metrics = step(state, batch)                          # the state is donated, the metrics are futures
    float(metrics["loss"])                                       # waits

Terms:

- The batch is a dict of NumPy arrays of `sizes.batch` examples. Example e belongs to microbatch e // (b·d), and there
  to replica e % (b·d) // b.
- `optimizer` makes an optax transformation for a tree of parameters; its argument is the tree of booleans that says
  which of them decay (`Parameter.decay`). It must work element by element; the global norm is clipped by
  `Options.clip`. Learning rates follow the count in optax's own state.
- A `State` is a pytree of `pw.Array`s. `step` donates it: use what it returns. `step.snapshot(state)` is a copy to be
  read (`step.gather`) while training goes on.
- `step.gather(state)` is the canonical whole state, the same for all sizes: {"params": tree, "slots": {name: tree},
  "counts": {name: array}}, all NumPy; `slots` are the optimizer's arrays of each parameter (Adam's mu and nu).
  `step.place(whole)` is the inverse, under any sizes.
- `metrics`: "loss" in nats per token, "norm" (of the whole gradient, before clipping), "applied" (False: something was
  not finite, and the state is what it was), "bad" (for each stage, how many values of each parameter's gradient are not
  finite). `step.first_bad(metrics)` names the first one.
- `step.gradients(state, batch)` is (loss, whole NumPy gradients), for verification.

`explain` shows the bytes that move between stages.
"""

from megatron_ptdp.parallel.layer_split import cut
from megatron_ptdp.parallel.layout import Layout, Placement
from megatron_ptdp.parallel.options import Keep, Options
from megatron_ptdp.parallel.sizes import Sizes
from megatron_ptdp.parallel.step import Step, build_step
from megatron_ptdp.parallel.step_state import State
from megatron_ptdp.parallel.update import Optimizer

__all__ = [
    "Keep",
    "Layout",
    "Optimizer",
    "Options",
    "Placement",
    "Sizes",
    "State",
    "Step",
    "build_step",
    "cut",
]
