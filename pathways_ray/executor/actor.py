"""A host as a Ray actor: one process that owns some devices and runs JAX.

Ray restarts the process when it dies (`max_restarts`); the constructor then joins again, under the next epoch.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import ray

from pathways_ray import limits, names
from pathways_ray.executor.compile.backend import adopt_environment
from pathways_ray.executor.compile.hardware import described
from pathways_ray.executor.compile.platforms import backend_of
from pathways_ray.executor.log_links import LogReader, LogWriter
from pathways_ray.executor.profiling.crash_log import CrashLog
from pathways_ray.executor.run.core import GROUP_LIMIT_S, HEARTBEAT_S
from pathways_ray.executor.run.instructions import Joined, SchedulerFound
from pathways_ray.executor.run.journal import Said
from pathways_ray.ir.links import Hardware
from pathways_ray.jax_arrays import letting_go
from pathways_ray.liveness import SILENCE_LIMIT_S
from pathways_ray.machine_load import slowness
from pathways_ray.observe.timeline import newest
from pathways_ray.os_process import started_at
from pathways_ray.process_log import ProcessLog
from pathways_ray.transport import streams, thread_links
from pathways_ray.transport.endpoints import ListenConfig, joined
from pathways_ray.transport.frames import LinkLost
from pathways_ray.transport.inspectable import Inspectable
from pathways_ray.transport.links import silence_of
from pathways_ray.transport.messages import (
    TO_HOST,
    Heartbeat,
    Holds,
    HostInfo,
    HostUp,
    JoinReply,
    Message,
    Stored,
    encode,
)
from pathways_ray.transport.tls import trust_of

if TYPE_CHECKING:
    from pathways_ray.executor.compile.compiler import Compiler
    from pathways_ray.executor.data.device_transfer import DeviceTransfer
    from pathways_ray.executor.data.partners import Partners
    from pathways_ray.executor.data.server import DataServer
    from pathways_ray.executor.profiling.profiler import Computed, Ran, Timeline
    from pathways_ray.executor.run.leading import Leader

UNKNOWN = Hardware()
"""Devices of which nothing is declared."""

RESTART_PAUSE_S = 0.5
"""A host that cannot join ends after this pause, so that Ray does not start it in a tight loop."""


LOOK_PAUSE_S = 0.2
LOOK_LIMIT_S = 1.0
"""A host that has lost its scheduler asks for the successor's address again after this pause, and waits as long."""


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


