"""Functions as clients send them: exported by JAX, or written by hand as StableHLO."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import export
from jax.interpreters.mlir import make_ir_context
from jax.sharding import AbstractMesh
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from pathways_ray.joint_exports import Joint, Packed

SQUARE = jax.ShapeDtypeStruct((4, 4), np.float32)
MESH = AbstractMesh((4,), ("x",))


def exported(
    function: Callable[..., Any],
    *avals: Any,
    platforms: tuple[str, ...] = ("cpu",),
    mesh: AbstractMesh = MESH,
    unchecked: bool = False,
) -> export.Exported:
    """A function of 4x4 floats, if `avals` does not say otherwise; `unchecked` exports any custom call."""
    disabled = (export.DisabledSafetyCheck.custom_call("ALL"),) if unchecked else ()
    with jax.sharding.use_abstract_mesh(mesh):
        return export.export(jax.jit(function), platforms=platforms, disabled_checks=disabled)(*avals or (SQUARE,))


def blob_of(found: export.Exported) -> bytes:
    return bytes(found.serialize())


def joint_of(found: export.Exported) -> Joint:
    """The joint export whose main function is that of an export, and calls members only."""
    return Joint(Packed(found.platforms, found.nr_devices, found.mlir_module_serialized))


def from_text(text: str, like: export.Exported) -> bytes:
    """An exported function with the types of `like`, whose StableHLO is `text`."""
    with make_ir_context() as context, ir.Location.unknown(context):
        module = ir.Module.parse(text)
        code = stablehlo.serialize_portable_artifact(module, stablehlo.get_current_version(), True)
    return blob_of(dataclasses.replace(like, mlir_module_serialized=code))


def written(body: str, rest: str = "", **changes: Any) -> bytes:
    """An exported function from 4x4 floats to 4x4 floats, whose StableHLO was changed by hand; `%0` is its result."""
    text = (
        "module { func.func public @main(%arg0: tensor<4x4xf32>) -> tensor<4x4xf32> {\n"
        f"{body}\nreturn %0 : tensor<4x4xf32> }}\n{rest} }}"
    )
    return from_text(text, dataclasses.replace(exported(lambda v: v + 1), **changes))
