"""Compiling ahead: `pw.warmup`, for types that are known before the values, and `pw.like`, which names such types."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from pathways_ray.client.array import Array
from pathways_ray.client.buffer import DELETED, Buffer, BufferRecord
from pathways_ray.client.compiled import CompiledFunction
from pathways_ray.client.orbax_arrays import register
from pathways_ray.client.padding import Padded
from pathways_ray.client.placement import targets
from pathways_ray.client.program import Program
from pathways_ray.client.registered import type_of
from pathways_ray.errors import InvalidArray, UsageError
from pathways_ray.jax_types import partition_spec

_JITTED = type(jax.jit(lambda: 0))


def warmup(fun: Any, *calls: tuple[Any, ...]) -> None:
    """Traces and compiles a function for the arguments of calls to come, and waits until hosts have compiled it.

        pw.warmup(serve, *((params, jax.ShapeDtypeStruct((n, 64), np.float32)) for n in (1, 8, 32)))

    Nothing is launched. The first call of each kind is then like a later one.

    Args:
        fun: a `pw.program`, `pw.compiled`, `pw.jit` or `jax.jit` function, or a `pw.padded` of one: then of each call
            all its sizes.
        calls: for each, a tuple of positional arguments: values, or `jax.ShapeDtypeStruct`s for what will come from
            this process, or what `pw.like` gives for arrays that will lie on a slice.

    Raises:
        UsageError: `fun` is another thing, or a call is no tuple.
        CompileError: it cannot be compiled.
    """
    for call in calls:
        if not isinstance(call, tuple):
            raise UsageError(f"each call of pw.warmup is a tuple of arguments, not {call!r}")
    if isinstance(fun, Padded):
        fun, calls = fun.fun, tuple(one for call in calls for one in fun.calls(call))
    if isinstance(fun, _JITTED):
        for jitted in [fun.lower(*jax.tree.map(_stand_in, call)) for call in calls]:
            jitted.compile()
        return
    if not isinstance(fun, Program | CompiledFunction):
        raise UsageError(f"pw.warmup takes a pw.program, pw.compiled or pw.jit function, not {fun!r}")
    prepared = []
    for call in calls:
        program, dynamic = fun.alone(call) if isinstance(fun, CompiledFunction) else (fun, call)
        prepared.append(program.prepared(dynamic))
    for lowered in prepared:  # all are on their way before the first is waited for
        lowered.register()
    for lowered in prepared:
        lowered.wait_compiled()


def _stand_in(leaf: Any) -> Any:
    """An array in place of the type of one that will lie on a slice: JAX traces for it as for the array to come."""
    if not isinstance(leaf, jax.ShapeDtypeStruct) or not isinstance(leaf.sharding, NamedSharding):
        return leaf
    kind = type_of(leaf)
    if kind.slice is None:
        return leaf
    session: Any = kind.slice.session
    return Array(Buffer(session, BufferRecord(-1, DELETED)), kind)


def like(tree: Any, slice: Any = None, spec: Any = None) -> Any:
    """The types of arrays like those of a tree, that will lie as `pw.put(tree, slice, spec)` has them.

    For `pw.warmup`, and for what restores arrays by their types and shardings.

        state = orbax.checkpoint.StandardCheckpointer().restore(path, pw.like(state, slice, P("x")))

    Args:
        tree: of arrays or `jax.ShapeDtypeStruct`s.
        slice: and `spec`: as in `pw.put`. Both left out, `pw.Array`s keep their own.

    Raises:
        InvalidArray: a leaf has no shape. SpecError: the spec does not fit.
    """
    register()
    leaves, treedef = jax.tree.flatten(tree)
    for leaf in leaves:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise InvalidArray(f"pw.like takes a tree of arrays, or of jax.ShapeDtypeStruct; a leaf is {leaf!r}")
    if slice is None and spec is None:
        shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    else:
        shardings = [NamedSharding(s.mesh, partition_spec(p)) for s, p in targets(tree, leaves, slice, spec)]
    types = [
        jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=sharding if isinstance(sharding, NamedSharding) else None,
            weak_type=bool(getattr(leaf, "weak_type", False)),
        )
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(treedef, types)
