"""Events and commands of the client's core (`core.ClientCore`).

Messages are events and commands as they are: one of the controller (`transport.messages.ToClient`) was received, and
one for the controller is to be sent.
"""

from __future__ import annotations

import msgspec

from pathways_ray.client.buffer import BufferRecord, Upload
from pathways_ray.errors import Failure
from pathways_ray.ir.graph import Graph
from pathways_ray.transport.messages import (
    Cancel,
    Free,
    HostAddress,
    Launch,
    PrioritizedLaunch,
    Put,
    Register,
    SessionResumed,
    Unregister,
)

# --- events -----------------------------------------------------------------------------------------------------------


class Placed(msgspec.Struct, frozen=True, gc=False):
    """Uploads began; the controller must learn of the buffers."""

    messages: tuple[Put, ...]


class Registered(msgspec.Struct, frozen=True, gc=False):
    """A program was lowered. The functions are all that it uses; those sent before are not sent again."""

    program: int
    graph: Graph
    encoded: bytes
    functions: dict[str, bytes]


class Renewing(msgspec.Struct, frozen=True, gc=False):
    """A program is needed at the controller, which may have forgotten it since a slice of it has moved."""

    program: int


class Uploaded(msgspec.Struct, frozen=True, gc=False):
    """A host acknowledged its part of an upload, or could not take it."""

    buffer: BufferRecord
    upload: Upload
    host: int
    failure: Failure | None = None


class Disconnected(msgspec.Struct, frozen=True, gc=False):
    """The connection to the controller ended."""

    reason: str


class Resumed(msgspec.Struct, frozen=True, gc=False):
    """The controller's successor has opened the session again. Comes once there is a connection to it."""

    reply: SessionResumed


class ResumeFailed(msgspec.Struct, frozen=True, gc=False):
    """There is no successor, or the session is not open there."""

    reason: str


class Cancelling(msgspec.Struct, frozen=True, gc=False):
    """The user cancels the launch that makes a buffer."""

    buffer: BufferRecord


class Closing(msgspec.Struct, frozen=True, gc=False):
    """The user closes the session. `Disconnected` follows."""


class Forked(msgspec.Struct, frozen=True, gc=False):
    """This process is a fork: the session belongs to its parent."""


# --- commands ---------------------------------------------------------------------------------------------------------


class Wake(msgspec.Struct, frozen=True, gc=False):
    """Wake the threads that wait for an outcome or for room; with `fetches`, also those that fetch values."""

    fetches: bool


class ReleaseQueue(msgspec.Struct, frozen=True, gc=False):
    """Send what may leave the queue now."""


class MoveHost(msgspec.Struct, frozen=True, gc=False):
    """Use another address for a host; an empty one means that it is down."""

    address: HostAddress


class MoveSlices(msgspec.Struct, frozen=True, gc=False):
    """Move these slices, one after the other, while the user's threads go on."""

    slices: tuple[int, ...]


class MakeWay(msgspec.Struct, frozen=True, gc=False):
    """Suspend the session, or, with `back`, resume it, while the user's calls wait."""

    back: bool


class Resume(msgspec.Struct, frozen=True, gc=False):
    """Find the successor of the controller, and open the session there again; answered with `Resumed` or
    `ResumeFailed`."""


class CloseData(msgspec.Struct, frozen=True, gc=False):
    """End all data streams; what is under way on them fails with `failure`."""

    failure: Failure


Call = Register | Launch | PrioritizedLaunch | Put | Free | Cancel | Unregister
"""A message for the controller, which is the command to send it."""

Command = Call | Wake | ReleaseQueue | MoveHost | MoveSlices | MakeWay | Resume | CloseData
