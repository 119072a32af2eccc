"""Copies of what a program computes once and returns twice, and of constants that it returns: each result of each call
is an array of its own, as of `jax.jit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pathways_ray.client.export import Exported
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.ir.graph import Ref
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.jax_types import dtype_named


def apart(builder: Any, outputs: Sequence[Any]) -> list[Any]:
    """The outputs of a program of a `GraphBuilder`, where a computed value that comes again is a copy, and a constant,
    which the program keeps for its calls."""
    seen: set[Ref] = set()
    found: list[Any] = []
    for value in outputs:
        ref, is_given, is_constant = value.ref, value.leaf >= 0 or value.array is not None, value.constant is not None
        if ref in seen or is_constant:
            array, (where, spec) = builder.type_of(value), builder.layout_of(value) or (builder.default_slice(), ())
            (value,) = builder.node(_copy(builder, array, where, spec), where, [value], "")
        elif ref is not None and not is_given:
            seen.add(ref)
        found.append(value)
    return found


def _copy(builder: Any, array: ArrayType, where: VirtualSlice, spec: Spec) -> Exported:
    """The function that copies such a value; exported once in a trace, as its operations are."""
    key = ("copy", array, spec, where.shape, where.axes)
    found = builder.operations.get(key)
    if found is None:
        aval = jax.ShapeDtypeStruct(array.shape, dtype_named(array.dtype))
        with jax.enable_x64(True):  # 64 bits stay so
            made = builder.export(
                "copy", lambda v: [jnp.copy(v)], [aval], [spec], lambda _: [spec], where, builder.session.platforms
            )
        found = builder.operations[key] = made.without_function()
    return found
