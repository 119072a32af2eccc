"""Readers of MLIR attributes, whose Python bindings can be iterated over though their types do not say so."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from jaxlib.mlir import ir

Value: TypeAlias = "ir.Value[Any]"


def integers(attribute: Any) -> list[int]:
    """The elements of an array of integers, row by row."""
    return [int(element) for element in ir.DenseIntElementsAttr(attribute)]  # type: ignore[attr-defined]


def matrix(attribute: ir.Attribute) -> np.ndarray[Any, np.dtype[np.int64]]:
    """An array of integers in its shape."""
    return np.array(integers(attribute), np.int64).reshape(ir.RankedTensorType(attribute.type).shape)


def entries(op: ir.Operation, name: str) -> dict[str, ir.Attribute]:
    """The entries of an attribute that is a dictionary; none if the operation has no such attribute."""
    if name not in op.attributes:
        return {}
    return {item.name: item.attr for item in ir.DictAttr(op.attributes[name])}  # type: ignore[attr-defined]


def maker(value: Value) -> ir.Operation | None:
    """The operation that makes a value; None for an argument."""
    owner = value.owner
    return owner.operation if isinstance(owner, ir.Operation | ir.OpView) else None
