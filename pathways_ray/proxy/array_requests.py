"""Requests about arrays: made of bytes, put together, taken apart, copied. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pathways_ray.ir.types import ArrayType
from pathways_ray.proxy import events as do
from pathways_ray.proxy.arrays import Array, Arrays, Code, Place, Refused, Sharding, Status
from pathways_ray.proxy.events import Command


class ArrayRequests:
    """Carries out requests about arrays.

    Args:
        read: reads parts of requests (`codec.Reader`).
        islands: by the numbers of the devices that the client has, the island of each.
    """

    def __init__(self, arrays: Arrays, read: Any, islands: Mapping[int, int]) -> None:
        self.arrays = arrays
        self.read = read
        self.islands = islands

    def carry_out(self, request: do.Requested, commands: list[Command]) -> tuple[str, Any]:
        """The kind and the body of the answer; commands are added to the list, also where it fails halfway."""
        body = _HANDLERS[request.kind](self, request.body, commands)
        return request.kind.removesuffix("request") + "response", body

    def bytes_needed(self, request: do.Requested) -> Sequence[int]:
        """The host buffers that a request is about."""
        if request.kind == "make_array_from_host_buffer_request":
            return (request.body.host_buffer_handle,)
        if request.kind == "make_arrays_from_host_buffer_shards_request":
            return [buffer.host_buffer_handle for spec in request.body.specs for buffer in spec.host_buffers]
        return ()

    def names_given(self, request: do.Requested) -> Sequence[int]:
        """The names that the client has given to what a request makes."""
        named = _NAMED.get(request.kind)
        if named is None:
            return ()
        found = getattr(request.body, named)
        return [found] if isinstance(found, int) else list(found)

    def as_buffer(self, array: Array, kind: ArrayType, sharding: Sharding, commands: list[Command]) -> int:
        """A buffer of an array, in a type and a sharding that describe the same shards.

        Raises:
            Refused: they are others.
        """
        number = self.arrays.buffer_of(array)
        if number:
            found = self.arrays.buffers[number]
            same = found.type is kind or found.type == kind
            if same and (found.sharding is sharding or found.sharding.is_same_but_memory(sharding)):
                return number
        shard = ArrayType(sharding.shard_shape(kind.shape), kind.dtype)
        if array.sharding.devices != sharding.devices or array.shard_type != shard:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"an array {array.type} with shards {array.shard_type} on devices {array.sharding.devices} was given "
                f"for {kind} with shards {shard} on devices {sharding.devices}",
            )
        if sharding.order:
            return self._straightened(array, kind, sharding, commands)
        number = self._regrouped(array.shards, kind, sharding, commands)
        self.arrays.move(array, number)
        array.type, array.sharding = kind, sharding
        return number

    def _straightened(self, array: Array, kind: ArrayType, sharding: Sharding, commands: list[Command]) -> int:
        """A buffer with the values of an array that lies in some order of the devices, laid out in theirs."""
        lying = sharding.straight
        listed = self.arrays.borrow(Array(kind, lying, tuple(array.shards[k] for k in sharding.order)))
        source = self.as_buffer(listed, kind, lying, commands)
        self.arrays.buffers[source].shared = True
        target = replace(sharding, order=())
        number = self.arrays.new(kind, target, shared=True)
        commands.append(do.Move(number, kind, target, source))
        self.arrays.borrow(self.arrays.alone(number))
        return number

    def _regrouped(self, shards: Sequence[Place], kind: ArrayType, sharding: Sharding, commands: list[Command]) -> int:
        sources = list(dict.fromkeys(buffer for buffer, _ in shards))
        for source in sources:
            self.arrays.buffers[source].shared = True
        number = self.arrays.new(kind, sharding, shared=True)
        places = tuple((sources.index(buffer), place) for buffer, place in shards)
        commands.append(do.Regroup(number, kind, sharding, tuple(sources), places))
        return number

    def _check_devices(self, devices: Sequence[int]) -> None:
        unknown = [device for device in devices if device not in self.islands]
        if unknown:
            raise Refused(Code.INVALID_ARGUMENT, f"there are no devices {unknown}; there are {sorted(self.islands)}")

    def _sharding(self, proto: Any, shape: Sequence[int]) -> Sharding:
        found: Sharding = self.read.sharding(proto, shape)
        self._check_devices(found.devices)
        return found

    # --- made of bytes ------------------------------------------------------------------------------------------------

    def _from_host(self, body: Any, commands: list[Command]) -> Any:
        kind = self.read.array_type(body.dtype, body.shape)
        sharding = self._sharding(body.sharding, kind.shape)
        if sharding.shard_shape(kind.shape) != kind.shape:
            raise Refused(Code.UNIMPLEMENTED, f"one host buffer for an array {kind} that is split over devices")
        strides = tuple(body.byte_strides.strides) if body.HasField("byte_strides") else ()
        places = tuple(range(len(sharding.devices)))
        self._upload(body.array_handle, kind, sharding, (do.Piece(body.host_buffer_handle, strides, places),), commands)
        return {"array_handle": body.array_handle}

    def _from_host_shards(self, body: Any, commands: list[Command]) -> Any:
        for handle, spec in zip(body.array_handles, body.specs, strict=True):
            kind = self.read.array_type(spec.array_spec.dtype, spec.array_spec.shape)
            sharding = self._sharding(spec.array_spec.sharding, kind.shape)
            pieces = tuple(
                do.Piece(
                    buffer.host_buffer_handle,
                    tuple(buffer.byte_strides.strides) if buffer.HasField("byte_strides") else (),
                    tuple(places.indices),
                )
                for buffer, places in zip(spec.host_buffers, spec.addressable_shard_indices, strict=True)
            )
            given = sorted(place for piece in pieces for place in piece.places)
            if given != list(range(len(sharding.devices))):
                raise Refused(Code.INVALID_ARGUMENT, f"bytes for shards {given} of an array on {sharding.devices}")
            self._upload(handle, kind, sharding, pieces, commands)
        return {"array_handles": list(body.array_handles)}

    def _upload(
        self,
        handle: int,
        kind: ArrayType,
        sharding: Sharding,
        pieces: tuple[do.Piece, ...],
        commands: list[Command],
    ) -> None:
        shard = ArrayType(sharding.shard_shape(kind.shape), kind.dtype)
        if not self._is_spread(sharding):
            if sharding.order:
                at = {device: place for place, device in enumerate(sharding.order)}
                pieces = tuple(piece._replace(places=tuple(at[k] for k in piece.places)) for piece in pieces)
            buffer = self.arrays.new(kind, sharding.straight)
            self.arrays.name(handle, self.arrays.listed(buffer, sharding))
            commands.append(do.Upload(buffer, kind, sharding.straight, pieces))
            return
        shards: dict[int, Place] = {}
        for piece in pieces:
            for place in piece.places:
                alone = Sharding.on(sharding.devices[place], sharding.memory)
                buffer = self.arrays.new(shard, alone)
                shards[place] = buffer, 0
                commands.append(do.Upload(buffer, shard, alone, (piece._replace(places=(0,)),)))
        self.arrays.name(handle, Array(kind, sharding, tuple(shards[k] for k in range(len(shards)))))

    def _is_spread(self, sharding: Sharding) -> bool:
        """Whether the devices are of several islands: a buffer lies on one, so each shard is one of its own."""
        return len({self.islands[device] for device in sharding.devices}) > 1

    def _failed(self, body: Any, commands: list[Command]) -> Any:
        for handle, spec in zip(body.array_handles, body.array_specs, strict=True):
            kind = self.read.array_type(spec.dtype, spec.shape)
            status = Status(body.error.code, body.error.message)
            self.arrays.name(handle, Array(kind, self._sharding(spec.sharding, kind.shape), (), status))
        return {"array_handles": list(body.array_handles)}

    # --- put together, taken apart ------------------------------------------------------------------------------------

    def _assemble(self, body: Any, commands: list[Command]) -> Any:
        parts = [self.arrays.usable(handle) for handle in body.single_device_array_handles]
        if not parts:
            raise Refused(Code.INVALID_ARGUMENT, "an array is assembled of one or more others, not of none")
        kind = ArrayType(tuple(body.shape.dims), parts[0].type.dtype)
        sharding = self._sharding(body.sharding, kind.shape)
        shards = tuple(shard for part in parts for shard in part.shards)
        self._alias(body.result_handle, kind, sharding, shards, parts)
        return {"array_handle": body.result_handle}

    def _alias(
        self, handle: int, kind: ArrayType, sharding: Sharding, shards: tuple[Place, ...], parts: Sequence[Array]
    ) -> None:
        """Names an array that consists of shards of others."""
        wanted = ArrayType(sharding.shard_shape(kind.shape), kind.dtype)
        for part in parts:
            if part.shard_type != wanted:
                text = f"shards of {kind} are {wanted}; one that it is made of is {part.shard_type}"
                raise Refused(Code.INVALID_ARGUMENT, text)
        devices = tuple(self.arrays.buffers[b].sharding.devices[place] for b, place in shards)
        if devices != sharding.devices:
            text = f"an array on devices {sharding.devices} cannot be made of shards on devices {devices}"
            raise Refused(Code.INVALID_ARGUMENT, text)
        self.arrays.name(handle, Array(kind, sharding, shards))

    def _disassemble(self, body: Any, commands: list[Command]) -> Any:
        array = self.arrays.usable(body.array_handle)
        if len(body.result_handles) != len(array.shards):
            text = f"{len(body.result_handles)} names for {len(array.shards)} shards"
            raise Refused(Code.INVALID_ARGUMENT, text)
        kind, memory = array.shard_type, array.sharding.memory
        for handle, shard, device in zip(body.result_handles, array.shards, array.sharding.devices, strict=True):
            self.arrays.name(handle, Array(kind, Sharding.on(device, memory), (shard,)))
        return {"array_handles": list(body.result_handles)}

    def _first_copy(self, body: Any, commands: list[Command]) -> Any:
        array = self.arrays.usable(body.array_handle)
        if array.shard_type != array.type:
            raise Refused(Code.INVALID_ARGUMENT, f"array {body.array_handle} is not whole on each of its devices")
        sharding = Sharding.on(array.sharding.devices[0], array.sharding.memory)
        self.arrays.name(body.result_handle, Array(array.type, sharding, array.shards[:1]))
        return {"array_handle": body.result_handle}

    def _remap(self, body: Any, commands: list[Command]) -> Any:
        inputs = [self.arrays.usable(handle) for handle in body.array_handles]
        places: list[dict[int, Place]] = [{} for _ in body.plan.output_specs]
        parts: list[list[Array]] = [[] for _ in body.plan.output_specs]
        for mapping in body.plan.mappings:
            source = inputs[mapping.in_array]
            parts[mapping.out_array].append(source)
            taken = _steps(mapping.from_start, mapping.from_end, mapping.from_step, len(source.shards))
            given = _steps(mapping.to_start, mapping.to_end, mapping.to_step, len(taken))
            for at, to in zip(taken, given, strict=True):
                places[mapping.out_array][to] = source.shards[at]
        for handle, spec, found, used in zip(body.result_handles, body.plan.output_specs, places, parts, strict=True):
            kind = self.read.array_type(spec.dtype, spec.shape)
            sharding = self._sharding(spec.sharding, kind.shape)
            if sorted(found) != list(range(len(sharding.devices))):
                raise Refused(Code.INVALID_ARGUMENT, f"the plan gives shards {sorted(found)} of {sharding.devices}")
            self._alias(handle, kind, sharding, tuple(found[k] for k in range(len(found))), used)
        if body.copy_semantics == DONATE:
            for array in inputs:
                self.arrays.delete(array)
        return {"array_handles": list(body.result_handles)}

    # --- copied -------------------------------------------------------------------------------------------------------

    def _copy(self, body: Any, commands: list[Command]) -> Any:
        devices = tuple(body.device_ids)
        self._check_devices(devices)
        for handle, result in zip(body.array_handles, body.result_handles, strict=True):
            array = self.arrays.usable(handle)
            before = array.sharding
            if devices and len(devices) != len(before.devices):
                text = f"an array on {len(before.devices)} devices cannot be copied to {len(devices)}"
                raise Refused(Code.INVALID_ARGUMENT, text)
            memory = body.memory_kind if body.HasField("memory_kind") else before.memory
            target = replace(before, devices=devices or before.devices, memory=memory)
            self._moved(array, result, target, commands)
            if body.copy_semantics == DONATE:
                self.arrays.delete(array)
        return {"array_handles": list(body.result_handles)}

    def _reshard(self, body: Any, commands: list[Command]) -> Any:
        for handle, spec, result in zip(body.array_handles, body.array_specs, body.result_handles, strict=True):
            array = self.arrays.usable(handle)
            kind = self.read.array_type(spec.dtype, spec.shape)
            if kind != array.type:
                raise Refused(Code.INVALID_ARGUMENT, f"an array {array.type} cannot be resharded to {kind}")
            self._moved(array, result, self._sharding(spec.sharding, kind.shape), commands)
            if body.copy_semantics == DONATE:
                self.arrays.delete(array)
        return {"array_handles": list(body.result_handles)}

    def _moved(self, array: Array, result: int, target: Sharding, commands: list[Command]) -> None:
        """Names a copy of an array on other devices, or in another layout; where neither differs, the same shards."""
        target.shard_shape(array.type.shape)
        if target.is_same_but_memory(array.sharding):
            self.arrays.name(result, Array(array.type, target, array.shards))
            return
        if self._is_spread(target) or self._is_spread(array.sharding):
            self._moved_apart(array, result, target, commands)
            return
        lying = array.sharding.straight
        if array.sharding.order:
            shards = tuple(array.shards[k] for k in array.sharding.order)
            array = self.arrays.borrow(Array(array.type, lying, shards))
        source = self.as_buffer(array, array.type, lying, commands)
        self.arrays.buffers[source].shared = True
        number = self.arrays.new(array.type, target.straight, shared=True)
        commands.append(do.Move(number, array.type, target.straight, source))
        self.arrays.name(result, self.arrays.listed(number, target))

    def _moved_apart(self, array: Array, result: int, target: Sharding, commands: list[Command]) -> None:
        """The same, shard by shard, where the devices are of several islands.

        Raises:
            Refused: other shards are asked for.
        """
        shard, before = array.shard_type, array.sharding
        if (target.mesh, target.spec, target.order) != (before.mesh, before.spec, before.order):
            text = (
                f"from {before.devices} to {target.devices}, of several islands, arrays go shard by shard as they are"
            )
            raise Refused(Code.UNIMPLEMENTED, f"{text}, and not as other shards; read them and put them")
        made: list[Place] = []
        for place, source, device in zip(array.shards, before.devices, target.devices, strict=True):
            if device == source:
                made.append(place)
                continue
            alone = self.arrays.borrow(Array(shard, Sharding.on(source), (place,)))
            buffer = self.as_buffer(alone, shard, Sharding.on(source), commands)
            number = self.arrays.new(shard, Sharding.on(device), shared=True)
            self.arrays.buffers[buffer].shared = True
            commands.append(do.Move(number, shard, Sharding.on(device), buffer))
            made.append((number, 0))
        self.arrays.name(result, Array(array.type, target, tuple(made)))

    # --- questions ----------------------------------------------------------------------------------------------------

    def _default_layout(self, body: Any, commands: list[Command]) -> Any:
        order = ",".join(str(k) for k in reversed(range(len(body.dims))))
        return {"serialized_pjrt_layout": f"{{{order}}}".encode()}

    def _default_assignment(self, body: Any, commands: list[Command]) -> Any:
        asked = body.num_replicas * body.num_partitions
        if min(body.num_replicas, body.num_partitions) < 1 or asked > len(self.islands):
            raise Refused(Code.INVALID_ARGUMENT, f"{asked} devices are asked for; there are {len(self.islands)}")
        return {"replicas": body.num_replicas, "partitions": body.num_partitions, "devices": sorted(self.islands)}


DONATE = 3
"""ARRAY_COPY_SEMANTICS_DONATE_INPUT."""


def _steps(starts: Sequence[int], ends: Sequence[int], steps: Sequence[int], most: int) -> list[int]:
    """The places of some intervals. Raises `Refused` for more than there can be, before they are made."""
    places = (at for bounds in zip(starts, ends, steps, strict=True) for at in range(*bounds))
    found = list(itertools.islice(places, most + 1))
    if len(found) > most:
        raise Refused(Code.INVALID_ARGUMENT, f"the plan has more places than the {most} of an array")
    return found


_HANDLERS: dict[str, Callable[[ArrayRequests, Any, list[Command]], Any]] = {
    "make_array_from_host_buffer_request": ArrayRequests._from_host,
    "make_arrays_from_host_buffer_shards_request": ArrayRequests._from_host_shards,
    "make_error_arrays_request": ArrayRequests._failed,
    "assemble_array_from_single_device_arrays_request": ArrayRequests._assemble,
    "disassemble_into_single_device_arrays_request": ArrayRequests._disassemble,
    "fully_replicated_shard_request": ArrayRequests._first_copy,
    "remap_arrays_request": ArrayRequests._remap,
    "copy_arrays_request": ArrayRequests._copy,
    "reshard_arrays_request": ArrayRequests._reshard,
    "get_default_layout_request": ArrayRequests._default_layout,
    "get_default_device_assignment_request": ArrayRequests._default_assignment,
}

ARRAY_REQUESTS = frozenset(_HANDLERS)

QUESTIONS = frozenset(("get_default_layout_request", "get_default_device_assignment_request"))
"""Those whose answers the client waits for."""

BRING_BYTES = frozenset(("make_array_from_host_buffer_request", "make_arrays_from_host_buffer_shards_request"))
"""Requests that may have to wait for bytes."""

_NAMED = {
    "make_array_from_host_buffer_request": "array_handle",
    "make_arrays_from_host_buffer_shards_request": "array_handles",
    "make_error_arrays_request": "array_handles",
    "assemble_array_from_single_device_arrays_request": "result_handle",
    "disassemble_into_single_device_arrays_request": "result_handles",
    "fully_replicated_shard_request": "result_handle",
    "remap_arrays_request": "result_handles",
    "bitcast_arrays_request": "result_handles",
    "copy_arrays_request": "result_handles",
    "reshard_arrays_request": "result_handles",
    "loaded_executable_execute_request": "result_array_handle",
}
"""Where requests name what they make."""
