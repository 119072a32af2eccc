"""The resource manager as a Ray actor: where the processes of a cluster meet, and who maps slices.

Arguments and results of its methods are integers, strings and encoded messages. After its own death Ray starts it
anew, empty: the controller sees that and starts anew as well, and all others after it (ADR 0014).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import time

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pathways_ray import names
from pathways_ray.errors import PathwaysError, to_failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.resource_manager.allocation import HostRecord, Inventory, SliceRequest
from pathways_ray.transport.messages import HostInfo, JoinReply, Refused, SliceCreated, encode

_HOST = msgspec.msgpack.Decoder(HostInfo)

REJOIN_LIMIT_S = 30.0
"""A slice that is asked for before all hosts have joined waits this long for them."""

CONTROLLER_LIMIT_S = 30.0
"""A controller that says nothing for this long is stopped or hangs, and is killed. That is long, since it may be busy
with a big program; clients of one that is stopped have seen it before, by its missing answers to their pings."""


class ResourceManager:
    """One for a cluster. All methods run on the actor's event loop, one at a time between awaits."""

    def __init__(self, islands: dict[int, list[int]], data_secret: str, link_secret: str) -> None:
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        # What is left of the time before a restart has lower epochs.
        self.inventory = Inventory(last_epoch=int(time.time()) if restarted else 0)
        self.islands = islands
        self.controller = ""
        self.past_controllers: set[str] = set()
        self.watch: asyncio.Task[None] | None = None
        self.incarnation = secrets.token_hex(8)
        self.forming: dict[int, dict[int, tuple[HostInfo, asyncio.Future[tuple[int, str]]]]] = {}
        self.addresses: dict[str, str] = {}
        self.changed = asyncio.Condition()
        self.data_secret = data_secret
        self.link_secret = link_secret

    async def controller_serves(self, incarnation: str, address: str, name: str) -> str:
        """Said by the controller once a second. A new one knows of no session: slices are free, hosts have to join.

        Args:
            name: that of its actor.

        Returns:
            What this resource manager is known by: another one after its own restart, when it knows of no slice.
        """
        if incarnation in self.past_controllers:
            return self.incarnation  # sent before it died
        if incarnation != self.controller:
            self.past_controllers.add(self.controller)
            self.controller = incarnation
            self.inventory.start_over()
            for name in [name for name in self.addresses if name.startswith("scheduler-")]:
                del self.addresses[name]
        if self.watch is not None:
            self.watch.cancel()
        self.watch = asyncio.ensure_future(self._expect_controller(name))
        if self.addresses.get("controller") != address:
            await self.publish("controller", address)
        return self.incarnation

    async def _expect_controller(self, name: str) -> None:
        """Kills a controller that is not heard of in time; Ray starts it anew."""
        for _ in range(round(CONTROLLER_LIMIT_S)):  # by the second, so that a pause of this process does not count
            await asyncio.sleep(1.0)
        with contextlib.suppress(ValueError):  # it ends just now
            ray.kill(ray.get_actor(name, names.NAMESPACE), no_restart=False)

    async def publish(self, name: str, address: str) -> None:
        """A process says where it serves."""
        async with self.changed:
            self.addresses[name] = address
            self.changed.notify_all()

    async def withdraw(self, name: str, address: str) -> None:
        """The process that served at `address` is gone; `lookup` waits for its successor, unless that was quicker."""
        if self.addresses.get(name) == address:
            del self.addresses[name]

    async def lookup(self, name: str) -> str:
        """Waits until `name` has published its address."""
        async with self.changed:
            await self.changed.wait_for(lambda: name in self.addresses)
            return self.addresses[name]

    async def secrets(self) -> tuple[str, str]:
        """The secrets of the cluster: for clients' data tokens, and for links between its processes."""
        return self.data_secret, self.link_secret

    async def join(self, info: bytes) -> bytes:
        """A host is about to start JAX. Answers once all hosts of its island have come, since they form one group: they
        get a common epoch, and the coordinator that the first of them offered."""
        host = _HOST.decode(info)
        scheduler = await self.lookup(f"scheduler-{host.island}")
        waiting = self.forming.setdefault(host.island, {})
        # A host that comes twice died while it waited; its first call has nobody to answer any more.
        waiting[host.host] = (host, asyncio.get_running_loop().create_future())
        formed = waiting[host.host][1]
        for other in self.inventory.left_behind(host.host):
            if other.host not in waiting:
                await self.kill_host(other.host, other.epoch)
        if set(waiting) == set(self.islands[host.island]):
            members = [waiting[number][0] for number in sorted(waiting)]
            records = [HostRecord(m.host, m.island, m.platform, m.devices, m.node, m.pid) for m in members]
            epoch = self.inventory.join(records)
            coordinator = members[0].coordinator if len(members) > 1 else ""
            for _, future in waiting.values():
                future.set_result((epoch, coordinator))
            waiting.clear()
            async with self.changed:
                self.changed.notify_all()
        epoch, coordinator = await formed
        return encode(JoinReply(epoch, scheduler, self.data_secret, coordinator))

    async def leave(self, host: int, epoch: int) -> None:
        self.inventory.leave(host, epoch)

    async def kill_host(self, host: int, epoch: int) -> None:
        """Kills the process that a host had under `epoch`, stopped or stuck as it may be; Ray starts it anew."""
        record = self.inventory.hosts.get(host)
        if record is None or record.epoch != epoch:
            return
        if record.node == ray.get_runtime_context().get_node_id():
            _kill(record.pid)
        else:
            there = NodeAffinitySchedulingStrategy(record.node, soft=False)
            ray.remote(num_cpus=0, scheduling_strategy=there)(_kill).remote(record.pid)

    async def create_slice(
        self, session: int, shape: tuple[int, ...], axes: tuple[str, ...], island: int, platform: str, name: str
    ) -> bytes:
        """An encoded `SliceCreated`, or `Refused` with what exists."""
        # Only after its own restart does it not know of all hosts.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REJOIN_LIMIT_S), self.changed:
                await self.changed.wait_for(lambda: self.inventory.islands().keys() >= self.islands.keys())
        try:
            return encode(
                SliceCreated(self.inventory.create(session, SliceRequest(shape, axes, island, platform, name)))
            )
        except PathwaysError as error:
            return encode(Refused(to_failure(error)))

    async def release_slice(self, session: int, slice_id: int) -> bool:
        return self.inventory.release(session, slice_id)

    async def release_session(self, session: int) -> int:
        return self.inventory.release_session(session)

    async def platforms(self) -> tuple[str, ...]:
        return tuple(sorted({host.platform for host in self.inventory.hosts.values()}))

    async def status(self) -> str:
        """JSON: islands with their hosts and devices, and the slices on each device."""
        holders: dict[tuple[int, int], list[str]] = {}
        for record in self.inventory.slices.values():
            for device in record.placed.devices:
                holders.setdefault((device.host, device.index), []).append(
                    _label(record.session, record.placed, record.name)
                )
        islands = [
            {
                "island": island,
                "platform": hosts[0].platform,
                "hosts": [
                    {
                        "host": h.host,
                        "node": h.node,
                        "pid": h.pid,
                        "epoch": h.epoch,
                        "up": h.up,
                        "devices": [
                            {"device": f"{h.host}.{k}", "slices": holders.get((h.host, k), [])}
                            for k in range(h.devices)
                        ],
                    }
                    for h in hosts
                ],
            }
            for island, hosts in self.inventory.islands().items()
        ]
        slices = [
            {
                "session": record.session,
                "slice": record.placed.mesh.id,
                "name": record.name,
                "mesh": dict(zip(record.placed.mesh.axes, record.placed.mesh.shape, strict=True)),
                "island": record.placed.island,
                "devices": [str(d) for d in record.placed.devices],
            }
            for record in self.inventory.slices.values()
        ]
        return json.dumps({"islands": islands, "slices": slices})


def _kill(pid: int) -> None:
    """Kills a process of this machine; one that is gone already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _label(session: int, placed: PlacedSlice, name: str) -> str:
    return f"session {session}: {name or f'slice {placed.mesh.id}'}"
