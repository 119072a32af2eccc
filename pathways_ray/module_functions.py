"""Main functions of StableHLO modules: what they say of their arguments and results, changed in place."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

LAYOUT = "mhlo.layout_mode"
"""Says how an argument or result lies in memory."""

MEMORY_KIND = "mhlo.memory_kind"
"""Says in which memory of a device an argument or result is."""

DONATING = frozenset({"jax.buffer_donor", "tf.aliasing_output"})
"""Say that the memory of an argument may be taken."""


def add_end(main: Any) -> None:
    """Has a function return a further scalar."""
    import numpy as np
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import func, stablehlo

    *_, last = main.regions[0].blocks[0].operations
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    with ir.Location.unknown(), ir.InsertionPoint(last):
        end = stablehlo.constant(ir.DenseElementsAttr.get(np.zeros((), np.float32).data))
        func.ReturnOp([*last.operands, end])
        made = ir.FunctionType.get(kind.inputs, [*kind.results, end.type])
    last.operation.erase()
    main.attributes["function_type"] = ir.TypeAttr.get(made)
    if "res_attrs" in main.attributes:
        main.attributes["res_attrs"] = ir.ArrayAttr.get([*main.attributes["res_attrs"], ir.DictAttr.get({})])


def forget(main: Any, name: str, words: Collection[str], but: Collection[int] = ()) -> None:
    """Takes words of a function (`name`: `arg_attrs` or `res_attrs`) off all arguments or results but some numbers."""
    from jaxlib.mlir import ir

    if name in main.attributes:
        kept = [
            {one.name: one.attr for one in said if k in but or one.name not in words}
            for k, said in enumerate(main.attributes[name])
        ]
        main.attributes[name] = ir.ArrayAttr.get([ir.DictAttr.get(said) for said in kept])


def memory_layouts(main: Any) -> tuple[list[str], list[str]]:
    """The words of a function on how its arguments and its results lie in memory: "default", "auto", or a layout."""
    return tuple(  # type: ignore[return-value]
        [said[LAYOUT].value if LAYOUT in said else "default" for said in main.attributes[name]]
        if name in main.attributes
        else []
        for name in ("arg_attrs", "res_attrs")
    )


def result_memories(main: Any) -> list[str]:
    """The kinds of memory that a function says its results are in, "" where it says none; empty without any."""
    if "res_attrs" not in main.attributes:
        return []
    return [said[MEMORY_KIND].value if MEMORY_KIND in said else "" for said in main.attributes["res_attrs"]]


def is_laid_out(main: Any, name: str, number: int) -> bool:
    """Whether a function says how an argument or result of it is laid out over devices."""
    if name not in main.attributes:
        return False
    said = main.attributes[name][number]
    return "sdy.sharding" in said or "mhlo.sharding" in said
