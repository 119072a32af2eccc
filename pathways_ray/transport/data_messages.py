"""Messages between clients and hosts on data streams: arrays in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from pathways_ray import limits
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.transport.early_messages import EarlyAllowed, EarlyRefused, LaunchEarly, ServeCall
from pathways_ray.transport.message import Codec, Message, Uploaded

if TYPE_CHECKING:
    Bytes = bytes | memoryview
else:
    Bytes = memoryview
"""The bytes of a part: where a message is decoded, a view of what came, which is copied once, to its place."""

# --- client ↔ host, data stream ---------------------------------------------------------------------------------------


class PutOpen(Message, tag=50):
    """An array is coming: the distinct boxes that this host's devices hold, in row-major order of the devices.

    `slice_tag` is what came with the slice: that it is the session's, and lies on these devices. `living` are the bytes
    of the session's uploads on this host that its client has not freed, where there is a quota: an array that fits
    beside them waits until the others are gone. With -1 none waits. `whole` are the bytes of all boxes, each in C
    order, where these come with it: then no part follows. `places` are the addresses of all boxes, each in C order, in
    the memory of a client that also gave the end of a pipe, and waits for a host that reads them there.
    """

    request: int
    buffer: Uploaded
    type: ArrayType
    spec: Spec
    placed: PlacedSlice
    slice_tag: str
    living: int = -1
    whole: Annotated[tuple[Bytes, ...], msgspec.Meta(max_length=limits.MAX_HOST_DEVICES)] = ()
    places: Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_HOST_DEVICES)] = ()


class PutPart(Message, tag=51):
    """Bytes of box number `box`, in C order, from `offset` on, which is where the part before ended."""

    request: int
    box: int
    offset: int
    data: Bytes


class Fetch(Message, tag=52):
    """Asks for the shards on some devices of this host (their places on the host), once the buffer is ready; on none,
    only whether it is, which `FetchDone` answers.

    `also` are further requests and their buffers, for the same devices: they are answered before this one as far as
    they are small, computed and no more than `limits.MAX_SIBLINGS_BYTES` together, and not at all otherwise; nor where
    much waits for the client to read it. Where no devices are asked for, the one answer comes once these are ready too.
    """

    request: int
    buffer: int
    devices: Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_FETCHED_SHARDS)]
    also: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=limits.MAX_SIBLINGS)] = ()


class CancelFetch(Message, tag=53):
    """A fetch whose result is not needed any more. It goes by the stream, and before it the host takes what has come by
    the local socket: so it overtakes no question, by whatever way this went."""

    request: int


ToHostData = PutOpen | PutPart | Fetch | CancelFetch | LaunchEarly | ServeCall
"""By the local socket, where there is one, come `PutOpen` that is whole, or with a file in memory that has all boxes,
`Fetch` with one that takes the array, `LaunchEarly` and `ServeCall`. Where the socket is full, or a message too long
for it, `Fetch`, `ServeCall` and what is whole come by the stream, with no order between the two, and other arrays in
parts; `LaunchEarly` does not come."""


class LocalDoor(Message, tag=54):
    """The first message: where a client on the same machine can hand over files in memory (`local_sockets`)."""

    name: str
    tag: bytes
    answer: bytes


class PutDone(Message, tag=55):
    """The array lies on the devices."""

    request: int


class FetchPart(Message, tag=56):
    """Bytes of the shard on device `device`, in C order, from `offset` on; `total` bytes in all."""

    request: int
    device: int
    offset: int
    total: int
    data: Bytes


class FetchShards(Message, tag=68):
    """In place of parts, where several shards are small: the bytes of all that were asked for, in that order."""

    request: int
    data: Bytes


class DataFailed(Message, tag=57):
    """A put or fetch that could not be served."""

    request: int
    failure: Failure


class FetchDone(Message, tag=58):
    """The shards that were asked for are in the file that came with the question, or come by the pipe."""

    request: int


FromHostData = PutDone | FetchPart | FetchShards | DataFailed | LocalDoor | FetchDone | EarlyAllowed | EarlyRefused


TO_HOST_DATA: Codec[ToHostData] = Codec(ToHostData)
FROM_HOST_DATA: Codec[FromHostData] = Codec(FromHostData)
