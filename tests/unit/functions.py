"""The functions of a graph, read from what came with it, as a host reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pathways_ray.executor.compile.functions import Read, function_in, read
from pathways_ray.ir.graph import Graph, functions_in


def functions_of(graph: Graph, blobs: Mapping[str, bytes]) -> dict[str, Any]:
    """What can be called, by the name of the function; host functions are left out."""
    wholes: dict[str, Read] = {}
    found: dict[str, Any] = {}
    for part in functions_in(part for recipe in graph.recipes for part in recipe.parts):
        if part.host_limit_ms or part.function in found:
            continue
        if part.digest not in wholes:
            wholes[part.digest] = read(part.function, blobs[part.digest])
        found[part.function] = function_in(wholes[part.digest], part.function)
    return found
