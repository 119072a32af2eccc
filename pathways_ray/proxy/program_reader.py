"""Programs of a proxy's client, read and compiled to be looked at: `python -m pathways_ray.proxy.program_reader`.

A process beside the proxy, since readers of MLIR and XLA trust what they read, and a program that crashes them should
end nothing else; `readers` asks it. Where XLA chooses a layout, a module is compiled for as many CPU devices of this
process, to see which.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import msgspec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from pathways_ray import limits
from pathways_ray.compat import compiled_module, exported_module, module_of, serialized_module
from pathways_ray.ir.tilings import refined
from pathways_ray.ir.types import ArrayType
from pathways_ray.jax_types import dtype_named
from pathways_ray.module_functions import DONATING, memory_layouts, result_memories
from pathways_ray.proxy.arrays import Code, Refused, Sharding
from pathways_ray.proxy.codec import PACKED, laid_out, mlir_dtype
from pathways_ray.proxy.descriptors import messages
from pathways_ray.proxy.events import Orders, Signature
from pathways_ray.proxy.orders import in_order, orders_of
from pathways_ray.proxy.programs import Overrides, Program
from pathways_ray.proxy.readers import CPU_S, MEMORY_BYTES, Answer, Question, Read, Refusal
from pathways_ray.proxy.statuses import code_of_xla
from pathways_ray.proxy.tokens import has_tokens, replace_tokens
from pathways_ray.worker import serve_alone

IN_CLIENT = {
    "InspectSharding": "jax.debug.inspect_array_sharding",
    "CustomSPMDPartitioning": "jax.experimental.custom_partitioning",
}
"""Custom calls that name a function of the client's process by its address, which XLA calls as it splits a program over
devices; and what emits them."""

_QUESTION = msgspec.msgpack.Decoder(Question)


def main() -> None:
    """Answers questions from standard input until its end."""
    messages()
    serve_alone(lambda question: msgspec.msgpack.encode(answer(question)), MEMORY_BYTES, CPU_S)


def answer(question: bytes) -> Answer:
    """Answers a question: a program, or how XLA compiles it."""
    try:
        asked = _QUESTION.decode(question)
        if isinstance(asked, Read):
            return read_program(asked.module, asked.devices, asked.platforms, asked.overrides)
        compiled = compiled_here(asked.module, asked.devices)
        if asked.what == "cost":
            return {key: float(value) for key, value in compiled.cost_analysis().items()}
        return str(compiled.get_hlo_text())
    except Refused as refused:
        return Refusal(*refused.status)
    except Exception as error:  # whatever a reader of foreign bytes may raise
        return Refusal(Code.INTERNAL, f"the program cannot be read ({type(error).__name__}: {error})")


def read_program(
    data: bytes, devices: tuple[int, ...], platforms: tuple[str, ...], overrides: Overrides = ()
) -> Program:
    """A program of a module as the client sent it. Hosts compile it without the options; XLA sees here whether there
    are such.

    Raises:
        Refused: it cannot be read, or XLA refuses it.
    """
    try:
        module = module_of(data)
    except Exception as error:
        raise Refused(Code.INVALID_ARGUMENT, f"the program's StableHLO cannot be read: {error}") from None
    if len(devices) > 1:
        _check_functions(data, module)
    with module.context:
        orders = orders_of(module, _main(module))
        if orders:
            module = in_order(module)
            data = serialized_module(module)
        tokens: frozenset[int] = frozenset()
        if has_tokens(_main(module)):
            tokens = replace_tokens(_main(module))
            data = serialized_module(module)
        name, meshes, inputs, outputs, donated = _interface(module)
        asked = memory_layouts(_main(module))
        memories = result_memories(_main(module))
    if len(devices) > 1 and (packed := next((kind for kind in (*inputs, *outputs) if kind.dtype in PACKED), None)):
        raise Refused(Code.UNIMPLEMENTED, f"values of type {packed.dtype} over several devices are not supported")
    given, made, taken = _shardings(data, devices, meshes, inputs, outputs, frozenset(donated))
    given = tuple(replace(one, order=orders[k]) if k in orders else one for k, one in enumerate(given))
    if memories:
        made = tuple(replace(one, memory=memory) for one, memory in zip(made, memories, strict=True))
    layouts: tuple[Orders, Orders] = (), ()
    if overrides or any(one != "default" for listed in asked for one in listed):
        compiled = compiled_here(data, len(devices), in_memory=True, overrides=overrides)
        layouts = _orders(compiled.get_parameter_layouts()), _orders(compiled.get_output_layouts())
    exported = exported_module(name, data, _typed(inputs), _typed(outputs), len(devices), platforms)
    try:
        blob = bytes(exported.serialize())
    except KeyError as error:  # int2, say, of which `jax.export` knows nothing
        raise Refused(Code.UNIMPLEMENTED, f"arguments and results of type {error.args[0]} are not supported") from None
    digest = hashlib.sha256(blob).hexdigest()
    fingerprint = hashlib.sha256(data).digest()
    signature = Signature(name, inputs, outputs, given, made, taken, devices, fingerprint, *layouts)
    if tokens:
        signature = replace(signature, tokens=tokens)
    return Program(signature, data, digest, blob)


def _check_functions(data: bytes, module: Any) -> None:
    """Raises `Refused` where XLA would call a function of the client's process."""
    suspected = {target for target in IN_CLIENT if target.encode() in data}
    found: set[str] = set()

    def look(op: Any) -> Any:
        if op.name == "stablehlo.custom_call":
            found.add(ir.StringAttr(op.attributes["call_target_name"]).value)
        return ir.WalkResult.ADVANCE

    if suspected:
        module.operation.walk(look)
    for target in sorted(found & suspected):
        text = f"XLA would call a function of the client's process for {IN_CLIENT[target]}, and runs in another one"
        raise Refused(Code.UNIMPLEMENTED, text)


