"""Every error the project raises, in one tree.

    PathwaysError
    ├── UsageError               the caller's turn to act: the call itself was wrong
    │   ├── NotInitialized       no session: pw.init() or pw.connect() comes first
    │   ├── AlreadyInitialized   pw.init() while a cluster of this process is up
    │   ├── SessionClosed        the session (or its cluster) was shut down
    │   ├── SessionSuspended     a session was used between suspend() and resume()
    │   ├── TraceError           a function could not be traced; __cause__ is what it raised
    │   ├── GraphError           a program does not fit together: types, layouts, results
    │   │   └── SpecError        a PartitionSpec does not fit the mesh or the array
    │   ├── InvalidArray         an argument that is no array, or has a dtype JAX does not have
    │   ├── BufferDeleted        a deleted or donated array was used
    │   ├── ForeignArray         an array of another session was used
    │   └── RoutingError         rows were to go to a slice that there is not, or that has no room
    ├── ResourceError            the request is well formed, the cluster cannot serve it
    │   ├── Unschedulable        no island can hold the slice; the message says what exists
    │   ├── QuotaExceeded        over a limit of this tenant; asked and allowed are named
    │   ├── ProgramRefused       a program with operations that are not allowed, or that ended hosts
    │   ├── OutOfMemory          a launch or an upload does not fit into the memory of its devices
    │   └── TooLarge             over a fixed limit of the runtime
    ├── ExecutionError           a node failed on a device; consumers fail with the same root cause
    │   ├── CompileError         XLA refused a function
    │   ├── BufferLost           the data was on a host that is gone
    │   ├── HostLost             a host died while the launch needed it
    │   ├── HostFunctionError    a function of pw.host raised, or ended its process; the traceback is in its notes
    │   │   └── HostFunctionTimeout  it did not return within its limit
    │   ├── LaunchTimeout        a launch kept its devices for longer than the cluster allows
    │   └── OrderMismatch        two hosts of an island ran gangs in different orders; only when that is checked
    ├── Cancelled                the launch was cancelled, or one that it depends on
    ├── ControllerLost           the controller is gone; what was under way has failed
    ├── AuthenticationError      wrong or missing token
    ├── WireError                a message that is not of this protocol
    ├── SuspensionDamaged        what suspend() wrote into a directory cannot be read again
    └── WaitTimeout              a wait was longer than its limit

One is caught by what it is:

    try:
        print(float(step(x)))
    except pw.errors.ExecutionError as error:
        print(error.failure)

A failure on a host travels as a `Failure` value along the dataflow graph and becomes one of these where the user looks.
"""

from __future__ import annotations

import msgspec


class PathwaysError(Exception):
    """Root of the tree. `failure` is set when the error came from the cluster."""

    failure: Failure | None = None


class UsageError(PathwaysError):
    """The call was wrong; nothing was sent.

    When: an option of the wrong kind or value; no Ray cluster at `address`; a runtime that would listen beyond
        loopback without TLS and tenants; an invalid certificate or tenants file
    Do: read the message: it names the option and what it takes
    """


class NotInitialized(UsageError):
    """There is no session yet.

    When: no session yet
    Do: call `pw.init()` or `pw.connect(url, token)` first
    """


class AlreadyInitialized(UsageError):
    """This process already runs a cluster.

    When: `pw.init()` while this process runs a cluster
    Do: use that one, or `pw.shutdown()` it first
    """


class SessionClosed(UsageError):
    """The session was shut down.

    When: the session was shut down, or ended; the message says why
    Do: open a new session. Arrays of the old one are gone
    """


class SessionSuspended(UsageError):
    """The session is suspended: its arrays are in host memory or files, and it has no devices.

    When: an array, a slice or a function of a suspended session was used; the session was suspended twice; it gave way
        to another one, and for half a minute no island could hold one of its slices
    Do: call its `resume()` first; where no island can hold its slices, once there is one
    """


class TraceError(UsageError):
    """A decorated function could not be traced.

    When: a function raised while it was traced, looked at a value (`float(v)`), calls back to the host for a value,
        has side effects, assigns to an outer variable, or lets a tracer escape; a compiled function that uses a
        `pw.Array` without taking it
    Do: the message has the line; `__cause__` is what was raised. Return values in place of assigning them; put loops
        and derivatives inside the compiled function
    """


