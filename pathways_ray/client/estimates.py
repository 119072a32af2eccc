"""An estimate of the time that a function takes on its devices, to decide how much may run as one computation.

No tenant is charged by it, and no plan of time rests on it (`megatron_ptdp.planner` is for that): it separates a matrix
product of milliseconds from an addition. Rates are those of a modest device of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pathways_ray.client.jaxprs import inner_jaxprs


class Rate(NamedTuple):
    """Floating-point operations and bytes a second of one device."""

    operations: float
    bytes: float


class Work(NamedTuple):
    """Floating-point operations, and bytes that operations take and make, of all devices together."""

    operations: float
    bytes: float

    def __add__(self, other: Any) -> Work:
        return Work(self.operations + other.operations, self.bytes + other.bytes)


NO_WORK = Work(0.0, 0.0)

HOST = Rate(1e10, 5e9)
"""A CPU device: some cores of a server among several."""

ACCELERATOR = Rate(5e13, 5e11)

COLLECTIVE_S = 20e-6
"""The time that devices of one island take to meet."""

_COLLECTIVES = ("psum", "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "pbroadcast", "reduce_scatter")

_CUBIC = ("cholesky", "eig", "eigh", "svd", "qr", "geqrf", "lu", "schur", "hessenberg", "triangular_solve")
"""Operations that take a size's third power: as many products for each element as the longest side is."""


_MOVING = (
    "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "dynamic_slice",
    "dynamic_update_slice", "gather", "iota", "optimization_barrier", "pad", "reshape", "rev", "select_n",
    "sharding_constraint", "slice", "squeeze", "transpose",
)  # fmt: skip
"""Operations that compute nothing."""


def seconds(jaxpr: Any, devices: int, platforms: Sequence[str]) -> float:
    """Seconds of a traced function on `devices` devices of the slowest of the platforms; infinite where a loop has no
    length that is known beforehand."""
    return _of(jaxpr, devices, HOST if "cpu" in platforms else ACCELERATOR)


def _of(jaxpr: Any, share: int, rate: Rate) -> float:
    """Args: share: how many devices the shapes in the jaxpr are of; 1 inside shard_map."""
    return sum(_of_equation(equation, share, rate) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _of_equation(equation: Any, share: int, rate: Rate) -> float:
    name, params = equation.primitive.name, equation.params
    inner = list(inner_jaxprs(equation))
    if name == "while":
        return math.inf
    if name == "scan":
        return sum(_of(one, share, rate) for one in inner) * params["length"] if params["length"] else 0.0
    if name == "cond":
        return max((_of(one, share, rate) for one in inner), default=0.0)
    if name == "shard_map":
        return sum(_of(one, 1, rate) for one in inner)
    if inner:
        return sum(_of(one, share, rate) for one in inner)
    moved = sum(_bytes(v.aval) for v in [*equation.invars, *equation.outvars]) / share / rate.bytes
    met = COLLECTIVE_S if name.startswith(_COLLECTIVES) else 0.0
    return met + max(moved, _operations(equation, name) / share / rate.operations)


def work(jaxpr: Any, devices: int) -> Work:
    """The work of a traced function, each loop without a known length once. An element of a floating-point result
    counts as one operation, but for products and decompositions, which count theirs, and what moves values."""
    total = NO_WORK
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = equation.primitive.name
        inner = [work(one, devices) for one in inner_jaxprs(equation)]
        if inner:
            most = max(inner) if name == "cond" else sum(inner, NO_WORK)
            times = equation.params["length"] if name == "scan" else devices if name == "shard_map" else 1
            total += Work(most.operations * times, most.bytes * times)
            continue
        made = [v.aval for v in equation.outvars]
        stays = name in ("sharding_constraint", "optimization_barrier")
        moved = 0.0 if stays else sum(_bytes(v.aval) for v in [*equation.invars, *equation.outvars])
        single = _elements(equation, name, made) if name not in _MOVING else 0.0
        total += Work(_operations(equation, name) or single, moved)
    return total


def _elements(equation: Any, name: str, made: Sequence[Any]) -> float:
    """The elements that an operation computes: of what it reduces, or of its result."""
    given = [variable.aval for variable in equation.invars] if name.startswith("reduce_") else made
    return float(
        sum(math.prod(_shape(a)) for a in given if jax.numpy.issubdtype(getattr(a, "dtype", bool), np.inexact))
    )


def _operations(equation: Any, name: str) -> float:
    """Floating-point operations; those of element-wise operations are bounded by memory and left out."""
    given = [variable.aval for variable in equation.invars]
    made = float(sum(math.prod(_shape(variable.aval)) for variable in equation.outvars))
    if name == "dot_general":
        ((contracted, _), _) = equation.params["dimension_numbers"]
        return 2.0 * made * math.prod(given[0].shape[k] for k in contracted)
    if name == "conv_general_dilated":
        features = given[1].shape[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * made * math.prod(given[1].shape) / max(features, 1)
    if name in _CUBIC:
        return 2.0 * made * max((side for aval in given for side in _shape(aval)), default=1)
    return 0.0


def _shape(aval: Any) -> tuple[int, ...]:
    return getattr(aval, "shape", ())  # a token has none


def _bytes(aval: Any) -> float:
    size = math.prod(_shape(aval))
    try:
        return float(size * np.dtype(aval.dtype).itemsize)
    except (AttributeError, TypeError):  # a token; a typed PRNG key, which has some words for each element
        return 16.0 * size
