"""Programs of a proxy's client: StableHLO for a device assignment, as functions of the runtime.

The module goes to the hosts as it came, in an export whose types are those of its main function. So it is checked,
compiled, launched, charged and blamed like any other function. A module for one device is called like a function of
the runtime; one for several brings its own shardings, and is compiled as it is. Where XLA chooses a layout, the proxy
compiles the module for as many CPU devices of its own, to see which.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from pathways_ray.compat import compiled_module, exported_module, memory_layouts, module_of, serialized_module
from pathways_ray.ir.graph import Argument, Compute, Graph, Part, Recipe, Ref, Regroup, Result, Transfer
from pathways_ray.ir.tilings import axis_names, refined
from pathways_ray.ir.types import ArrayType, Layout, SliceType
from pathways_ray.jax_types import dtype_named
from pathways_ray.proxy.arrays import Code, Refused, Sharding
from pathways_ray.proxy.codec import laid_out, mlir_dtype
from pathways_ray.proxy.events import Orders, Signature
from pathways_ray.proxy.orders import in_order, orders_of
from pathways_ray.proxy.reading import READING
from pathways_ray.proxy.tokens import has_tokens, replace_tokens

PROGRAM, OPTIONS = "xla::ifrt::XlaProgram", "xla::ifrt::XlaCompileOptions"

PLUGIN_PROGRAM = "xla::ifrt::PluginProgram"
"""Programs of no language that IFRT knows, which a server and what runs beside a client agree on."""

_LOOP = b"while"


@dataclass(frozen=True)
class Program:
    """A module of the client, or a function in Python (one with a `host_limit_ms`), as a function of the runtime."""

    signature: Signature
    module: bytes
    digest: str
    blob: bytes
    host_limit_ms: int = 0

    @property
    def place(self) -> Sharding:
        """A sharding of the devices and the mesh that the program runs on."""
        for sharding in (*self.signature.input_shardings, *self.signature.output_shardings):
            return sharding
        return Sharding.copies(self.signature.devices)


HANDING_OVER = Program(Signature("hand_over", (), (), (), (), frozenset(), (0,), b"", hands_over=True), b"", "", b"")
"""The program that has the client get its argument in a file (`reading`)."""


def hands_over(serialized: Any) -> bool:
    """Whether a program of the client is that one."""
    return bool(serialized.type_name == PLUGIN_PROGRAM and serialized.data.endswith(READING))


Overrides = tuple[tuple[str, Any], ...]
"""Options of the compiler by name."""


def devices_of(messages: Any, options: Any) -> tuple[tuple[int, ...], Overrides]:
    """The devices that a program is for, in the order in which it counts them; and options of the compiler.

    Raises:
        Refused: the options are others than XLA's, or ask for replicas.
    """
    if options.type_name != OPTIONS:
        raise Refused(Code.UNIMPLEMENTED, f"programs with options of type {options.type_name!r} are not supported")
    try:
        found = messages.XlaCompileOptionsProto.FromString(options.data).compile_options
    except Exception as error:
        raise Refused(Code.INVALID_ARGUMENT, f"the compile options cannot be read: {error}") from None
    assignment = found.executable_build_options.device_assignment
    if assignment.replica_count > 1:
        raise Refused(Code.UNIMPLEMENTED, f"a program of {assignment.replica_count} replicas; use partitions")
    devices = tuple(part.replica_device_ids[0] for part in assignment.computation_devices) or (0,)
    return devices, tuple((key, getattr(said, said.WhichOneof("value"))) for key, said in _options(found))


def _options(found: Any) -> list[tuple[str, Any]]:
    return [(key, said) for key, said in sorted(found.env_option_overrides.items()) if said.WhichOneof("value")]


def read_program(
    messages: Any, serialized: Any, devices: tuple[int, ...], platforms: tuple[str, ...], overrides: Overrides = ()
) -> Program:
    """A program as the client sent it. Hosts compile it without the options; XLA sees here whether there are such.

    Raises:
        Refused: it cannot be read, or XLA refuses it.
    """
    data = bytes(serialized.data)
    try:
        module = module_of(data)
    except Exception as error:
        raise Refused(Code.INVALID_ARGUMENT, f"the program's StableHLO cannot be read: {error}") from None
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
    given, made = _shardings(messages, data, devices, meshes, inputs, outputs)
    given = tuple(replace(one, order=orders[k]) if k in orders else one for k, one in enumerate(given))
    layouts: tuple[Orders, Orders] = (), ()
    if overrides or any(one != "default" for listed in asked for one in listed):
        compiled = compiled_here(data, len(devices), in_memory=True, overrides=overrides)
        layouts = _orders(compiled.get_parameter_layouts()), _orders(compiled.get_output_layouts())
    exported = exported_module(name, data, _typed(inputs), _typed(outputs), len(devices), platforms)
    blob = bytes(exported.serialize())
    digest = hashlib.sha256(blob).hexdigest()
    fingerprint = hashlib.sha256(data).digest()
    signature = Signature(name, inputs, outputs, given, made, frozenset(donated), devices, fingerprint, *layouts)
    if tokens:
        signature = replace(signature, tokens=tokens)
    return Program(signature, data, digest, blob)


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
            if "jax.buffer_donor" in said or "tf.aliasing_output" in said:
                donated.append(k)
    return name, meshes, tuple(map(_type, kind.inputs)), tuple(map(_type, kind.results)), donated


def _type(kind: Any) -> ArrayType:
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        raise Refused(Code.UNIMPLEMENTED, f"programs with values of type {kind} are not supported")
    return ArrayType(tuple(kind.shape), mlir_dtype(str(kind.element_type)))


def _shardings(
    messages: Any,
    module: bytes,
    devices: tuple[int, ...],
    meshes: Sequence[tuple[int, ...]],
    inputs: tuple[ArrayType, ...],
    outputs: tuple[ArrayType, ...],
) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]]:
    if len(devices) == 1:
        alone = Sharding.on(devices[0])
        return (alone,) * len(inputs), (alone,) * len(outputs)
    if not outputs:  # it is never run
        copies = Sharding.copies(devices)
        return (copies,) * len(inputs), ()
    compiled = compiled_here(module, len(devices))
    found = [
        [messages.OpSharding.FromString(op.SerializeToString()) for op in listed or ()]
        for listed in (compiled.get_parameter_shardings(), compiled.get_output_shardings())
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
            return given, made
        except Refused as error:
            refusal = error
    assert refusal is not None
    raise refusal


def _typed(kinds: Sequence[ArrayType]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(kind.shape, dtype_named(kind.dtype)) for kind in kinds]


def compiled_here(module: bytes, devices: int, in_memory: bool = False, overrides: Overrides = ()) -> Any:
    """A module compiled for CPU devices of this process, only to be looked at; see `compat.compiled_module`.

    Raises:
        Refused: this process has too few, or XLA refuses it.
    """
    local = jax.local_devices(backend="cpu")
    if len(local) < devices:
        raise Refused(Code.INTERNAL, f"the proxy has {len(local)} devices to look at a program for {devices}")
    try:
        return compiled_module(module, local[:devices], in_memory=in_memory, overrides=overrides)
    except Exception as error:
        raise Refused(Code.INVALID_ARGUMENT, f"XLA refuses the program: {error}") from None


# --- graphs -----------------------------------------------------------------------------------------------------------


def slice_named(number: int, mesh: Sequence[int]) -> SliceType:
    """A slice of the session as a graph has it."""
    return SliceType(number, tuple(mesh), axis_names(mesh))


def call_graph(program: Program, where: int, donated: Sequence[int]) -> Graph:
    """The graph of one call of a program on slice number `where`."""
    signature = program.signature
    inputs = [Layout(where, sharding.spec) for sharding in signature.input_shardings]
    outputs = [Layout(where, sharding.spec) for sharding in signature.output_shardings]
    count = len(inputs)
    several = len(signature.devices) > 1
    taken = tuple(Ref(-1, k) for k in range(count))
    if program.host_limit_ms:
        part = Part(signature.name, program.digest, taken, no_fusion=True, host_limit_ms=program.host_limit_ms)
    else:
        loops = _LOOP in program.module
        part = Part(signature.name, program.digest, taken, no_fusion=several, has_loop=loops, as_is=several)
    compute = Compute(
        name=signature.name,
        recipe=0,
        slice=where,
        inputs=tuple(Ref(k) for k in range(count)),
        input_layouts=tuple(inputs),
        outputs=signature.outputs,
        output_layouts=tuple(outputs),
        donated=tuple(donated),
    )
    results = tuple(Ref(count, k) for k in range(len(outputs)))
    arguments = [Argument(k, kind, inputs[k]) for k, kind in enumerate(signature.inputs)]
    recipe = Recipe((part,), tuple(Ref(0, k) for k in range(len(outputs))))
    mesh = slice_named(where, program.place.mesh)
    return Graph(signature.name, (mesh,), (recipe,), (*arguments, compute, Result(results)))


Lying = tuple[ArrayType, Sharding, int]
"""The type of an array, its sharding, and the number of the slice that it lies on."""


def regroup_graph(sources: Sequence[Lying], shards: tuple[tuple[int, int], ...], made: Lying) -> Graph:
    """The graph that makes an array of shards of others."""
    arguments = [Argument(k, kind, Layout(where, sharding.spec)) for k, (kind, sharding, where) in enumerate(sources)]
    kind, sharding, where = made
    inputs = tuple(Ref(k) for k in range(len(arguments)))
    node = Regroup(inputs, shards, kind, Layout(where, sharding.spec))
    return Graph("regroup", _slices([*sources, made]), (), (*arguments, node, Result((Ref(len(arguments)),))))


def move_graph(source: Lying, made: Lying) -> Graph:
    """The graph that copies an array to other devices, or into another layout."""
    kind, sharding, where = source
    argument = Argument(0, kind, Layout(where, sharding.spec))
    node = Transfer(Ref(0), kind, Layout(made[2], made[1].spec))
    return Graph("copy", _slices([source, made]), (), (argument, node, Result((Ref(1),))))


def _slices(lying: Sequence[Lying]) -> tuple[SliceType, ...]:
    return tuple({where: slice_named(where, sharding.mesh) for _, sharding, where in lying}.values())
