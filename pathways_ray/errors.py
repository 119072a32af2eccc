"""Every error the project raises, in one tree.

    PathwaysError
    ├── UsageError               the caller's turn to act: the call itself was wrong
    │   ├── NotInitialized       no session: pw.init() or pw.connect() comes first
    │   ├── AlreadyInitialized   pw.init() while a cluster of this process is up
    │   ├── SessionClosed        the session (or its cluster) was shut down
    │   ├── TraceError           a function could not be traced; __cause__ is what it raised
    │   ├── GraphError           a program does not fit together: types, layouts, results
    │   │   └── SpecError        a PartitionSpec does not fit the mesh or the array
    │   ├── InvalidArray         an argument that is no array, or has a dtype JAX does not have
    │   ├── BufferDeleted        a deleted or donated array was used
    │   └── ForeignArray         an array of another session was used
    ├── ResourceError            the request is well formed, the cluster cannot serve it
    │   ├── Unschedulable        no island can hold the slice; the message says what exists
    │   ├── QuotaExceeded        over a limit of this tenant; asked and allowed are named
    │   ├── ProgramRefused       a program with operations that are not allowed, or that ended hosts
    │   ├── OutOfMemory          a launch does not fit into the memory of its devices; the message has the figures
    │   └── TooLarge             over a fixed limit of the runtime
    ├── ExecutionError           a node failed on a device; consumers fail with the same root cause
    │   ├── CompileError         XLA refused a function
    │   ├── BufferLost           the data was on a host that is gone
    │   ├── HostLost             a host died while the launch needed it
    │   ├── LaunchTimeout        a launch kept its devices for longer than the cluster allows
    │   └── OrderMismatch        two hosts of an island ran gangs in different orders; only when that is checked
    ├── Cancelled                the launch was cancelled, or one that it depends on
    ├── ControllerLost           the controller is gone; every open launch has failed
    ├── AuthenticationError      wrong or missing token
    ├── WireError                a message that is not of this protocol
    └── WaitTimeout              a wait was longer than its limit

A failure on a host travels as a `Failure` value along the dataflow graph and becomes one of these where the user looks.
"""

from __future__ import annotations

import msgspec


class PathwaysError(Exception):
    """Root of the tree. `failure` is set when the error came from the cluster."""

    failure: Failure | None = None


class UsageError(PathwaysError):
    """The call was wrong; nothing was sent."""


class NotInitialized(UsageError):
    """There is no session yet."""


class AlreadyInitialized(UsageError):
    """This process already runs a cluster."""


class SessionClosed(UsageError):
    """The session was shut down."""


class TraceError(UsageError):
    """A decorated function could not be traced."""


class GraphError(UsageError):
    """The parts of a program do not fit together."""


class SpecError(GraphError):
    """A partition spec does not fit its mesh or its array."""


class InvalidArray(UsageError):
    """Not an array JAX can hold."""


class BufferDeleted(UsageError):
    """The array was deleted or donated."""


class ForeignArray(UsageError):
    """The array belongs to another session."""


class ResourceError(PathwaysError):
    """The cluster cannot serve the request."""


class Unschedulable(ResourceError):
    """No island can hold the slice."""


class QuotaExceeded(ResourceError):
    """Over a limit of this tenant."""


class ProgramRefused(ResourceError):
    """A program that the cluster does not run: what it does, or what it did, is not allowed."""


class OutOfMemory(ResourceError):
    """A launch does not fit into the memory of its devices."""


class TooLarge(ResourceError):
    """Over a fixed limit of the runtime."""


class ExecutionError(PathwaysError):
    """A node failed while the program ran."""


class CompileError(ExecutionError):
    """A function could not be compiled for its devices, or not in time."""


class BufferLost(ExecutionError):
    """The data was on a host that is gone."""


class HostLost(ExecutionError):
    """A host died while the launch needed it."""


class LaunchTimeout(ExecutionError):
    """A launch kept its devices for longer than the cluster allows; its island was restarted."""


class OrderMismatch(ExecutionError):
    """Hosts of one island enqueued gangs in different orders, so their results are worthless."""


class Cancelled(PathwaysError):
    """The launch was cancelled (`pw.Array.cancel`), or one that it depends on."""


class ControllerLost(PathwaysError):
    """The controller is gone."""


class AuthenticationError(PathwaysError):
    """Wrong or missing token."""


class WireError(PathwaysError):
    """A message that does not follow the protocol."""


class WaitTimeout(PathwaysError):
    """A wait was longer than its limit."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The reason of a failure, as a value that crosses processes.

    `kind` is the name of a class above; `node` and `where` name the node of the program and the user's line; `host` is
    the host it happened on, or -1. `story` has the last events that led to it, as lines of text; they become notes of
    the exception.
    """

    kind: str
    message: str
    node: str = ""
    where: str = ""
    host: int = -1
    story: tuple[str, ...] = ()


def _by_name() -> dict[str, type[PathwaysError]]:
    found: dict[str, type[PathwaysError]] = {}
    pending = [PathwaysError]
    while pending:
        kind = pending.pop()
        found[kind.__name__] = kind
        pending.extend(kind.__subclasses__())
    return found


_KINDS = _by_name()


def from_failure(failure: Failure) -> PathwaysError:
    """The exception for a failure value, with node, line and host in the message."""
    kind = _KINDS.get(failure.kind, ExecutionError)
    place = ""
    if failure.node:
        place += f" [node {failure.node}"
        place += f", {failure.where}" if failure.where else ""
        place += f", host {failure.host}" if failure.host >= 0 else ""
        place += "]"
    error = kind(failure.message + place)
    error.failure = failure
    for line in failure.story:
        error.add_note(line)
    return error


def to_failure(error: BaseException, node: str = "", where: str = "", host: int = -1) -> Failure:
    """The failure value for an exception; foreign exceptions become `ExecutionError`."""
    if isinstance(error, PathwaysError):
        if error.failure is not None:
            return error.failure
        return Failure(type(error).__name__, str(error), node, where, host)
    return Failure("ExecutionError", f"{type(error).__name__}: {error}", node, where, host)