class GraphError(UsageError):
    """The parts of a program do not fit together.

    When: the parts of a program do not fit: no array returned, use after donation, a released slice, a slice of
        another session
    Do: the message names node and line
    """


class SpecError(GraphError):
    """A partition spec does not fit its mesh or its array.

    When: a spec names an axis that the mesh lacks, or partitions a dimension into unequal parts
    Do: choose another spec, or pad the array
    """


class InvalidArray(UsageError):
    """Not an array JAX can hold.

    When: an argument that is no array or number, or has a dtype that JAX lacks; an integer that does not fit
    Do: convert it
    """


class BufferDeleted(UsageError):
    """The array was deleted or donated.

    When: a deleted or donated array was used; or one that was donated to a launch that failed after it had taken the
        memory
    Do: keep a handle that was not deleted; drop `donate_argnums`
    """


class ForeignArray(UsageError):
    """The array belongs to another session.

    When: an array of another session was passed
    Do: fetch it there, and pass the NumPy array; of a session that was closed, make or put it again
    """


class RoutingError(UsageError):
    """A row cannot go where it is to go.

    When: `pw.route` with a destination that is not the number of a slice, or, with `overflow="error"`, with more rows
        than the capacity of one
    Do: the message has the values. -1 is the destination of rows that go nowhere; raise the capacity, or leave it out
    """


class ResourceError(PathwaysError):
    """The cluster cannot serve the request."""


class Unschedulable(ResourceError):
    """No island can hold the slice.

    When: no island can hold the slice; Ray cannot place the hosts
    Do: the message says what there is
    """


class QuotaExceeded(ResourceError):
    """Over a limit of this tenant.

    When: over a quota that the operator gave this tenant: devices, device bytes, launches, message bytes, nodes; over
        a limit that every session has: sessions, calls that wait, uploads under way
    Do: the message says what was asked, allowed and held. Release or delete something, or ask the operator
        ([security](security.md))
    """


class ProgramRefused(ResourceError):
    """A program that the cluster does not run: what it does, or what it did, is not allowed.

    When: a function has an operation or a custom call that is not allowed, or a collective that some devices may not
        enter, or is not what the graph says; or the program ended hosts three times; or it could not be planned in time
    Do: the message names function, operation, line and host, or the three reasons and the id under which the operator
        lifts the refusal. Take collectives out of branches and loops by `axis_index` or by the device's own data, or
        make the predicate equal on all devices with `psum`. What a busy machine could not plan is tried again with the
        next call. Callbacks are not allowed; Pallas kernels, `jax.lax.empty` and other custom calls to
        [trusted](security.md#trust) tenants only
    """


class OutOfMemory(ResourceError):
    """A launch or an upload does not fit into the memory of its devices.

    When: results and temporaries of a launch do not fit beside the buffers on its devices: at once where they never
        can, since this session holds the rest, or after 60 s of waiting for the buffers of others (five
        minutes under policy `preempt`); an upload takes more of a device than the whole of its memory
    Do: the message has the figures; delete arrays, donate arguments, use more devices
    """


class TooLarge(ResourceError):
    """Over a fixed limit of the runtime.

    When: over a limit of `limits.py`: constants of 64 MiB in a function or program, functions of 128 MiB or a plan of
        32 MiB in a program, 8,192 nodes, a host function of 16 MiB with what it uses
    Do: pass big constants as arguments (`pw.put` places one once), or have a host function read a file; split the
        program into several
    """


class ExecutionError(PathwaysError):
    """A node failed while the program ran.

    When: a computation or a transfer failed on a device, out of memory included
    Do: the message has node, line and host. Needs less memory: `explain()` shows the bytes
    """


class CompileError(ExecutionError):
    """A function could not be compiled for its devices, or not in time.

    When: XLA, or the export format, refused a function; it took a host longer than `compile_limit_s` of `pw.init` (2
        minutes), or its checker longer than 30 s to read it; others were compiled before it for five times as long
    Do: the message is XLA's, or says which host and why. A launch that comes a second later has it compiled again.
        Where a host dies while it compiles, launches wait for its successor, which tries again; the third time the
        program is refused with `ProgramRefused`
    """


