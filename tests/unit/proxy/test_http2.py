"""The server's end of HTTP/2: events of what a client sends, and what goes out within its windows."""

from __future__ import annotations

import contextlib
import struct

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.proxy.http2 import Called, Event, Finished, Gone, Http2, Message
from pathways_ray.proxy.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_FRAME,
    MAX_STREAMS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH,
    RESET,
    SETTINGS,
    WINDOW,
    WITH_PRIORITY,
    ProtocolError,
    frame,
)

PATH, LIMIT = "/service/Call", 1000
WINDOW_SETTING, FRAME_SETTING = 4, 5


def block(path: str = PATH, **more: str) -> bytes:
    return bytes(hpack.Encoder().encode([(":method", "POST"), (":path", path), *more.items()]))


def called(stream: int = 1, flags: int = 0, path: str = PATH) -> bytes:
    return frame(HEADERS, END_HEADERS | flags, stream, block(path))


def message(data: bytes) -> bytes:
    return b"\x00" + struct.pack(">I", len(data)) + data


def setting(key: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", key, value))


def opened(*frames: bytes) -> Http2:
    made = Http2({PATH: LIMIT})
    made.receive(PREFACE + b"".join(frames))
    made.taken()
    return made


def frames_of(http: Http2) -> list[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of all frames that go out."""
    out, found = b"".join(http.taken()), []
    while out:
        size = int.from_bytes(out[:3], "big")
        found.append((out[3], out[4], int.from_bytes(out[5:9], "big"), out[9 : 9 + size]))
        out = out[9 + size :]
    return found


def status_of(payload: bytes) -> tuple[str, str]:
    headers = {str(key): str(value) for key, value in hpack.Decoder().decode(payload)}
    return headers["grpc-status"], headers.get("grpc-message", "")


CONVERSATION = (
    PREFACE
    + setting(3, 100)
    + frame(HEADERS, WITH_PRIORITY | PADDED, 1, b"\x02" + bytes(5) + block()[:4] + bytes(2))
    + frame(CONTINUATION, END_HEADERS, 1, block()[4:])
    + frame(PRIORITY, 0, 1, bytes(5))
    + frame(PING, 0, 0, b"8 bytes.")
    + frame(DATA, PADDED, 1, b"\x03" + message(b"one")[:6] + bytes(3))
    + frame(DATA, 0, 1, message(b"one")[6:] + message(b"two") + message(b""))
    + called(3)
    + frame(DATA, END_STREAM, 1, message(b"three"))
    + frame(RESET, 0, 3, bytes(4))
    + frame(11, 0, 7, b"of a kind that nobody knows")
)


def test_bytes_say_the_same_wherever_they_are_cut() -> None:
    whole, cut = Http2({PATH: LIMIT}), Http2({PATH: LIMIT})
    events = whole.receive(CONVERSATION)
    apart: list[Event] = []
    for k in range(len(CONVERSATION)):
        apart += cut.receive(CONVERSATION[k : k + 1])
    assert apart == events
    assert [type(event) for event in events] == [Called, Message, Message, Message, Called, Message, Finished, Gone]
    assert [event.data for event in events if isinstance(event, Message)] == [b"one", b"two", b"", b"three"]
    assert b"".join(whole.taken()) == b"".join(cut.taken())


def test_binary_metadata_come_as_they_were() -> None:
    http = Http2({PATH: LIMIT})
    (event,) = http.receive(
        PREFACE + frame(HEADERS, END_HEADERS, 1, block(**{"a-bin": "/wA", "b-bin": "??", "c": "d"}))
    )
    assert isinstance(event, Called)
    assert event.metadata == {"a-bin": b"\xff\x00", "b-bin": b"", "c": b"d"}


def test_an_answer_waits_for_the_windows_of_its_stream_and_of_the_connection() -> None:
    """1. The client takes ten bytes of a stream. 2. A message of twenty has to go, and the end behind it. 3. More is
    taken step by step; a ping in between is answered at once."""
    http = opened(setting(WINDOW_SETTING, 10), called())
    http.send(1, b"x" * 12, b"y" * 8)
    http.finish(1, 0)
    http.send(1, b"too late")
    begin, first = frames_of(http)
    assert begin[:3] == (HEADERS, END_HEADERS, 1)
    assert first == (DATA, 0, 1, message(b"x" * 12 + b"y" * 8)[:10])
    http.receive(frame(PING, 0, 0, b"8 bytes."))
    assert frames_of(http) == [(PING, ACK, 0, b"8 bytes.")]
    http.receive(frame(WINDOW, 0, 1, struct.pack(">I", 4)))
    assert frames_of(http) == [(DATA, 0, 1, b"xxxx")]
    http.receive(setting(WINDOW_SETTING, 1000))
    (taken, rest, end, reset) = frames_of(http)
    assert taken == (SETTINGS, ACK, 0, b"")  # first: until it has come, the client counts with the old window
    assert rest == (DATA, 0, 1, b"xxx" + b"y" * 8)
    assert end[:3] == (HEADERS, END_HEADERS | END_STREAM, 1)
    assert reset == (RESET, 0, 1, bytes(4))  # the client had not ended the call


def test_a_long_answer_is_cut_into_frames_and_stops_at_the_window_of_the_connection() -> None:
    http = opened(setting(WINDOW_SETTING, 1 << 20), setting(FRAME_SETTING, 1 << 15), called())
    http.send(1, memoryview(bytes(100_000)))
    sizes = [len(payload) for kind, _, _, payload in frames_of(http) if kind == DATA]
    assert sizes == [1 << 15, (1 << 15) - 1]
    http.receive(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 20)))
    assert sum(len(payload) for kind, _, _, payload in frames_of(http) if kind == DATA) == 100_005 - sum(sizes)


def test_messages_that_leave_together_are_one_frame_where_the_windows_take_it() -> None:
    http = opened(setting(WINDOW_SETTING, 16), called())
    http.send_all(1, [b"one", b"two"])
    begin, both = frames_of(http)
    assert begin[:3] == (HEADERS, END_HEADERS, 1)
    assert both == (DATA, 0, 1, message(b"one") + message(b"two"))
    http.receive(frame(WINDOW, 0, 1, struct.pack(">I", 10)))
    http.send_all(1, [b"three", b"four"])
    assert b"".join(payload for *_, payload in frames_of(http)) == message(b"three")
    http.receive(frame(WINDOW, 0, 1, struct.pack(">I", 10)))
    assert b"".join(payload for *_, payload in frames_of(http)) == message(b"four")
    http.finish(1)
    http.send_all(1, [b"too late"])
    assert DATA not in [kind for kind, *_ in frames_of(http)]


@pytest.mark.parametrize(
    ("sent", "status", "text"),
    [
        (called(path="/service/Other"), "12", "there is no method /service/Other"),
        (called() + frame(DATA, 0, 1, b"\x01" + bytes(4)), "12", "uncompressed"),
        (called() + frame(DATA, 0, 1, message(bytes(LIMIT + 1))), "8", "1001 bytes is longer"),
        (called() + frame(DATA, 0, 1, b"\x00\xff\xff\xff\xff"), "8", "4294967295 bytes is longer"),
    ],
    ids=["method", "compressed", "long", "announced"],
)
def test_a_call_that_cannot_be_taken_ends_alone(sent: bytes, status: str, text: str) -> None:
    http = opened(sent)
    assert http.receive(frame(DATA, 0, 1, message(b"more"))) == []
    assert http.receive(called(3)) == [Called(3, PATH, {})]
    http = Http2({PATH: LIMIT})
    http.receive(PREFACE + sent)
    found = status_of(next(f for f in frames_of(http) if f[0] == HEADERS)[3])
    assert found[0] == status
    assert text in found[1]


def test_the_text_of_a_status_is_escaped_and_bounded() -> None:
    http = opened(called())
    http.finish(1, 13, "50 % of ü\n" + "x" * 100_000)
    ((_, _, _, payload), _) = frames_of(http)
    code, text = status_of(payload)
    assert code == "13"
    assert text.startswith("50 %25 of %C3%BC%0Ax")
    assert len(payload) < MAX_FRAME


def test_calls_beyond_the_limit_are_refused_and_can_be_made_again() -> None:
    http = opened(*(called(1 + 2 * k) for k in range(MAX_STREAMS)))
    last = 1 + 2 * MAX_STREAMS
    assert http.receive(called(last)) == []
    assert frames_of(http) == [(RESET, 0, last, struct.pack(">I", 7))]
    http.finish(1)
    assert len(http.receive(called(last + 2))) == 1


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not begin"),
        (PREFACE + (MAX_FRAME + 1).to_bytes(3, "big") + bytes(6), "16385 bytes"),
        (PREFACE + frame(DATA, 0, 1, b"x"), "stream 1, which was not opened"),
        (PREFACE + frame(DATA, 0, 0, b"x"), "stream 0"),
        (PREFACE + frame(HEADERS, 0, 1, block()) + frame(PING, 0, 0, bytes(8)), "interrupted"),
        (PREFACE + frame(CONTINUATION, END_HEADERS, 1, block()), "did not begin"),
        (PREFACE + frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, bytes(MAX_FRAME)) * 5, "more than 65536"),
        (PREFACE + frame(HEADERS, END_HEADERS, 1, b"\xff" * 9), "cannot be read"),
        (PREFACE + called(2), "cannot open stream 2"),
        (PREFACE + called() + frame(DATA, PADDED, 1, b"\x09abc"), "padding"),
        (PREFACE + frame(PUSH, 0, 1, b""), "cannot push"),
        (PREFACE + frame(PING, 0, 0, b"seven.."), "eight bytes"),
        (PREFACE + frame(SETTINGS, 0, 0, b"seven.."), "six bytes"),
        (PREFACE + setting(WINDOW_SETTING, 1 << 31), "too wide"),
        (PREFACE + setting(FRAME_SETTING, 5), "frames of 5 bytes"),
        (PREFACE + frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff"), "too wide"),
        (PREFACE + frame(WINDOW, 0, 1, b""), "four bytes"),
    ],
)
def test_what_is_against_the_rules_ends_the_connection_with_a_reason(sent: bytes, text: str) -> None:
    http = Http2({PATH: LIMIT})
    with pytest.raises(ProtocolError, match=text) as error:
        http.receive(sent)
    http.goodbye(error.value)
    assert frames_of(http)[-1][0] == GOAWAY


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=40))))
def test_any_frames_are_events_or_an_error(sent: list[tuple[int, int, int, bytes]]) -> None:
    """And what goes out is whole frames, however many that were answered."""
    http = opened(called(1))
    with contextlib.suppress(ProtocolError):
        for one in sent:
            for event in http.receive(frame(*one)):
                http.send(event.stream, b"answer")
    kinds = {kind for kind, *_ in frames_of(http)}
    assert kinds <= {DATA, HEADERS, RESET, SETTINGS, PING, WINDOW}
