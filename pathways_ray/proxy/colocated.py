"""Python functions of a client that run beside its devices (`jax.experimental.colocated_python`), as host functions.

JAX sends the function pickled, with the types of what it takes and gives. It is read by the process of the session's
host functions alone (`executor.calls.colocated`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from pathways_ray.client.host_functions import pickled
from pathways_ray.errors import ProgramRefused
from pathways_ray.executor.calls.colocated import MAX_TEXT_BYTES, Colocated
from pathways_ray.ir.graph import MAX_HOST_LIMIT_MS
from pathways_ray.ir.tilings import iota, refined, spec_of, tiles_of
from pathways_ray.ir.types import ArrayType
from pathways_ray.proxy.arrays import Code, Refused, Sharding
from pathways_ray.proxy.codec import PACKED, TEXT, Reader
from pathways_ray.proxy.events import Signature
from pathways_ray.proxy.programs import Program

CUSTOM_CALL = "xla::ifrt::CustomCallProgram"

KIND = "jax_colocated_python"
"""How the types of such programs begin; a version follows."""

_TEXT_TYPE = ArrayType((MAX_TEXT_BYTES,), "uint8")
_WIDE = frozenset(("int64", "uint64", "float64", "complex128"))


def read_function(messages: Any, read: Reader, serialized: Any, devices: int, trusted: bool) -> Program:
    """A function as the client sent it.

    Args:
        devices: those of the client.
        trusted: whether the client's tenant may have Python run on hosts.

    Raises:
        ProgramRefused: it may not.
        Refused: the function cannot be read, or has types that host functions have not.
    """
    try:
        found = messages.CustomCallProgramProto.FromString(serialized.data)
    except Exception as error:
        raise Refused(Code.INVALID_ARGUMENT, f"the program cannot be read: {error}") from None
    if not found.type.startswith(KIND):
        raise Refused(Code.UNIMPLEMENTED, f"custom programs of type {found.type!r} are not supported, {KIND!r} are")
    if not trusted:
        raise ProgramRefused(
            f"{found.name} is Python for hosts, which run that only of tenants that the operator trusts "
            "(pathways tenants add NAME --trusted)"
        )
    if not found.output_specs:
        raise Refused(Code.UNIMPLEMENTED, f"{found.name} gives no array; have it give at least one, such as a count")
    on = tuple(found.devices.device_ids)
    if unknown := [device for device in on if not 0 <= device < devices]:
        raise Refused(Code.INVALID_ARGUMENT, f"the program is for devices {unknown}; there are 0 to {devices - 1}")
    texts = frozenset(k for k, spec in enumerate(found.output_specs) if spec.dtype.kind == TEXT)
    inputs = tuple(_type(read, spec) for spec in found.input_specs)
    outputs = tuple(_TEXT_TYPE if k in texts else _type(read, spec) for k, spec in enumerate(found.output_specs))
    laid = _over_one_mesh(
        [read.sharding(spec.sharding, spec.shape.dims) for spec in (*found.input_specs, *found.output_specs)],
        [len(kind.shape) for kind in (*inputs, *outputs)],
        on,
    )
    wide = any(kind.dtype in _WIDE for kind in (*inputs, *outputs))
    call = Colocated(bytes(found.serialized_program_text), devices, wide)
    blob = pickled(call, (tuple(range(len(inputs))), {}), tuple(range(len(outputs))))
    digest = hashlib.sha256(blob)
    given, made = tuple(laid[: len(inputs)]), tuple(laid[len(inputs) :])
    name = found.name or "colocated"
    signature = Signature(name, inputs, outputs, given, made, frozenset(), on, digest.digest(), texts=texts)
    return Program(signature, b"", digest.hexdigest(), blob, host_limit_ms=MAX_HOST_LIMIT_MS)


def _type(read: Reader, spec: Any) -> ArrayType:
    kind = read.array_type(spec.dtype, spec.shape)
    if kind.dtype in PACKED:
        raise Refused(Code.UNIMPLEMENTED, f"arrays of {kind.dtype} cannot be given to functions on hosts; convert them")
    return kind


def _over_one_mesh(found: Sequence[Sharding], ranks: Sequence[int], devices: tuple[int, ...]) -> list[Sharding]:
    """Shardings over one mesh of the devices.

    Raises:
        Refused: no mesh says all of them, or they are on other devices.
    """
    if any(sharding.devices != devices or sharding.order for sharding in found):
        raise Refused(Code.UNIMPLEMENTED, f"a function on devices {devices} with arrays on others, or in another order")
    for mesh in dict.fromkeys((*(one.mesh for one in found if one.spec), refined((len(devices),)))):
        specs = []
        for sharding, rank in zip(found, ranks, strict=True):
            tiles, order = tiles_of(sharding.spec, sharding.mesh, rank)
            specs.append(spec_of(tiles, iota(tiles, sharding.mesh, order), rank, mesh))
        if None not in specs and math.prod(mesh) == len(devices):
            return [
                Sharding(devices, mesh, spec, one.memory)
                for one, spec in zip(found, specs, strict=True)
                if spec is not None
            ]
    raise Refused(
        Code.UNIMPLEMENTED, f"a function on devices {devices} with arrays over meshes that have no common one"
    )
