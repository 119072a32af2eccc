"""Views: what the processes know of launches that run and wait, as values.

An island's scheduler makes an `IslandView` when it is asked, a host says in its heartbeat where its launches stand
(`Stopped`), the controller makes a `LaunchView` of a launch. `why` explains them; the page, the terminal and
`pathways status --diagnose` show them. All are literals: JSON on the wire, equal where their fields are.

Lists are bounded by the constants below, and say how much they leave out. Ages are in seconds; -1 is unknown.
"""

from __future__ import annotations

import msgspec

MAX_STOPPED = 8
"""Launches of a host in a heartbeat: the oldest ones, for which the others wait."""

MAX_SESSIONS = 64
"""Sessions whose queues a view has."""

MAX_DEVICES = 16
"""Devices that a view names of a launch."""


class View(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of all views."""


class Stopped(View, frozen=True, array_like=True):
    """A launch that stands on a host. `phase` is that of `ActiveLaunch`, by name.

    `producers` are the launches whose results it waits for, `senders` the hosts whose data, `calls` the host functions
    that run here. With `arrived` its data is there, and it waits for the other hosts of its island.
    """

    sequence: int
    phase: str
    producers: tuple[int, ...] = ()
    senders: tuple[int, ...] = ()
    arrived: bool = False
    calls: tuple[str, ...] = ()


class Arriving(View, frozen=True, array_like=True):
    """An upload that comes to a host: `received` of its `bytes` are there."""

    session: int
    buffer: int
    received: int
    bytes: int


class ArrivingAt(View, frozen=True):
    """An upload that comes to a host."""

    host: int
    upload: Arriving


class StoppedOn(View, frozen=True):
    """A launch that stands on a host."""

    host: int
    launch: Stopped


class Running(View, frozen=True):
    """A launch that has kept all its devices of a host for some seconds."""

    host: int
    sequence: int
    seconds: float


class Compiling(View, frozen=True):
    """A program that a host compiles. `seconds` are those in which its compiler ran."""

    host: int
    program: int
    name: str
    seconds: float


class Dispatched(View, frozen=True):
    """A launch that is with the hosts of an island: `hosts` have yet to complete it."""

    sequence: int
    session: int
    tenant: str
    program: str
    age_s: float
    hosts: tuple[int, ...]
    devices: tuple[str, ...] = ()
    more_devices: int = 0
    failure: str = ""


class Queue(View, frozen=True):
    """Launches of a session that wait in an island's order; `launches` of them, of which `head` is the next one.

    Queues are in the order in which the policy would take them now.
    """

    session: int
    tenant: str
    launches: int
    head: int
    program: str
    age_s: float
    devices: tuple[str, ...] = ()


class Place(View, frozen=True):
    """The place of a launch that waits on an island: behind `before` launches that are with the hosts or go earlier, of
    which `behind` is first on a device that it wants; 0 where no such launch is there."""

    sequence: int
    before: int
    behind: int = 0


class IslandView(View, frozen=True):
    """An island as its scheduler knows it.

    `absent` are hosts that are not there: nothing is sent until they are. `places` are those of the launches that were
    asked for and wait, `story` the last events that concern them.
    """

    island: int
    hosts: tuple[int, ...]
    absent: tuple[int, ...] = ()
    dispatched: tuple[Dispatched, ...] = ()
    queues: tuple[Queue, ...] = ()
    places: tuple[Place, ...] = ()
    running: tuple[Running, ...] = ()
    compiling: tuple[Compiling, ...] = ()
    stopped: tuple[StoppedOn, ...] = ()
    uploads: tuple[ArrivingAt, ...] = ()
    story: tuple[str, ...] = ()


class Lacking(View, frozen=True):
    """The memory that a launch waits for, in a pool of `size` bytes: `held` are taken, `own` by its session. Session
    `gives_way` is being suspended for it, unless that is 0."""

    pool: str
    needed: int
    size: int
    held: int
    own: int
    gives_way: int = 0


class Upload(View, frozen=True):
    """An upload that a launch waits for, and the hosts that have yet to report it."""

    buffer: int
    hosts: tuple[int, ...]
    bytes: int


class LaunchView(View, frozen=True):
    """A launch as the controller knows it.

    `launch` is its client's number, `sequence` its number in the cluster, 0 until it is admitted; `state` is that of
    `LaunchState`, in words. It waits for reports of `islands`, for results of `producers`, for hosts that are `absent`
    or do not hold its program yet (`unready`), for `uploads`, for memory (`lacking`), or for its session's turn:
    `before` calls of its session stand before it, of which the launch `behind` (the client's number) is the first that
    has to wait; or the session has `flying` launches in flight, as many as it may. Of one that goes in parts, `parts`
    are the numbers of those under way, `rounds` the rounds of its loops so far.
    """

    session: int
    tenant: str
    launch: int
    sequence: int
    program: str
    key: int
    state: str
    age_s: float = -1.0
    islands: tuple[int, ...] = ()
    producers: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    unready: tuple[int, ...] = ()
    uploads: tuple[Upload, ...] = ()
    lacking: Lacking | None = None
    before: int = 0
    behind: int = 0
    flying: int = 0
    failure: str = ""
    parts: tuple[int, ...] = ()
    rounds: int = 0


ISLAND_VIEW: msgspec.json.Decoder[IslandView] = msgspec.json.Decoder(IslandView)
"""Raises `msgspec.MsgspecError` for what is no view of an island."""

encode = msgspec.json.encode
