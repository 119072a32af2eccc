"""The core of a proxy: requests of a client in, commands out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pathways_ray.errors import Failure
from pathways_ray.ir.types import ArrayType
from pathways_ray.proxy import events as do
from pathways_ray.proxy.arrays import Code, Refused, Sharding, Status
from pathways_ray.proxy.codec import Reader, Writer, laid_out
from pathways_ray.proxy.core import FIRST_HANDLE, MAX_EARLY, ProxyCore
from pathways_ray.proxy.descriptors import messages
from pathways_ray.proxy.programs import HANDING_OVER
from pathways_ray.proxy.statuses import status_of

M = messages()
F32 = M.DTypeProto(kind=11)
ROW, WHOLE = ArrayType((8,), "float32"), ArrayType((2,), "float32")
SPLIT = Sharding((0, 1, 2, 3), (2, 2), (("f0", "f1"),))
COPIES = Sharding((0, 1, 2, 3), (2, 2))


ISLANDS = dict.fromkeys(range(4), 0)


class Client:
    """A client of four devices; `ask` gives the answer and the other commands."""

    def __init__(self, islands: Mapping[int, int] = ISLANDS) -> None:
        self.core = ProxyCore(Reader(M), islands)
        self.ops = itertools.count(1)

    def send(self, kind: str, **fields: Any) -> list[do.Command]:
        body = getattr(M.IfrtRequest(), kind).__class__(**fields)
        op = next(self.ops)
        return self.core.handle(do.Requested(op, 1000 + op, kind, body))

    def ask(self, kind: str, **fields: Any) -> tuple[do.Reply, list[do.Command]]:
        commands = self.send(kind, **fields)
        (reply,) = (command for command in commands if isinstance(command, do.Reply))
        return reply, [command for command in commands if command is not reply]

    def put(self, handle: int, sharding: Sharding = SPLIT, shape: tuple[int, ...] = (8,)) -> do.Upload:
        """An array of the client, whose bytes have come."""
        kind = ArrayType(shape, "float32")
        self.core.handle(do.Stored(handle))
        spec = M.ArraySpecProto(dtype=F32, shape=M.ShapeProto(dims=shape))
        Writer(M).set_sharding(spec.sharding, sharding, len(shape))
        shards = M.MakeArraysFromHostBufferShardsRequest
        of_one = shards.MakeArraysFromHostBufferShardsSpec(array_spec=spec)
        of_one.host_buffers.add(host_buffer_handle=handle, dtype=F32)
        of_one.addressable_shard_indices.add(indices=range(len(sharding.devices)))
        reply, commands = self.ask(
            "make_arrays_from_host_buffer_shards_request", specs=[of_one], array_handles=[handle]
        )
        assert reply.status is None
        upload, discarded = commands
        assert isinstance(upload, do.Upload)
        assert upload.type == kind
        assert discarded == do.Discard((handle,))
        return upload

    def assemble(self, handle: int, parts: Sequence[int]) -> None:
        """A row over the four devices, of an array on each."""
        sharding = M.ShardingProto()
        Writer(M).set_sharding(sharding, SPLIT, 1)
        about = {"shape": M.ShapeProto(dims=[8]), "sharding": sharding, "single_device_array_handles": parts}
        reply, _ = self.ask("assemble_array_from_single_device_arrays_request", result_handle=handle, **about)
        assert reply.status is None

    def program(self, donated: tuple[int, ...] = (), outputs: int = 1, inputs: int = 1) -> int:
        """A program from rows to rows, over the four devices."""
        (command,) = self.send("compile_request", program=M.Serialized(type_name="x"))
        assert isinstance(command, do.Compile)
        signature = do.Signature(
            "jit_f",
            (ROW,) * inputs,
            (ROW,) * outputs,
            (SPLIT,) * inputs,
            (SPLIT,) * outputs,
            frozenset(donated),
            (0, 1, 2, 3),
            b"f",
        )
        (reply,) = self.core.handle(do.Compiled(command.executable, signature))
        assert isinstance(reply, do.Reply)
        assert reply.body["loaded_executable_handle"] == command.executable
        return command.executable

    def execute(
        self, program: int, *arguments: int, results: tuple[int, ...] = ()
    ) -> tuple[do.Reply, list[do.Command]]:
        return self.ask(
            "loaded_executable_execute_request",
            loaded_executable_handle=program,
            args_handles=arguments,
            result_array_handle=results,
        )


def test_a_request_for_bytes_on_their_way_waits_and_so_do_those_behind_it() -> None:
    """1. An array is to be made of bytes that have not come. 2. A deletion comes behind it. 3. The bytes come: both are
    carried out, in order."""
    client = Client()
    spec = M.ShardingProto()
    Writer(M).set_sharding(spec, Sharding.on(1), 1)
    fields = {"dtype": F32, "shape": M.ShapeProto(dims=[8]), "sharding": spec, "host_buffer_handle": 5}
    assert client.send("make_array_from_host_buffer_request", array_handle=5, **fields) == []
    assert client.send("destruct_array_request", array_handle=[5]) == []
    commands = client.core.handle(do.Stored(5))
    assert [type(command) for command in commands] == [do.Upload, do.Reply, do.Discard, do.Reply, do.Free]
    assert commands[0].pieces == (do.Piece(5, (), (0,)),)  # type: ignore[union-attr]


def test_the_first_results_are_named_here_and_later_ones_by_the_client() -> None:
    client = Client()
    upload = client.put(1)
    program = client.program()
    reply, (launch,) = client.execute(program, 1)
    assert isinstance(launch, do.Execute)
    assert launch.arguments == (upload.buffer,)
    (first,) = reply.body["handles"]
    assert first > FIRST_HANDLE
    reply, (launch,) = client.execute(program, first, results=(77,))
    assert reply.body is None
    assert client.core.arrays.find(77).shards == tuple((launch.results[0], k) for k in range(4))  # type: ignore[union-attr]


def test_shards_that_are_named_apart_and_put_together_again_are_the_same_buffer() -> None:
    client = Client()
    upload = client.put(1)
    names = [11, 12, 13, 14]
    client.ask("disassemble_into_single_device_arrays_request", array_handle=1, result_handles=names)
    assert client.core.arrays.find(13).sharding == Sharding.on(2)
    proto = M.ShardingProto()
    Writer(M).set_sharding(proto, SPLIT, 1)
    assembled = {"shape": M.ShapeProto(dims=[8]), "sharding": proto, "single_device_array_handles": names}
    _, commands = client.ask("assemble_array_from_single_device_arrays_request", result_handle=2, **assembled)
    assert commands == []
    assert client.core.arrays.buffer_of(client.core.arrays.find(2)) == upload.buffer
    client.send("destruct_array_request", array_handle=[1, *names])
    freed = client.send("destruct_array_request", array_handle=[2])
    assert do.Free((upload.buffer,)) in freed


def test_a_computation_on_shards_of_several_buffers_regroups_them_once() -> None:
    client = Client()
    uploads = [client.put(k, Sharding.on(k), (2,)) for k in range(4)]
    client.assemble(9, range(4))
    program = client.program()
    _, commands = client.execute(program, 9)
    regroup, launch = commands
    assert isinstance(regroup, do.Regroup)
    assert regroup.sources == tuple(upload.buffer for upload in uploads)
    assert regroup.shards == ((0, 0), (1, 0), (2, 0), (3, 0))
    assert launch.arguments == (regroup.buffer,)  # type: ignore[union-attr]
    _, commands = client.execute(program, 9, results=(10,))
    assert [type(command) for command in commands] == [do.Execute]


@pytest.mark.parametrize("wrong", ["deleted", "split otherwise"])
def test_an_argument_that_is_put_together_outlives_a_call_that_another_one_fails(wrong: str) -> None:
    """1. A call takes an array that is put together of others, and one that it cannot take. 2. It is refused; the first
    argument lies in a buffer of its own now, which a later call takes."""
    client = Client()
    uploads = [client.put(k, Sharding.on(k), (2,)) for k in range(4)]
    client.assemble(9, range(4))
    client.send("destruct_array_request", array_handle=range(4))
    client.put(10, COPIES)
    if wrong == "deleted":
        client.send("delete_array_request", array_handle=[10])
    reply, (regroup, freed) = client.execute(client.program(inputs=2), 9, 10, results=(11,))
    assert reply.status is not None
    assert reply.status.code == Code.INVALID_ARGUMENT
    assert isinstance(regroup, do.Regroup)
    assert freed == do.Free(tuple(upload.buffer for upload in uploads))
    assert client.core.arrays.find(11).failure == reply.status
    reply, (launch,) = client.execute(client.program(), 9)
    assert reply.status is None
    assert launch.arguments == (regroup.buffer,)  # type: ignore[union-attr]


def test_memory_is_given_away_only_by_the_last_that_has_it() -> None:
    """1. A program that donates takes an array that another name has too: it is spared. 2. Then it takes one that
    nothing else has."""
    client = Client()
    client.put(1)
    client.ask("copy_arrays_request", array_handles=[1], result_handles=[2], memory_kind="pinned_host")
    program = client.program(donated=(0,))
    _, (spared,) = client.execute(program, 1)
    assert spared.donated == ()  # type: ignore[union-attr]
    _, commands = client.execute(program, 2, results=(3,))
    assert commands[0].donated == (0,)  # type: ignore[union-attr]
    reply, _ = client.execute(program, 2, results=(4,))
    assert reply.status == Status(Code.INVALID_ARGUMENT, "argument 0 of jit_f has been deleted or donated")


def test_what_fails_poisons_its_results_and_what_is_made_of_them() -> None:
    client = Client()
    client.put(1)
    program = client.program()
    client.execute(program, 1)
    reply, _ = client.execute(program, 404, results=(2,))
    assert reply.status is not None
    assert reply.status.code == Code.NOT_FOUND
    reply, commands = client.execute(program, 2, results=(3,))
    assert reply.status is None
    assert commands == []
    reply, _ = client.ask("check_value_ready_request", value_handles=[3])
    assert reply.status == Status(Code.NOT_FOUND, "there is no array with handle 404")


def test_a_buffer_that_could_not_be_made_fails_those_that_wait_for_it() -> None:
    client = Client()
    upload = client.put(1)
    broken = Status(Code.UNAVAILABLE, "HostLost: gone")
    client.core.handle(do.Broken((upload.buffer,), broken))
    reply, _ = client.ask("check_value_ready_request", value_handles=[1])
    assert reply.status == broken


def test_waiting_is_answered_when_it_is_over() -> None:
    client = Client()
    upload = client.put(1)
    (wait,) = client.send("check_value_ready_request", value_handles=[1])
    assert isinstance(wait, do.Await)
    assert wait.buffers == (upload.buffer,)
    (reply,) = client.core.handle(do.Settled(wait.ticket))
    assert isinstance(reply, do.Reply)
    assert (reply.kind, reply.context) == ("check_value_ready_response", 1000 + reply.op)
    assert client.core.handle(do.Settled(wait.ticket)) == []


def test_values_are_fetched_before_they_are_there_and_their_memory_is_not_given_away_meanwhile() -> None:
    """1. A shard is fetched again and again: the first questions are answered at once, one beyond the limit when it is
    settled. 2. A program that donates is to take the array: it is spared.
    3. All values have come: the next one is taken."""
    client = Client()
    client.put(1)
    shards = [11, 12, 13, 14]
    client.ask("disassemble_into_single_device_arrays_request", array_handle=1, result_handles=shards)
    tickets = []
    for k in range(MAX_EARLY):
        _, (fetch,) = client.ask("copy_to_host_buffer_request", array_handle=12, host_buffer_handle=100 + k)
        assert isinstance(fetch, do.Fetch)
        assert (fetch.place, fetch.handle, fetch.early) == (1, 100 + k, True)
        tickets.append(fetch.ticket)
    (late,) = client.send("copy_to_host_buffer_request", array_handle=12, host_buffer_handle=99)
    assert isinstance(late, do.Fetch)
    assert not late.early
    client.send("destruct_array_request", array_handle=shards)
    program = client.program(donated=(0,))
    _, (launch, _) = client.execute(program, 1)
    assert launch.donated == ()  # type: ignore[union-attr]
    assert [client.core.handle(do.Settled(ticket)) for ticket in tickets] == [[]] * MAX_EARLY
    (reply,) = client.core.handle(do.Settled(late.ticket))
    assert isinstance(reply, do.Reply)
    assert reply.kind == "copy_to_host_buffer_response"
    client.put(2)
    _, commands = client.execute(program, 2, results=(3,))
    assert commands[0].donated == (0,)  # type: ignore[union-attr]


def test_whichever_small_arrays_are_read_the_same_ones_are_given_away() -> None:
    """Each choice is compiled by itself. A big array is given away unless it is the one that is read."""
    big = ArrayType((1 << 20,), "float32")
    kinds = (ROW, big, ROW)
    for read, given in ((0, (1,)), (2, (1,)), (1, ()), (None, (0, 1, 2))):
        client = Client()
        program = client.program(donated=(0, 1, 2))
        made = client.core.executables[program]
        assert made is not None
        client.core.executables[program] = replace(made, inputs=kinds, input_shardings=(SPLIT,) * 3)
        for k, kind in enumerate(kinds):
            client.put(k + 1, shape=kind.shape)
        if read is not None:
            names = [11, 12, 13, 14]
            client.ask("disassemble_into_single_device_arrays_request", array_handle=read + 1, result_handles=names)
            client.ask("copy_to_host_buffer_request", array_handle=11, host_buffer_handle=100)
            client.send("destruct_array_request", array_handle=names)
        _, (launch, *_) = client.execute(program, 1, 2, 3)
        assert launch.donated == given  # type: ignore[union-attr]


def test_arrays_are_handed_over_by_number_and_what_cannot_be_counts_too() -> None:
    """1. A client has an array handed over, then one that is unknown and one that is split. 2. Its memory is not given
    away until it is in its file."""
    client = Client()
    (command,) = client.send("compile_request", program=M.Serialized(type_name="x"))
    assert isinstance(command, do.Compile)
    client.core.handle(do.Compiled(command.executable, HANDING_OVER.signature))
    upload = client.put(1)
    client.ask("disassemble_into_single_device_arrays_request", array_handle=1, result_handles=[11, 12, 13, 14])
    given: list[do.HandOver] = []
    for handle in (13, 404, 1):
        reply, (handed,) = client.execute(command.executable, handle)
        assert isinstance(handed, do.HandOver)
        assert reply.status is None
        assert reply.awaited == (not given)
        given.append(handed)
    assert [one[1:] for one in given] == [(1, upload.buffer, 2), (2, 0, 0), (3, 0, 0)]
    client.send("destruct_array_request", array_handle=[11, 12, 13, 14])
    program = client.program(donated=(0,))
    for donated in ((), (0,)):
        _, (launch, *_) = client.execute(program, 1)
        assert launch.donated == donated  # type: ignore[union-attr]
        client.core.handle(do.Settled(given[0].ticket))
        client.put(1)


def test_a_future_is_asked_for_once_and_those_of_deletions_are_not_counted() -> None:
    client = Client()
    client.put(1)
    reply, _ = client.ask("delete_array_request", array_handle=[1])
    assert not reply.counted
    future = reply.body["deletion_future_handle"]
    reply, _ = client.ask("check_future_request", future_handle=future)
    assert (reply.status, reply.counted) == (None, False)
    reply, _ = client.ask("check_future_request", future_handle=future)
    assert reply.status is not None
    assert reply.status.code == Code.NOT_FOUND
    reply, _ = client.ask("is_array_deleted_request", array_handle=1)
    assert reply.body == {"deleted": True}


def test_a_program_that_cannot_be_compiled_says_why() -> None:
    client = Client()
    (command,) = client.send("compile_request", program=M.Serialized())
    assert isinstance(command, do.Compile)
    (reply,) = client.core.handle(do.Compiled(command.executable, Status(Code.INVALID_ARGUMENT, "no")))
    assert reply.status == Status(Code.INVALID_ARGUMENT, "no")  # type: ignore[union-attr]
    reply, _ = client.execute(command.executable)
    assert reply.status is not None
    assert reply.status.code == Code.NOT_FOUND


@pytest.mark.parametrize(
    ("kind", "fields", "code", "text"),
    [
        ("bitcast_arrays_request", {"result_handles": [4]}, Code.UNIMPLEMENTED, "bitcast_arrays_request is not"),
        ("copy_to_host_buffer_request", {"array_handle": 1}, Code.UNIMPLEMENTED, "is split over devices"),
        (
            "copy_arrays_request",
            {"array_handles": [1], "result_handles": [4], "device_ids": [7]},
            3,
            "no devices \\[7\\]",
        ),
        (
            "copy_arrays_request",
            {"array_handles": [1], "result_handles": [4], "device_ids": [1]},
            3,
            "4 devices cannot",
        ),
        ("fully_replicated_shard_request", {"array_handle": 1, "result_handle": 4}, 3, "not whole on each"),
        (
            "disassemble_into_single_device_arrays_request",
            {"array_handle": 1, "result_handles": [4]},
            3,
            "1 names for 4",
        ),
        (
            "loaded_executable_metadata_request",
            {"loaded_executable_handle": 5},
            Code.NOT_FOUND,
            "no program with handle 5",
        ),
        ("loaded_executable_fetch_execute_result_request", {"result_status_handle": 5}, Code.NOT_FOUND, "no execution"),
        ("compile_request", {"host_callbacks": [b"x"]}, Code.UNIMPLEMENTED, "call back"),
        ("get_default_device_assignment_request", {"num_replicas": 1, "num_partitions": 9}, 3, "9 devices are asked"),
        ("", {}, Code.UNIMPLEMENTED, "is not among what"),
    ],
)
def test_bad_requests_get_a_status_and_the_client_goes_on(kind: str, fields: Any, code: int, text: str) -> None:
    client = Client()
    client.put(1)
    body = getattr(M.IfrtRequest(), kind).__class__(**fields) if kind else None
    (reply,) = client.core.handle(do.Requested(50, 0, kind, body))
    assert isinstance(reply, do.Reply)
    assert reply.status is not None
    assert reply.status.code == code
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(reply.status.message)
    assert client.ask("is_array_deleted_request", array_handle=1)[0].body == {"deleted": False}


def test_copies_on_other_devices_are_moved_and_have_memory_of_their_own() -> None:
    client = Client()
    upload = client.put(1, Sharding.on(0), (2,))
    _, (move,) = client.ask("copy_arrays_request", array_handles=[1], result_handles=[2], device_ids=[3])
    assert isinstance(move, do.Move)
    assert (move.source, move.sharding) == (upload.buffer, Sharding.on(3))
    reply, _ = client.ask("fully_replicated_shard_request", array_handle=2, result_handle=3)
    assert reply.status is None


def test_arrays_over_two_islands_lie_shard_by_shard_and_go_so() -> None:
    """1. Two islands have two devices each. An array over all is four buffers, made of the same bytes. 2. Its shards
    change places: only those that do are copied. 3. As other shards it is not to be had."""
    client = Client({0: 0, 1: 0, 2: 1, 3: 1})
    client.core.handle(do.Stored(1))
    spec = M.ShardingProto()
    Writer(M).set_sharding(spec, COPIES, 1)
    about = {"dtype": F32, "shape": M.ShapeProto(dims=[8]), "sharding": spec}
    _, commands = client.ask("make_array_from_host_buffer_request", array_handle=1, host_buffer_handle=1, **about)
    *uploads, discarded = commands
    assert [(one.sharding, one.pieces) for one in uploads if isinstance(one, do.Upload)] == [
        (Sharding.on(device), (do.Piece(1, (), (0,)),)) for device in range(4)
    ]
    assert discarded == do.Discard((1,))
    swapped = {"array_handles": [1], "result_handles": [2], "device_ids": [0, 3, 2, 1]}
    _, moves = client.ask("copy_arrays_request", **swapped)
    assert [(one.source, one.sharding) for one in moves if isinstance(one, do.Move)] == [
        (uploads[1].buffer, Sharding.on(3)),  # type: ignore[union-attr]
        (uploads[3].buffer, Sharding.on(1)),  # type: ignore[union-attr]
    ]
    asked = M.ArraySpecProto(dtype=F32, shape=M.ShapeProto(dims=[8]))
    Writer(M).set_sharding(asked.sharding, SPLIT, 1)
    reply, commands = client.ask("reshard_arrays_request", array_handles=[1], array_specs=[asked], result_handles=[3])
    assert (reply.status is not None and reply.status.code, commands) == (Code.UNIMPLEMENTED, [])
    freed = client.send("destruct_array_request", array_handle=[1, 2])
    assert isinstance(freed[-1], do.Free)
    assert len(freed[-1].buffers) == 6


def test_remapped_shards_stay_on_their_devices() -> None:
    """Of an array over four devices, two arrays over two devices each are made, and nothing moves."""
    client = Client()
    client.put(1)
    plan = M.RemapPlanProto()
    specs = []
    for devices in ((0, 1), (2, 3)):
        spec = plan.output_specs.add(dtype=F32, shape=M.ShapeProto(dims=[4]))
        specs.append(Sharding(devices, (2,), (("f0",),)))
        Writer(M).set_sharding(spec.sharding, specs[-1], 1)
    for out, start in enumerate((0, 2)):
        plan.mappings.add(
            in_array=0,
            out_array=out,
            from_start=[start],
            from_end=[start + 2],
            from_step=[1],
            to_start=[0],
            to_end=[2],
            to_step=[1],
        )
    reply, commands = client.ask("remap_arrays_request", plan=plan, array_handles=[1], result_handles=[2, 3])
    assert reply.status is None
    assert commands == []
    assert [client.core.arrays.find(k).sharding for k in (2, 3)] == specs


@pytest.mark.parametrize(
    ("kind", "code"),
    [("HostLost", Code.UNAVAILABLE), ("OutOfMemory", Code.RESOURCE_EXHAUSTED), ("ExecutionError", Code.INTERNAL)],
)
def test_failures_of_the_runtime_have_codes(kind: str, code: int) -> None:
    assert status_of(Failure(kind, "so it is")) == Status(code, f"{kind}: so it is")


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("NOT_FOUND: No FFI handler registered", Code.NOT_FOUND),
        ("f could not be compiled on host 0: RESOURCE_EXHAUSTED: Out of memory", Code.RESOURCE_EXHAUSTED),
        ("f could not be compiled on host 0: SOME_OTHER: no", Code.INTERNAL),
        ("it took too long", Code.INTERNAL),
    ],
)
def test_a_program_that_xla_refuses_has_the_code_of_xla(said: str, code: int) -> None:
    assert status_of(Failure("CompileError", said)) == Status(code, f"CompileError: {said}")


@pytest.mark.parametrize(
    ("op", "spec"),
    [
        (M.OpSharding(type="UNREDUCED"), ()),
        (
            M.OpSharding(type="OTHER", tile_assignment_dimensions=(2, 2), iota_reshape_dims=(4,), last_tile_dims=[6]),
            (("f0",),),
        ),
    ],
)
def test_parts_of_a_sum_lie_as_copies_would_and_are_called_what_xla_calls_them(op: Any, spec: Any) -> None:
    found = laid_out(op, (0, 1, 2, 3), 1)
    assert found.spec == spec
    assert Writer(M).op_sharding(found, 1) == op
    assert found != laid_out(M.OpSharding(type="REPLICATED"), (0, 1, 2, 3), 1)


def test_tiles_of_three_by_two_are_laid_out_though_they_are_said_over_six() -> None:
    op = M.OpSharding(type="OTHER", tile_assignment_dimensions=(3, 2), iota_reshape_dims=(6,), iota_transpose_perm=[0])
    found = laid_out(op, tuple(range(6)), 2)
    assert (found.mesh, found.spec, found.shard_shape((6, 4))) == ((3, 2), (("f0",), ("f1",)), (2, 2))


@pytest.mark.parametrize(
    "asked",
    [
        {"tile_assignment_dimensions": [2**61 - 1], "tile_assignment_devices": [0, 1]},
        {"tile_assignment_dimensions": [2**40], "iota_reshape_dims": [2**40], "iota_transpose_perm": [0]},
        {"tile_assignment_dimensions": [2], "iota_reshape_dims": [2], "iota_transpose_perm": [0] * 60},
        {"tile_assignment_dimensions": [2, *[1] * 10**6], "iota_reshape_dims": [2, *[1] * 10**6]},
        {"tile_assignment_dimensions": [-1, -2], "tile_assignment_devices": [0, 1]},
    ],
)
def test_tiles_without_end_are_refused_before_they_are_made(asked: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        laid_out(M.OpSharding(type="OTHER", **asked), (0, 1), 1)
    assert refused.value.status.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize("step", [1, -1])
def test_steps_without_end_are_refused_before_they_are_made(step: int) -> None:
    client = Client()
    client.put(1)
    plan = M.RemapPlanProto()
    plan.output_specs.add(dtype=F32, shape=M.ShapeProto(dims=[4]))
    ends = {"from_start": [0], "from_end": [step * 2**62], "from_step": [step], "to_start": [0], "to_end": [1]}
    plan.mappings.add(in_array=0, out_array=0, to_step=[1], **ends)
    reply, _ = client.ask("remap_arrays_request", plan=plan, array_handles=[1], result_handles=[2])
    assert reply.status is not None
    assert reply.status.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize(("replicas", "partitions"), [(0, 2**60), (2**60, 0), (1, 5)])
def test_an_assignment_of_no_devices_is_refused(replicas: int, partitions: int) -> None:
    asked = {"num_replicas": replicas, "num_partitions": partitions}
    reply, _ = Client().ask("get_default_device_assignment_request", **asked)
    assert reply.status is not None
    assert reply.status.code == Code.INVALID_ARGUMENT
