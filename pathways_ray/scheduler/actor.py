"""The scheduler of one island as a Ray actor: streams in, `IslandOrder` decides, streams out."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time
import traceback
from concurrent.futures import Future
from typing import Any

import ray

from pathways_ray import limits, names
from pathways_ray.scheduler.order import IslandOrder
from pathways_ray.scheduler.plugins import policy_named
from pathways_ray.scheduler.state import Command, Kill, Refuse, ToController, ToHosts
from pathways_ray.transport import links, outboxes, streams
from pathways_ray.transport.endpoints import ListenConfig
from pathways_ray.transport.messages import (
    FROM_HOST,
    TO_ISLAND,
    Heartbeat,
    HostUp,
    IslandUp,
)
from pathways_ray.transport.tls import trust_of

REJOIN_PAUSE_S = 1.0
"""A scheduler without its controller ends after this pause, so that a dead controller is not hammered."""

SILENCE_LIMIT_S = 8.0
"""A host that says nothing for this long is taken for dead; hosts send a heartbeat every second."""

TICK_S = 0.1
"""Policies see the time in steps of this."""


class IslandScheduler:
    """One for an island. Everything runs on an event loop in a thread of its own.

    Ray starts it anew when its process dies. The hosts have ended with their stream by then and join again; the
    controller has failed the launches it had on the island.
    """

    def __init__(
        self,
        runtime: str,
        island: int,
        hosts: list[int],
        listen: ListenConfig,
        policy: str = "fifo",
        limit_s: float = math.inf,
    ) -> None:
        self.runtime = runtime
        self.island = island
        self.listen = listen
        self.order = IslandOrder(island, frozenset(hosts), limits.ISLAND_WINDOW, policy_named(policy), limit_s)
        self.hosts = outboxes.FanOut(self.order.outstanding.__len__)
        self.heard: dict[int, float] = {}
        self.controller = outboxes.AsyncOutbox(self.order.outstanding.__len__)
        self.tasks: set[asyncio.Task[None]] = set()
        self.address: Future[str] = Future()
        # A thread of its own, since Ray calls nothing but the constructor after a restart.
        threading.Thread(target=self._serve, name="serve", daemon=True).start()

    def start(self) -> str:
        """The address it serves its hosts on; answers once it has joined the controller."""
        return self.address.result()

    def statistics(self) -> dict[str, int]:
        return {"queued": sum(self.order.load().queued.values()), "outstanding": len(self.order.outstanding)}

    def _serve(self) -> None:
        """Serves until the controller's stream ends or something is wrong.

        Then the process ends: a scheduler that hears nothing is a hang for everybody. Ray starts it anew.
        """
        try:
            asyncio.run(self._main())
        except BaseException:
            traceback.print_exc()
        time.sleep(REJOIN_PAUSE_S)
        os._exit(1)

    async def _main(self) -> None:
        self.address.set_result(await self._start())
        while (data := await self.stream.read()) is not None:
            for message in TO_ISLAND.decode_batch(data):
                self._do(self.order.from_controller(message))
        # Otherwise the successor might find the old controller; one that lives says every second where it is.
        await self.resource_manager.withdraw.remote("controller", self.controller_address)

    async def _start(self) -> str:
        self.resource_manager = ray.get_actor(names.resource_manager(self.runtime), names.NAMESPACE)
        _, self.link_secret = await self.resource_manager.secrets.remote()
        self.server, address = await links.serve(
            {streams.HOST_STREAM: self._host_stream},
            streams.bind_address(self.listen.links),
            tls=self.listen.tls,
        )
        self.controller_address = await self.resource_manager.lookup.remote("controller")
        self.stream = await links.dial(
            self.controller_address,
            streams.ISLAND_STREAM,
            {"authorization": self.link_secret},
            trust_of(self.listen.tls),
        )
        self.controller.send(IslandUp(self.island, address))
        self._spawn(self.controller.carry(self.stream))
        self._spawn(self._watch())
        await self.resource_manager.publish.remote(f"scheduler-{self.island}", address)
        return address

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _host_stream(self, context: links.AsyncLink) -> None:
        if not streams.authorised(context.metadata, self.link_secret):
            context.refuse("wrong link secret")
        data = await context.read()
        hello = FROM_HOST.decode_batch(data)[0] if data else None
        if not isinstance(hello, HostUp):
            return
        commands = self.order.host_up(hello)
        if any(isinstance(command, Refuse) for command in commands):
            self._do(commands)
            context.refuse(f"epoch {hello.epoch} of host {hello.host} is over")
        branch = self.hosts.open(hello.host)
        self.heard[hello.host] = time.monotonic()
        self._do(commands)
        pump = asyncio.ensure_future(branch.carry(context))
        try:
            while (data := await context.read()) is not None:
                self.heard[hello.host] = time.monotonic()
                for message in FROM_HOST.decode_batch(data):
                    if not isinstance(message, Heartbeat | HostUp):
                        self._do(self.order.from_host(hello.host, hello.epoch, message))
        finally:
            pump.cancel()
            self._lost(hello.host, hello.epoch, "its process ended")

    def _lost(self, host: int, epoch: int, reason: str, silent: bool = False) -> None:
        commands = self.order.host_lost(host, epoch, reason, silent)
        if commands:
            self.hosts.clear()
            self._do(commands)

    async def _watch(self) -> None:
        """Declares silent hosts dead and has their processes killed, so that they come back under a new epoch."""
        for ticks in itertools.count(1):
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._do(self.order.tick(now))
            if ticks % round(1.0 / TICK_S) == 0:
                self.controller.send(self.order.load())
            # At every tick: a second later would be much of what is left of the ten in which launches have to end.
            if now - before > SILENCE_LIMIT_S / 2:
                # This process did not run either: it cannot judge others.
                self.heard = dict.fromkeys(self.heard, now)
            for host, heard in self.heard.items():
                epoch = self.order.epochs.get(host, 0)
                if epoch > 0 and now - heard > SILENCE_LIMIT_S:
                    self._lost(host, epoch, f"it did not answer for {SILENCE_LIMIT_S:.0f} s", silent=True)

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case ToHosts(message):
                    self.hosts.send(message)
                case ToController(message):
                    self.controller.send(message)
                case Kill(host, epoch):
                    self.resource_manager.kill_host.remote(host, epoch)
                case Refuse():
                    pass
