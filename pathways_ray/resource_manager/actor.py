"""The resource manager as a Ray actor: calls in, `ManagerCore` decides, answers out.

Arguments and results of its methods are integers, strings and encoded messages. After its own death Ray restarts it,
empty: the controller sees that and restarts as well, and all others after it (ADR 0014).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pathways_ray import names
from pathways_ray.liveness import SILENCE_LIMIT_S
from pathways_ray.machine_load import slowness
from pathways_ray.process_log import ProcessLog
from pathways_ray.resource_manager import events
from pathways_ray.resource_manager.allocation import SliceRequest
from pathways_ray.resource_manager.core import TICK_S, ManagerCore
from pathways_ray.resource_manager.status import status
from pathways_ray.transport.messages import HostInfo, encode

CLIENTS = "clients"
"""The concurrency group of calls that clients cause."""

GROUPS = {CLIENTS: 64}
"""Calls of a concurrency group that are under way at a time; none of them waits for anything."""

_HOST = msgspec.msgpack.Decoder(HostInfo)


class ResourceManager:
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
    ) -> None:
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        # Hosts from before a restart have lower epochs.
        last_epoch = int(time.time()) if restarted else 0
        self.core = ManagerCore(islands, data_secret, last_epoch, silence_limit_s)
        self.core.story.sink = ProcessLog(runtime, "resource manager").write
        self.incarnation = secrets.token_hex(8)
        self.data_secret = data_secret
        self.link_secret = link_secret
        self.tokens = itertools.count()
        self.lock = threading.Lock()
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.clock: asyncio.Task[None] | None = None

    async def controller_serves(self, incarnation: str, address: str, name: str) -> str:
        """Called by the controller once a second. A new one knows of no session: slices are free, hosts have to join.

        Args:
            name: that of its actor.

        Returns:
            The incarnation of this resource manager: another one after its own restart, when it knows of no slice.
        """
        self._handle(events.ControllerServes(incarnation, address, name))
        return self.incarnation

    async def publish(self, name: str, address: str) -> None:
        """A process says where it serves."""
        self._handle(events.Published(name, address))

    async def withdraw(self, name: str, address: str) -> None:
        """The process that served at `address` is gone; `lookup` waits for its successor, unless that was quicker."""
        self._handle(events.Withdrawn(name, address))

    async def lookup(self, name: str) -> str:
        """The address that `name` has published, once there is one."""
        found: str = await self._answer(lambda token: events.LookedUp(token, name))
        return found

    async def secrets(self) -> tuple[str, str]:
        """The secrets of the cluster: for clients' data tokens, and for links between its processes."""
        return self.data_secret, self.link_secret

    async def join(self, info: bytes) -> bytes:
        """A host is about to start JAX. Answers with an encoded `JoinReply` once all hosts of its island have come."""
        return encode(await self._answer(lambda token: events.JoinRequested(token, _HOST.decode(info))))

    async def remove_island(self, island: int) -> None:
        """An island was ended for good."""
        self._handle(events.IslandRemoved(island))

    async def leave(self, host: int, epoch: int) -> None:
        """A host is gone that was up under `epoch`."""
        self._handle(events.HostLeft(host, epoch))

    async def kill_host(self, host: int, epoch: int) -> None:
        """Kills the process that a host had under `epoch`, stopped or stuck as it may be; Ray restarts it."""
        self._handle(events.KillRequested(host, epoch))

    @ray.method(concurrency_group=CLIENTS)
    async def create_slice(
        self,
        session: int,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        island: int,
        platform: str,
        name: str,
        tenant: str,
        final: bool,
    ) -> bytes:
        """An encoded `SliceCreated`, or `Refused` with what exists.

        Args:
            tenant: the one that has islands for itself; "" where all share them.
        """
        request = SliceRequest(shape, axes, island, platform, name, tenant)
        return encode(await self._answer(lambda token: events.SliceRequested(token, session, request, final)))

    @ray.method(concurrency_group=CLIENTS)
    async def release_slice(self, session: int, slice_id: int) -> bool:
        """Whether the session had the slice, which is free now."""
        released: bool = await self._answer(lambda token: events.SliceReleased(token, session, slice_id))
        return released

    @ray.method(concurrency_group=CLIENTS)
    async def release_session(self, session: int) -> int:
        """The number of slices that the session had, which are free now."""
        released: int = await self._answer(lambda token: events.SessionReleased(token, session))
        return released

    @ray.method(concurrency_group=CLIENTS)
    async def platforms(self) -> tuple[str, ...]:
        """The platforms of all hosts that have joined."""
        with self.lock:
            return tuple(sorted({host.platform for host in self.core.inventory.hosts.values()}))

    @ray.method(concurrency_group=CLIENTS)
    async def status(self) -> str:
        """JSON: islands with their hosts and devices, and the slices on each device."""
        with self.lock:
            found = status(self.core.inventory)
        return json.dumps(found)

    # --- driver -------------------------------------------------------------------------------------------------------

    async def _answer(self, event: Callable[[int], events.Event]) -> Any:
        """Takes an event to the core, under a token of its own, and waits for the answer."""
        token = next(self.tokens)
        self.calls[token] = answer = asyncio.get_running_loop().create_future()
        self._handle(event(token))
        return await answer

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(events.Ticked(slowness()))

    def _handle(self, event: events.Event) -> None:
        """Takes an event to the core, and carries out its commands."""
        with self.lock:
            if self.clock is None:  # Ray runs the constructor outside of the event loop
                self.clock = asyncio.ensure_future(self._tick())
            commands = self.core.handle(event, time.monotonic())
        for command in commands:
            match command:
                case events.Answer(token, value):
                    answer = self.calls.pop(token)  # perhaps of another thread's loop
                    answer.get_loop().call_soon_threadsafe(_settle, answer, value)
                case events.KillProcess(node, pid):
                    _kill_on(node, pid)
                case events.KillController(actor):
                    with contextlib.suppress(ValueError):  # it ends just now
                        ray.kill(ray.get_actor(actor, names.NAMESPACE), no_restart=False)


def _settle(answer: asyncio.Future[Any], value: Any) -> None:
    if not answer.cancelled():
        answer.set_result(value)


def _kill_on(node: str, pid: int) -> None:
    """Kills a process of this machine, or of another one, by a task there."""
    if node == ray.get_runtime_context().get_node_id():
        _kill(pid)
    else:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        ray.remote(num_cpus=0, scheduling_strategy=there)(_kill).remote(pid)


def _kill(pid: int) -> None:
    """Kills a process of this machine; one that is gone already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
