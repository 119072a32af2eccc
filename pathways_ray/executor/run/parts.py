"""The protocols of what a launch on a host asks others for: compilers, the store, peers, those who call host functions.

`compile/jax_parts.py` and `data/` have those of JAX and of real peers, the simulator its own.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

from pathways_ray.errors import Failure
from pathways_ray.ir.plan import NodeLabel, Regroup
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.observe import computations

Computation = Callable[..., Any]
"""A compiled computation: takes arrays, gives a sequence of arrays (a regroup: one array), raises when it cannot be
enqueued, which a `Failure` among its arguments makes sure of. What is executed gives a last array, its *end*, which is
no output: it is ready, or fails, when the computation has, and no later one takes its memory."""

Pieces = list[Any]


class Keeps(enum.IntEnum):
    """The time for which computations keep a thread that calls them, if it computes them (`Backend.within_calls`)."""

    BRIEFLY = 0
    """Some microseconds: what is called is enqueued all the same, or over by then."""

    ALIKE = 1
    """About as long as the last time."""

    VARYING = 2
    """As long as the values have it: it has loops or branches that depend on them, or calls what is not XLA's."""


class Parts(Protocol):
    """The compiled side of a program on one host, and what knows of devices.

    All of it is made before the first launch. Methods raise `CompileError`. `queues` is whether a computation may be in
    a device's queue when the call that enqueues it returns; `keeps` is how long a launch may keep a thread that
    computes within its calls.
    """

    temporary_bytes: int
    queues: bool
    keeps: Keeps

    def executable(self, number: int) -> Computation | None:
        """Executable `number` of the plan, or None when this host has no part in its slice."""

    def agreed(self, number: int) -> Callable[[int, int], None] | None:
        """Returns what tells executable `number` that a call comes, by its launch and its gang; None where it need not
        know."""

    def host_function(self, number: int) -> HostFunction:
        """Executable `number` of the plan, which is a host function on a slice that this host has a part of."""

    def analyses(self, runs: Mapping[int, int], text: bool) -> tuple[computations.Computation, ...]:
        """The compiler's figures of the executables in which this host has a part, and with `text` their code. `runs`
        has for each how often a launch has it run."""

    def argument(self, kind: ArrayType, layout: Layout) -> Callable[[bytes], Any]:
        """The maker of this host's part of an array, from all of its bytes."""

    def reshard(self, bundle: int) -> Computation:
        """The computation that takes and gives one array for each edge of a bundle."""

    def regroup(self, step: Regroup) -> Computation:
        """The maker of one array from the shards that a step names; called with the arrays of its sources that have a
        shard on this host, and with anything in the places of the others."""

    def copies(self, bundles: Sequence[int]) -> Computation | None:
        """The copier of one array for each edge of these bundles to other devices of this host; None where an edge is
        not such a copy, or where nothing is gained by it."""

    def outgoing(self, bundle: int) -> Outgoing: ...

    def incoming(self, bundle: int) -> Incoming: ...


class Store(Protocol):
    """The buffers of this host."""

    def of_session(self, session: int) -> Mapping[int, Any]: ...

    def held(self) -> dict[int, tuple[int, ...]]: ...

    def put_all(
        self,
        session: int,
        buffers: Collection[int],
        values: Iterable[Any],
        later: list[Callable[[], None]] | None = None,
    ) -> bool: ...

    def new_uploads(self, session: int) -> Set[int]: ...

    def launched(self, session: int, buffers: Iterable[int]) -> None: ...

    def drop(self, session: int, buffers: tuple[int, ...]) -> None: ...

    def drop_session(self, session: int) -> None: ...

    def ended(self, session: int) -> bool: ...


class Transfer(Protocol):
    """This host's connections to its peers."""

    def own(self, array: Any) -> Any:
        """The array, or a copy of it when a peer may still read its memory, or another array or session has it: what is
        returned may be overwritten."""

    def copy(self, array: Any) -> Any:
        """An array with the same values in memory of its own."""

    def is_consumed(self, array: Any) -> bool:
        """Whether a computation has taken the memory of an array."""


class Outgoing(Protocol):
    """The sending side of a bundle on this host."""

    number: int
    host: int

    def send(self, values: Sequence[Any] | Failure, launch: int, transfer: Any) -> Pieces | Failure:
        """Serves the pieces of values, one for each edge, that other hosts need; returns those that stay on this host.
        A failure among them is served in place of all."""

    def take_back(self, launch: int, failure: Failure, transfer: Any) -> None:
        """Offers `failure` in place of the pieces of a launch, which are not needed any more."""


class Incoming(Protocol):
    """The receiving side of a bundle on this host."""

    number: int
    host: int

    def post(self, launch: int, transfer: Any) -> dict[int, Pieces | Failure]:
        """Posts the pulls, before the producers need to have run; by sending host."""

    def assemble(self, pulled: dict[int, Pieces | Failure], local: Pieces | Failure | None) -> Sequence[Any] | Failure:
        """The arrays in their new layouts, one for each edge, or the failure that came in their place."""


class PendingCall(Protocol):
    """A call of a host function that is made beside the devices. `failure` is set when it is over and has failed."""

    failure: Failure | None

    def is_ready(self) -> bool:
        """Whether it is over."""

    def block_until_ready(self) -> Any:
        """Waits until it is."""

    def values(self) -> list[Any]:
        """The arrays that it gave; it is over, and has not failed."""

    def abandon(self, failure: Failure) -> None:
        """Has it fail, unless it is over. One that has begun is not stopped by that."""


def is_call(value: Any) -> bool:
    """Whether a value is a `PendingCall`. To ask for the type takes several microseconds for each array."""
    return hasattr(value, "abandon")


HostFunction = Callable[[int, NodeLabel, list[Any]], PendingCall]
"""Has this host's part of a host function called, for a session, on arrays that may not be computed yet. Calls of a
session are made one after the other, in the order in which they were asked for."""


def first_failure(values: Sequence[Any] | Failure) -> Failure:
    """The failure in place of values, or the first one among them."""
    return values if isinstance(values, Failure) else next(value for value in values if isinstance(value, Failure))