class HostExecutor(Inspectable):
    """The process of one host. Methods answer Ray's calls; the work happens in threads (see `dispatcher`)."""

    def __init__(
        self,
        runtime: str,
        host: int,
        island: int,
        members: list[int],
        devices: int,
        platform: str,
        listen: ListenConfig,
        check_order: bool = False,
        tenant: str = "",
        base: int = -1,
        hardware: Hardware = UNKNOWN,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self.tenant, self.base, self.hardware = tenant, base, hardware
        self.host, self.island, self.members, self.check_order = host, island, members, check_order
        self.runtime, self.process = runtime, f"host {host}"
        self.log = ProcessLog(runtime, self.process)
        self.listen = listen
        self.silence = silence_of(silence_limit_s)
        self.timeline: Timeline | None = None
        self.partners: Partners | None = None
        self.bind = streams.bind_address(listen.links)
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        try:
            self.resource_manager = ray.get_actor(names.resource_manager(runtime), names.NAMESPACE)
            self.backend = backend_of(platform)
            self.backend.configure(devices)
            # Programs carry their own types; without this JAX would narrow 64-bit arrays on their way in.
            os.environ["JAX_ENABLE_X64"] = "1"
            adopt_environment()
            crashes = CrashLog(runtime, host)
            self.crash = crashes.take()
            crashes.watch()
            self._start(devices, platform)
        except Exception as error:
            if not restarted and not isinstance(error, ray.exceptions.RayError):
                raise
            # Ray does not restart an actor whose constructor raised, but one whose process ended.
            traceback.print_exc()
            time.sleep(RESTART_PAUSE_S)
            os._exit(1)

    def _start(self, devices: int, platform: str) -> None:
        # Imported here, after the environment is set: XLA reads it once, when it makes devices.
        import jax

        from pathways_ray.executor.compile import disk_cache
        from pathways_ray.executor.compile.compiler import Compiler
        from pathways_ray.executor.data.buffer_store import BufferStore
        from pathways_ray.executor.data.device_transfer import DeviceTransfer
        from pathways_ray.executor.data.partners import Partners
        from pathways_ray.executor.profiling.order_check import OrderReporter
        from pathways_ray.executor.run.dispatcher import Dispatcher
        from pathways_ray.transport.neighbours import machine

        disk_cache.use(self.tenant, alike=platform != "tpu")
        node = ray.get_runtime_context().get_node_id()
        offer = joined(self.bind, _free_port(self.bind))
        members, pid = tuple(self.members), os.getpid()
        place = (members, self.tenant, self.base)
        self.info = info = HostInfo(
            self.host, self.island, platform, devices, node, pid, offer, *place, started_at(pid), self.hardware
        )
        answer = ray.get(self.resource_manager.join.remote(encode(info)))
        reply = msgspec.msgpack.decode(answer, type=JoinReply)
        if not reply.epoch:
            raise RuntimeError(f"island {self.island} did not come together: hosts {reply.absent} did not join")
        _, self.link_secret = ray.get(self.resource_manager.secrets.remote())
        if reply.coordinator:
            self._join_group(reply.coordinator)
        with self.backend.making_devices(self.host):
            local = jax.local_devices()
        if len(local) < devices or local[0].platform != platform:
            raise RuntimeError(f"host {self.host} was to have {devices} {platform} devices; JAX sees {local}")
        grouped = {h: [d for d in jax.devices() if d.process_index == k] for k, h in enumerate(self.members)}
        self.epoch = reply.epoch
        self.store, self.let_go = BufferStore(), letting_go()
        compiler = Compiler(self.host, local[:devices], grouped)
        near = machine() if self.backend.shares_memory else ""
        transfer = DeviceTransfer(self.host, local[0].client, self.bind, self.link_secret, near)
        if near and len(self.members) > 1:
            self.partners = Partners(self.host, transfer, self.link_secret)
            compiler.meet = self.partners.meet
        self.outbox = self._new_outbox()
        self.found: thread_links.Outbox | None = None
        self.said = Said()
        self.uploads: deque[Stored] = deque(maxlen=limits.MAX_REMEMBERED_UPLOADS)
        self.dispatcher = Dispatcher(self.host, compiler, self.store, transfer, self._send, members, self.log.write)
        self.dispatcher.core.story.sink = self.log.write
        self.dispatcher.inbox.put([Joined(self.epoch)])
        if self.check_order:
            self.dispatcher.observe(OrderReporter(self.host, members, self._send))
        self.data = self._serve_data(compiler, reply.data_secret)
        shared = self.backend.shares_memory and not self.hardware.memory
        self.pool = node if shared else ""
        self.hardware = described(self.hardware, local[:devices], self.backend.memory(local[0]))
        ray.get(self.resource_manager.describe.remote(self.host, self.epoch, msgspec.msgpack.encode(self.hardware)))
        if self.dispatcher.core.leader is not None:
            self._lead(self.dispatcher.core.leader)
        self._link(reply.scheduler_address, transfer, devices)
        compiler.sandbox.start()

    def _serve_data(self, compiler: Compiler, secret: str) -> DataServer:
        """Serves clients, and the followers of the island's leader."""
        from pathways_ray.executor.data.server import DataServer

        dispatcher = self.dispatcher
        log = LogReader(self.host, self.epoch, self.link_secret, dispatcher.take)
        # Noted at once: who rejoins meanwhile says what is stored, and what was, or is to be, reported of it.
        said = self.listen, self._say_stored, self.uploads.append
        reach = *said, dispatcher.hand, {streams.LOG_STREAM: log.serve}
        # Of several hosts another thread makes calls (`Dispatcher.hand`), and a collective wants the cores.
        how = () if dispatcher.multi_host else (dispatcher.busy_poll(), self.backend.within_calls)
        data = DataServer(self.host, compiler, self.store, secret, *reach, *how)
        dispatcher.refuse_early = lambda handed: data.later(data.early.refuse, handed)
        dispatcher.answer_call, dispatcher.leave_call = data.served.answer, data.served.leave
        dispatcher.say_allowed = lambda tenant: data.later(data.early.allow, tenant)
        if data.equal is not None:
            dispatcher.transfer.take_out = data.equal.take_out
        return data

    def _join_group(self, coordinator: str) -> None:
        """Makes the hosts of the island one JAX group; each sees the devices of all."""
        import jax

        self.backend.before_group(self.bind)
        jax.distributed.initialize(
            coordinator,
            len(self.members),
            self.members.index(self.host),
            initialization_timeout=GROUP_LIMIT_S,
            coordinator_bind_address=coordinator,  # left out, it would listen everywhere
        )

    def _lead(self, leader: Leader) -> None:
        """Has this host lead its island, once it is linked to the others."""

        def linked() -> None:
            leader.linked = True

        trust = trust_of(self.listen.tls)
        log = LogWriter(self.host, self.members, self.epoch, self.link_secret, trust, self.silence, linked)
        self.dispatcher.tell, self.dispatcher.on_peers = log.tell, log.set_peers
        self.dispatcher.say_leads = lambda: self._send(self._heartbeat())

    # --- the scheduler ------------------------------------------------------------------------------------------------

    def _new_outbox(self) -> thread_links.Outbox:
        return thread_links.Outbox(lambda: self.dispatcher.under_way().launches)

    def _send(self, message: Message) -> None:
        self.said.note(message)  # before it leaves by a link that may have ended
        self.outbox.send(message)

    def _say_stored(self, reports: Sequence[Stored]) -> None:
        outbox = self.outbox
        for report in reports:
            outbox.put(report)
        outbox.leave(len(reports))

    def _link_to(self, address: str, outbox: thread_links.Outbox) -> thread_links.ThreadLink:
        shown, trust = {"authorization": self.link_secret}, trust_of(self.listen.tls)
        return thread_links.ThreadLink(address, streams.HOST_STREAM, shown, outbox, trust, self.silence)

    def _link(self, address: str, transfer: DeviceTransfer, devices: int) -> None:
        from pathways_ray.executor.threads import ending_with_process, heartbeat

        where = (transfer.address, self.data.address, devices, os.getpid())
        memory = (self.hardware.memory, self.pool)
        info = msgspec.structs.replace(self.info, hardware=self.hardware)
        self.hello = HostUp(self.host, self.epoch, *where, self.crash, *memory, info, machine=transfer.machine)
        self.outbox.send(self.hello)
        self.dispatcher.rejoin = self._rejoin
        link = self._link_to(address, self.outbox)
        threading.Thread(target=self._read, args=(link,), name="read", daemon=True).start()
        self.dispatcher.start()
        beating = ending_with_process(heartbeat)
        threading.Thread(target=beating, args=(self._send, self._heartbeat, HEARTBEAT_S), daemon=True).start()

    def _read(self, link: thread_links.ThreadLink) -> None:
        """Hears one scheduler after the other. A host ends that a scheduler does not take, which says so, and one that
        has heard of none for `ORPHAN_LIMIT_S`."""
        alone_since = 0.0
        try:
            while True:
                try:
                    for data in link:
                        alone_since = 0.0
                        self.dispatcher.take(TO_HOST.decode_batch(data))
                except Exception as error:
                    print(f"host {self.host}: the scheduler's stream ended: {error}", flush=True)
                alone_since = alone_since or time.monotonic()
                taken = link.close_reason is None
                found = self._find_scheduler(alone_since + limits.ORPHAN_LIMIT_S) if taken else None
                if found is None:
                    return
                link = found
        finally:
            os._exit(1)  # no one else may fill its queues; Ray restarts it

    def _find_scheduler(self, deadline: float) -> thread_links.ThreadLink | None:
        """A link to the successor of a scheduler that has died; None where it does not come in time."""
        while time.monotonic() < deadline:
            time.sleep(LOOK_PAUSE_S)
            outbox = self._new_outbox()
            try:
                answer = self.resource_manager.lookup.remote(f"scheduler-{self.island}")
                link = self._link_to(ray.get(answer, timeout=LOOK_LIMIT_S), outbox)
                link.dial()
            except (ray.exceptions.RayError, LinkLost):
                continue
            self.found = outbox
            self.dispatcher.take([SchedulerFound()])
            return link
        return None

    def _rejoin(self, holds: Holds) -> None:
        """Joins the scheduler that was found; or says the same to the one that there is, for another controller. In the
        thread of the dispatcher, which has heard all that was said before; what is sent from here on goes there."""
        from pathways_ray.executor.run.rejoining import stored_since, with_uploads

        known = with_uploads(holds, list(self.uploads))
        outbox, self.found = self.found or self.outbox, None
        outbox.send(msgspec.structs.replace(self.hello, holds=known))
        self.outbox = outbox
        for once_more in self.said.again(holds):
            outbox.send(once_more)
        # Of what was uploaded in the meantime, the thread of uploads has told the old one.
        for report in stored_since(known, list(self.uploads), self.store.held()):
            self._send(report)

    def _heartbeat(self) -> Heartbeat:
        self.let_go()  # not as arrays are dropped: what frees big ones holds up what comes into new memory meanwhile
        self.dispatcher.reports.say_served(self.host)
        beat = self.dispatcher.heartbeat(slowness())
        arriving = self.data.arriving()
        return msgspec.structs.replace(beat, uploads=arriving) if arriving else beat

    def ready(self) -> int:
        """The epoch; answers once the constructor is through."""
        return self.epoch

    def statistics(self) -> dict[str, int]:
        """Live entries of this host's tables."""
        return {
            "pid": os.getpid(),
            "buffers": self.store.count(),
            "programs": len(self.dispatcher.core.programs),
            "active": len(self.dispatcher.core.active),
            "early": self.dispatcher.core.early.count - self.dispatcher.core.early.calls,
            "served": self.dispatcher.reports.served,
            "queued": self.dispatcher.inbox.qsize(),
            "shared": self.data.equal.shared if self.data.equal is not None else 0,
            "exchanged": self.partners.agreed if self.partners is not None else 0,
        }

    def trace(self, seconds: float) -> list[Ran]:
        """The launches that run on the devices in the next `seconds`, in the order of their ends."""
        from pathways_ray.executor.profiling.profiler import LaunchTrace

        trace = LaunchTrace()
        self.dispatcher.observe(trace)
        time.sleep(seconds)
        self.dispatcher.release(trace)
        return list(trace.entries)

    def traced(self, since: float, most: int) -> tuple[list[Any], ...]:
        """Launches that were on the devices, waits for data of other hosts, and for host functions; the last that ended
        since then."""
        shift = time.monotonic() - time.perf_counter()
        arrivals = self.dispatcher.arrivals
        found = [ring.records() for ring in (self.dispatcher.ran, arrivals.waits, arrivals.python)]
        return tuple([(s, a + shift, b + shift) for s, a, b in newest(one, since - shift, 2, most)] for one in found)

    def profile(self, seconds: float) -> bytes | str:
        """Has JAX's profiler run for some seconds; its profile, or the reason for its lack."""
        from pathways_ray.executor.profiling.profiler import xprof

        return xprof(seconds)

    def record(self) -> None:
        """Begins to note when each computation runs, until `recorded`; earlier notes are forgotten."""
        from pathways_ray.executor.profiling.profiler import Timeline

        self.recorded(0.0)  # where the caller that began it did not come back
        self.timeline = Timeline(self.dispatcher.driver.programs)
        self.dispatcher.observe(self.timeline)

    def recorded(self, limit_s: float) -> list[Computed]:
        """The computations that ran since `record`, see `Timeline.stop`."""
        timeline, self.timeline = self.timeline, None
        if timeline is None:
            return []
        self.dispatcher.release(timeline)
        return timeline.stop(limit_s)
