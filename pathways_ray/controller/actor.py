"""The controller as a Ray actor: a driver of `ControllerCore`, with the islands' streams and the calls of Ray.

Clients come in by its `ClientService`. When its process dies, Ray starts it again: schedulers, hosts and clients say to
it what there is (ADR 0042). The resource manager's death ends nothing (ADR 0037).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import ray

from pathways_ray import limits, names, os_process
from pathways_ray.controller import events, late_drops, metrics, succession
from pathways_ray.controller.client_service import ClientService
from pathways_ray.controller.clients import Clients
from pathways_ray.controller.core import ControllerCore
from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.log_reading import read_log
from pathways_ray.controller.manager_calls import FENCED_CALLS
from pathways_ray.controller.metrics_server import serve_once_free, serve_page
from pathways_ray.controller.planner import Planner
from pathways_ray.controller.planning import PlanReply
from pathways_ray.controller.programs import check_functions
from pathways_ray.controller.standstill import TELLING, Standstill
from pathways_ray.controller.state import SendClient, SendIsland
from pathways_ray.controller.watch import TICK_S
from pathways_ray.errors import Failure, PathwaysError, to_failure
from pathways_ray.liveness import SILENCE_LIMIT_S
from pathways_ray.machine_load import slowness
from pathways_ray.observe.timeline import newest
from pathways_ray.process_log import ProcessLog, path_of
from pathways_ray.scheduler.plugins import policy_named
from pathways_ray.story import Entry
from pathways_ray.transport import links, loops, outboxes, streams
from pathways_ray.transport.capabilities import authorised
from pathways_ray.transport.endpoints import ListenConfig
from pathways_ray.transport.inspectable import Inspectable
from pathways_ray.transport.messages import (
    FROM_ISLAND,
    HeldSlices,
    IslandUp,
    LogPart,
    Refused,
    Status,
    StatusReply,
    encode,
)
from pathways_ray.waits import tick_s

METRICS_LIMIT_S = 5.0

RESTART_PAUSE_S = 0.5
"""A controller that cannot serve ends after this pause, so that Ray does not start it in a tight loop."""


class Controller(Inspectable):
    """One for a cluster. Everything runs on an event loop in a thread of its own.

    Args:
        runtime: its name, by which the resource manager is found.
        listen: where to listen; port 0 is a free one, another one after each restart.
        token: the operator's.
        islands: the hosts of each island.
        compile_limit_s: seconds that a host may compile one program.
        isolation: whether each tenant has islands for itself.
        silence_limit_s: silence after which another process counts as lost.
        launch_limit_s: the schedulers' limit, to be shown.
        lost_after_s: seconds without one of its hosts after which slices move off an island.
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
        islands: Mapping[int, Sequence[int]] | None = None,
        compile_limit_s: float = limits.COMPILE_LIMIT_S,
        isolation: bool = False,
        silence_limit_s: float = SILENCE_LIMIT_S,
        launch_limit_s: float = limits.LAUNCH_LIMIT_S,
        coalesce: bool = True,
        lost_after_s: float = limits.LOST_AFTER_S,
    ) -> None:
        self.runtime, self.process = runtime, "controller"
        self.metrics_at = metrics_at
        self.silence_limit_s = silence_limit_s
        self.listen = listen
        data_secret, self.link_secret = link_secrets
        self.incarnation = secrets.token_hex(8)
        self.own_process = os.getpid(), os_process.started_at(os.getpid())
        self.restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self.token = token
        window = CrossIslandWindow(policy_named(policy))
        self.launches = Launches(parallel, limits.MAX_LAUNCHES_IN_FLIGHT, window, compile_limit_s, launch_limit_s)
        if policy == "preempt":
            self.launches.preemption.enable()
        # Hosts know a session by its number: one from before a restart must not come again.
        clients = Clients(self.launches, fusion, sessions_made=int(time.time() * 100) if self.restarted else 0)
        expected = (islands or {}) if self.restarted else ()  # at first they start after this process
        self.core = ControllerCore(self.launches, clients, token, data_secret, expected, silence_limit_s, islands)
        about: dict[str, Any] = {"launch_limit_s": launch_limit_s, "compile_limit_s": compile_limit_s}
        about["silence_limit_s"] = silence_limit_s
        pid, started = self.own_process
        here = {"pid": pid, "started": started, "dispatch": "parallel" if parallel else "sequential"}
        self.core.requests.about |= about | {"policy": policy, "controller": here}
        self.core.requests.isolation.enabled = isolation
        self.core.requests.coalesce = coalesce
        self.core.requests.changes.moves.lost_after_s = lost_after_s
        self.core.story.sink = ProcessLog(runtime, self.process).write
        node = ray.get_runtime_context().get_node_id()
        self.core.requests.logs = str(path_of(runtime, "controller").parent), node
        self._unwrap("handle")
        self.islands: dict[int, outboxes.AsyncOutbox] = {}
        self.link_numbers = itertools.count(1)
        self.links: dict[int, links.AsyncLink] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.standstill = Standstill(tick_s(TICK_S), data_secret, time.process_time)
        self.address: Future[str] = Future()
        # A thread of its own, since Ray calls nothing but the constructor after a restart.
        threading.Thread(target=self._serve, name="serve", daemon=True).start()

    def start(self) -> str:
        """`address:port` of the client service; answers once it serves."""
        return self.address.result()

    def access(self) -> tuple[str, str, str]:
        """Url, token and CA file of the client service, for those who can reach Ray, which gives them all rights."""
        ca = self.listen.tls.ca if self.listen.tls is not None else ""
        return self.listen.scheme + self.address.result(), self.token, ca

    def traced(self, since: float, most: int) -> tuple[list[Any], dict[int, str], dict[int, str], dict[int, int]]:
        """Launches that have ended since then, the last ones (`Recorder.ring`), names of programs, tenants of sessions,
        and the bytes that a launch of each program moves between hosts."""
        tables, details = self.launches.tables, self.core.requests.looks.overview.details()
        programs = {**self.launches.preparation.dropped, **tables.programs}
        return (
            newest(tables.recorder.ring.records(), since, 4, most),
            {key: program.name for key, program in list(programs.items())},
            tables.recorder.tenants(),
            {key: sum(found.moved.values()) for key, found in details.items()},
        )

    def _serve(self) -> None:
        """Serves until something is wrong; then the process ends."""
        try:
            asyncio.run(self._main())
        except BaseException as error:
            traceback.print_exc()
            if not self.address.done() and not self.restarted:
                self.address.set_exception(error)  # the process that starts the runtime will end this one
                return
        time.sleep(RESTART_PAUSE_S)
        os._exit(1)

    async def _main(self) -> None:
        self.loop = loops.stop_on_errors(asyncio.get_running_loop())
        self.resource_manager = ray.get_actor(names.resource_manager(self.runtime), names.NAMESPACE)
        self.resource_manager.controller_starts.remote(*self.own_process)
        if self.restarted:
            await self._take_over()
        self.planner = Planner()
        self.planner.start()
        self.front = ClientService(self.core, self.handle, self.listen, strict=not self.restarted)
        if self.metrics_at is not None:
            metrics_served = self._serve_metrics(*self.metrics_at)
            self._later(metrics_served) if self.restarted else await metrics_served
        self.server, self.link_address = await links.serve(
            {streams.ISLAND_STREAM: self._island_stream},
            streams.bind_address(self.listen.links),
            tls=self.listen.tls,
            silence=links.silence_of(self.silence_limit_s),
        )
        self.client_address = await self.front.serve()
        await self._tick()

    async def _take_over(self) -> None:
        """After a restart: islands have come and gone since the runtime began. This process would end with what it did
        before it has asked, so it asks first."""
        self.core.take_over(HeldSlices())  # where nobody says what there is
        limit = self.silence_limit_s / succession.ASKED
        found = await succession.ask_manager(
            self.resource_manager, self.own_process, lambda: slowness() * limit, self._kill_silent_manager
        )
        if found is not None:
            islands, slices = found
            self.core.take_over(msgspec.msgpack.decode(slices, type=HeldSlices), islands)

    def _kill_silent_manager(self) -> None:
        reason = f"it did not answer for {self.silence_limit_s:.0f} s a controller that began"
        self.launches.story.note(Entry(time.monotonic(), "resource manager killed", cause=reason))
        ray.kill(self.resource_manager, no_restart=False)

    async def _tick(self) -> None:
        while True:
            self.standstill.ran(time.monotonic())
            self.handle(events.Tick(slowness()))
            self.front.refresh()
            await asyncio.sleep(tick_s(TICK_S))

    async def _serve_metrics(self, address: str, port: int) -> None:
        """Serves metrics; after a restart, once nobody else has their port: all else goes on without them."""

        def taken(problem: str) -> None:
            self.launches.story.note(Entry(time.monotonic(), "metrics not served", cause=problem))

        async def status() -> dict[str, Any]:
            reply = await self.front.request(None, Status(0))
            if not isinstance(reply, StatusReply):
                raise RuntimeError(f"no status: {reply}")
            found: dict[str, Any] = json.loads(reply.text)
            return found

        def page() -> bytes:
            return metrics.text(asyncio.run_coroutine_threadsafe(status(), self.loop).result(METRICS_LIMIT_S))

        place = address, port, self.listen.tls, self.token, metrics.CONTENT_TYPE, page
        served = await serve_once_free(taken, *place) if self.restarted else serve_page(*place)
        self.core.requests.about["metrics"] = served

    # --- commands -----------------------------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        """Takes an event to the core, and carries out its commands."""
        now = time.monotonic()
        if type(event) in TELLING and self.standstill.explains(event, self.core.clients.known, now):
            cause = "it stood still for so long that clients gave it up; their sessions go on with its successor"
            self.launches.story.note(Entry(now, "controller ends", cause=cause))
            print(f"the controller ends: {cause}", file=sys.stderr, flush=True)
            os._exit(1)
        for command in self.core.handle(event, now):
            if type(command) is SendIsland:
                if (outbox := self.islands.get(command.island)) is not None:
                    outbox.send(command.message)
            elif type(command) is SendClient:
                self.front.send(command.session, command.message)
            else:
                self._do(command)

    def _do(self, command: events.Command) -> None:
        match command:
            case events.OpenChannel(session):
                self.front.open(session)
            case events.SwitchToLink(session):
                self.front.switch(session)
            case events.CloseChannel():
                self.front.close(command)
            case events.TakeTurn():
                self.loop.call_soon(self.handle, events.Turn())
            case events.PauseReading(session):
                self.front.pause(session)
            case events.ResumeReading(session):
                self.front.resume(session)
            case events.Plan():
                self._later(self._plan(command))
            case events.AnswerCall():
                self.front.answer(command)
            case events.CallManager(method, arguments):
                self._call_manager(command, method, arguments)
            case events.TellManager(holdings):
                self._call_manager(command, "controller_holds", (self.incarnation, encode(holdings)))
            case events.ReportToManager():
                self._later(self._report_to_manager())
            case events.WantIslands(tenants):
                self._later(self._want_islands(tenants))
            case events.CloseIsland(link):
                if link in self.links:
                    self.links[link].close()
            case events.KillScheduler(island):
                with contextlib.suppress(ValueError):  # it ends just now
                    ray.kill(ray.get_actor(names.scheduler(self.runtime, island), names.NAMESPACE), no_restart=False)
            case events.AskForLog():
                self._later(self._ask_for_log(command))
            case events.KillManager():
                ray.kill(self.resource_manager, no_restart=False)
            case events.ReportFault(text):
                print(text, file=sys.stderr, flush=True)

    async def _ask_for_log(self, command: events.AskForLog) -> None:
        """Has the process read its log; or, where it does not answer, a task on its node."""
        request = command.request
        reply: LogPart | Refused
        try:
            reply = LogPart(*await read_log(self.runtime, request))
        except ValueError:
            reply = Refused(Failure("UsageError", f"no process is named {request.process[:40]!r}"))
        except (TimeoutError, ray.exceptions.RayError) as error:
            text = f"neither {request.process} nor its machine answers ({type(error).__name__}): its log lies there"
            reply = Refused(Failure("UsageError", text))
        self.front.answer(events.AnswerCall(command.call, reply))

    async def _plan(self, command: events.Plan) -> None:
        """In threads: one compares functions with their digests, the other waits for the planner's process."""
        try:
            await asyncio.to_thread(check_functions, command.functions)
        except PathwaysError as error:
            reply = PlanReply(failure=to_failure(error), checked=False)
        else:
            reply = await asyncio.to_thread(self.planner.plan, command.request)
        self.handle(events.Planned(command.call, reply))

    def _call_manager(
        self, command: events.CallManager | events.TellManager, method: str, arguments: tuple[Any, ...]
    ) -> None:
        if method in FENCED_CALLS:
            arguments = (self.own_process[1], *arguments)
        # Here and now, and not in a task: Ray keeps the order of calls.
        result = getattr(self.resource_manager, method).remote(*arguments)
        self._later(self._manager_answers(command, result))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        loops.begin(work, self.tasks)

    async def _manager_answers(self, command: events.CallManager | events.TellManager, result: Any) -> None:
        """Waits for a result, which may be an error of the method; a call that went astray has no result."""
        answer: Any
        try:
            answer = await result
        except ray.exceptions.RayTaskError as error:
            traceback.print_exc()
            answer = error
        except ray.exceptions.RayError:
            return self.handle(events.ManagerMissed(command))
        if isinstance(command, events.CallManager) and command.call:
            self.handle(events.ManagerAnswered(command.call, answer))

    async def _report_to_manager(self) -> None:
        """Tells the resource manager that this controller serves. Once it knows, the controller has an address."""
        name = names.controller(self.runtime)
        busy = tuple((device.host, device.index, share) for device, share in self.launches.device_shares())
        serves = self.resource_manager.controller_serves
        try:
            known: str = await serves.remote(self.incarnation, self.link_address, name, busy, self.own_process)
        except ray.exceptions.RayError as error:
            self.handle(events.ManagerLost(str(error)))
            return
        self.handle(events.ManagerKnows(known))
        if not self.address.done():
            self.address.set_result(self.client_address)

    async def _want_islands(self, tenants: tuple[str, ...]) -> None:
        """Has islands run for these tenants. Where the actor that starts them is away, the list is sent again later."""
        held = None
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            held = await ray.get_actor(names.tenant_islands(self.runtime), names.NAMESPACE).want.remote(tenants)
        if held is not None:
            self.handle(events.IslandsHeld(*held))

    # --- islands ------------------------------------------------------------------------------------------------------

    async def _island_stream(self, context: links.AsyncLink) -> None:
        if not authorised(context.metadata, self.link_secret):
            context.refuse("wrong link secret")
        first = await context.read() or b""
        hello = next(iter(FROM_ISLAND.decode_batch(first)), None) if first else None
        if not isinstance(hello, IslandUp):
            return
        link, island = next(self.link_numbers), hello.island
        self.links[link] = context
        outbox = self.islands[island] = outboxes.AsyncOutbox(
            self.launches.in_flight.__len__,
            lambda full: self.handle(events.IslandFull(island) if full else events.IslandRoom(island)),
            late_drops.with_drops_joined,
        )
        self.handle(events.IslandConnected(link, hello))
        pump = asyncio.ensure_future(outbox.carry(context))

        def take(data: bytes) -> None:
            self.handle(events.IslandMessages(link, island, FROM_ISLAND.decode_batch(data)))

        try:
            with loops.vital():
                take(first)
                await context.each(take)
        finally:
            pump.cancel()
            del self.links[link]
            if self.islands.get(island) is outbox:
                del self.islands[island]
                self.handle(events.IslandRoom(island))
            self.handle(events.IslandDisconnected(link, island, hello.address, context.given_up))
