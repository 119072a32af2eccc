"""Arrays of a proxy's client that come by pipes (`putting`): their ends go on to hosts.

Where a host does not take one, since the slice has moved to another machine, say, or its local socket has broken, a
thread reads the array here, and its bytes are counted as host buffers are. What the client has asked for behind it is
carried out once it has come; nobody waits meanwhile.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from pathways_ray.client.array import Array
from pathways_ray.client.array_pieces import ArrayPipe
from pathways_ray.client.session import Session
from pathways_ray.errors import WireError
from pathways_ray.jax_types import dtype_named
from pathways_ray.proxy import events as do
from pathways_ray.proxy.arrays import Code, Refused, Status
from pathways_ray.proxy.handover import Handover
from pathways_ray.proxy.host_buffers import HostBuffers
from pathways_ray.proxy.loaded import Loaded
from pathways_ray.transport.local_sockets import NotLocal
from pathways_ray.transport.pipes import HostPipe, is_pipe
from pathways_ray.transport.shared_memory import aligned

MAX_BEHIND_BYTES = 256 << 20
"""About what a client may have kept behind an array that is read here, beyond which its array is read no further."""

_COMMAND_BYTES = 500
"""Of a command, without what it names."""


def _kept_bytes(command: do.Command) -> int:
    """About how many bytes of memory a command takes."""
    names = sum(len(part) for part in command if isinstance(part, tuple))
    return _COMMAND_BYTES + 50 * names + (len(command.program.data) if isinstance(command, do.Compile) else 0)


class _Reading:
    """An array on its way.

    Args:
        over: called by the thread that reads, once nothing more comes.

    Raises:
        Refused: there is no room for it, or no thread.
    """

    def __init__(self, pipe: ArrayPipe, host_buffers: HostBuffers, over: Callable[[], None]) -> None:
        self._end, self._over = HostPipe(pipe.end), over
        self._kind, self._host_buffers = (pipe.shape, pipe.dtype), host_buffers
        self._size = math.prod(pipe.shape) * pipe.dtype.itemsize
        self._found: np.ndarray[Any, Any] | Status = Status(Code.CANCELLED, "nobody reads it any more")
        self._refused: Status | None = None
        host_buffers.reserve(self._size)
        try:
            threading.Thread(target=self._read, name="pathways-proxy-put", daemon=True).start()
        except RuntimeError as error:
            host_buffers.release(self._size)
            text = f"no thread can be started to read an array of {self._size} bytes: {error}"
            raise Refused(Code.RESOURCE_EXHAUSTED, text) from None

    def _read(self) -> None:
        try:
            whole = aligned(self._size)
            self._end.read([whole])
            shape, dtype = self._kind
            self._found = whole.view(dtype).reshape(shape)
        except (WireError, OSError) as error:
            self._found = Status(Code.DATA_LOSS, str(error))
        except MemoryError:
            self._found = Status(Code.RESOURCE_EXHAUSTED, f"there is no memory for an array of {self._size} bytes")
        finally:
            self._over()

    def value(self) -> np.ndarray[Any, Any]:
        """The array, once nothing more comes, which counts no longer then. Raises `Refused` where it did not come."""
        self._host_buffers.release(self._size)
        if isinstance(self._found, Status):
            raise Refused(*(self._refused or self._found))
        return self._found

    def end(self, why: Status | None = None) -> None:
        """Has the thread stop; `why` is the status of an array that has not come by then."""
        self._refused = why
        self._end.end()


class PipedPuts:
    """The puts by pipes of a client, and the commands behind an array that is read here. All but `close` is called
    under the client's lock.

    Args:
        handover: has the ends of pipes, and counts them.
        resume: has somebody call `resumed`; called by the thread that has read an array, without that lock.
    """

    def __init__(
        self, session: Session, host_buffers: HostBuffers, handover: Handover, resume: Callable[[], None]
    ) -> None:
        self._session, self._host_buffers, self._handover, self._resume = session, host_buffers, handover, resume
        self._reading: _Reading | None = None
        self._read: _Reading | None = None
        self._behind: deque[do.Command] = deque()
        self._behind_bytes = 0
        self._closed = False

    def holds(self, command: do.Command) -> bool:
        """Whether a command stands behind an array on its way, and is kept here. Where many do, the array has failed,
        so that they need wait no longer."""
        if self._reading is None:
            return False
        self._behind.append(command)
        self._behind_bytes += _kept_bytes(command)
        if self._behind_bytes > MAX_BEHIND_BYTES:
            text = f"more than {MAX_BEHIND_BYTES} bytes of requests stand behind an array that comes too slowly"
            self._reading.end(Status(Code.RESOURCE_EXHAUSTED, text))
        return True

    def put(self, loaded: Loaded, command: do.Execute) -> Array | None:
        """The array of a call, whose bytes the client writes to a pipe; None where it is read here: the call is carried
        out again once it has come.

        Raises:
            Refused: no pipe came, there is no room for the array, or it did not come.
            PathwaysError: as `Session.upload` does.
        """
        (kind,), (read, self._read) = loaded.results, (self._read, None)
        if read is not None:
            made = self._session.upload(read.value(), kind)
        else:
            end = self._handover.taken()
            if end is None or not is_pipe(end):
                raise Refused(Code.INVALID_ARGUMENT, "no pipe came for an array whose bytes were to come by one")
            pipe = ArrayPipe(end, kind.array.shape, dtype_named(kind.array.dtype))
            try:
                made = self._session.upload(pipe, kind)
            except NotLocal:  # the host took such ends when the program was compiled
                self._reading = _Reading(pipe, self._host_buffers, self._resume)
                self._behind.appendleft(command)
                self._behind_bytes += _kept_bytes(command)
                if self._closed:
                    self._reading.end()
                return None
        self._handover.count_pipe(read is None)
        return made

    def resumed(self, carry: Callable[[do.Command], list[do.Event]]) -> list[do.Event]:
        """Carries out a command whose array has come, and those behind it, up to the next that waits for one; the
        events that follow."""
        events: list[do.Event] = []
        self._read, self._reading = self._reading, None
        while self._behind and self._reading is None and not self._closed:
            command = self._behind.popleft()
            self._behind_bytes -= _kept_bytes(command)
            events += carry(command)
        return events

    def close(self) -> None:
        """Reads nothing more; what stands behind is not carried out. Any thread may call this."""
        self._closed = True
        if (reading := self._reading) is not None:
            reading.end()