def _orders(layouts: Sequence[Any]) -> Orders:
    """The dimensions of arrays from the fastest to the slowest, of layouts such as `{0,1:T(8)}`."""
    return tuple(tuple(map(int, re.findall(r"\d+", str(layout).partition(":")[0]))) for layout in layouts)


def _main(module: Any) -> Any:
    """Raises `Refused` where a module has no main function."""
    for op in module.body.operations:
        if op.operation.name == "func.func" and op.operation.attributes["sym_name"].value == "main":
            return op
    raise Refused(Code.INVALID_ARGUMENT, "the program has no main function")


def _interface(
    module: Any,
) -> tuple[str, list[tuple[int, ...]], tuple[ArrayType, ...], tuple[ArrayType, ...], list[int]]:
    """The name of a module, the sizes of its meshes, the types of its main function, and which arguments it takes."""
    name = str(module.operation.attributes["sym_name"].value) if "sym_name" in module.operation.attributes else "main"
    meshes, main = [], _main(module)
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            sizes = [sdy.MeshAxisAttr(axis).size for axis in sdy.MeshAttr(op.operation.attributes["mesh"]).axes]
            meshes.append(tuple(sizes))
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    donated = []
    if "arg_attrs" in main.attributes:
        for k, said in enumerate(main.attributes["arg_attrs"]):
            if any(one in said for one in DONATING):
                donated.append(k)
    return name, meshes, tuple(map(_type, kind.inputs)), tuple(map(_type, kind.results)), donated


def _type(kind: Any) -> ArrayType:
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        raise Refused(Code.UNIMPLEMENTED, f"programs with values of type {kind} are not supported")
    found = ArrayType(tuple(kind.shape), mlir_dtype(str(kind.element_type)))
    if found.nbytes > limits.MAX_TENSOR_BYTES:  # no mistake of the program: JAX would say that it is out of memory
        text = f"{found} is larger than the {limits.MAX_TENSOR_BYTES} bytes that a value may have"
        raise Refused(Code.RESOURCE_EXHAUSTED, text)
    return found


def _shardings(
    module: bytes,
    devices: tuple[int, ...],
    meshes: Sequence[tuple[int, ...]],
    inputs: tuple[ArrayType, ...],
    outputs: tuple[ArrayType, ...],
    donated: frozenset[int],
) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...], frozenset[int]]:
    """The shardings of arguments and results, and the donated arguments that are taken: over several devices JAX leaves
    it to XLA which."""
    if len(devices) == 1:
        alone = Sharding.on(devices[0])
        return (alone,) * len(inputs), (alone,) * len(outputs), donated
    if not outputs:  # it is never run
        copies = Sharding.copies(devices)
        return (copies,) * len(inputs), (), donated
    # With an end, as hosts compile it: without one XLA forgets the sharding of an only result that is empty.
    compiled = compiled_here(module, len(devices), with_end=True)
    found = [
        [messages().OpSharding.FromString(op.SerializeToString()) for op in listed or ()]
        for listed in (compiled.get_parameter_shardings(), (compiled.get_output_shardings() or [])[:-1])
    ]
    if len(found[0]) != len(inputs) or len(found[1]) != len(outputs):
        raise Refused(Code.UNIMPLEMENTED, "XLA does not say how the arguments and results of the program are laid out")
    # Meshes may be written inside attributes; then what XLA made of them says their sizes.
    written = [tuple(op.iota_reshape_dims) for ops in found for op in ops]
    written += [tuple(op.tile_assignment_dimensions) for ops in found for op in ops]
    candidates = [refined(sizes) for sizes in (*meshes, *written) if sizes and len(devices) == math.prod(sizes)]
    refusal: Refused | None = None
    for mesh in dict.fromkeys([*candidates, refined((len(devices),))]):
        try:
            given, made = (
                tuple(laid_out(op, devices, len(kind.shape), mesh=mesh) for op, kind in zip(ops, kinds, strict=True))
                for ops, kinds in zip(found, (inputs, outputs), strict=True)
            )
            return given, made, donated and donated & _used(compiled)
        except Refused as error:
            refusal = error
    assert refusal is not None
    raise refusal


def _used(compiled: Any) -> frozenset[int]:
    """The arguments of a compiled module in whose memory results lie."""
    (module,) = compiled.hlo_modules()
    head = module.to_string().partition("\n")[0]
    return frozenset(int(number) for number in re.findall(r"\((\d+), \{[^}]*\}, (?:may|must)-alias\)", head))


def _typed(kinds: Sequence[ArrayType]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(kind.shape, dtype_named(kind.dtype)) for kind in kinds]


def compiled_here(
    module: bytes, devices: int, with_end: bool = False, in_memory: bool = False, overrides: Overrides = ()
) -> Any:
    """A module compiled for CPU devices of this process, only to be looked at; see `compat.compiled_module`.

    Raises:
        Refused: this process has too few, or XLA refuses it.
    """
    local = jax.local_devices(backend="cpu")
    if len(local) < devices:
        raise Refused(Code.INTERNAL, f"its reader has {len(local)} devices to look at a program for {devices}")
    try:
        return compiled_module(module, local[:devices], with_end, in_memory, overrides)
    except Exception as error:
        code = code_of_xla(str(error), Code.INVALID_ARGUMENT)
        raise Refused(code, f"XLA refuses the program: {error}") from None


if __name__ == "__main__":
    main()
