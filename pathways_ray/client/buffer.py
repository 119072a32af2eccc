"""A logical array in its client: the record that the client's core decides on, and the handle that users' arrays share.

The record outlives the handle when a launch that waits behind an upload still takes the array. The handle frees the
shards on the devices when the last `pw.Array` that shares it is dropped, or one of them is deleted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from pathways_ray.client.siblings import Results
from pathways_ray.errors import BufferLost, ControllerLost, Failure, HostLost
from pathways_ray.observe.why import Why


class BufferState(Enum):
    """The progress of a logical array. The values are what `repr` shows."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    DELETED = "deleted"


# An attribute of an enumeration costs a descriptor call each time; these are compared on the path of each launch.
PENDING, READY, FAILED, DELETED = BufferState


class Upload:
    """An array on its way to the hosts of its slice.

    It is done once all of them acknowledged it, or one of them could not take it. `epochs` has the incarnation of each
    that it goes to.
    """

    __slots__ = ("done", "epochs", "failure", "missing")

    def __init__(self, hosts: set[int], epochs: Mapping[int, int] = MappingProxyType({})) -> None:
        self.missing = hosts
        self.epochs = dict(epochs)
        self.failure: Failure | None = None
        self.done = False


class BufferRecord(msgspec.Struct, eq=False, gc=False):
    """A logical array as the client's core knows it.

    `kind` has its type, slice and spec, as an `ArgumentType` does; None of one that no other process has to know.
    `failure` is set when the launch that makes it, or its upload, failed, or its host was lost; `upload` when it is, or
    was, uploaded by the client.

    While a launch that it was donated to has no outcome it is DELETED, and `donated` has the state that it returns to
    if the launch fails before it takes the memory. `dropped` says that the user has no handle to it then; `undecided`
    that the launch has failed, and that it is not known yet whether it took the memory. `late` says that the launch
    that makes it was cancelled after it had begun, or had left as one with others that were not. `results` are all
    those of that launch, where there are several. `launch` is its number, 0 of what was uploaded; `early` the same
    where it was handed to `host`, else 0. Of what was `fetched` before its launch, which was only sent, had an outcome,
    the host has the value.
    """

    id: int
    state: BufferState = PENDING
    kind: Any = None
    results: Results | None = None
    failure: Failure | None = None
    upload: Upload | None = None
    why_deleted: str = ""
    donated: BufferState | None = None
    dropped: bool = False
    undecided: bool = False
    late: bool = False
    launch: int = 0
    early: int = 0
    host: int = -1
    fetched: bool = False

    @property
    def shown(self) -> BufferState:
        """Its state for the user, for whom it is ready once its hosts have it."""
        return READY if self.fetched and self.state is PENDING else self.state

    @property
    def is_there(self) -> bool:
        """Whether its hosts have it, also for a launch that it is donated to."""
        state = self.donated or self.state
        return state is READY or (self.fetched and state is PENDING)

    @property
    def refusal(self) -> Failure | None:
        """The reason for which no launch may take it: its failure, or its deletion, which another thread may just have
        called."""
        if self.failure is None and self.state is DELETED:
            return Failure("BufferDeleted", f"the array cannot be an argument: {self.why_deleted}")
        return self.failure

    def donate(self, why: str) -> None:
        """Notes that a launch may take its memory."""
        self.donated, self.state, self.why_deleted = self.state, DELETED, why

    def take_back(self) -> None:
        """Notes that the launch did not take it."""
        assert self.donated is not None
        self.state = FAILED if self.failure is not None else self.donated
        self.donated, self.undecided, self.why_deleted = None, False, ""

    def become_ready(self) -> None:
        """Notes that it is computed, or uploaded."""
        if self.state is PENDING:
            self.state = READY
        elif self.donated is PENDING:
            self.donated = READY

    def names_cause_of(self, symptom: Failure) -> bool:
        """Whether the outcome of the launch that makes it names the cause of what a host says in place of its value: an
        argument that is not there may never have been made, since its launch was cancelled."""
        return self.state is PENDING and symptom.kind == "BufferLost"

    def cancel_late(self, failure: Failure) -> None:
        """Notes that the launch that makes it is cancelled, and yet runs to its end. Hosts drop what it makes, even if
        its value has come before."""
        if self.state is PENDING or self.donated is PENDING or self.early:
            self.late = True
            self.fail(failure)

    def fail(self, failure: Failure) -> None:
        """Notes a failure. A deleted array stays deleted; launches that were called before still fail with it."""
        self.failure = failure
        if self.state is not DELETED:
            self.state = FAILED


