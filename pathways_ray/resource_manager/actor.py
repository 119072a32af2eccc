"""The resource manager as a Ray actor: where the processes of a cluster meet, and who maps slices.

Arguments and results of its methods are integers, strings and encoded messages.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

import msgspec
import ray

from pathways_ray.errors import PathwaysError, to_failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.resource_manager.allocation import HostRecord, Inventory, Wish
from pathways_ray.transport.messages import HostInfo, JoinReply, Refused, SliceCreated, encode

_HOST = msgspec.msgpack.Decoder(HostInfo)


class ResourceManager:
    """One for a cluster. All methods run on the actor's event loop, one at a time between awaits."""

    def __init__(self, hosts: int) -> None:
        self.inventory = Inventory()
        self.expected = hosts
        self.addresses: dict[str, str] = {}
        self.changed = asyncio.Condition()
        self.actors: dict[int, Any] = {}
        self.data_secret = secrets.token_hex(16)
        self.link_secret = secrets.token_hex(16)

    async def publish(self, name: str, address: str) -> None:
        """A process says where it serves."""
        async with self.changed:
            self.addresses[name] = address
            self.changed.notify_all()

    async def withdraw(self, name: str) -> None:
        """`name` is gone; `lookup` waits for its successor."""
        self.addresses.pop(name, None)

    async def lookup(self, name: str) -> str:
        """Waits until `name` has published its address."""
        async with self.changed:
            await self.changed.wait_for(lambda: name in self.addresses)
            return self.addresses[name]

    async def secrets(self) -> tuple[str, str]:
        """The secrets of the cluster: for clients' data tokens, and for links between its processes."""
        return self.data_secret, self.link_secret

    async def join(self, info: bytes) -> bytes:
        """A host's devices are there; it gets its epoch and its scheduler."""
        host = _HOST.decode(info)
        scheduler = await self.lookup(f"scheduler-{host.island}")
        async with self.changed:
            epoch = self.inventory.join(
                HostRecord(host.host, host.island, host.platform, host.devices, host.node, host.pid)
            )
            self.changed.notify_all()
        return encode(JoinReply(epoch, scheduler, self.data_secret))

    async def leave(self, host: int, epoch: int) -> None:
        self.inventory.leave(host, epoch)

    async def watch_over(self, actors: dict[int, Any]) -> None:
        """Takes the host actors, by host number, so that a stuck one can be killed."""
        self.actors = actors

    async def kill_host(self, host: int) -> None:
        """Kills a host's process; Ray starts it anew, and it joins under the next epoch."""
        if host in self.actors:
            ray.kill(self.actors[host], no_restart=False)

    async def wait_for_hosts(self) -> int:
        """Waits until every host of the cluster has joined once."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.inventory.hosts) >= self.expected)
        return len(self.inventory.hosts)

    async def create_slice(
        self, session: int, shape: tuple[int, ...], axes: tuple[str, ...], island: int, platform: str, name: str
    ) -> bytes:
        """An encoded `SliceCreated`, or `Refused` with what exists."""
        try:
            return encode(SliceCreated(self.inventory.create(session, Wish(shape, axes, island, platform, name))))
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


def _label(session: int, placed: PlacedSlice, name: str) -> str:
    return f"session {session}: {name or f'slice {placed.mesh.id}'}"
