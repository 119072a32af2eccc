"""Placing arrays: `pw.put`, `jax.device_put` on a slice's sharding, and moving what lies on another slice."""

from __future__ import annotations

import weakref
from typing import Any

import jax
from jax.sharding import NamedSharding

from pathways_ray.client import context, leaves
from pathways_ray.client.array import Array
from pathways_ray.client.compiled import compiled
from pathways_ray.client.slices import VirtualSlice, slice_of
from pathways_ray.client.specs import broadcast_specs, ranks_of, spec_from_user
from pathways_ray.errors import InvalidArray, SpecError, TraceError, UsageError
from pathways_ray.ir.types import Spec
from pathways_ray.jax_types import partition_spec

Target = tuple[VirtualSlice, Spec]
"""Where an array is placed."""

_moves: weakref.WeakKeyDictionary[VirtualSlice, dict[Spec, Any]] = weakref.WeakKeyDictionary()
"""For each slice and spec the function that takes arrays there."""


def put(value: Any, slice: Any = None, spec: Any = None) -> Any:
    """Places an array (or every array of a pytree) on a slice once, to be used by many launches.

        state = pw.put(state, slice, P("x"))
        state = pw.put(state, NamedSharding(slice.mesh, P("x")))

    An array that lies on another slice of the session, or in another layout, moves from device to device.

    Args:
        slice: a `pw.VirtualSlice`; left out, the default slice: all devices of one island. Or a `NamedSharding` over
            the mesh of a slice, or a pytree prefix of them; then there is no `spec`.
        spec: a `PartitionSpec`, or a pytree prefix of them; None is replicated.

    Returns:
        A `pw.Array` for every leaf, usable at once.

    Raises:
        InvalidArray: a leaf is no array. SpecError: the spec does not fit. Both name the leaf.
    """
    found, tree = jax.tree.flatten(value)
    places = targets(value, found, slice, spec)
    arrays = []
    for number, (leaf, (where, layout)) in enumerate(zip(found, places, strict=True)):
        try:
            arrays.append(put_at(leaf, where, layout))
        except (InvalidArray, SpecError) as error:
            at = leaves.path(value, number)
            if not at:
                raise
            raise leaves.named(error, f"leaf {at}") from None
    return jax.tree.unflatten(tree, arrays)


def put_at(value: Any, where: VirtualSlice, spec: Spec) -> Any:
    """Places one array: uploads it from here, or moves it from where it lies."""
    if isinstance(value, jax.core.Tracer):
        raise TraceError(f"pw.put places a value, and {value} has none yet: call a function on {where} instead")
    if not isinstance(value, Array):
        return where.session.put(value, where, spec)
    value._check_not_deleted()
    if value._type.slice is where and value._type.spec == spec:
        return value.__copy__()
    owner: Any = value._buffer.session
    if owner is not where.session:
        return where.session.put(value, where, spec)  # sessions share no arrays: through this process
    moves = _moves.setdefault(where, {})
    if spec not in moves:
        layout = partition_spec(spec)
        moves[spec] = compiled(_same, slice=where, in_specs=layout, out_specs=layout)
    return moves[spec](value)


def _same(array: Any) -> Any:
    return array


def targets(value: Any, found: list[Any], slice: Any, spec: Any) -> list[Target]:
    """The target of each leaf."""
    if slice is None or isinstance(slice, VirtualSlice):
        if isinstance(spec, NamedSharding):
            if slice not in (None, slice_of_sharding(spec)):
                raise UsageError(f"the array is to be put on {slice}, and {spec} is over another slice")
            slice, spec = spec, None
        else:
            where = slice if slice is not None else context.current_session().default_slice()
            return [(where, s) for s in broadcast_specs(spec, value, where.axes, "spec", ranks_of(found))]
    shardings = jax.tree.leaves(slice)
    if not shardings or not all(isinstance(one, NamedSharding) for one in shardings):
        raise UsageError(
            f"slice= takes what pw.virtual_slice returns, or NamedSharding(slice.mesh, spec), not {slice!r}"
        )
    if spec is not None:
        raise UsageError("a NamedSharding has a spec: leave spec= out")
    try:
        full = jax.tree.leaves(jax.tree.broadcast(slice, value))
    except ValueError as error:
        raise SpecError(f"the shardings are no pytree prefix of the value: {error}") from None
    targets = []
    for sharding, rank in zip(full, ranks_of(found), strict=True):
        where = slice_of_sharding(sharding)
        targets.append((where, spec_from_user(sharding.spec, where.axes, rank)))
    return targets


def slice_of_sharding(sharding: NamedSharding) -> VirtualSlice:
    """The slice of a sharding.

    Raises:
        UsageError: it is over another mesh.
    """
    found = slice_of(sharding.mesh)
    if found is None:
        raise UsageError(
            f"{sharding} is over a mesh of no slice; write NamedSharding(slice.mesh, spec) with a pw.virtual_slice"
        )
    return found
