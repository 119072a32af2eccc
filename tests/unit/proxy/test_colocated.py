"""Functions in Python that a proxy's client sends: what is read of them, and what is refused. None is unpickled."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_ray.errors import ProgramRefused
from pathways_ray.executor.calls.colocated import MAX_TEXT_BYTES, text_array
from pathways_ray.ir.graph import Compute
from pathways_ray.ir.types import ArrayType
from pathways_ray.ir.verify import verify
from pathways_ray.proxy.arrays import Refused, Sharding
from pathways_ray.proxy.codec import TEXT, Reader, Writer
from pathways_ray.proxy.colocated import CUSTOM_CALL, read_function
from pathways_ray.proxy.descriptors import messages
from pathways_ray.proxy.programs import Program, call_graph

M = messages()
GRID = Sharding((0, 1, 2, 3), (2, 2), (("f0",), ("f1",)))
COPIES = Sharding((0, 1, 2, 3), (2, 2))
FLOAT, INT4, INT64 = 11, 21, 5


def spec(kind: int, shape: tuple[int, ...], sharding: Sharding) -> Any:
    made = M.ArraySpecProto(dtype=M.DTypeProto(kind=kind))
    made.shape.SetInParent()
    made.shape.dims.extend(shape)
    Writer(M).set_sharding(made.sharding, sharding, len(shape))
    return made


def sent(**fields: Any) -> Any:
    """A function that JAX might send, with some fields as they are given."""
    made = M.CustomCallProgramProto(type="jax_colocated_python_v0.0.1", name="f", serialized_program_text=b"\xffnone")
    made.devices.device_ids.extend(fields.pop("devices", (0, 1, 2, 3)))
    made.input_specs.append(spec(FLOAT, (4, 4), GRID))
    made.output_specs.extend(fields.pop("outputs", [spec(FLOAT, (), COPIES)]))
    for name, value in fields.items():
        setattr(made, name, value)
    return M.Serialized(type_name=CUSTOM_CALL, data=made.SerializeToString())


def read(program: Any, trusted: bool = True) -> Program:
    return read_function(M, Reader(M), program, 4, trusted)


def test_a_function_is_a_host_function_with_its_arrays_over_one_mesh() -> None:
    found = read(sent(outputs=[spec(FLOAT, (), COPIES), spec(TEXT, (), COPIES)]))
    assert found.signature.inputs == (ArrayType((4, 4), "float32"),)
    assert found.signature.outputs == (ArrayType((), "float32"), ArrayType((MAX_TEXT_BYTES,), "uint8"))
    assert found.signature.texts == {1}
    assert {one.mesh for one in (*found.signature.input_shardings, *found.signature.output_shardings)} == {(2, 2)}
    graph = call_graph(found, 1, ())
    verify(graph)
    (node,) = [node for node in graph.nodes if isinstance(node, Compute)]
    assert graph.recipes[node.recipe].parts[0].host_limit_ms == found.host_limit_ms > 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (M.Serialized(type_name=CUSTOM_CALL, data=b"\xff"), "cannot be read"),
        (sent(type="mpmd"), "custom programs of type 'mpmd' are not supported"),
        (sent(outputs=[]), "f gives no array"),
        (sent(devices=(0, 9)), r"for devices \[9\]; there are 0 to 3"),
        (sent(devices=(0, 1)), "with arrays on others"),
        (sent(outputs=[spec(INT4, (8,), COPIES)]), "arrays of int4 cannot be given"),
    ],
    ids=["bytes", "type", "nothing", "devices", "elsewhere", "packed"],
)
def test_what_cannot_be_a_host_function_is_refused(program: Any, text: str) -> None:
    with pytest.raises(Refused, match=text):
        read(program)


def test_only_trusted_tenants_have_python_run() -> None:
    with pytest.raises(ProgramRefused, match="f is Python for hosts, which run that only of tenants"):
        read(sent(), trusted=False)


def test_a_text_fills_its_bytes_and_is_told_apart_from_what_follows_it() -> None:
    """Protobuf's form: field 1 has the text, field 15 the rest, which readers skip. Both lengths have four bytes."""
    found = text_array(b"abc").tobytes()
    assert len(found) == MAX_TEXT_BYTES
    assert found[:9] == b"\x0a\x83\x80\x80\x00abc\x7a"
    length = sum((byte & 0x7F) << 7 * k for k, byte in enumerate(found[9:13]))
    assert (length, found[13:]) == (MAX_TEXT_BYTES - 13, bytes(length))
    with pytest.raises(ValueError, match=f"{MAX_TEXT_BYTES} are the limit"):
        text_array(bytes(MAX_TEXT_BYTES))
