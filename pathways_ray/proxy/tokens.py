"""Programs that take or give tokens, as programs of arrays.

A token is no value: it says that what makes it comes before what takes it. The calls of a client on the same devices
run in their order anyway, so a token between two programs has nothing left to say. JAX gives an empty array in the
place of one that is an argument; of a result it is told that it is a token.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

_TOKEN, _ARRAY = "!stablehlo.token", "tensor<0xi1>"


def has_tokens(main: Any) -> bool:
    """Whether a main function takes or gives tokens."""
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    return any(str(one) == _TOKEN for one in (*kind.inputs, *kind.results))


def replace_tokens(main: Any) -> frozenset[int]:
    """Has a main function take and give empty arrays where it takes and gives tokens; the numbers of such results. The
    caller has its context."""
    block = main.regions[0].blocks[0]
    array = ir.Type.parse(_ARRAY)
    replaced = set()
    with ir.Location.unknown():
        for argument in block.arguments:
            if str(argument.type) == _TOKEN:
                with ir.InsertionPoint.at_block_begin(block):
                    made = stablehlo.after_all([])
                argument.replace_all_uses_with(made)
                argument.set_type(array)
        *_, last = block.operations
        for number, value in enumerate(last.operands):
            if str(value.type) == _TOKEN:
                replaced.add(number)
                with ir.InsertionPoint(last):
                    last.operands[number] = stablehlo.constant(ir.Attribute.parse(f"dense<> : {_ARRAY}"))
    kinds = [argument.type for argument in block.arguments], [value.type for value in last.operands]
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(*kinds))
    return frozenset(replaced)
