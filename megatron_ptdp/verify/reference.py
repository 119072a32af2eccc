"""Results of one device: the other side of all comparisons.

Loss and gradients come from `models.reference`, which shares no code with the parallel models, in float64 always and
under plain `jax.value_and_grad`; training from plain optax on top of it. Nothing here has meshes or stages.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import optax

from megatron_ptdp.models import build, whole
from megatron_ptdp.models.interface import Tree
from megatron_ptdp.models.reference import reference_loss
from megatron_ptdp.verify import models

STEPS = 5
"""Steps of a training that is compared."""

CLIP = 0.2
"""Its largest norm of the gradient: less than every norm that there is, so that all steps are clipped."""

RATE, DECAY = 1e-2, 0.1

_AS_WRITTEN = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options: compiling takes most of the time here, and a reference is best compiled as it is written."""


def optimizer(decay: Tree) -> optax.GradientTransformation:
    """AdamW; `decay` says which parameters decay."""
    return optax.adamw(RATE, weight_decay=DECAY, mask=decay)


@cache
def _function(name: str) -> Any:
    config = models.CONFIGS[name]

    def mean(tree: Tree, batch: Any) -> Any:
        return reference_loss(config, tree, batch) / batch["weights"].astype("float64").sum()

    return jax.jit(jax.value_and_grad(mean), compiler_options=_AS_WRITTEN)


def _differentiated(name: str, tree: Tree, batch: Any) -> tuple[Any, Tree]:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.device_get(_function(name)(tree, batch))


def _wide(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@cache
def gradients(name: str, dtype: str) -> tuple[float, Tree]:
    """Loss per token and its gradient of a model whose parameters were rounded to `dtype`."""
    loss, tree = _differentiated(name, _wide(models.parameters(name, dtype)), models.batch(name))
    return float(loss), tree


@cache
def trained(name: str) -> dict[str, Any]:
    """Results of `STEPS` steps: {"params": whole tree, "losses": [steps], "norms": [steps], before clipping}."""
    model = build(models.CONFIGS[name])
    decay = jax.tree.map(lambda parameter: parameter.decay, model.parameters(whole(model)))
    transform = optax.chain(optax.clip_by_global_norm(CLIP), optimizer(decay))
    apply = jax.jit(_applied(transform), compiler_options=_AS_WRITTEN)
    params = _wide(models.parameters(name, "float64"))
    slots = transform.init(params)
    losses, norms = [], []
    for step in range(STEPS):
        loss, found = _differentiated(name, params, models.batch(name, step))
        losses.append(float(loss))
        params, slots, norm = apply(params, slots, found)
        norms.append(float(norm))
    return {"params": jax.device_get(params), "losses": losses, "norms": norms}


def _applied(transform: optax.GradientTransformation) -> Any:
    def apply(params: Tree, slots: Any, found: Tree) -> tuple[Tree, Any, Any]:
        updates, after = transform.update(found, slots, params)
        return optax.apply_updates(params, updates), after, optax.global_norm(found)

    return apply
