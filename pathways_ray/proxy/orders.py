"""Programs whose arguments lie in another order of the program's devices, as programs that take them in theirs.

JAX makes such a program for `jax.device_put` of an array to the same devices in another order: the mesh of its argument
lists the numbers of its devices. Taking that list away changes no value, only where the argument has to lie; so the
proxy copies it there before the call.
"""

from __future__ import annotations

import re
from typing import Any

from jaxlib.mlir import ir

from pathways_ray.proxy.arrays import Code, Refused

Order = tuple[int, ...]
"""The number of the device at each place of a mesh, in row-major order."""

_LIST = r"device_ids=\[([\d, ]*)\]"
_NUMBERED = re.compile(rf"(\[\"[^\]]*\]), {_LIST}")
"""A mesh of axes with a list of devices; one without axes stands for a single device, and keeps its list."""

_MESH = re.compile(rf"sdy\.mesh @(\S+) = <\[\"[^\]]*\], {_LIST}")
_OF = re.compile(rf"#sdy\.sharding<(?:@([^\s,>]+)|mesh<\[\"[^\]]*\], {_LIST})")


def orders_of(module: Any, main: Any) -> dict[int, Order]:
    """The orders in which arguments lie, by their numbers; of those that are in the order of the devices none.

    Raises:
        Refused: results are to lie in another order.
    """
    meshes = {}
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh" and (found := _MESH.search(str(op))):
            meshes[found[1].strip('"')] = _numbers(found[2])
    arguments = _orders(main, "arg_attrs", meshes)
    if _orders(main, "res_attrs", meshes):
        raise Refused(Code.UNIMPLEMENTED, "results in another order of the devices than the program's")
    return arguments


def _orders(main: Any, name: str, meshes: dict[str, Order]) -> dict[int, Order]:
    found = {}
    for number, said in enumerate(main.attributes.get(name, ())):
        sharding = _OF.search(str(said["sdy.sharding"])) if "sdy.sharding" in said else None
        if sharding is not None:
            listed = _numbers(sharding[2]) if sharding[2] else meshes.get((sharding[1] or "").strip('"'), ())
            if listed != tuple(range(len(listed))):
                found[number] = listed
    return found


def in_order(module: Any) -> Any:
    """A module without the lists of devices; the caller has its context."""
    return ir.Module.parse(_NUMBERED.sub(r"\1", module.operation.get_asm()))


def _numbers(listed: str) -> Order:
    return tuple(int(number) for number in listed.split(","))
