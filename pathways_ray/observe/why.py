"""Reasons for which something is not ready: one chain from a launch to what holds it, out of views.

`explain` walks from launch to launch, each with one reason, until it comes to one that runs or that waits for
something outside: a host, an upload, a compiler, memory. A reason names what it knows: place, device, seconds, bytes.
Pure: the controller gives what it knows, and asks the islands that `Explanation.wanted` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pathways_ray.observe.views import ArrivingAt, Compiling, Dispatched, IslandView, LaunchView, Stopped

MAX_LINKS = 16
"""Links of a chain; a longer one is cut, since its reader acts on the last."""

Find = Callable[[int, int], LaunchView | None]
"""A launch by its session and its client's number for it; session 0: by its number in the cluster."""


class Link(msgspec.Struct, frozen=True, omit_defaults=True):
    """One reason. `launch` is the number in the cluster of the launch that it is about, `age_s` since when, in seconds
    (-1: unknown), `done` the part that is over, 0 to 1 (-1: unknown); -1 stands for no island and no host."""

    text: str
    launch: int = 0
    island: int = -1
    host: int = -1
    age_s: float = -1.0
    done: float = -1.0


class Why(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to why `subject` is not ready: the chain, and the last events of a launch that is over, as lines.

    `print` shows it as text, `dict` gives it as JSON has it.
    """

    subject: str
    links: tuple[Link, ...] = ()
    story: tuple[str, ...] = ()

    def dict(self) -> dict[str, Any]:
        """The same as dictionaries and lists."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def __str__(self) -> str:
        return "\n".join([chain_text(self.links), *(f"   {line}" for line in self.story)])

    __repr__ = __str__


WHY: msgspec.json.Decoder[Why] = msgspec.json.Decoder(Why)


@dataclass
class Explanation:
    """A chain of reasons. `wanted` has, for islands that have to be asked before it can be continued, the launches
    whose places are needed."""

    links: list[Link] = field(default_factory=list)
    wanted: dict[int, set[int]] = field(default_factory=dict)


def chain_text(links: Iterable[Link]) -> str:
    """A chain as lines, each the reason of the one above it."""
    return "\n".join(("   because " if number else "") + link.text for number, link in enumerate(links))


def explain(subject: LaunchView, find: Find, islands: Mapping[int, IslandView], viewer: str = "") -> Explanation:
    """The chain from a launch to what holds it.

    Args:
        find: gives the views of other launches.
        islands: those that were asked.
        viewer: the tenant that asks, who learns neither names nor numbers of others; "" is the operator.
    """
    walk = _Walk(find, islands, viewer)
    launch: LaunchView | None = subject
    while launch is not None and len(walk.made.links) < MAX_LINKS:
        key = (launch.session, launch.launch, walk.at)
        if key in walk.seen:
            break
        walk.seen.add(key)
        launch = walk.step(launch)
    return walk.made


def named(launch: LaunchView | Dispatched, viewer: str = "") -> str:
    """A launch in words, as `viewer` may know it."""
    if viewer and launch.tenant != viewer:
        return "a launch of another tenant"
    number = str(launch.sequence)
    if isinstance(launch, LaunchView) and not launch.sequence:
        number = f"{launch.session}.{launch.launch}"
    return f"launch {number} of program {launch.program!r} ({launch.tenant})"


def bytes_text(count: int) -> str:
    """Bytes in words."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def hosts_text(hosts: Iterable[int]) -> str:
    """Hosts in words: the first four."""
    found = list(hosts)
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"host{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:4]))}{more}"


def for_text(seconds: float) -> str:
    """The end of a sentence about something that lasts."""
    return f", for {seconds:.1f} s" if seconds >= 0 else ""


def arriving_link(one: ArrivingAt) -> Link:
    """The part of an upload that a host has."""
    upload = one.upload
    text = (
        f"host {one.host} has {bytes_text(upload.received)} of the {bytes_text(upload.bytes)} of array {upload.buffer}"
    )
    return Link(text, host=one.host, done=upload.received / upload.bytes if upload.bytes else -1.0)


class _Walk:
    """A walk from launch to launch. `at` is the island on which it is, or -1."""

    def __init__(self, find: Find, islands: Mapping[int, IslandView], viewer: str) -> None:
        self.find, self.islands, self.viewer = find, islands, viewer
        self.made = Explanation()
        self.seen: set[tuple[int, int, int]] = set()
        self.at = -1

    def add(self, launch: LaunchView, text: str, island: int = -1, host: int = -1, age_s: float = -1.0) -> None:
        number = launch.sequence if self._is_shown(launch) else 0
        self.made.links.append(Link(f"{named(launch, self.viewer)} {text}", number, island, host, age_s))

    def _is_shown(self, launch: LaunchView) -> bool:
        """Whether the viewer may learn more of a launch than where it stands."""
        return not self.viewer or launch.tenant == self.viewer

    def step(self, launch: LaunchView) -> LaunchView | None:
        """Adds the reason of a launch; returns the launch that it waits for, if it is one."""
        if not launch.sequence:
            return self._at_controller(launch)
        if launch.failure:
            failure = f" ({launch.failure})" if self._is_shown(launch) else ""
            self.add(launch, f"has failed{failure}, and waits for the cause")
            return self._producer(launch)
        return self._in_flight(launch)

    # --- before it is admitted ----------------------------------------------------------------------------------------

    def _at_controller(self, launch: LaunchView) -> LaunchView | None:
        last = for_text(launch.age_s)
        if launch.absent:
            self.add(launch, f"waits for {hosts_text(launch.absent)} to come back{last}", host=launch.absent[0])
        elif launch.uploads:
            first = launch.uploads[0]
            more = f" and {len(launch.uploads) - 1} more" if len(launch.uploads) > 1 else ""
            text = f"waits for an upload of {bytes_text(first.bytes)}{more}, which {hosts_text(first.hosts)} "
            self.add(launch, f"{text}{_has(first.hosts)} not got whole{last}", host=min(first.hosts, default=-1))
            self.made.wanted.update({island: set[int]() for island in launch.islands if island not in self.islands})
            there = [one for view in self.islands.values() for one in view.uploads]
            mine = [one for one in there if (one.upload.session, one.upload.buffer) == (launch.session, first.buffer)]
            self.made.links += map(arriving_link, mine)
        elif launch.unready:
            self._compiling(launch, last)
        elif launch.lacking is not None:
            lack = launch.lacking
            what = f"device {lack.pool}" if "." in lack.pool else "its devices' memory"
            text = f"waits for {bytes_text(lack.needed)} on {what}, which has {bytes_text(lack.size)}: "
            held = f"{bytes_text(lack.own)} hold this session's buffers, {bytes_text(lack.held - lack.own)} those of "
            other = "another session" if self.viewer else f"session {lack.gives_way}"
            way = f"; {other} gives way to it" if lack.gives_way else ""
            self.add(launch, f"{text}{held}others{way}{last}")
        elif launch.parts:
            rounds = f", after {launch.rounds} rounds of its loops" if launch.rounds else ""
            self.add(
                launch,
                f"goes on by what a part of it computes, {len(launch.parts)} of which are under way{rounds}{last}",
            )
            return self.find(0, launch.parts[0])
        elif launch.behind:
            self.add(launch, f"waits behind {launch.before} calls of its session{last}")
            return self.find(launch.session, launch.behind)
        elif launch.flying:
            self.add(launch, f"waits until its session has less than {launch.flying} launches in flight{last}")
            return self._producer(launch)
        else:
            self.add(launch, f"is {launch.state} at the controller{last}")
        return None

    def _compiling(self, launch: LaunchView, last: str) -> None:
        """Its program is not compiled everywhere."""
        if lacking := [island for island in launch.islands if island not in self.islands]:
            self.made.wanted.update({island: set[int]() for island in lacking})
        compiled = [
            one for island in launch.islands if island in self.islands for one in self.islands[island].compiling
        ]
        mine = [one for one in compiled if one.program == launch.key and one.host in launch.unready]
        others = [one for one in compiled if one.host in launch.unready]
        if mine:
            self.add(launch, f"waits for its program: {_compiles(mine[0])}", host=mine[0].host, age_s=mine[0].seconds)
        elif others:
            name = f"program {others[0].name!r}" if not self.viewer else "another program"
            text = f"waits for its program, which host {others[0].host} compiles after {name}{last}"
            self.add(launch, text, host=others[0].host, age_s=launch.age_s)
        else:
            text = f"waits until {hosts_text(launch.unready)} {_has(launch.unready)} its program compiled{last}"
            self.add(launch, text, host=launch.unready[0])

    # --- on its islands -----------------------------------------------------------------------------------------------

    def _in_flight(self, launch: LaunchView) -> LaunchView | None:
        places = [self.at] if self.at in launch.islands else list(launch.islands)
        self.at = -1
        unknown: list[int] = []
        for island in places:
            view = self.islands.get(island)
            if view is None:
                unknown.append(island)
            elif view.absent:
                text = (
                    f"waits: island {island} starts nothing until {hosts_text(view.absent)} {_has(view.absent)} joined"
                )
                self.add(launch, text, island, view.absent[0])
                return None
        if unknown:
            self.made.wanted.update({island: {launch.sequence} for island in unknown})
            self.add(launch, f"is on {_islands(unknown)}")
            return None
        for island in places:
            view = self.islands[island]
            dispatched = next((one for one in view.dispatched if one.sequence == launch.sequence), None)
            place = next((one for one in view.places if one.sequence == launch.sequence), None)
            if place is not None:
                behind = self.find(0, place.behind) if place.behind else None
                text = f"is at place {place.before + 1} in the order of island {island}"
                self.add(launch, f"{text}, behind {named(behind, self.viewer)}" if behind is not None else text, island)
                self.at = island if behind is not None and island in behind.islands else -1
                return behind
            if dispatched is not None:
                return self._with_hosts(launch, view, dispatched)
        queued = [i for i in places if any(q.launches for q in self.islands[i].queues if q.session == launch.session)]
        if queued:
            self.made.wanted.update({island: {launch.sequence} for island in queued})
        self.add(launch, f"is on its way to {_islands(places)}, or its report is on its way back", places[0])
        return None

    def _with_hosts(self, launch: LaunchView, view: IslandView, sent: Dispatched) -> LaunchView | None:
        """It is with the hosts of an island."""
        island = view.island
        running = [one for one in view.running if one.sequence == launch.sequence]
        if running:
            one = max(running, key=lambda one: one.seconds)
            self.add(launch, f"runs on host {one.host}{for_text(one.seconds)}", island, one.host, one.seconds)
            return None
        stops = {one.host: one.launch for one in view.stopped if one.launch.sequence == launch.sequence}
        for host, stop in stops.items():
            if stop.producers:
                producer = self.find(0, stop.producers[0])
                number = f"launch {stop.producers[0]}" if self._is_shown(launch) else "another launch"
                text = f"waits on host {host} for a result of {named(producer, self.viewer) if producer else number}"
                self.add(launch, text + for_text(sent.age_s), island, host, sent.age_s)
                self.at = island
                return producer
        for host, stop in stops.items():
            if stop.senders and not stop.arrived:
                return self._at_barrier(launch, island, host, stop, sent.age_s)
            if stop.calls and not stop.arrived:
                called = f"the host function {stop.calls[0]}" if self._is_shown(launch) else "a host function"
                text = f"waits on host {host} for {called}{for_text(sent.age_s)}"
                self.add(launch, text, island, host, sent.age_s)
                return None
        earlier = [one for one in view.dispatched if one.sequence < launch.sequence and _share(one, sent)]
        if earlier and not stops:
            self.add(
                launch, f"is in the device queues of island {island} behind {named(earlier[0], self.viewer)}", island
            )
            self.at = island
            return self.find(0, earlier[0].sequence)
        if stops and (others := [host for host in sent.hosts if host not in stops]):
            self.add(launch, f"waits on host {min(stops)} for {hosts_text(others)} of its island", island, others[0])
            return None
        text = f"is first on {_devices(sent)}, and {hosts_text(sent.hosts)} {_has(sent.hosts)} not reported its end"
        if sent.age_s >= 0:
            text += f"; it was sent there {sent.age_s:.1f} s ago"
        self.add(launch, text, island, min(sent.hosts, default=-1), sent.age_s)
        return None

    def _at_barrier(self, launch: LaunchView, island: int, host: int, stop: Stopped, age_s: float) -> LaunchView | None:
        text = f"waits on host {host} for data of {hosts_text(stop.senders)}{for_text(age_s)}"
        self.add(launch, text, island, host, age_s)
        for other in launch.islands:
            view = self.islands.get(other)
            if other != island and view is not None and set(view.hosts) & set(stop.senders):
                self.at = other
                return launch
        return None

    def _producer(self, launch: LaunchView) -> LaunchView | None:
        return self.find(0, launch.producers[0]) if launch.producers else None


def _has(hosts: Iterable[int]) -> str:
    return "have" if len(list(hosts)) > 1 else "has"


def _islands(islands: Iterable[int]) -> str:
    found = list(islands)
    return f"island{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def _devices(sent: Dispatched) -> str:
    more = f" and {sent.more_devices} more" if sent.more_devices else ""
    return f"devices {' '.join(sent.devices)}{more}" if sent.devices else "its devices"


def _share(one: Dispatched, other: Dispatched) -> bool:
    return bool(one.more_devices and other.more_devices) or not set(one.devices).isdisjoint(other.devices)


def _compiles(one: Compiling) -> str:
    return f"host {one.host} compiles {one.name!r}{for_text(one.seconds)}"
