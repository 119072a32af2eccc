"""An estimate of the time that a function takes on its devices, to decide how much may run as one computation.

No tenant is charged by it, and no plan of time rests on it (`megatron_ptdp.planner` is for that): it separates a matrix
product of milliseconds from an addition. Rates are those of a modest device of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pathways_ray.client.jaxprs import inner_jaxprs


class Rate(NamedTuple):
    """Floating-point operations and bytes a second of one device."""

    operations: float
    bytes: float


HOST = Rate(1e10, 5e9)
"""A CPU device: some cores of a server among several."""

ACCELERATOR = Rate(5e13, 5e11)

COLLECTIVE_S = 20e-6
"""The time that devices of one island take to meet."""

_COLLECTIVES = ("psum", "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "pbroadcast", "reduce_scatter")

_CUBIC = ("cholesky", "eig", "eigh", "svd", "qr", "geqrf", "lu", "schur", "hessenberg", "triangular_solve")
"""Operations that take a size's third power: as many products for each element as the longest side is."""


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
