"""Events and commands of a proxy's core (`core.ProxyCore`). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from pathways_ray.ir.types import ArrayType
from pathways_ray.proxy.arrays import Sharding, Status

# --- events -----------------------------------------------------------------------------------------------------------


class Requested(NamedTuple):
    """A request of the client. `kind` is the name of its message, `body` the message; the client waits for an answer
    under `op`, and for the return of `context`."""

    op: int
    context: int
    kind: str
    body: Any


class Stored(NamedTuple):
    """The bytes of a host buffer have come, or will not."""

    handle: int
    failure: Status | None = None


Orders = tuple[tuple[int, ...], ...]
"""The dimensions of some arrays in memory, of each from the fastest to the slowest."""


@dataclass(frozen=True)
class Signature:
    """A compiled program, as far as its calls go. How arguments and results lie in memory is a label here, for they lie
    in C order; left out where the client asks for nothing else. One that `hands_over` computes nothing: it has the
    client get its argument in a file. Results number `tokens` are to the client no arrays, but tokens; those of `texts`
    are arrays of one text, which has a number of bytes here."""

    name: str
    inputs: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    input_shardings: tuple[Sharding, ...]
    output_shardings: tuple[Sharding, ...]
    donated: frozenset[int]
    devices: tuple[int, ...]
    fingerprint: bytes
    input_orders: Orders = ()
    output_orders: Orders = ()
    hands_over: bool = False
    tokens: frozenset[int] = frozenset()
    texts: frozenset[int] = frozenset()


class Compiled(NamedTuple):
    """A program was compiled, or could not be."""

    executable: int
    signature: Signature | Status


class Settled(NamedTuple):
    """Something that was waited for under a ticket has come, or failed."""

    ticket: int
    failure: Status | None = None
    value: Any = None


class Broken(NamedTuple):
    """Buffers that could not be made."""

    buffers: tuple[int, ...]
    failure: Status


Event = Requested | Stored | Compiled | Settled | Broken

# --- commands ---------------------------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """Answer a request. `kind` names the message, "" for one without a body; `counted` replies are numbered, and the
    client waits for `awaited` ones."""

    op: int
    context: int
    kind: str = ""
    body: Any = None
    status: Status | None = None
    counted: bool = True
    awaited: bool = True


class Piece(NamedTuple):
    """Bytes of a host buffer for the shards number `places`."""

    handle: int
    strides: tuple[int, ...]
    places: tuple[int, ...]


class Upload(NamedTuple):
    """Make a buffer of bytes that the client has sent."""

    buffer: int
    type: ArrayType
    sharding: Sharding
    pieces: tuple[Piece, ...]


class Regroup(NamedTuple):
    """Make a buffer of shards of others, as they lie."""

    buffer: int
    type: ArrayType
    sharding: Sharding
    sources: tuple[int, ...]
    shards: tuple[tuple[int, int], ...]


class Move(NamedTuple):
    """Make a buffer that has the values of another one, on other devices or in another layout."""

    buffer: int
    type: ArrayType
    sharding: Sharding
    source: int


class Execute(NamedTuple):
    """Run a program. It may take the memory of the arguments number `donated`."""

    executable: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    donated: tuple[int, ...]


class Free(NamedTuple):
    """Let go of buffers."""

    buffers: tuple[int, ...]


class Discard(NamedTuple):
    """Let go of the bytes of host buffers."""

    handles: tuple[int, ...]


class Fetch(NamedTuple):
    """Have a shard of a buffer as a host buffer, then say that it is settled. The client asks for an `early` one before
    it is there, and hears of a failure then."""

    ticket: int
    buffer: int
    place: int
    handle: int
    strides: tuple[int, ...]
    early: bool = False


class HandOver(NamedTuple):
    """Give the client a shard of a buffer in a file, as the one with this number of those that it asks for; of buffer 0
    nothing. Then say that it is settled."""

    ticket: int
    number: int
    buffer: int
    place: int


class Await(NamedTuple):
    """Say that it is settled once all buffers are computed, or one has failed."""

    ticket: int
    buffers: tuple[int, ...]


class Compile(NamedTuple):
    """Compile a program, and say what came of it."""

    executable: int
    program: Any
    options: Any


class Inspect(NamedTuple):
    """Find something out about a program, and say that it is settled: "cost", "text" or "metadata"."""

    ticket: int
    executable: int
    what: str


class Unload(NamedTuple):
    """Let go of a program."""

    executable: int


Command = (
    Reply | Upload | Regroup | Move | Execute | Free | Discard | Fetch | HandOver | Await | Compile | Inspect | Unload
)


@dataclass
class Pending:
    """A request that waits for something: what is answered then."""

    op: int
    context: int
    kind: str
