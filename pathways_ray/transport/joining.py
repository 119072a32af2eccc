"""Reports of hosts and of the controller to the resource manager, and its answer to hosts: arguments of Ray's calls."""

from __future__ import annotations

from pathways_ray.ir.links import Hardware
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.transport.message import Message


class HostInfo(Message, frozen=True):
    """The report of a host that joins. `coordinator` is the address at which it could serve its island's group.

    `members` are all hosts of the island. Where a tenant has the island for itself, `tenant` is its name, and `base`
    the island whose devices it shares. `started` is when its process began, as the kernel counts: no other process of
    its machine has the same pid and that. `hardware` is what is known of its devices before JAX runs.
    """

    host: int
    island: int
    platform: str
    devices: int
    node: str
    pid: int
    coordinator: str
    members: tuple[int, ...] = ()
    tenant: str = ""
    base: int = -1
    started: int = 0
    hardware: Hardware = Hardware()


class JoinReply(Message, frozen=True):
    """The epoch of the host's island, and whom to talk to. `coordinator` is empty for an island of one host.

    The epoch is 0 when the island did not come together; then `absent` has the hosts that it waited for.
    """

    epoch: int
    scheduler_address: str
    data_secret: str
    coordinator: str
    absent: tuple[int, ...] = ()


class KnownHost(Message):
    """A host that has come to its scheduler under an epoch; `up` is False once it is gone."""

    info: HostInfo
    epoch: int
    up: bool = True


class HeldSlice(Message):
    """A slice that a session has. With `within`, it is a part of that one."""

    session: int
    placed: PlacedSlice
    name: str = ""
    within: int = 0


class Holdings(Message):
    """All that a controller knows of the cluster, for a resource manager that knows nothing yet.

    `schedulers` are islands with the addresses at which they serve their hosts; `last_slice` is the highest number that
    a slice has had, also one that was given back since. A controller numbers its lists from 1 on: one that comes twice
    may be older than other news.
    """

    hosts: tuple[KnownHost, ...]
    schedulers: tuple[tuple[int, str], ...]
    slices: tuple[HeldSlice, ...]
    last_slice: int
    number: int = 1


class HeldSlices(Message):
    """The slices that a resource manager knows, for a controller that follows another one; the highest number that a
    slice has had; and the islands that are being drained."""

    slices: tuple[HeldSlice, ...] = ()
    last_slice: int = 0
    draining: tuple[int, ...] = ()
