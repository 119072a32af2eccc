"""Mutable arrays of JAX, `jax.Ref`s. They are of this process; a function on a slice may make some for its own use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import jax

from pathways_ray import jax_refs
from pathways_ray.errors import TraceError, UsageError

_INSTEAD = "take and return arrays (x = x.at[i].set(v)), or make the Ref inside of a jitted function"

Ref: Any = jax.Ref
"""The class of those that are there, outside of traces."""


def check_own(name: str, effects: Iterable[Any]) -> None:
    """Raises `TraceError` where a function reads or writes a `jax.Ref` that it has not made."""
    if jax_refs.uses_outer(effects):
        raise TraceError(
            f"{name} reads or writes a jax.Ref that it has not made, which is of this process and not on a slice: "
            f"{_INSTEAD}"
        )


def refuse_start(value: Any) -> NoReturn:
    """Raises the error for a `jax.Ref` that is to start as an array on a slice."""
    raise UsageError(f"a jax.Ref is of this process, and {value!r} lies on a slice: {_INSTEAD}")


def refuse_use(aval: Any) -> NoReturn:
    """Raises the error for a `jax.Ref` beside arrays on slices."""
    raise UsageError(f"a jax.Ref, {aval}, is of this process, and is used with what is on a slice: {_INSTEAD}")
