"""The scheduler of one island as a Ray actor: links in, `SchedulerCore` decides, links out."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import threading
import time
import traceback
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from typing import Any

import ray

from pathways_ray import limits, names
from pathways_ray.liveness import SILENCE_LIMIT_S
from pathways_ray.machine_load import slowness
from pathways_ray.observe.timeline import newest
from pathways_ray.process_log import ProcessLog
from pathways_ray.scheduler import events
from pathways_ray.scheduler.controller_absence import REJOIN_PAUSE_S
from pathways_ray.scheduler.core import TICK_S, SchedulerCore
from pathways_ray.scheduler.plugins import policy_named
from pathways_ray.transport import links, loops, outboxes, streams
from pathways_ray.transport.capabilities import authorised
from pathways_ray.transport.endpoints import ListenConfig
from pathways_ray.transport.frames import LinkLost
from pathways_ray.transport.inspectable import Inspectable
from pathways_ray.transport.messages import FROM_HOST, TO_ISLAND, FromHost, HostUp
from pathways_ray.transport.tls import trust_of
from pathways_ray.waits import tick_s

LOOK_PAUSE_S = 0.2
"""A scheduler that has lost its controller asks for the successor's address again after this pause."""

LOOK_LIMIT_S = 0.5
"""It asks again where no answer has come within this time: a question that the resource manager's death catches on its
way fails only a second after that, when its successor has long been there."""

FAREWELL_S = 0.2
"""The last messages to hosts leave within this time."""


