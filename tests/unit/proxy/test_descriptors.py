"""The protocol's messages, as the installed jaxlib describes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pathways_ray.errors import UsageError
from pathways_ray.proxy.descriptors import Messages, messages


def test_requests_survive_their_bytes() -> None:
    request = messages().IfrtRequest()
    request.request_metadata.op_id = 7
    request.destruct_array_request.array_handle.extend([1, 2])
    read = messages().IfrtRequest.FromString(request.SerializeToString())
    assert read.WhichOneof("request") == "destruct_array_request"
    assert list(read.destruct_array_request.array_handle) == [1, 2]


def test_of_two_messages_of_one_name_those_of_ifrt_are_meant() -> None:
    assert messages().ShapeProto.DESCRIPTOR.full_name == "xla.ifrt.ShapeProto"


def test_a_message_that_the_protocol_does_not_have_is_named() -> None:
    with pytest.raises(AttributeError, match="no message Nonsense"):
        _ = messages().Nonsense


def test_a_library_without_the_protocol_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    # What looks like the name of a file, and is followed by bytes that are none.
    library.write_bytes(b"\x0a\x0bxla/x.proto\xff\xff" * 3)
    with pytest.raises(UsageError, match="does not describe xla/python/ifrt_proxy"):
        Messages(library)
