"""The data links of a simulated client to hosts: its uploads and fetches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol

import msgspec

from pathways_ray.client.buffer import INLINE, BufferRecord, Upload
from pathways_ray.client.events import Uploaded
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.script import has_control
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.simulation.environment import Environment
from pathways_ray.simulation.host import SimulatedHost
from pathways_ray.simulation.network import Process
from pathways_ray.simulation.programs import ARRAY, Drawn
from pathways_ray.simulation.values import Outcome, bytes_of
from pathways_ray.transport.messages import HostAddress, InlineArgument, LaunchEarly, Put, ServeCall

AMISS = ("absent", "misfit", "other")
"""An upload that a host does not get, gets as an array of another type, or with other bytes than the others."""


@dataclass(eq=False)
class Handle:
    """A handle of the user: the array it stands for, where that lies, and what it should be.

    It is `doubtful` when its launch fails, but not the calls that it comes from: a launch that takes it fails with it,
    or was over before. It is `revived` once a launch that it was donated to has failed without taking it.
    """

    record: BufferRecord
    layout: Layout
    expected: Outcome
    doubtful: bool = False
    fetches: int = 0
    revived: bool = False

    @property
    def number(self) -> int:
        return self.record.id


def carried(arguments: Sequence[Handle]) -> tuple[InlineArgument, ...]:
    """Those of a launch's arguments that go with it."""
    return tuple(
        (place, bytes_of(handle.expected, ARRAY.nbytes))
        for place, handle in enumerate(arguments)
        if handle.record is INLINE and isinstance(handle.expected, int)
    )


def may_carry(program: Drawn, place: int) -> bool:
    """Whether launches of a program carry an argument."""
    return place not in program.donated and not has_control(program.graph)


def early_delays(random: Random) -> tuple[float, float]:
    """Seconds until a call that is handed to its host leaves for there, and for which what is sent of it lingers."""
    return random.choice([0.0, 0.0, 0.0, 0.05, 0.5]), random.choice([0.0, 0.1, 0.3])


@dataclass(eq=False)
class Fetch:
    """A fetch: the hosts that have yet to answer. What one of them has `refused` it with is what its user sees, unless
    the outcome of the launch that makes the array names the cause."""

    handle: Handle
    waiting: set[int]
    refused: Failure | None = None
    shards: dict[tuple[int, int], int] = field(default_factory=dict)


class DataEnvironment(Environment, Protocol):
    """The environment of data links."""

    hosts: dict[int, SimulatedHost]


