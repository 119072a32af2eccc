"""The functions of a graph, read from the exports that came with it, as a host reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import export

from pathways_ray.ir.graph import Graph, functions_in
from pathways_ray.joint_exports import Joint, Packed


def functions_of(graph: Graph, blobs: Mapping[str, bytes]) -> dict[str, Any]:
    """What can be called, by the name of the function; host functions are left out."""
    joints: dict[str, Joint] = {}
    found: dict[str, Any] = {}
    for part in functions_in(part for recipe in graph.recipes for part in recipe.parts):
        _, is_joint, member = part.function.partition("#")
        if part.host_limit_ms or part.function in found:
            continue
        if is_joint and part.digest not in joints:
            joints[part.digest] = Joint(Packed.read(blobs[part.digest]))
        found[part.function] = (
            joints[part.digest].member(member) if is_joint else export.deserialize(bytearray(blobs[part.digest]))
        )
    return found
