"""Programs of a proxy's client: StableHLO for a device assignment, as functions of the runtime.

The module goes to the hosts as it came, in an export whose types are those of its main function. So it is checked,
compiled, launched, charged and blamed like any other function. A module for one device is called like a function of
the runtime; one for several brings its own shardings, and is compiled as it is. Modules are read by processes of their
own (`program_reader`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pathways_ray.errors import PathwaysError
from pathways_ray.ir.graph import Argument, Compute, Graph, Part, Recipe, Ref, Regroup, Result, Transfer
from pathways_ray.ir.tilings import axis_names
from pathways_ray.ir.types import ArrayType, Layout, SliceType, item_bytes
from pathways_ray.proxy.arrays import Code, Refused, Sharding
from pathways_ray.proxy.events import Signature
from pathways_ray.proxy.putting import PUTTING, Piped
from pathways_ray.proxy.reading import READING

PROGRAM, OPTIONS = "xla::ifrt::XlaProgram", "xla::ifrt::XlaCompileOptions"

PLUGIN_PROGRAM = "xla::ifrt::PluginProgram"
"""Programs of no language that IFRT knows, which a server and what runs beside a client agree on."""

_LOOP = b"while"


@dataclass(frozen=True)
class Program:
    """A module of the client, or a function in Python (one with a `host_limit_ms`), as a function of the runtime; or,
    with `by_pipe`, what makes an array of bytes that the client writes to a pipe (`putting`)."""

    signature: Signature
    module: bytes
    digest: str
    blob: bytes
    host_limit_ms: int = 0
    by_pipe: bool = False

    @property
    def place(self) -> Sharding:
        """A sharding of the devices and the mesh that the program runs on."""
        for sharding in (*self.signature.input_shardings, *self.signature.output_shardings):
            return sharding
        return Sharding.copies(self.signature.devices)


HANDING_OVER = Program(Signature("hand_over", (), (), (), (), frozenset(), (0,), b"", hands_over=True), b"", "", b"")
"""The program that has the client get its argument in a file (`reading`)."""


def understood(serialized: Any, devices: int) -> Program | None:
    """The program of a client that the proxy carries out itself, which nobody reads or compiles; None where it is
    another one. Raises as `putting` does."""
    if serialized.type_name == PLUGIN_PROGRAM and serialized.data.endswith(READING):
        return HANDING_OVER
    return putting(serialized, devices)


def putting(serialized: Any, devices: int) -> Program | None:
    """The program of a client that makes an array of what it writes to a pipe; None where it is another one.

    Raises:
        Refused: it cannot be read, or is for a device that the client has not.
    """
    _, found, said = bytes(serialized.data).partition(PUTTING)
    if serialized.type_name != PLUGIN_PROGRAM or not found:
        return None
    try:
        result = msgspec.json.decode(said, type=Piped)
        kind = ArrayType(result.shape, result.dtype)
        item_bytes(kind.dtype)
        if min(kind.shape, default=0) < 0:
            raise ValueError(f"a dimension of {min(kind.shape)}")
    except (msgspec.MsgspecError, PathwaysError, TypeError, ValueError) as error:
        raise Refused(Code.INVALID_ARGUMENT, f"the array that is to come by a pipe cannot be read: {error}") from None
    if not 0 <= result.device < devices:
        text = f"an array for device {result.device} is to come by a pipe; there are 0 to {devices - 1}"
        raise Refused(Code.INVALID_ARGUMENT, text)
    made = Sharding.on(result.device)
    on = (result.device,)
    return Program(Signature("put", (), (kind,), (), (made,), frozenset(), on, b""), b"", "", b"", by_pipe=True)


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
    if not all(part.replica_device_ids for part in assignment.computation_devices):
        raise Refused(Code.INVALID_ARGUMENT, "the compile options name partitions without a device")
    devices = tuple(part.replica_device_ids[0] for part in assignment.computation_devices) or (0,)
    return devices, tuple((key, getattr(said, said.WhichOneof("value"))) for key, said in _options(found))


def _options(found: Any) -> list[tuple[str, Any]]:
    return [(key, said) for key, said in sorted(found.env_option_overrides.items()) if said.WhichOneof("value")]


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