class BufferLost(ExecutionError):
    """The data was on a host that is gone.

    When: the array lay on a host that is gone, or its upload has not come to all hosts in 20 s
    Do: make it again: launch what made it, or `pw.put` it again
    """


class HostLost(ExecutionError):
    """A host died while the launch needed it.

    When: a host died while the launch needed its island; a launch, a put or a fetch found a host away for 20 s; nothing
        ran on the island for twice the longest `launch_limit_s` while launches waited there, or for ten times that
        where they waited for another island
    Do: launch again, with arguments that are still there
    """


class LaunchTimeout(ExecutionError):
    """A launch kept its devices for longer than the cluster allows; its island was restarted.

    When: a launch on the island kept its devices for longer than `launch_limit_s` of `pw.init` (60 s), or the
        tenant's own, without the time that it waited for others: a loop without end, a collective that one device
        never enters. The island's processes are killed and start again, since nothing can be taken off a device queue.
        A `pw.while_loop` over several slices just ends
    Do: the message names the program, and the line of its loop. Mend that, cut it into shorter launches, or start the
        cluster with a higher limit. The third time, the program that the message names is refused with
        `ProgramRefused`, and no other
    """


class HostFunctionError(ExecutionError):
    """A function of `pw.host` gave no result.

    When: the function raised, gave another tree, shape or type than `result=` says, or ended its process; a module that
        it imports is not on the host
    Do: the message has the exception and its line, the notes have the whole traceback. What it has printed is in the
        log of the host's process (`pathways logs`)
    """


class HostFunctionTimeout(HostFunctionError):
    """A function of `pw.host` did not return within its limit.

    When: a call took longer than `limit_s` of `pw.host` (60 s). The process of the session's functions on that host is
        killed; the next call starts another one. Devices, and launches that do not take its results, went on meanwhile
    Do: give it a higher limit, or mend its loop
    """


class OrderMismatch(ExecutionError):
    """Hosts of one island enqueued gangs in different orders, so their results are worthless.

    When: with `pw.init(check_order=True)` only: two hosts of an island enqueued two gangs in different orders, so
        their collectives met the wrong partners and the results are worthless. The island starts again
    Do: the message names both gangs. Launch again; it is a bug of the runtime, so please report it
    """


class Cancelled(PathwaysError):
    """The launch was cancelled (`pw.Array.cancel`), or one that it depends on.

    When: `y.cancel()` was called for the launch, or for one that it takes arguments from. One that had begun runs to
        its end on the devices, and leaves nothing
    Do: launch again if you need it
    """


class ControllerLost(PathwaysError):
    """The controller is gone.

    When: nothing answers at `url`; the controller ended while a launch was under way, of which nobody knows whether it
        ran. Arrays that were ready stay, and the session goes on with the controller's successor; where that does not
        come, later calls raise `SessionClosed`
    Do: call again (`pw.retry(step, on=pw.errors.ControllerLost)(x)`), with arrays that are left; start a new cluster
        where the session is closed
    """


class AuthenticationError(PathwaysError):
    """Wrong or missing token.

    When: wrong or missing token; something of another session
    Do: use `.token` of what `pw.init` returned, or the token the operator gave you
    """


class WireError(PathwaysError):
    """A message that does not follow the protocol.

    When: a message that is not of this protocol, or of another version of it
    Do: use the same version at both ends. Within one version it is a bug
    """


class SuspensionDamaged(PathwaysError):
    """The files of a suspension cannot be read again.

    When: a file of the directory of `suspend(path)` is missing, shorter than it was or has other bytes; or the
        directory given to `resume` is that of another suspension, or of none
    Do: the message names the file. Put the directory back as it was, and call `resume()` again: the session stays
        suspended, and nothing else is lost
    """


class WaitTimeout(PathwaysError):
    """A wait was longer than its limit.

    When: a wait was longer than its `timeout`, or than 60 s for uploads before a fetch
    Do: wait again: the launch goes on
    """


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
