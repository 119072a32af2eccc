"""The controller as a Ray actor: the root of all island streams; clients come in by its `ClientService`.

`Launches` decides; this file reads the islands' streams. When its process or the resource manager's dies, Ray starts it
anew, without sessions; schedulers and hosts join again (ADR 0014).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future

import ray

from pathways_ray import limits, names
from pathways_ray.controller import metrics
from pathways_ray.controller.client_service import ClientService
from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.metrics_server import serve_page
from pathways_ray.controller.state import Command, SendIsland
from pathways_ray.scheduler.plugins import policy_named
from pathways_ray.transport import links, outboxes, streams
from pathways_ray.transport.endpoints import ListenConfig
from pathways_ray.transport.messages import (
    FROM_ISLAND,
    Done,
    Enqueued,
    FromIsland,
    HostDown,
    HostUp,
    IslandLaunchFailed,
    IslandUp,
    Load,
    Ready,
)

MANAGER_LIMIT_S = 4.0
"""A resource manager that twice does not answer for this long is taken for dead."""

SCHEDULER_LIMIT_S = 8.0
"""A scheduler that says nothing for this long, which tells every second how much waits there, is taken for dead."""

METRICS_LIMIT_S = 5.0

RESTART_PAUSE_S = 0.5
"""A controller that cannot serve ends after this pause, so that Ray does not start it in a tight loop."""


class Controller:
    """One for a cluster. Everything runs on an event loop in a thread of its own.

    Args:
        runtime: its name, by which the resource manager is found.
        listen: where to listen; port 0 is a free one, another one after each restart.
        token: the operator's.
    """

    def __init__(
        self,
        runtime: str,
        listen: ListenConfig,
        token: str,
        link_secrets: tuple[str, str],
        parallel: bool,
        fusion: bool,
        policy: str = "fifo",
        metrics_at: tuple[str, int] | None = None,
    ) -> None:
        self.runtime = runtime
        self.metrics_at = metrics_at
        self.listen = listen
        self.data_secret, self.link_secret = link_secrets
        self.incarnation = secrets.token_hex(8)
        self.restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self.token = token
        self.fusion = fusion
        self.launches = Launches(
            parallel=parallel,
            max_in_flight=limits.MAX_LAUNCHES_IN_FLIGHT,
            cross_island=CrossIslandWindow(policy_named(policy)),
        )
        self.policy = policy
        self.islands: dict[int, outboxes.AsyncOutbox] = {}
        self.heard: dict[int, float] = {}
        self.address: Future[str] = Future()
        # A thread of its own, since Ray calls nothing but the constructor after a restart.
        threading.Thread(target=self._serve, name="serve", daemon=True).start()

    def start(self) -> str:
        """`address:port` of the front door; answers once it serves."""
        return self.address.result()

    def access(self) -> tuple[str, str, str]:
        """Url, token and CA file of the front door, for who can reach Ray, and so can do as he likes anyway."""
        ca = self.listen.tls.ca if self.listen.tls is not None else ""
        return self.listen.scheme + self.address.result(), self.token, ca

    def _serve(self) -> None:
        """Serves until the resource manager is gone or something is wrong; then the process ends, and all sessions."""
        try:
            asyncio.run(self._main())
        except BaseException as error:
            traceback.print_exc()
            if not self.address.done() and not self.restarted:
                self.address.set_exception(error)  # for who starts the runtime, and will end this process
                return
        time.sleep(RESTART_PAUSE_S)
        os._exit(1)

    async def _main(self) -> None:
        self.resource_manager = ray.get_actor(names.resource_manager(self.runtime), names.NAMESPACE)
        self.front = ClientService(
            launches=self.launches,
            do=self._do,
            listen=self.listen,
            token=self.token,
            data_secret=self.data_secret,
            fusion=self.fusion,
            # Hosts know a session by its number: one from before a restart must not come again.
            sessions_made=int(time.time() * 100) if self.restarted else 0,
            strict=not self.restarted,
        )
        dispatch = "parallel" if self.launches.parallel else "sequential"
        self.front.about = {"policy": self.policy, "controller": {"pid": os.getpid(), "dispatch": dispatch}}
        if self.metrics_at is not None:
            self.front.about["metrics"] = self._serve_metrics(*self.metrics_at)
        self.server, link = await links.serve(
            {streams.ISLAND_STREAM: self._island_stream},
            streams.bind_address(self.listen.links),
            tls=self.listen.tls,
        )
        address = await self.front.serve(self.resource_manager)
        self.clock = asyncio.ensure_future(self._tick())
        manager = await self._report(link)
        self.address.set_result(address)
        while not self.clock.done():
            await asyncio.wait([self.clock], timeout=1.0)
            if await self._report(link) != manager:
                print("a new resource manager, which knows of no slice: starting anew", flush=True)
                return
        self.clock.result()

    def _serve_metrics(self, address: str, port: int) -> str:
        loop = asyncio.get_running_loop()

        def page() -> bytes:
            asked = asyncio.run_coroutine_threadsafe(self.front.status(), loop)
            return metrics.text(asked.result(METRICS_LIMIT_S))

        return serve_page(address, port, self.listen.tls, self.token, metrics.CONTENT_TYPE, page)

    async def _report(self, address: str) -> str:
        """Tells the resource manager that this controller serves; returns what the resource manager is known by.

        Raises:
            ray.exceptions.RayError: it is gone.
            TimeoutError: it has not answered for so long that it was killed.
        """
        for last in (False, True):
            try:
                # Twice: after a pause of this process the time may be over before an answer that is there is seen.
                async with asyncio.timeout(MANAGER_LIMIT_S):
                    name = names.controller(self.runtime)
                    known: str = await self.resource_manager.controller_serves.remote(self.incarnation, address, name)
                    return known
            except TimeoutError:
                if last:
                    break
        ray.kill(self.resource_manager, no_restart=False)
        raise TimeoutError(f"the resource manager did not answer for {2 * MANAGER_LIMIT_S:.0f} s")

    async def _tick(self) -> None:
        before = time.monotonic()
        while True:
            now = time.monotonic()
            if now - before > SCHEDULER_LIMIT_S / 2:
                self.heard = dict.fromkeys(self.heard, now)  # this process did not run either: it cannot judge others
            before = now
            for island in [island for island, heard in self.heard.items() if now - heard > SCHEDULER_LIMIT_S]:
                self._island_ended(
                    island, self.islands[island], f"its island's scheduler did not answer for {SCHEDULER_LIMIT_S:.0f} s"
                )
                # Ray starts it anew; its hosts end with their streams and follow.
                scheduler = names.scheduler(self.runtime, island)
                with contextlib.suppress(ValueError):  # it ends just now
                    ray.kill(ray.get_actor(scheduler, names.NAMESPACE), no_restart=False)
            self._do(self.launches.tick(now))
            await self.front.tick(now)
            await asyncio.sleep(1.0)

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if not isinstance(command, SendIsland):
                self.front.send(command.session, command.message)
            elif (outbox := self.islands.get(command.island)) is not None:
                outbox.send(command.message)

    # --- islands ------------------------------------------------------------------------------------------------------

    async def _island_stream(self, context: links.AsyncLink) -> None:
        if not streams.authorised(context.metadata, self.link_secret):
            context.refuse("wrong link secret")
        data = await context.read()
        rest = FROM_ISLAND.decode_batch(data) if data else []
        hello = rest.pop(0) if rest else None
        if not isinstance(hello, IslandUp):
            return
        # A new scheduler may be heard of before the end of the old one's stream.
        self._island_ended(hello.island, self.islands.get(hello.island))
        outbox = self.islands[hello.island] = outboxes.AsyncOutbox(self.launches.in_flight.__len__)
        self.heard[hello.island] = time.monotonic()
        self._do(self.launches.island_up(hello.island))
        pump = asyncio.ensure_future(outbox.carry(context))
        try:
            while True:
                for message in rest:
                    await self._from_island(hello.island, message)
                if (data := await context.read()) is None:
                    break
                if self.islands.get(hello.island) is not outbox:
                    break  # another scheduler took its place; with its stream this one ends, and starts anew
                self.heard[hello.island] = time.monotonic()
                rest = FROM_ISLAND.decode_batch(data)
        finally:
            pump.cancel()
            self._island_ended(hello.island, outbox)
            await self.resource_manager.withdraw.remote(f"scheduler-{hello.island}", hello.address)

    def _island_ended(
        self, island: int, outbox: outboxes.AsyncOutbox | None, reason: str = "its island's scheduler ended"
    ) -> None:
        """The stream that `outbox` belongs to is over: what it knew of hosts is worth nothing any more."""
        if outbox is None or self.islands.get(island) is not outbox:
            return
        del self.islands[island], self.heard[island]
        for host in [h for h in self.launches.hosts.values() if h.island == island]:
            self._do(self.launches.host_down(HostDown(host.host, host.epoch, reason)))

    async def _from_island(self, island: int, message: FromIsland) -> None:
        match message:
            case Done():
                self._do(self.launches.done(island, message))
            case IslandLaunchFailed():
                self._do(self.launches.run_failed(island, message))
            case Enqueued():
                self._do(self.launches.enqueued(island, message))
            case Ready():
                self._do(self.launches.ready(message))
                await self.front.programs_changed()
            case HostUp():
                self._do(self.launches.host_up(island, message))
            case HostDown():
                self._do(self.launches.host_down(message))
                await self.resource_manager.leave.remote(message.host, message.epoch)
            case Load():
                self.launches.load(message)
            case IslandUp():
                pass
