"""Messages of the protocol: the parts that the core reads of requests, and answers written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pathways_ray.errors import GraphError
from pathways_ray.ir.tilings import fills, iota, refined, spec_of, tiles_of
from pathways_ray.ir.types import MAX_ARRAY_DIMENSIONS, ArrayType, item_bytes
from pathways_ray.proxy.arrays import Code, Refused, Sharding, Status
from pathways_ray.proxy.events import Reply, Signature

_DTYPES = {
    1: "bool",
    26: "int2",
    21: "int4",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    27: "uint2",
    22: "uint4",
    6: "uint8",
    7: "uint16",
    8: "uint32",
    9: "uint64",
    10: "float16",
    11: "float32",
    12: "float64",
    16: "bfloat16",
    15: "complex64",
    18: "complex128",
    29: "float8_e3m4",
    28: "float8_e4m3",
    20: "float8_e4m3fn",
    23: "float8_e4m3b11fnuz",
    25: "float8_e4m3fnuz",
    19: "float8_e5m2",
    24: "float8_e5m2fnuz",
    31: "float8_e8m0fnu",
    30: "float4_e2m1fn",
}
"""IFRT's element types (`DTypeProto.Kind`); tokens, strings and opaque values are no arrays of the runtime."""

_KINDS = {name: kind for kind, name in _DTYPES.items()}

PACKED = frozenset(("int2", "int4", "uint2", "uint4", "float4_e2m1fn"))
"""Types of less than a byte, which programs pack."""

_TOKEN = 17
"""The type of tokens, which are no arrays."""

TEXT = 99
"""The type of texts, of which functions in Python may give arrays."""

_REPLICATED, _MAXIMAL, _OTHER, _UNREDUCED = 0, 1, 3, 6
"""`OpSharding.Type`."""

_SINGLE, _HLO = "xla::ifrt::SingleDeviceSharding", "xla::ifrt::HloSharding"
_EVEN, _CONCRETE = "xla::ifrt::ConcreteEvenSharding", "xla::ifrt::ConcreteSharding"


class Reader:
    """Reads parts of requests.

    Args:
        messages: the classes of the protocol (`descriptors.Messages`).
    """

    def __init__(self, messages: Any) -> None:
        self._messages = messages
        self._known: dict[tuple[str, bytes, int], Sharding] = {}

    def array_type(self, dtype: Any, shape: Any) -> ArrayType:
        """Raises `Refused` for an element type or a shape that arrays of the runtime cannot have."""
        name = _DTYPES.get(dtype.kind)
        if name is None:
            raise Refused(Code.UNIMPLEMENTED, f"arrays of IFRT's element type {dtype.kind} are not supported")
        if len(shape.dims) > MAX_ARRAY_DIMENSIONS:
            text = f"an array has {len(shape.dims)} dimensions; {MAX_ARRAY_DIMENSIONS} are the limit"
            raise Refused(Code.INVALID_ARGUMENT, text)
        if any(size < 0 for size in shape.dims):
            raise Refused(Code.INVALID_ARGUMENT, f"shape {list(shape.dims)} has a negative size")
        return ArrayType(tuple(shape.dims), name)

    def sharding(self, proto: Any, shape: Sequence[int]) -> Sharding:
        """Raises `Refused` for a sharding that no spec over a mesh says."""
        serialized = proto.serialized_sharding
        # Those of concrete shardings depend on the shape, which is in their bytes.
        key = (serialized.type_name, serialized.data, len(shape))
        found = self._known.get(key)
        if found is None:
            if len(self._known) > 4096:
                self._known.clear()
            found = self._known[key] = self._read(serialized, shape)
        return found

    def _read(self, serialized: Any, shape: Sequence[int]) -> Sharding:
        messages, kind = self._messages, serialized.type_name
        try:
            if kind == _SINGLE:
                single = messages.SingleDeviceShardingProto.FromString(serialized.data)
                return Sharding.on(single.device_id, single.memory_kind)
            if kind == _HLO:
                hlo = messages.HloShardingProto.FromString(serialized.data)
                devices = tuple(hlo.devices.device_ids)
                return laid_out(hlo.xla_op_sharding, devices, len(shape), hlo.memory_kind)
            if kind == _EVEN:
                even = messages.ConcreteEvenShardingProto.FromString(serialized.data)
                return _even(even, tuple(even.shape.dims), tuple(even.shard_shape.dims), even.is_fully_replicated)
            if kind == _CONCRETE:
                concrete = messages.ConcreteShardingProto.FromString(serialized.data)
                shards = {tuple(shard.dims) for shard in concrete.shard_shapes}
                if len(shards) == 1:
                    (shard,) = shards
                    whole = tuple(concrete.shape.dims)
                    return _even(concrete, whole, shard, shard == whole)
        except Refused:
            raise
        except Exception as error:
            raise Refused(Code.INVALID_ARGUMENT, f"a {kind} cannot be read: {error}") from None
        raise Refused(Code.UNIMPLEMENTED, f"shardings of type {kind!r} are not supported")


