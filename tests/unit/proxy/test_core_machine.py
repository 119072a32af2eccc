"""Any requests in any order: each is answered once, nothing is raised, what is used has been made, and what no array
lies in is freed."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from pathways_ray.ir.types import ArrayType
from pathways_ray.proxy import events as do
from pathways_ray.proxy.arrays import Sharding, Status
from pathways_ray.proxy.codec import Reader, Writer
from pathways_ray.proxy.core import ProxyCore
from pathways_ray.proxy.descriptors import messages
from pathways_ray.proxy.programs import HANDING_OVER
from tests.unit.strategies import repeatable

M = messages()
SHARDINGS = [
    Sharding.on(0),
    Sharding.on(3),
    Sharding.on(9),
    Sharding((0, 1, 2, 3), (2, 2), (("f0", "f1"),)),
    Sharding((0, 1, 2, 3), (2, 2)),
    Sharding((3, 1), (2,), (("f0",),), "pinned_host"),
    Sharding((0, 1, 2, 3), (2, 2), (("f0", "f1"),), order=(3, 1, 2, 0)),
]
FIRST = 1 << 62

handles = st.integers(0, 6) | st.integers(FIRST + 1, FIRST + 6)
several = st.lists(handles, max_size=5)
dims = st.sampled_from([(), (2,), (8,), (8, 2), (3,), (0,)])


@st.composite
def specs(draw: st.DrawFn) -> Any:
    sharding, shape = draw(st.sampled_from(SHARDINGS)), draw(dims)
    made = M.ArraySpecProto(dtype=M.DTypeProto(kind=draw(st.sampled_from([0, 4, 11, 17, 99]))))
    made.shape.dims.extend(shape)
    if len(sharding.spec) <= len(shape):
        Writer(M).set_sharding(made.sharding, sharding, len(shape))
    return made


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    spec = draw(specs())
    one, many, named = draw(handles), draw(several), draw(several)
    about = {"dtype": spec.dtype, "shape": spec.shape, "sharding": spec.sharding}
    shards = M.MakeArraysFromHostBufferShardsRequest()
    part = shards.specs.add(array_spec=spec)
    part.host_buffers.add(host_buffer_handle=one)
    part.addressable_shard_indices.add(indices=range(draw(st.integers(0, 5))))
    shards.array_handles.extend(named[:1])
    plan = M.RemapPlanProto(output_specs=[spec])
    plan.mappings.add(
        in_array=0, out_array=0, from_start=[0], from_end=[4], from_step=[1], to_start=[0], to_end=[4], to_step=[1]
    )
    assembled = {"shape": spec.shape, "sharding": spec.sharding, "single_device_array_handles": many}
    choices = {
        "make_array_from_host_buffer_request": {**about, "host_buffer_handle": one, "array_handle": one},
        "make_error_arrays_request": {"array_specs": [spec], "array_handles": named[:1]},
        "assemble_array_from_single_device_arrays_request": {**assembled, "result_handle": one},
        "disassemble_into_single_device_arrays_request": {"array_handle": one, "result_handles": named},
        "fully_replicated_shard_request": {"array_handle": one, "result_handle": draw(handles)},
        "remap_arrays_request": {"plan": plan, "array_handles": many, "result_handles": named},
        "copy_arrays_request": {"array_handles": many, "result_handles": named, "device_ids": [0], "copy_semantics": 3},
        "reshard_arrays_request": {"array_handles": many, "array_specs": [spec], "result_handles": named},
        "copy_to_host_buffer_request": {"array_handle": one},
        "check_value_ready_request": {"value_handles": many},
        "check_future_request": {"future_handle": one},
        "delete_array_request": {"array_handle": many},
        "destruct_array_request": {"array_handle": many},
        "is_array_deleted_request": {"array_handle": one},
        "compile_request": {},
        "loaded_executable_execute_request": {
            "loaded_executable_handle": one,
            "args_handles": many,
            "result_array_handle": named,
        },
        "loaded_executable_destruct_request": {"loaded_executable_handle": one},
        "loaded_executable_metadata_request": {"loaded_executable_handle": one},
        "get_default_layout_request": {"dims": spec.shape.dims},
    }
    kind = draw(st.sampled_from([*choices, "make_arrays_from_host_buffer_shards_request"]))
    return kind, getattr(M.IfrtRequest(), kind).__class__(**choices[kind]) if kind in choices else shards


def signature(inputs: int) -> do.Signature:
    row, split = ArrayType((8,), "float32"), SHARDINGS[3]
    takes = (row,) * inputs, (row, row), (split,) * inputs
    return do.Signature("f", *takes, (split, split), frozenset([0]), (0, 1, 2, 3), b"")


@repeatable(100)
@given(st.lists(requests(), max_size=25), st.sampled_from([(0, 0, 0, 0), (0, 0, 1, 1)]))
def test_each_request_is_answered_once(asked: list[tuple[str, Any]], islands: tuple[int, ...]) -> None:
    core = ProxyCore(Reader(M), dict(enumerate(islands)))
    answered: list[int] = []
    known: set[int] = set()

    def take(commands: list[do.Command]) -> None:
        for command in commands:
            match command:
                case do.Reply():
                    answered.append(command.op)
                case do.Upload():
                    known.add(command.buffer)
                case do.Regroup() | do.Move():
                    assert known.issuperset(command.sources if isinstance(command, do.Regroup) else [command.source])
                    known.add(command.buffer)
                case do.Execute():
                    assert known.issuperset(command.arguments)
                    known.update(command.results)
                case do.Free():
                    assert known.issuperset(command.buffers)
                    known.difference_update(command.buffers)
                case do.Compile():
                    made = (
                        signature(1 + command.executable % 4 // 2) if command.executable % 2 else HANDING_OVER.signature
                    )
                    take(core.handle(do.Compiled(command.executable, made)))
                case do.Await() | do.Fetch() | do.HandOver() | do.Inspect():
                    take(core.handle(do.Settled(command.ticket, Status(13, "no"))))

    for op, (kind, body) in enumerate(asked):
        take(core.handle(do.Requested(op, 0, kind, body)))
        while core.parked:  # the bytes come, one after the other
            needed = core.parked.awaited[0]
            take(core.handle(do.Stored(needed, Status(4, "late") if needed % 3 == 1 else None)))
    assert sorted(answered) == list(range(len(asked)))
    take(
        core.handle(
            do.Requested(-1, 0, "destruct_array_request", M.DestructArrayRequest(array_handle=list(core.arrays.arrays)))
        )
    )
    assert core.arrays.buffers == {}
    assert known == set()