ID_OF, STATE_OF, FAILURE_OF, UPLOAD_OF, EARLY_OF = map(attrgetter, ("id", "state", "failure", "upload", "early"))
"""Fields of records, by functions of the interpreter: a launch may take hundreds."""

LOSSES = (HostLost, BufferLost, ControllerLost)
"""The losses for which guards make arrays again. A controller's death takes the results of launches under way."""

_KINDS = frozenset(one.__name__ for one in LOSSES)


class Guard(Protocol):
    """Something that can make arrays again that were lost."""

    def covers(self, buffer: Buffer) -> bool: ...

    def recover(self) -> None: ...


class Callbacks(Protocol):
    """The part of a session that makes calls in a thread of its own, once that was started."""

    def start(self) -> None: ...

    def put(self, call: Callable[[], None]) -> None: ...


class BufferOwner(Protocol):
    """The part of a session that buffers and arrays use."""

    guards: weakref.WeakValueDictionary[int, Guard]

    watch: Callable[[Callable[[], None]], None]
    unwatch: Callable[[Callable[[], None]], None]

    @property
    def callbacks(self) -> Callbacks: ...

    @property
    def closed_because(self) -> str: ...

    def check_open(self) -> None: ...

    def free(self, record: BufferRecord) -> None: ...

    def free_again(self, record: BufferRecord) -> None: ...

    def delete(self, record: BufferRecord) -> None: ...

    def wait(self, record: BufferRecord, timeout: float | None = None, there: bool = False) -> None: ...

    def wait_there(self, record: BufferRecord, until: float | None) -> bool: ...

    def lasting(self, record: BufferRecord) -> AbstractContextManager[None]: ...

    def explain_timeout(self, error: BaseException, record: BufferRecord, timeout: float | None) -> None: ...

    def fetch(self, array: Any) -> Any: ...

    def settle(self, record: BufferRecord) -> None: ...

    def cancel(self, record: BufferRecord) -> bool: ...

    def hurry(self) -> None: ...

    def why(self, record: BufferRecord) -> Why: ...


INLINE = BufferRecord(0, READY)
"""Stands in the place of an argument that its launch carries, of which there is no buffer."""


class Buffer:
    """A counted handle to a logical array."""

    __slots__ = ("__weakref__", "record", "session")

    def __init__(self, session: BufferOwner, record: BufferRecord) -> None:
        self.session = session
        self.record = record

    @property
    def id(self) -> int:
        """The number that messages name the array by."""
        return self.record.id

    @property
    def is_lost(self) -> bool:
        """Whether a loss took it for which guards make arrays again."""
        failure = self.record.failure
        return failure is not None and failure.kind in _KINDS and self.record.state is not DELETED

    def delete(self, why: str) -> None:
        """Frees the array now; `why` completes the message of later errors. A second call does nothing."""
        record = self.record
        record.dropped = True
        if record.state is not DELETED:
            record.state = DELETED
            record.why_deleted = why
            self.session.delete(record)

    def __del__(self) -> None:
        try:
            try:
                record = self.record
            except AttributeError:
                return  # Ctrl-C came as it was made
            record.dropped = True  # before the look: who takes a donated one back looks here after it
            if record.state is not DELETED:
                self.session.free(record)
        except KeyboardInterrupt:
            self.session.free_again(self.record)