def _even(proto: Any, shape: tuple[int, ...], shard: tuple[int, ...], replicated: bool) -> Sharding:
    """Equal shards without a word on which device has which: in row-major order, copies of one side by side. What takes
    them says it, too."""
    devices = tuple(proto.devices.device_ids)
    if replicated:
        return Sharding.copies(devices, proto.memory_kind)
    tiles = [size // part if part else 1 for size, part in zip(shape, shard, strict=True)]
    copies, rest = divmod(len(devices), math.prod(tiles))
    if rest or not copies:
        raise Refused(Code.UNIMPLEMENTED, f"{len(devices)} devices have shards {shard} of an array {shape}")
    tiles.append(copies)
    mesh = refined(tiles)
    spec = spec_of(tiles, range(len(devices)), len(shape), mesh)
    assert spec is not None
    return Sharding(devices, mesh, spec, proto.memory_kind)


def laid_out(
    op: Any, devices: tuple[int, ...], dimensions: int, memory: str = "", mesh: tuple[int, ...] = ()
) -> Sharding:
    """XLA's sharding of an array over devices.

    Args:
        op: an `OpSharding`.
        mesh: the refined mesh to say it over; left out, the one that it is written over.

    Raises:
        Refused: no spec over the mesh says it. Where none is given, one over the tiles may, in an order of the devices.
    """
    sums = op.SerializeToString() if _UNREDUCED in (op.type, *op.last_tile_dims) else b""
    if op.type in (_REPLICATED, _MAXIMAL, _UNREDUCED):
        if len(devices) == 1:
            return Sharding.on(devices[0], memory)
        return Sharding(devices, mesh or refined((len(devices),)), (), memory, sums)
    if op.type == _OTHER:
        tiles = list(op.tile_assignment_dimensions)
        sizes = list(op.iota_reshape_dims)
        if len(devices) == 1:
            return Sharding.on(devices[0], memory)
        axes = list(op.iota_transpose_perm) or range(len(sizes))
        if not fills(tiles, len(devices)) or (sizes and not fills(sizes, len(devices), axes)):
            raise Refused(Code.INVALID_ARGUMENT, f"a sharding over {len(devices)} devices is of other tiles than these")
        order = iota(tiles, sizes, axes) if sizes else tuple(op.tile_assignment_devices)
        # Tiles may be said over a box of other sizes, such as 3 x 2 over 6, whose finest mesh is 2 x 3.
        for over in (mesh,) if mesh else dict.fromkeys(map(refined, (sizes or (len(devices),), tiles))):
            spec = spec_of(tiles, order, dimensions, over) if math.prod(over) == len(devices) else None
            if spec is not None:
                return Sharding(devices, over, spec, memory, sums)
        if not mesh and sorted(order) == list(range(len(devices))):
            over = refined(tiles)
            spec = spec_of(tiles, range(len(devices)), dimensions, over)
            if spec is not None:
                return Sharding(devices, over, spec, memory, sums, order)
    raise Refused(Code.UNIMPLEMENTED, f"XLA's sharding {op} over {len(devices)} devices is not supported")


class Writer:
    """Writes answers.

    Args:
        messages: the classes of the protocol.
    """

    def __init__(self, messages: Any) -> None:
        self.messages = messages
        self._head = messages.IfrtResponse()
        self._about = self._head.response_metadata
        self._empty: dict[str, bytes] = {}

    def response(self, reply: Reply, number: int) -> bytes:
        """The bytes of a reply; `number` is its place among those the client counts."""
        kind, body = reply.kind, reply.body
        about = self._about
        about.op_id, about.seq_num = reply.op, number
        del about.destroyed_user_context_ids[:]
        if reply.context:
            about.destroyed_user_context_ids.append(reply.context)
        if reply.status is not None:
            made = self.messages.IfrtResponse()
            made.CopyFrom(self._head)
            self._set_status(made.response_metadata.status, reply.status)
            return bytes(made.SerializeToString())
        # The fields of a message may follow each other in any order, so its parts are written one by one.
        head: bytes = self._head.SerializeToString()
        if body is None:
            if kind not in self._empty:
                self._empty[kind] = self._body(kind, None)
            return head + self._empty[kind]
        return head + self._body(kind, body)

    def _body(self, kind: str, found: Any) -> bytes:
        made = self.messages.IfrtResponse()
        body = getattr(made, kind)
        body.SetInParent()
        special = _SPECIAL.get(kind)
        if special is not None and found is not None:
            special(self, body, found)
        elif found:
            for name, value in found.items():
                if isinstance(value, (list, tuple)):
                    getattr(body, name).extend(value)
                else:
                    setattr(body, name, value)
        return bytes(made.SerializeToString())

    def _set_status(self, proto: Any, status: Status) -> None:
        proto.code, proto.message = status

    def _copied(self, body: Any, made: Any) -> None:
        """An answer that was made elsewhere as a message of its own."""
        body.CopyFrom(made)

    def _assignment(self, body: Any, made: Any) -> None:
        found = body.device_assignment
        found.replica_count, found.computation_count = made["replicas"], made["partitions"]
        for k in range(made["partitions"]):
            part = found.computation_devices.add()
            for replica in range(made["replicas"]):
                part.replica_device_ids.append(made["devices"][replica * made["partitions"] + k])

    def _execution(self, body: Any, made: Any) -> None:
        body.status_handle = made["status_handle"]
        if made["handles"] is None:
            return
        program: Signature = made["program"]
        listed = zip(made["handles"], program.outputs, program.output_shardings, strict=True)
        for number, (handle, kind, sharding) in enumerate(listed):
            output = body.outputs.add()
            if number in program.tokens or number in program.texts:
                output.dtype.kind = _TOKEN if number in program.tokens else TEXT
                output.shape.SetInParent()
            else:
                output.dtype.kind = _KINDS[kind.dtype]
                output.shape.dims.extend(kind.shape)
            output.array_handle = handle
            self.set_sharding(output.sharding, sharding, len(kind.shape))

    def set_sharding(self, proto: Any, sharding: Sharding, dimensions: int) -> None:
        """Writes a sharding as IFRT has it."""
        if len(sharding.devices) == 1:
            made = self.messages.SingleDeviceShardingProto(device_id=sharding.devices[0])
            proto.serialized_sharding.type_name = _SINGLE
        else:
            made = self.messages.HloShardingProto()
            made.devices.device_ids.extend(sharding.devices)
            made.xla_op_sharding.CopyFrom(self.op_sharding(sharding, dimensions))
            proto.serialized_sharding.type_name = _HLO
        if sharding.memory:
            made.memory_kind = sharding.memory
        proto.serialized_sharding.data = made.SerializeToString()

    def op_sharding(self, sharding: Sharding, dimensions: int) -> Any:
        """A sharding as XLA has it."""
        if sharding.sums:
            return self.messages.OpSharding.FromString(sharding.sums)
        made = self.messages.OpSharding()
        tiles, order = tiles_of(sharding.spec, sharding.mesh, dimensions)
        if tiles[-1] == len(sharding.devices):
            made.type = _REPLICATED
            return made
        made.type = _OTHER
        made.replicate_on_last_tile_dim = tiles[-1] > 1
        made.tile_assignment_dimensions.extend(tiles if tiles[-1] > 1 else tiles[:-1])
        if sharding.order:
            made.tile_assignment_devices.extend(sharding.order[k] for k in iota(tiles, sharding.mesh, order))
            return made
        made.iota_reshape_dims.extend(sharding.mesh)
        made.iota_transpose_perm.extend(order)
        return made

    def metadata(self, program: Signature, temporary_bytes: int, memory: str) -> Any:
        """The facts that the client wants of a program before it calls it.

        Args:
            memory: the kind of memory that results without a kind of their own are in.
        """
        made = self.messages.LoadedExecutableMetadataResponse()
        if len(program.devices) > 1:
            for name, kinds, shardings in (
                ("parameter_shardings", program.inputs, program.input_shardings),
                ("output_shardings", program.outputs, program.output_shardings),
            ):
                listed = getattr(made, name)
                listed.SetInParent()
                for kind, sharding in zip(kinds, shardings, strict=True):
                    listed.shardings.append(self.op_sharding(sharding, len(kind.shape)))
        for name, kinds, orders in (
            ("parameter_layouts_list", program.inputs, program.input_orders),
            ("output_layouts_list", program.outputs, program.output_orders),
        ):
            layouts = getattr(made, name)
            layouts.SetInParent()
            for k, kind in enumerate(kinds):
                if name == "output_layouts_list" and (k in program.tokens or k in program.texts):
                    layouts.layouts.add()
                    continue
                order = orders[k] if orders else reversed(range(len(kind.shape)))
                layouts.layouts.add().minor_to_major.extend(order)
        kinds_of_memory = made.output_memory_kinds.memory_kind_lists.add()
        kinds_of_memory.memory_kinds.extend(sharding.memory or memory for sharding in program.output_shardings)
        made.donated_input_indices.SetInParent()
        made.donated_input_indices.donated_input_indices.extend(sorted(program.donated))
        stats = made.compiled_memory_stats
        stats.argument_size_in_bytes = _bytes(program.inputs, program.input_shardings)
        stats.output_size_in_bytes = _bytes(program.outputs, program.output_shardings)
        stats.temp_size_in_bytes = temporary_bytes
        return made

    def cost(self, found: dict[str, float]) -> Any:
        """XLA's cost analysis."""
        made = self.messages.LoadedExecutableCostAnalysisResponse()
        made.attributes.SetInParent()
        for key, value in found.items():
            made.attributes.attributes[key].float_value = value
        return made


def _bytes(kinds: Sequence[ArrayType], shardings: Sequence[Sharding]) -> int:
    """Bytes of arrays on one of their devices."""
    found = 0
    for kind, sharding in zip(kinds, shardings, strict=True):
        found += math.prod(sharding.shard_shape(kind.shape)) * item_bytes(kind.dtype)
    return found


_SPECIAL: dict[str, Any] = {
    "get_default_device_assignment_response": Writer._assignment,
    "loaded_executable_execute_response": Writer._execution,
    "loaded_executable_metadata_response": Writer._copied,
    "loaded_executable_cost_analysis_response": Writer._copied,
    "init_response": Writer._copied,
}

MLIR_DTYPES = {
    "i1": "bool",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
    **{f"i{bits}": f"int{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"ui{bits}": f"uint{bits}" for bits in (2, 4, 8, 16, 32, 64)},
}


def mlir_dtype(text: str) -> str:
    """The element type that MLIR writes in this way. Raises `Refused` for one that arrays cannot have."""
    found = MLIR_DTYPES.get(text)
    if found is None and text.startswith("f"):
        form = text.lower()[1:]  # such as f8E4M3FN
        found = f"float{form[:1]}_{form[1:]}"
    try:
        item_bytes(found or text)
    except GraphError:
        raise Refused(Code.UNIMPLEMENTED, f"programs with values of type {text} are not supported") from None
    assert found is not None
    return found
