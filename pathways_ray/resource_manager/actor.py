"""The resource manager as a Ray actor: calls in, `ManagerCore` decides, answers out.

Arguments and results of its methods are integers, strings and encoded messages. After its own death Ray restarts it:
the controller sees that, and says what it holds (ADR 0037). Nothing else of the runtime notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray.experimental import internal_kv
from ray.util.placement_group import get_placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pathways_ray import limits, names, os_process
from pathways_ray.ir.links import Hardware
from pathways_ray.ir.plan import Device
from pathways_ray.liveness import SILENCE_LIMIT_S
from pathways_ray.machine_load import slowness
from pathways_ray.process_log import ProcessLog
from pathways_ray.resource_manager import events
from pathways_ray.resource_manager.controllers import TICK_S
from pathways_ray.resource_manager.core import ManagerCore
from pathways_ray.resource_manager.islands import KeptIslands
from pathways_ray.resource_manager.slice_requests import SliceRequest
from pathways_ray.resource_manager.status import status
from pathways_ray.transport.inspectable import Inspectable
from pathways_ray.transport.messages import HeldSlices, Holdings, HostInfo, KnownHost, Refused, encode
from pathways_ray.waits import tick_s

KILL_LIMIT_S = 5.0
"""A task that kills a process on another machine has run within this time, or does not run."""
CLIENTS = "clients"
"""The concurrency group of calls that clients cause."""

WAITING = "waiting"
"""That of calls that wait for what other calls bring: of hosts that look for their scheduler, or for each other."""

GROUPS = {CLIENTS: 64, WAITING: 1 << 14}
"""Calls of a concurrency group that are under way at a time. Those of `CLIENTS` wait for nothing. Of the others there
may be several for each host of the cluster: one that looks for its scheduler gives up waiting, and asks again. Were
they in the way of all other calls, a thousand of them would keep out the one that answers them."""

RETRIES = -1
"""Calls that hosts and schedulers make as they start are made again, by Ray, as often as this actor is restarted: their
processes would end, and start again behind it."""

_HOST = msgspec.msgpack.Decoder(HostInfo)
_KNOWN_HOST = msgspec.msgpack.Decoder(KnownHost)
_SLICES = msgspec.msgpack.Decoder(HeldSlices)
_HOLDINGS = msgspec.msgpack.Decoder(Holdings)
_HARDWARE = msgspec.msgpack.Decoder(Hardware)
_KEPT = msgspec.msgpack.Decoder(KeptIslands)


class ResourceManager(Inspectable):
    """One for a cluster.

    Calls that clients cause are in a concurrency group of their own, `CLIENTS`, so that the cluster's own never queue
    behind them. Ray runs each group on an event loop in a thread; a lock has one event handled at a time.
    """

    def __init__(
        self,
        runtime: str,
        islands: dict[int, list[int]],
        data_secret: str,
        link_secret: str,
        silence_limit_s: float = SILENCE_LIMIT_S,
        lost_after_s: float = limits.LOST_AFTER_S,
        settings: bytes = b"",
        specs: dict[int, bytes] | None = None,
    ) -> None:
        self.runtime, self.process, self.settings = runtime, "resource manager", settings
        self.data_secret = data_secret
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        # Hosts from before a restart have lower epochs, also those of whom nobody will say so.
        last_epoch = int(time.time()) if restarted else 0
        controller = names.controller(runtime) if restarted else ""
        kept = self._kept() if restarted else None
        first = kept or KeptIslands.first(islands, specs)
        self.core = ManagerCore(first, data_secret, last_epoch, silence_limit_s, lost_after_s, controller)
        self.core.story.sink = ProcessLog(runtime, self.process).write
        self.incarnation = secrets.token_hex(8)
        self.link_secret = link_secret
        self.tokens = itertools.count()
        self.lock, self.keeping = threading.Lock(), threading.Lock()
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.kills: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.ticking: asyncio.Task[None] | None = None

    async def controller_serves(
        self,
        incarnation: str,
        address: str,
        name: str,
        busy: tuple[tuple[int, int, float], ...],
        process: tuple[int, int],
    ) -> str:
        """Called by the controller once a second. A new one says what hosts there are.

        Args:
            name: that of its actor.
            busy: host and number of each device that computed lately, and for what part of its time.
            process: its pid, and when it began, see `HostInfo`.

        Returns:
            The incarnation of this resource manager: another one after its own restart, when it knows of no slice, and
            waits for `controller_holds`.
        """
        shares = tuple((Device(host, index), share) for host, index, share in busy)
        self._handle(events.ControllerServes(incarnation, address, name, shares, *process))
        return self.incarnation

    async def controller_holds(self, incarnation: str, holdings: bytes) -> None:
        """The controller says what it knows of the cluster, by an encoded `Holdings`."""
        self._handle(events.ControllerHolds(incarnation, _HOLDINGS.decode(holdings)))

    async def controller_starts(self, pid: int, started: int) -> None:
        """Called by the controller as soon as its process runs, which may be long before it serves."""
        self._handle(events.ControllerStarts(pid, started))

    async def publish(self, name: str, address: str) -> None:
        """A process says where it serves."""
        self._handle(events.Published(name, address))

    async def withdraw(self, name: str, address: str) -> None:
        """The process that served at `address` is gone; `lookup` waits for its successor, unless that was quicker."""
        self._handle(events.Withdrawn(name, address))

    @ray.method(concurrency_group=WAITING)
    async def lookup(self, name: str) -> str:
        """The address that `name` has published, once there is one."""
        found: str = await self._answer(lambda token: events.LookedUp(token, name))
        return found

    @ray.method(max_task_retries=RETRIES)
    async def secrets(self) -> tuple[str, str]:
        """The secrets of the cluster: for clients' data tokens, and for links between its processes."""
        return self.data_secret, self.link_secret

    @ray.method(max_task_retries=RETRIES, concurrency_group=WAITING)
    async def join(self, info: bytes) -> bytes:
        """A host is about to start JAX. Answers with an encoded `JoinReply` once all hosts of its island have come."""
        return encode(await self._answer(lambda token: events.JoinRequested(token, _HOST.decode(info))))

    @ray.method(max_task_retries=RETRIES)
    async def describe(self, host: int, epoch: int, hardware: bytes) -> None:
        """A host that has joined says what its devices are, by an encoded `Hardware`."""
        self._handle(events.HostDescribed(host, epoch, _HARDWARE.decode(hardware)))

    async def remove_island(self, island: int) -> None:
        """An island was ended for good."""
        self._handle(events.IslandRemoved(island))

    async def tenant_islands(self) -> list[int]:
        """The islands that tenants have for themselves."""
        with self.lock:
            return sorted({host.island for host in self.core.inventory.hosts.values() if host.tenant})

    async def add_island(self, hosts: int, spec: bytes = b"") -> tuple[int, tuple[int, ...]] | bytes:
        """The numbers of another island and of its hosts, which the caller starts; or an encoded `Refused`."""
        found = await self._answer(lambda token: events.IslandAdded(token, hosts, spec))
        return encode(found) if isinstance(found, Refused) else found

    async def islands(self) -> dict[int, tuple[int, ...]]:
        """The hosts of each island that all share."""
        with self.lock:
            return self.core.shared.kept().members

    async def slices(self, started: int) -> bytes:
        """The slices of all sessions, as an encoded `HeldSlices`, for a controller that follows another one and
        began at `started`, see `HostInfo`."""
        return encode(await self._answer(lambda token: events.ControllerAsks(token, started)))

    async def specs(self) -> dict[int, bytes]:
        """The spec of each island that all share, as who started it encoded it."""
        with self.lock:
            return dict(self.core.shared.specs)

    async def described(self) -> bytes:
        """The settings that the processes of all islands have in common, as who started the runtime encoded them."""
        return self.settings

    @ray.method(concurrency_group=CLIENTS)
    async def drain_island(self, started: int, island: int, deadline_s: float, reason: str) -> bytes:
        """An encoded `Accepted`, or `Refused`. The island gets no slices any more."""
        return encode(await self._of(started, lambda token: events.DrainRequested(token, island, deadline_s, reason)))

    @ray.method(concurrency_group=CLIENTS)
    async def undrain_island(self, started: int, island: int) -> bytes:
        """An encoded `Accepted`, or `Refused`. The island gets slices again."""
        return encode(await self._of(started, lambda token: events.UndrainRequested(token, island)))

    @ray.method(concurrency_group=CLIENTS)
    async def end_island(self, started: int, island: int) -> bytes:
        """An encoded `Accepted`, or `Refused`. The processes of the island are ended."""
        return encode(await self._of(started, lambda token: events.RemoveRequested(token, island)))

    async def serves(self, host: bytes) -> None:
        """A host has come to its scheduler, an encoded `KnownHost`."""
        self._handle(events.HostServes(_KNOWN_HOST.decode(host)))

    async def leave(self, host: int, epoch: int) -> None:
        """A host is gone that was up under `epoch`."""
        self._handle(events.HostLeft(host, epoch))

    async def kill_host(self, host: int, epoch: int) -> None:
        """Kills the process that a host had under `epoch`, stopped or stuck as it may be; Ray restarts it."""
        self._handle(events.KillRequested(host, epoch))

    @ray.method(concurrency_group=CLIENTS)
    async def create_slice(
        self,
        started: int,
        session: int,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        island: int,
        platform: str,
        name: str,
        tenant: str,
        within: int,
        places: tuple[int, ...],
        instead: int,
        topology: tuple[int, ...],
        memory: int,
        generation: str,
        call: int,
        final: bool,
    ) -> bytes:
        """An encoded `SliceCreated`, or `Refused` with what exists.

        Args:
            started: when the controller's process began, as in its other calls.
            tenant: the one that has islands for itself; "" where all share them.
            within: the slice that it is a part of, by its devices number `places`; 0 for one of its own.
            instead: the slice whose place it is to take, elsewhere; 0 for none.
            topology, memory, generation, call: see `SliceRequest`.
        """
        wanted = (topology, memory, generation, call)
        request = SliceRequest(shape, axes, island, platform, name, tenant, within, places, instead, *wanted)
        return encode(await self._of(started, lambda token: events.SliceRequested(token, session, request, final)))

    @ray.method(concurrency_group=CLIENTS)
    async def release_slice(self, started: int, session: int, slice_id: int) -> bool:
        """Whether the session had the slice, which is free now."""
        released: bool = await self._of(started, lambda token: events.SliceReleased(token, session, slice_id))
        return released

    @ray.method(concurrency_group=CLIENTS)
    async def exchange_slices(self, started: int, session: int, pairs: tuple[tuple[int, int], ...], call: int) -> bool:
        """Whether slices of the session have changed devices in pairs, by this call or one before with its number."""
        exchanged: bool = await self._of(started, lambda token: events.SlicesExchanged(token, session, pairs, call))
        return exchanged

    @ray.method(concurrency_group=CLIENTS)
    async def hold_slices(self, started: int, session: int, found: bytes) -> bool:
        """A session has come back to another controller with the slices of an encoded `HeldSlices`, and of those up to
        its `last_slice` with no others."""
        held: bool = await self._of(started, lambda token: events.SlicesHeld(token, session, _SLICES.decode(found)))
        return held

    @ray.method(concurrency_group=CLIENTS)
    async def release_session(self, started: int, session: int) -> int:
        """The number of slices that the session had, which are free now."""
        released: int = await self._of(started, lambda token: events.SessionReleased(token, session))
        return released

    @ray.method(concurrency_group=CLIENTS)
    async def platforms(self) -> tuple[str, ...]:
        """The platforms of all hosts that have joined."""
        await self._answer(events.Inquired)
        with self.lock:
            return tuple(sorted({host.platform for host in self.core.inventory.hosts.values()}))

    @ray.method(concurrency_group=CLIENTS)
    async def status(self) -> str:
        """JSON: islands with their states, hosts and devices, and the slices on each device."""
        await self._answer(events.Inquired)
        with self.lock:
            found = status(self.core.inventory, self.core.shared.numbers)
        return json.dumps(found)

    # --- driver -------------------------------------------------------------------------------------------------------

    async def _answer(self, event: Callable[[int], events.Event]) -> Any:
        """Takes an event to the core, under a token of its own, and waits for the answer."""
        token = next(self.tokens)
        self.calls[token] = answer = asyncio.get_running_loop().create_future()
        self._handle(event(token))
        return await answer

    async def _of(self, started: int, question: Callable[[int], events.ControllerQuestion]) -> Any:
        """The answer to the controller that began at `started`; None where another one has taken its place."""
        return await self._answer(lambda token: events.FromController(started, question(token)))

    def _kill(self, command: events.KillProcess) -> None:
        """Kills a process of this machine; or of another one, by a task there, unless one is under way: the scheduler
        asks every second."""
        node, pid, started = command.node, command.pid, command.started
        if node == ray.get_runtime_context().get_node_id():
            os_process.kill(pid, started, f"host {command.host}: {command.reason}")
        elif (node, pid) not in self.kills:
            task = self.kills[node, pid] = asyncio.ensure_future(self._kill_there(command))
            task.add_done_callback(lambda _: self.kills.pop((node, pid), None))

    async def _kill_there(self, command: events.KillProcess) -> None:
        """Kills by a task on the machine; where it runs none, Ray ends the actor, as far as it can."""
        there = NodeAffinitySchedulingStrategy(command.node, soft=False)
        kill = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(os_process.kill)
        try:
            await asyncio.wait_for(kill.remote(command.pid, command.started), KILL_LIMIT_S)
        except (TimeoutError, ray.exceptions.RayError):
            self._kill_actor(command.host)

    def _kill_actor(self, host: int) -> None:
        with contextlib.suppress(ValueError):  # it ends just now
            ray.kill(ray.get_actor(names.host(self.runtime, host), names.NAMESPACE), no_restart=False)

    def _end_island(self, command: events.EndIsland) -> None:
        """Ends the actors of an island, hosts first, and frees its placement group. In a thread: Ray is asked."""
        actors = [
            *(names.host(self.runtime, host) for host in command.hosts),
            names.scheduler(self.runtime, command.island),
        ]
        for name in actors:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it ends just now
                ray.kill(ray.get_actor(name, names.NAMESPACE), no_restart=True)
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            remove_placement_group(get_placement_group(names.group(self.runtime, command.island)))

    def _keep(self) -> None:
        """Has Ray keep the list of islands, as it is now, for the successor of this process, which may be on another
        machine, whose own clock is another one."""
        with self.keeping:  # two threads may have changed it, of which one has an older list to be kept
            with self.lock:
                kept = self.core.shared.kept()
            found = msgspec.msgpack.encode(kept.by_clock(time.time() - time.monotonic()))
            internal_kv._internal_kv_put(self._key, found, namespace=names.NAMESPACE.encode())

    def _kept(self) -> KeptIslands | None:
        found = internal_kv._internal_kv_get(self._key, namespace=names.NAMESPACE.encode())
        return _KEPT.decode(found).by_clock(time.monotonic() - time.time()) if found else None

    @property
    def _key(self) -> bytes:
        """Of this runtime alone: a later one may have its name."""
        digest = hashlib.sha256(self.data_secret.encode()).hexdigest()[:16]
        return f"{names.resource_manager(self.runtime)} {digest}".encode()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(tick_s(TICK_S))
            try:
                self._handle(events.Ticked(slowness()))
            except Exception:  # Ray is asked, which may be away; the next look asks again
                traceback.print_exc()

    def _handle(self, event: events.Event) -> None:
        """Takes an event to the core, and carries out its commands."""
        with self.lock:
            if self.ticking is None:  # Ray runs the constructor outside of the event loop
                self.ticking = asyncio.ensure_future(self._tick())
            commands = self.core.handle(event, time.monotonic())
        for command in commands:
            match command:
                case events.Answer(token, value):
                    answer = self.calls.pop(token)  # perhaps of another thread's loop
                    answer.get_loop().call_soon_threadsafe(_settle, answer, value)
                case events.KillProcess():
                    self._kill(command)
                case events.KillHost(host):
                    self._kill_actor(host)
                case events.EndIsland():
                    threading.Thread(target=self._end_island, args=(command,), daemon=True).start()
                case events.Keep():
                    self._keep()
                case events.KillController(pid=pid, started=started, reason=why) if pid:
                    os_process.kill(pid, started, f"the controller: {why}")  # it is on this node
                case events.KillController(actor):
                    with contextlib.suppress(ValueError):  # it ends just now
                        ray.kill(ray.get_actor(actor, names.NAMESPACE), no_restart=False)


def _settle(answer: asyncio.Future[Any], value: Any) -> None:
    if not answer.cancelled():
        answer.set_result(value)
