"""Events of a host and the instructions that follow from them.

Both are values: they hold numbers, wire messages and failures, and never an array, a computation or a connection. So
they can be logged, compared, and replayed into a fresh `HostCore`. Of what the driver is told to do, `Prepare`, `Ask`
and `AwaitInputs` come back as exactly one event each; the rest is done when the driver has gone on to the next one.
"""

from __future__ import annotations

import msgspec

from pathways_ray.errors import Failure
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.transport.messages import (
    CatchUp,
    Examine,
    FromLeader,
    FunctionsAhead,
    Heard,
    IslandLaunch,
    LaunchEarly,
    Message,
    Peer,
    Program,
    ServeCall,
    ToHost,
)

# --- events -----------------------------------------------------------------------------------------------------------


class Joined(msgspec.Struct, frozen=True):
    """This process is its host under an epoch of its island."""

    epoch: int


class Prepared(msgspec.Struct, frozen=True):
    """A program of a tenant is compiled. `temporary_bytes` are those of its largest computation, per device; whether
    one `queues` says the backend."""

    program: int
    plan: HostPlan
    temporary_bytes: int
    tenant: str = ""
    queues: bool = True


class PreparationFailed(msgspec.Struct, frozen=True):
    """A program cannot run here."""

    program: int
    failure: Failure


class InputsArrived(msgspec.Struct, frozen=True):
    """Everything that a launch waits for at a barrier is on this host, or failed."""

    sequence: int
    barrier: int
    failure: Failure | None


class Examined(msgspec.Struct, frozen=True):
    """The computations of a program, as JSON, for the look that asks."""

    look: int
    program: int
    report: bytes


class SchedulerFound(msgspec.Struct, frozen=True):
    """The successor of the scheduler, which has died, answers."""


class Handed(msgspec.Struct, frozen=True):
    """A client of the tenant that `tenant` stands for hands over a call. The driver looks at it, and its core hears of
    it as `LookedAt`."""

    session: int
    tenant: str
    message: LaunchEarly


class LookedAt(msgspec.Struct, frozen=True):
    """A call that is handed over, and what the driver found: whether it `fits` (its arguments are here as its program
    takes them, and its results are not), and how many launches are `under_way` on the device queues."""

    handed: Handed
    fits: bool
    under_way: int


class Called(msgspec.Struct, frozen=True):
    """A client of the tenant that `tenant` stands for asks for the values of a call. This host knows it by `number`."""

    session: int
    tenant: str
    message: ServeCall
    number: int


class Checked(msgspec.Struct, frozen=True):
    """Functions that came ahead of their program have been checked."""


class CatchingUp(msgspec.Struct, frozen=True):
    """The rest of a message by which this host catches up with others."""

    message: CatchUp


class Next(msgspec.Struct, frozen=True):
    """Events that waited for their turn may have it now."""


Event = (
    ToHost
    | FromLeader
    | CatchingUp
    | Next
    | Joined
    | Prepared
    | PreparationFailed
    | Checked
    | InputsArrived
    | Examined
    | SchedulerFound
    | Handed
    | LookedAt
    | Called
)
"""A message of the scheduler or of the leader, a call that a client hands over, or something that an instruction led
to."""


# --- instructions: a launch's values ----------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """Take a launch's arguments from the store, except those for the slots in `unresolved`, and post its pulls."""

    launch: IslandLaunch
    unresolved: tuple[int, ...]


class Copy(msgspec.Struct, frozen=True):
    """Copy the arguments in `slots`, which the launch is about to overwrite: each of them, or with `if_shared` only
    those that another active launch of this host still has in a slot."""

    sequence: int
    slots: tuple[int, ...]
    if_shared: bool


class Enqueue(msgspec.Struct, frozen=True):
    """Run the steps from `first` up to `last`, in order; with `failure`, that is what the gang of `first` receives."""

    sequence: int
    first: int
    last: int
    failure: Failure | None


class Abandon(msgspec.Struct, frozen=True):
    """A launch has ended elsewhere: stop waiting for what it takes from others, offer nothing more of it, and take back
    what its program offers to others."""

    sequence: int
    program: int
    failure: Failure


class Measure(msgspec.Struct, frozen=True):
    """Count the time until the steps from `first` up to `last` have run to that of the launch, which stops there."""

    sequence: int
    first: int
    last: int


