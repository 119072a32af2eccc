"""A tenant that floods every message of the protocol over raw, authenticated connections, and counts the ends."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc

from pathways_ray import limits
from pathways_ray.errors import PathwaysError
from pathways_ray.ir.graph import Argument, Compute, Graph, Node, Part, Recipe, Ref, Result
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.transport import grpc_streams, streams
from pathways_ray.transport import messages as wire

ADDRESS, TOKEN, SECONDS = sys.argv[1].partition("://")[2], sys.argv[2], float(sys.argv[3])
DEADLINE = time.monotonic() + SECONDS
STREAM_S = 1.5
KIND = ArrayType((1,), "float32")

ended: Counter[str] = Counter()
said: Counter[str] = Counter()


class Raw:
    """A session without any of the client's code; `batches` yields what it says, as bytes."""

    def __init__(self) -> None:
        self.channel = grpc_streams.channel(ADDRESS)
        self.batches: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        opened = self.call(wire.OpenSession(wire.VERSION, "hostile"), authorization=TOKEN)
        assert isinstance(opened, wire.SessionOpened), opened
        self.session, self.metadata = opened.session, {"session": str(opened.session), "authorization": opened.secret}
        self.stream: Any = self.channel.stream_stream(streams.CLIENT_STREAM)(
            iter(self.batches.get, None), metadata=tuple(self.metadata.items())
        )

    def call(self, request: Any, **metadata: str) -> wire.Reply:
        shown = tuple((metadata or self.metadata).items())
        replies = self.channel.stream_stream(streams.CALL)(iter([wire.encode(request)]), metadata=shown, timeout=10.0)
        reply = wire.REPLY.decode(next(replies))
        if isinstance(reply, wire.Refused):
            said[reply.failure.kind] += 1
        return reply

    def answers(self) -> Iterator[Any]:
        """What the controller says, until it hangs up."""
        try:
            for batch in self.stream:
                yield from wire.TO_CLIENT.decode_batch(batch)
        except grpc.RpcError:
            pass

    def flood(self, batch: bytes) -> None:
        """Says the same until its time is over or the session ends."""
        over = threading.Event()
        reason = []

        def read() -> None:
            for message in self.answers():
                if isinstance(message, wire.LaunchFailed):
                    said[message.failure.kind] += 1
                elif isinstance(message, wire.SessionEnded):
                    reason.append(message.reason)
            over.set()

        threading.Thread(target=read, daemon=True).start()
        until = min(time.monotonic() + STREAM_S, DEADLINE)
        while time.monotonic() < until and not over.is_set():
            if self.batches.qsize() < 8:
                self.batches.put(batch)
            else:
                time.sleep(0.001)
        ended[reason[0][:60] if reason else "went on"] += 1

    def close(self) -> None:
        self.batches.put(None)
        self.stream.cancel()
        self.channel.close()


def batch(*messages: Any) -> bytes:
    return wire.encode(messages)


def graph(mesh: Any, calls: int, results: int, parts: int = 1) -> bytes:
    layout = Layout(mesh.id, ())
    recipe = Recipe(tuple(Part("f", "f", (Ref(-1, 0),)) for _ in range(parts)), (Ref(parts - 1),))
    made: list[Node] = [Compute("f", 0, mesh.id, (Ref(k),), (layout,), (KIND,), (layout,)) for k in range(calls)]
    nodes = (Argument(0, KIND, layout), *made, Result((Ref(calls),) * results))
    return wire.encode(Graph("g", (mesh,), (recipe,), nodes))


def attacks(raw: Raw, mesh: Any) -> list[bytes]:
    digest = hashlib.sha256(b"x").hexdigest()
    wide = wire.Register(1, graph(mesh, 1, limits.MAX_RESULTS), {digest: b"x"})
    return [
        batch(*[wire.Launch(k, 9, (), k) for k in range(limits.MAX_CLIENT_BATCH_MESSAGES)]),
        batch(*[wire.Launch(k, 9, (), k) for k in range(limits.MAX_CLIENT_BATCH_MESSAGES + 1)]),
        batch(wide, *[wire.Launch(k, 1, (), 10_000 * k) for k in range(4000)]),
        batch(*[wire.Free((k,) * 1000) for k in range(1000)]),
        batch(*[wire.Put(random.getrandbits(40), mesh.id, ArrayType((0,), "float32"), ()) for k in range(4000)]),
        batch(*[wire.InlineLaunch(k, 9, (0,), k, ((0, bytes(limits.MAX_INLINE_BYTES)),)) for k in range(1, 50)]),
        batch(*[wire.InlineLaunch(k, 1, (0,) * 9, k, ((k, bytes(1 << 20)),) * 7) for k in range(1)]),
        batch(wire.Register(2, graph(mesh, 8000, 1, 20), {})),
        batch(wire.Register(2, graph(mesh, 8000, 1, 200_000), {})),
        batch(*[wire.Register(k, graph(mesh, 5, 1), {}) for k in range(500)]),
        batch(wire.Register(3, b"", {"f": bytes(40 << 20)})),
        batch(wire.Free(tuple(range(3 << 20)))),
        batch(wire.Upgrade(), wire.Free((1,))),
        b"\xdd\xff\xff\xff\xff" + bytes(1000),
        random.randbytes(1000),
    ]


def calls(raw: Raw, mesh: Any) -> None:
    """Calls from many threads: status, slices, plans, and other sessions' secrets."""
    requests = [
        wire.Status(raw.session),
        wire.CreateSlice(raw.session, (1,), ("x",), -1, "", "n" * 60_000),
        wire.CreateSlice(raw.session, (1,) * 30, ("x",) * 30, -1, "", ""),
        wire.ReleaseSlice(raw.session, random.getrandbits(20)),
        wire.Explain(raw.session, -1, graph(mesh, 2000, 1)),
        wire.Explain(raw.session, 77, graph(mesh, 1, 1)),
        wire.Status(raw.session + 1),
        wire.OpenSession(wire.VERSION, "x" * 100_000),
    ]
    until = min(time.monotonic() + STREAM_S, DEADLINE)

    def work() -> None:
        while time.monotonic() < until:
            try:
                said[type(raw.call(random.choice(requests))).__name__] += 1
            except (grpc.RpcError, PathwaysError, StopIteration, ValueError) as error:
                said[type(error).__name__] += 1

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


number = 0
while time.monotonic() < DEADLINE:
    raw = Raw()
    made = raw.call(wire.CreateSlice(raw.session, (1,), ("x",), 0, "", ""))
    assert isinstance(made, wire.SliceCreated), made
    kinds = attacks(raw, made.placed.mesh)
    if number % (len(kinds) + 1) == len(kinds):
        calls(raw, made.placed.mesh)
    else:
        raw.flood(kinds[number % (len(kinds) + 1)])
    raw.close()
    number += 1
print(json.dumps({"floods": number, "ended": ended, "said": said}), flush=True)
os._exit(0)  # streams that it left with errors are in cycles: the interpreter may wait for gRPC's threads as it ends
