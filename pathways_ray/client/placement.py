"""Placing arrays: `pw.put`, `jax.device_put` on a slice's sharding; and `pw.reshard`, which moves them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from pathways_ray import limits
from pathways_ray.client import context, leaves, prng
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.array import Array
from pathways_ray.client.compiled import CompiledFunction
from pathways_ray.client.context import tracing
from pathways_ray.client.export import Exported
from pathways_ray.client.program import LoweredProgram, Program
from pathways_ray.client.session import Session
from pathways_ray.client.slices import SliceOwner, VirtualSlice, slice_of
from pathways_ray.client.specs import broadcast_specs, ranks_of, spec_from_user, warn_of_memory
from pathways_ray.errors import InvalidArray, SpecError, TraceError, UsageError
from pathways_ray.ir.types import ArrayType, Spec, check_layout
from pathways_ray.jax_types import array_type, partition_spec

Target = tuple[VirtualSlice, Spec]
"""Where an array is placed."""

MAX_MOVED = 1024
"""Arrays that move by one launch: a graph has room for some four times as many."""

_check_once = functools.lru_cache(maxsize=1024)(check_layout)
"""The leaves of a tree are often alike, and move each turn."""


class _MoveAlone(Program):
    """The program of a move outside of programs. Nothing is computed: 64 bits stay so, whatever JAX is set to, and its
    traces are not counted, for the user has no function that could be padded."""

    def _lower(self, session: Session, tree: Any, kinds: list[ArgumentType], noted: bool = False) -> LoweredProgram:
        with jax.enable_x64(True):
            return super()._lower(session, tree, kinds)


class Move(CompiledFunction):
    """Takes any arrays to layouts on a slice: a function that gives what it takes, and becomes transfers in a graph."""

    _program_kind = _MoveAlone

    def __init__(self, slice: VirtualSlice, specs: tuple[Spec, ...]) -> None:
        layouts = tuple(map(partition_spec, specs))
        super().__init__(_reshard, slice, layouts, layouts, (), ())
        self.__name__ = "reshard"

    def _export(self, *arguments: Any) -> Exported:
        with jax.debug_nans(False), jax.debug_infs(False):  # nothing is computed that one could look at
            return replace(super()._export(*arguments), moves=True)


def _reshard(*arrays: Any) -> tuple[Any, ...]:
    return arrays


def _move(where: VirtualSlice, specs: tuple[Spec, ...]) -> Move:
    found: Move | None = where.functions.get(("move", specs))
    if found is None:
        found = where.functions["move", specs] = Move(where, specs)
    return found


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
    for leaf, (where, _) in zip(found, places, strict=True):
        _check_is_value(leaf, where)
    return jax.tree.unflatten(tree, _placed(value, found, places))


def reshard(tree: Any, slice: Any = None, spec: Any = None) -> Any:
    """Moves the arrays of a pytree to other layouts in one call: inside programs, and outside as one launch.

        weights = pw.reshard(weights, sampler, P())

    What leaves one slice for another travels together, small pieces as one array, so a tree of many leaves costs about
    what one array of its bytes does. Each array comes straight from where it was made. A derivative lies in the new
    layout.

    Args:
        tree: arrays on any slices of the session. Outside of programs arrays of this process are uploaded.
        slice, spec: as in `pw.put`.

    Returns:
        The same tree: of `pw.Array`s, or in a program of values of the trace.

    Raises:
        InvalidArray: a leaf is no array. SpecError: the spec does not fit. Both name the leaf.
    """
    found, structure = jax.tree.flatten(tree)
    places = targets(tree, found, slice, spec)
    if tracing.session is None and not any(isinstance(leaf, jax.core.Tracer) for leaf in found):
        return jax.tree.unflatten(structure, _placed(tree, found, places))
    for number, (leaf, (where, layout)) in enumerate(zip(found, places, strict=True)):
        if isinstance(leaf, jax.core.Tracer | Array):
            _check_layout(tree, number, array_type(prng.data_type(leaf.aval)), where, layout)
    return jax.tree.unflatten(structure, _moved(found, places))


def put_at(value: Any, where: VirtualSlice, spec: Spec) -> Array:
    """Places one array, as `put_all_at` does."""
    return put_all_at([value], [(where, spec)])[0]


def put_all_at(values: Sequence[Any], places: Sequence[Target]) -> list[Array]:
    """Places arrays: uploads them from here, or moves them from where they lie."""
    for value, (where, _) in zip(values, places, strict=True):
        _check_is_value(value, where)
    return _placed(None, values, places)


def _check_is_value(leaf: Any, where: VirtualSlice) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise TraceError(f"pw.put places a value, and {leaf} has none yet: use pw.reshard, or a function on {where}")


def _placed(tree: Any, found: Sequence[Any], places: Sequence[Target]) -> list[Array]:
    """The leaves of a tree, which may be unknown (None), at their places. Those that move leave in one launch for each
    slice that they go to."""
    made: dict[int, Array] = {}
    uploads: dict[SliceOwner, dict[int, Any]] = {}
    for number, (leaf, (where, spec)) in enumerate(zip(found, places, strict=True)):
        if isinstance(leaf, Array):
            leaf._check_not_deleted()
            kind = leaf._type
            _check_layout(tree, number, kind.array, where, spec)
            if kind.slice is where and kind.spec == spec:
                made[number] = leaf._alias()
            owner: Any = leaf._buffer.session
            if owner is where.session:
                continue
        try:  # sessions share no arrays: through this process
            given = where.session.to_put(leaf, where, spec)
        except (InvalidArray, SpecError) as error:
            raise _about_leaf(error, tree, number) from None
        if given[0].nbytes > limits.MAX_WHOLE_BYTES:  # at once: all of them together may not fit into this process
            (made[number],) = where.session.upload_all([given])
        else:
            uploads.setdefault(where.session, {})[number] = given
    for session, small in uploads.items():
        made.update(zip(small, session.upload_all([*small.values()], alone=len(found) == 1), strict=True))
    if not made:
        return _moved(found, places)
    left = [number for number in range(len(found)) if number not in made]
    moved = _moved([found[number] for number in left], [places[number] for number in left])
    made.update(zip(left, moved, strict=True))
    return [made[number] for number in range(len(found))]


def _moved(found: Sequence[Any], places: Sequence[Target]) -> list[Any]:
    """Arrays at their places, by one call for each slice, or several for very many. One that has failed goes by itself,
    and takes no other with it."""
    groups: dict[tuple[VirtualSlice, int], list[int]] = {}
    for number, (leaf, (where, _)) in enumerate(zip(found, places, strict=True)):
        has_failed = isinstance(leaf, Array) and leaf._buffer.record.failure is not None
        groups.setdefault((where, number + 1 if has_failed else 0), []).append(number)
    made: dict[int, Any] = {}
    for (where, _), group in groups.items():
        for first in range(0, len(group), MAX_MOVED):
            numbers = group[first : first + MAX_MOVED]
            move = _move(where, tuple(places[number][1] for number in numbers))
            made.update(zip(numbers, move(*(found[number] for number in numbers)), strict=True))
    return [made[number] for number in range(len(found))]


def _check_layout(tree: Any, number: int, kind: ArrayType, where: VirtualSlice, spec: Spec) -> None:
    try:
        _check_once(kind, spec, where.type, "reshard")
    except SpecError as error:
        raise _about_leaf(error, tree, number) from None


def _about_leaf(error: Any, tree: Any, number: int) -> Any:
    """The error, with the path of the leaf in the tree, where that is known."""
    at = leaves.path(tree, number) if tree is not None else ""
    return leaves.named(error, f"leaf {at}") if at else error


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
        warn_of_memory(sharding)
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
