"""Checkpoints by Orbax of trees with arrays on slices: `StandardCheckpointer().save(path, state)`, and restoring them.

Orbax looks up by type who writes and reads a leaf. The entry of `jax.Array` is replaced by one that knows arrays on
slices (`orbax_handler`), and leaves all others to Orbax. A checkpoint is like any other: plain JAX reads it, and the
other way round.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import jax

_registered: list[Any] = []


def register() -> None:
    """Has Orbax take arrays on slices, where the program has loaded Orbax."""
    if _registered or "orbax.checkpoint" not in sys.modules:
        return
    from orbax.checkpoint import type_handlers

    from pathways_ray.client.orbax_handler import Handler

    handler = Handler()
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)  # it would warn of the entry that is replaced
    try:
        type_handlers.register_type_handler(jax.Array, handler, override=True)
    finally:
        log.setLevel(before)
    _registered.append(handler)
