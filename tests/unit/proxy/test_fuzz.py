"""Any requests, damaged on the way: a stream that cannot be read ends, and the proxy and its other clients go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.unit.proxy.test_core_machine import requests
from tests.unit.proxy.test_server import Door, M, Stream
from tests.unit.strategies import repeatable


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    made = Door(tmp_path_factory.mktemp("f"))
    yield made
    made.channel.close()
    made.server.stop()


@st.composite
def sent(draw: st.DrawFn) -> bytes:
    """A request as the client sends it, with some bytes changed, cut off, or sent twice."""
    kind, body = draw(requests())
    request = M.IfrtRequest()
    request.request_metadata.op_id = draw(st.integers(1, 9))
    request.request_metadata.user_context_id = draw(st.integers(0, 1 << 63))
    getattr(request, kind).SetInParent()
    getattr(request, kind).CopyFrom(body)
    data = bytearray(request.SerializeToString())
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["turn", "turn", "cut", "twice"])):
            case "turn" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at : at + draw(st.integers(1, 40))]
            case "twice":
                data[at:at] = data[at : at + 20]
    return bytes(data)


@repeatable(60)
@given(st.lists(sent(), min_size=1, max_size=12))
@pytest.mark.timeout(300)
def test_damaged_requests_end_their_own_stream_at_most(door: Door, found: list[bytes]) -> None:
    bad, good = Stream(door), Stream(door)
    bad.ask("init_request")
    for data in found:
        bad.send(data)
    good.ask("init_request")
    assert good.ask("check_future_request", future_handle=3).response_metadata.status.code == 5
    good.call.cancel()
    bad.finish()
    answers = 0
    with contextlib.suppress(grpc.RpcError):
        for _ in bad.call:
            answers += 1
    assert answers <= len(found)
    assert bad.call.code() in (grpc.StatusCode.OK, grpc.StatusCode.INTERNAL)
    if bad.call.code() == grpc.StatusCode.INTERNAL:
        assert "a request cannot be read" in bad.call.details()