class AwaitInputs(msgspec.Struct, frozen=True):
    """Report `InputsArrived` once all that the launch waits for at the barrier at `position` has come or failed; with
    `failure`, which comes in its place, at once."""

    sequence: int
    position: int
    barrier: int
    failure: Failure | None = None


class Forward(msgspec.Struct, frozen=True):
    """Give a result of launch `source` to launch `target`, which takes it in these slots."""

    source: int
    target: int
    buffer: int
    slots: tuple[int, ...]


class Run(msgspec.Struct, frozen=True):
    """`Start` a launch that nothing stops, `Enqueue` all of its steps, and `Complete` it."""

    launch: IslandLaunch


class Complete(msgspec.Struct, frozen=True):
    """Store the results of a launch, all of which is enqueued; report to the scheduler when they are ready. Nothing on
    the host depends on that, so it does not come back as an event."""

    sequence: int


# --- instructions: early launches ------------------------------------------------------------------------------------


class Serve(msgspec.Struct, frozen=True):
    """Compute a call as `number`, answer with its values, and keep nothing; or leave it, where it does not fit."""

    called: Called
    number: int


class LeaveCall(msgspec.Struct, frozen=True):
    """Tell a client that its call has to be launched."""

    called: Called


class RefuseEarly(msgspec.Struct, frozen=True):
    """Tell a client that its call was left to the scheduler."""

    handed: Handed


class Confirm(msgspec.Struct, frozen=True):
    """The launch that was taken early as `number` was sent as `sequence`: report it so. With 0 it never will be. The
    `others` left as the same one: what they took on their devices is reported with it."""

    number: int
    sequence: int
    others: tuple[int, ...] = ()


class SayAllowed(msgspec.Struct, frozen=True):
    """Tell clients whether they may hand over calls: those of the tenant that `tenant` stands for may."""

    tenant: str


# --- instructions: everything else ------------------------------------------------------------------------------------


class Free(msgspec.Struct, frozen=True):
    """Drop buffers from the store."""

    session: int
    buffers: tuple[int, ...]


class FreeSession(msgspec.Struct, frozen=True):
    """Drop everything of a session, and what is stored for it later."""

    session: int


class Prepare(msgspec.Struct, frozen=True):
    """Compile a program; report `Prepared` or `PreparationFailed`."""

    message: Program


class Check(msgspec.Struct, frozen=True):
    """Have functions checked that a program will bring; report `Checked`, whatever was found."""

    message: FunctionsAhead


class Ask(msgspec.Struct, frozen=True):
    """Ask the compiler what it made of a program; report `Examined`."""

    message: Examine


class Forget(msgspec.Struct, frozen=True):
    """Let go of a prepared program."""

    program: int


class SetPeers(msgspec.Struct, frozen=True):
    """Pull from these hosts from now on."""

    peers: tuple[Peer, ...]


class Rejoin(msgspec.Struct, frozen=True):
    """Join the successor of the scheduler, or of the controller, with all that is in the store. `coming` are the
    buffers, by session, that launches have yet to store, `programs` those that are compiled, or to be; `sequence` is
    the highest number of a launch so far, `heard` what the scheduler had said to this host among several; launches up
    to number `since` were before this process. The `offered` launches have something for other hosts."""

    coming: dict[int, tuple[int, ...]]
    programs: tuple[int, ...]
    sequence: int
    heard: Heard | None = None
    since: int | None = None
    offered: tuple[tuple[int, int], ...] = ()


class Tell(msgspec.Struct, frozen=True):
    """Write an entry into the log that followers read, before anything else is done."""

    entry: FromLeader


class GoOn(msgspec.Struct, frozen=True):
    """Handle what is left, behind what the instructions before led to."""

    rest: CatchingUp | Next


class End(msgspec.Struct, frozen=True):
    """End this process; its successor starts again."""

    reason: str


class Send(msgspec.Struct, frozen=True):
    """Send a message to the scheduler."""

    message: Message


Instruction = (
    Start
    | Copy
    | Enqueue
    | Measure
    | AwaitInputs
    | Abandon
    | Forward
    | Run
    | Complete
    | Serve
    | LeaveCall
    | RefuseEarly
    | Confirm
    | SayAllowed
    | Free
    | FreeSession
    | Prepare
    | Check
    | Ask
    | Forget
    | SetPeers
    | Rejoin
    | Tell
    | GoOn
    | End
    | Send
)