class ClientData:
    """The uploads and fetches of one session. `uploaded` receives the outcome of an upload to each host."""

    def __init__(
        self, world: DataEnvironment, process: Process, session: int, uploaded: Callable[[Uploaded], None]
    ) -> None:
        self.world, self.process, self.session = world, process, session
        self.uploading: list[BufferRecord] = []
        self.fetches: list[Fetch] = []
        self.addresses: dict[int, tuple[int, str]] = {}
        self.came: Callable[[BufferRecord], None] = lambda record: None
        """Hears of the value of a call that was handed to its host."""
        self._uploaded = uploaded

    # --- links --------------------------------------------------------------------------------------------------------

    def host_moved(self, address: HostAddress) -> None:
        epoch, _ = self.addresses.get(address.host, (0, ""))
        self.addresses[address.host] = (address.epoch, address.address)
        if not address.address or epoch != address.epoch:
            self.link_broke(address.host)

    def link_broke(self, host: int) -> None:
        """The data stream to a host is gone: uploads and fetches that are under way there fail."""
        for record in self.uploading:
            if record.upload is not None and host in record.upload.missing:
                self._upload_ended(record, host, failed=True)
        for fetch in [fetch for fetch in self.fetches if host in fetch.waiting]:
            self._end_fetch(fetch)

    def _process_of(self, host: int) -> Process | None:
        """The process that serves a host's data, None while it is down."""
        epoch, address = self.addresses.get(host, (0, ""))
        serving = self.world.hosts.get(host)
        if not address or serving is None or serving.epoch != epoch:
            return None
        return serving.process if serving.process.alive or serving.process.vanished else None

    # --- uploads ------------------------------------------------------------------------------------------------------

    def epochs(self, placed: PlacedSlice) -> dict[int, int]:
        """The incarnations that an upload goes to."""
        return {host: self.addresses[host][0] for host in placed.hosts if host in self.addresses}

    def upload(self, record: BufferRecord, message: Put, value: int, placed: PlacedSlice) -> None:
        record.upload = Upload(set(placed.hosts), self.epochs(placed))
        self.uploading = [r for r in self.uploading if r.upload is not None and not r.upload.done] + [record]
        post = self.world.network.post
        for host in placed.hosts:
            process = self._process_of(host)
            if process is None:
                self._upload_ended(record, host, failed=True)
                break
            answer = partial(post, process, self.process, self._upload_ended, record, host)
            post(self.process, process, self.world.hosts[host].put, self.session, message, value, placed, answer)

    def upload_amiss(self, message: Put, value: int, placed: PlacedSlice, how: str) -> None:
        """Uploads an array that is not as it was said to be on the last host of a slice, in one of the ways of
        `AMISS`."""
        misfit = msgspec.structs.replace(message, type=ArrayType((3,), "float32"))
        for host in placed.hosts[:-1]:
            self.upload_to(host, message, value, placed)
        if how == "misfit" or (how == "other" and len(placed.hosts) == 1):
            self.upload_to(placed.hosts[-1], misfit, value, placed)
        elif how == "other":
            self.upload_to(placed.hosts[-1], message, value + 1, placed)

    def upload_to(self, host: int, message: Put, value: int, placed: PlacedSlice) -> None:
        """Brings an array to one host, and does not ask what becomes of it."""
        process = self._process_of(host)
        if process is not None:
            put = self.world.hosts[host].put
            self.world.network.post(self.process, process, put, self.session, message, value, placed, lambda: None)

    def _upload_ended(self, record: BufferRecord, host: int, failed: bool = False) -> None:
        assert record.upload is not None
        failure = Failure("HostLost", "an upload failed", host=host) if failed else None
        self._uploaded(Uploaded(record, record.upload, host, failure))

    # --- early launches -----------------------------------------------------------------------------------------------

    def launch_early(self, tenant: str, host: int, message: LaunchEarly) -> None:
        """Hands a call to a host, if that is up."""
        process = self._process_of(host)
        if process is not None:
            act = self.world.hosts[host].launch_early
            self.world.network.post(self.process, process, act, self.session, tenant, message)

    def ask_host(
        self, tenant: str, host: int, message: ServeCall, answered: Callable[[list[dict[int, int]] | None], None]
    ) -> None:
        """Asks a host for the values of a call, if that is up."""
        process, post = self._process_of(host), self.world.network.post
        if process is not None:
            answer = partial(post, process, self.process, answered)
            post(self.process, process, self.world.hosts[host].serve_call, self.session, tenant, message, answer)

    # --- fetches ------------------------------------------------------------------------------------------------------

    def fetch(self, handle: Handle, placed: PlacedSlice) -> None:
        """Fetches a buffer, if all of its hosts are up."""
        processes = {host: self._process_of(host) for host in placed.hosts}
        if None in processes.values():
            return
        handle.fetches += 1
        fetch = Fetch(handle, set(placed.hosts))
        self.fetches.append(fetch)
        post = self.world.network.post
        for host, process in processes.items():
            assert process is not None
            answer = partial(post, process, self.process, self._fetched, fetch, host)
            post(self.process, process, self.world.hosts[host].fetch, self.session, handle.number, answer)

    def _fetched(self, fetch: Fetch, host: int, found: dict[int, int] | Failure) -> None:
        if fetch not in self.fetches:
            return
        handle = fetch.handle
        if isinstance(found, Failure):
            fetch.refused = found
            self.end_failed_fetches()
            return
        fetch.waiting.discard(host)
        fetch.shards.update({(host, device): value for device, value in found.items()})
        if not fetch.waiting:
            self.world.checker.fetched(self.session, f"buffer {handle.number}", handle.expected, fetch.shards)
            self.came(handle.record)
            self._end_fetch(fetch)

    def end_failed_fetches(self) -> None:
        """Ends the fetches of buffers that the client knows to have failed, and those that hosts have refused, but for
        those whose launch says why."""
        for fetch in list(self.fetches):
            record, refused = fetch.handle.record, fetch.refused
            if record.failure is not None:
                self._end_fetch(fetch)
            elif refused is not None and not record.names_cause_of(refused):
                self.world.checker.fetch_failed(self.session, record.id, refused, fetch.handle.revived)
                self._end_fetch(fetch)

    def _end_fetch(self, fetch: Fetch) -> None:
        self.fetches.remove(fetch)
        fetch.handle.fetches -= 1
