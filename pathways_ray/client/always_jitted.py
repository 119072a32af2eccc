"""Functions that this package jits, under `jax.disable_jit` too.

There JAX would call them with the arrays themselves, and what they do to those would call them again, for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from pathways_ray import jax_hooks

_DISABLED = jax_hooks.setting("jax_disable_jit")


def always_jitted(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit(fun, **options)`, which is one operation whatever the user has set."""
    jitted = jax.jit(fun, **options)

    @functools.wraps(fun)
    def call(*arguments: Any) -> Any:
        if not _DISABLED.value:  # looked at first: to set it takes ten times as long
            return jitted(*arguments)
        with jax.disable_jit(False):
            return jitted(*arguments)

    return call
