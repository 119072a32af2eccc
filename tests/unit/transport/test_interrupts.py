"""Ctrl-C in the middle of a write: the link stays whole, whatever step it comes at."""

from __future__ import annotations

import itertools
import socket
import sys
from types import FrameType
from typing import Any

from pathways_ray.transport.frames import Frames, frame
from pathways_ray.transport.sockets import PlainSocket

FIRST, SECOND, THIRD = (bytes([65 + k]) * size for k, size in enumerate((900_000, 700_000, 10)))


class Interrupt(BaseException):
    pass


def interrupted(plain: PlainSocket, data: bytes, step: int) -> bool:
    """Writes, and raises before that step of the write's bytecode; whether it came to that."""
    steps = itertools.count()

    def trace(at: FrameType, event: str, _: object) -> Any:
        if at.f_code is not PlainSocket.write.__code__:
            return None
        at.f_trace_opcodes = True
        if event == "opcode" and next(steps) == step:
            raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        plain.write(data, False)
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_write_may_be_interrupted_at_any_step() -> None:
    """1. A frame is written of which the kernel takes only part. 2. So is a second one, but the write is interrupted.
    3. The first frame arrives whole, the second one whole or not at all, and what is written later as well."""
    arrived = 0
    for step in itertools.count():
        here, there = socket.socketpair()
        with here, there:
            plain, frames = PlainSocket(here), Frames(1 << 20)
            found: list[Any] = []
            assert not plain.write(frame(FIRST), False)
            found += frames.feed(there.recv(100_000))
            cut = interrupted(plain, frame(SECOND), step)
            there.settimeout(5.0)
            written = plain.write(frame(THIRD), False)
            while not written or THIRD not in found:
                found += frames.feed(there.recv(1 << 20))
                written = plain.write(b"", False)
        assert found in ([FIRST, SECOND, THIRD], [FIRST, THIRD]), f"step {step}: {[len(batch) for batch in found]}"
        arrived += SECOND in found
        if not cut:
            break
    assert 0 < arrived < step + 1, "it was interrupted before it was kept, and after"
