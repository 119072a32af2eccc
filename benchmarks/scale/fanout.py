"""The cost of links for a scheduler, by hosts.

The scheduler's decisions, its fan-out and its server are real and in this process. The hosts are links of another
process, which answer every launch with `Done` at once. The CPU time is that of the whole process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import measure
from benchmarks.scale.controlplane import Scheduler
from pathways_ray.ir.plan import Device
from pathways_ray.scheduler.events import HostConnected
from pathways_ray.transport import links, streams
from pathways_ray.transport import messages as wire

JOIN_LIMIT_S = 60.0
JOIN_AT_ONCE = 64
"""A server accepts a limited number of connections that have not yet shaken hands (256)."""

WELCOME = wire.encode([wire.Peers(())])
"""Says that a host has joined: only then may another one dial in its place."""

OTHER_FILES = 128
"""That a process may have open beside its connections to hosts: servers, event loops, libraries."""

END = wire.DropSession(0)
"""Ends the hosts of the benchmark."""

IN_A_ROW = 5
LONE_IN_A_ROW = 100
"""Lone launches are short, and what disturbs one of a few shows in their mean."""


def be_hosts(address: str, hosts: int) -> None:
    """Body of the process that plays the hosts, until the scheduler ends the streams."""
    asyncio.run(_be_hosts(address, hosts))


async def _be_hosts(address: str, hosts: int) -> None:
    joining = asyncio.Semaphore(JOIN_AT_ONCE)

    async def be_host(host: int) -> None:
        async with joining:
            stream = await links.dial(address, streams.HOST_STREAM, {})
            await stream.write(wire.encode([wire.HostUp(host, 1, "", "", 1, 1)]))
            if await stream.read() != WELCOME:
                raise RuntimeError(f"host {host} was not let in")
        ended = False
        while not ended and (data := await stream.read()) is not None:
            messages = wire.TO_HOST.decode_batch(data)
            done = tuple(message.sequence for message in messages if isinstance(message, wire.IslandLaunch))
            if done:
                await stream.write(wire.encode([wire.Done(done, (100,) * len(done))]))
            ended = END in messages
        stream.close()

    await asyncio.gather(*map(be_host, range(hosts)))


class Took(NamedTuple):
    """Microseconds for a batch: from its first launch to its last outcome, and of the scheduler's CPU time."""

    latency_us: float
    cpu_us: float


class Island:
    """A scheduler with real streams to its hosts."""

    def __init__(self, hosts: int) -> None:
        self.hosts, self.made, self.over = hosts, 0, 0
        self.scheduler = Scheduler(0, range(hosts), self._reported)
        self.changed = asyncio.Event()

    async def start(self) -> None:
        self.server, address = await links.serve({streams.HOST_STREAM: self._host}, "127.0.0.1")
        self.process = multiprocessing.get_context("spawn").Process(target=be_hosts, args=(address, self.hosts))
        self.process.start()
        async with asyncio.timeout(JOIN_LIMIT_S):
            while not self.scheduler.core.members.complete:
                await self._change()
        self.scheduler.from_controller(
            [wire.Program(1, b"", {}, "add", tuple(Device(host, 0) for host in range(self.hosts)))]
        )

    async def _change(self) -> None:
        self.changed.clear()
        await self.changed.wait()

    async def _host(self, context: links.AsyncLink) -> None:
        data = await context.read()
        assert data is not None
        (hello,) = wire.FROM_HOST.decode_batch(data)
        assert isinstance(hello, wire.HostUp)
        branch = self.scheduler.fan.open(hello.host)
        branch.put(WELCOME)
        self.scheduler.do(HostConnected(hello))
        pump = asyncio.ensure_future(branch.carry(context))
        self.changed.set()
        while (data := await context.read()) is not None:
            self.scheduler.from_host(hello.host, data)
        pump.cancel()

    def _reported(self, message: wire.Message) -> None:
        if isinstance(message, wire.Done):
            self.over += len(message.sequences)
            self.changed.set()

    async def launch(self, count: int) -> Took:
        """Launches at once, until all hosts are done with all of them."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            self.made += 1
            self.scheduler.from_controller([wire.IslandLaunch(self.made, 1, 1, (self.made,), self.made + 1)])
        while self.over < self.made:
            await self._change()
        return Took(1e6 * (time.perf_counter() - wall), 1e6 * (time.process_time() - cpu))

    async def launches(self, count: int) -> Took:
        """The mean of some batches in a row, after one that does not count: with few hosts, the first after a pause
        takes twice as long, as everything has to come into the caches again."""
        await self.launch(count)
        took = [await self.launch(count) for _ in range(IN_A_ROW if count > 1 else LONE_IN_A_ROW)]
        return Took(*(statistics.fmean(values) for values in zip(*took, strict=True)))

    async def stop(self) -> None:
        self.scheduler.fan.send(END)
        await asyncio.to_thread(self.process.join)
        self.server.close()


def check_descriptors(sizes: Sequence[int]) -> None:
    """Raises `RuntimeError` where this process may not open a connection to each host of all islands."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = sum(sizes) + OTHER_FILES
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise RuntimeError(
            f"connections to {sum(sizes)} hosts take some {needed} open files, and this process may have {allowed}: "
            f"run 'ulimit -n {needed}' before, or give fewer hosts with --streams"
        )


def measured(sizes: Sequence[int], batches: Sequence[int], rounds: int) -> dict[tuple[int, int], list[Took]]:
    """The time of batches on islands, all of them alive and measured in turn: by hosts and batch."""
    with asyncio.Runner() as runner, contextlib.ExitStack() as stack:
        islands = {hosts: Island(hosts) for hosts in sizes}
        for island in islands.values():
            runner.run(island.start())
            stack.callback(lambda island: runner.run(island.stop()), island)
        cases = list(itertools.product(sizes, batches))
        return measure.interleaved(cases, lambda case: runner.run(islands[case[0]].launches(case[1])), rounds)


def rows(found: Mapping[tuple[int, int], Sequence[Took]]) -> list[dict[str, Any]]:
    """`most_per_second` are the launches that one core can send and receive the outcome of, in batches of this size."""
    made = []
    for (hosts, batch), ones in found.items():
        values = {
            "latency_us": [one.latency_us for one in ones],
            "scheduler_us": [one.cpu_us for one in ones],
            "scheduler_us_per_host": [one.cpu_us / hosts for one in ones],
            "most_per_second": [1e6 * batch / one.cpu_us for one in ones],
        }
        made.append({"hosts": hosts, "batch": batch, **{key: measure.spread(one) for key, one in values.items()}})
    return made