class IslandScheduler(Inspectable):
    """One for an island. Everything runs on an event loop in a thread of its own.

    Ray restarts it when its process dies; the controller has failed the launches it had on the island by then. It
    outlives the controller itself, with all that its hosts hold.
    """

    def __init__(
        self,
        runtime: str,
        island: int,
        hosts: list[int],
        listen: ListenConfig,
        policy: str = "fifo",
        limit_s: float = math.inf,
        compile_limit_s: float = limits.COMPILE_LIMIT_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self.runtime, self.process = runtime, f"scheduler {island}"
        self.silence_limit_s = silence_limit_s
        self.listen = listen
        self.core = SchedulerCore(
            island,
            hosts,
            limits.ISLAND_WINDOW,
            policy_named(policy),
            limit_s,
            compile_limit_s,
            silence_limit_s,
        )
        self.core.story.sink = ProcessLog(runtime, self.process).write
        self._unwrap("_carry_out")
        self._unwrap("_take")
        self.depth = self.core.order.outstanding.__len__
        self.hosts = outboxes.FanOut(self.depth)
        self.branches: dict[int, outboxes.Branch] = {}
        self.links: dict[tuple[int, int], links.AsyncLink] = {}
        self.controller: outboxes.AsyncOutbox | None = None
        """To the controller. Without one, what is said is lost, and said again to the next one."""
        self.address: Future[str] = Future()
        # A thread of its own, since Ray calls nothing but the constructor after a restart.
        threading.Thread(target=self._serve, name="serve", daemon=True).start()

    def start(self) -> str:
        """The address it serves its hosts on; answers once it has joined the controller."""
        return self.address.result()

    def traced(self, since: float, most: int) -> list[Any]:
        """Launches that were over since then, the last ones: number, when hosts got them, when they were over."""
        return newest(self.core.order.over.records(), since, 2, most)

    def _serve(self) -> None:
        """Serves until there is no controller for too long, or something is wrong.

        Then the process ends, since everybody would wait for a scheduler that hears nothing. Ray restarts it.
        """
        try:
            asyncio.run(self._main())
        except BaseException:
            traceback.print_exc()
        time.sleep(REJOIN_PAUSE_S)
        os._exit(1)

    async def _main(self) -> None:
        loops.stop_on_errors(asyncio.get_running_loop())
        self.resource_manager = ray.get_actor(names.resource_manager(self.runtime), names.NAMESPACE)
        _, self.link_secret = await self.resource_manager.secrets.remote()
        self.server, address = await links.serve(
            {streams.HOST_STREAM: self._host_link},
            streams.bind_address(self.listen.links),
            tls=self.listen.tls,
            silence=links.silence_of(self.silence_limit_s),
        )
        # Neither ends before the other: without any of them this process is of no use.
        await _first_of(self._follow_controllers(address), self._tick())
        await asyncio.sleep(FAREWELL_S)

    async def _follow_controllers(self, address: str) -> None:
        """Joins one controller after the other. The hosts' links stay meanwhile.

        Args:
            address: where it serves its hosts.
        """
        while True:
            try:
                answer = self.resource_manager.lookup.remote("controller")
                controller = await asyncio.wait_for(answer, LOOK_LIMIT_S)
                link = await links.dial(
                    controller,
                    streams.ISLAND_STREAM,
                    {"authorization": self.link_secret},
                    trust_of(self.listen.tls),
                    links.silence_of(self.silence_limit_s),
                )
            except TimeoutError:
                continue
            except (ray.exceptions.RayError, LinkLost) as error:
                print(f"{self.process}: no controller yet: {error}", flush=True)
                await asyncio.sleep(LOOK_PAUSE_S)
                continue
            self.controller = outbox = outboxes.AsyncOutbox(self.depth)
            try:
                self._handle(events.ControllerConnected(address))
                if not self.address.done():
                    self.address.set_result(address)
                await _first_of(self._read(link), outbox.carry(link))
            except LinkLost as error:
                print(f"{self.process}: the link to the controller ended: {error}", flush=True)
            finally:
                self.controller = None
                link.close()
                self._handle(events.ControllerDisconnected(controller))
            await asyncio.sleep(LOOK_PAUSE_S)

    async def _read(self, link: links.AsyncLink) -> None:
        """Hears the controller until its link ends."""

        def take(data: bytes) -> None:
            self._carry_out(self.core.controller_batch(TO_ISLAND.decode_batch(data), time.monotonic()))

        with loops.vital():
            await link.each(take)

    async def _host_link(self, link: links.AsyncLink) -> None:
        if not authorised(link.metadata, self.link_secret):
            link.refuse("wrong link secret")
        data = await link.read()
        batch = FROM_HOST.decode_batch(data) if data else []
        hello = batch.pop(0) if batch else None
        if not isinstance(hello, HostUp):
            return
        host, epoch = hello.host, hello.epoch
        commands = self._handle(events.HostConnected(hello))
        for command in commands:
            if isinstance(command, events.Refuse):
                link.refuse(command.reason)
        self.links[host, epoch] = link
        pump = asyncio.ensure_future(self.branches[host].carry(link))

        take = functools.partial(self._take, host, epoch)
        try:
            with loops.vital():
                take(batch)
                await link.each(lambda data: take(FROM_HOST.decode_batch(data)))
        finally:
            pump.cancel()
            del self.links[host, epoch]
            self._handle(events.HostDisconnected(host, epoch))

    def _take(self, host: int, epoch: int, batch: list[FromHost]) -> None:
        """Takes a batch of a host to the core, or passes it on."""
        now = time.monotonic()
        if len(batch) < 2 or not self.core.passes_on(host, epoch, batch, now):
            self._carry_out(self.core.host_batch(host, epoch, batch, now))
        elif self.controller is not None:
            self.controller.send_all(batch)

    async def _tick(self) -> None:
        commands: list[events.Command] = []
        while not any(isinstance(command, events.Exit) for command in commands):
            await asyncio.sleep(tick_s(TICK_S))
            commands = self._handle(events.Ticked(slowness()))

    def _handle(self, event: events.Event) -> list[events.Command]:
        """Takes an event to the core, and carries out its commands."""
        commands = self.core.handle(event, time.monotonic())
        self._carry_out(commands)
        return commands

    def _carry_out(self, commands: Iterable[events.Command]) -> None:
        """Carries out the commands for an event, or a batch."""
        for command in commands:
            if type(command) is events.ToHosts:
                self.hosts.send(command.message)
            elif type(command) is not events.ToController:
                self._carry_out_rare(command)
            elif self.controller is not None:
                self.controller.send(command.message)

    def _carry_out_rare(self, command: events.Command) -> None:
        """Carries out a command that is no message; refused links are closed by their readers."""
        match command:
            case events.Accept(host):
                self.branches[host] = self.hosts.open(host)
            case events.ForgetHosts():
                self.hosts.clear()
            case events.Kill(host, epoch):
                self.resource_manager.kill_host.remote(host, epoch)
                if (link := self.links.get((host, epoch))) is not None:
                    link.close("this host is taken for lost")
            case events.Withdraw(name, address):
                self.resource_manager.withdraw.remote(name, address)
            case events.Exit(reason):  # the ticks end
                print(f"{self.process} ends: {reason}", flush=True)
            # `Refuse` is carried out by the reader of the link, which ends.


async def _first_of(*works: Coroutine[Any, Any, None]) -> None:
    """Runs several until one of them ends, and raises what it raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        for ended in (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]:
            ended.result()
    finally:
        for task in tasks:
            task.cancel()
