"""A client as a host's data server knows it: its stream, its uploads and its fetches."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pathways_ray import limits
from pathways_ray.errors import AuthenticationError, QuotaExceeded, WireError
from pathways_ray.executor.data.buffer_store import Gone, Waiter
from pathways_ray.executor.data.shard_reader import is_computed
from pathways_ray.executor.data.upload import PipedUpload, SharedUpload, Upload, WholeUpload
from pathways_ray.executor.data.upload_plan import UploadPlan
from pathways_ray.executor.data.upload_quota import Name, UploadQuota
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.observe.views import MAX_STOPPED, Arriving
from pathways_ray.transport import links, outboxes
from pathways_ray.transport import messages as wire
from pathways_ray.transport.capabilities import Grant, is_slice_tag
from pathways_ray.transport.local_sockets import LocalServer
from pathways_ray.transport.pipes import HostPipe, is_pipe
from pathways_ray.transport.shared_memory import SharedFile

MAX_WORKERS = 4
"""Shards of one client that are waited for and copied at a time."""

MAX_AWAITED = MAX_WORKERS - 1
"""Big values of one client that threads wait for to be computed; one thread is left for those that are."""

LOOK_S = 0.005
"""The pause between two looks at further ones: at each, so many times longer as there are."""

MAX_SLICES = 64
"""Slices of a stream's session whose tags were looked at."""

MAX_STORING = 2
"""Arrays of one client that are read from pipes, and put on devices, at a time."""

MAX_PIPES = 32
"""Uploads of one stream that are not stored yet and came with a pipe or a file, each a descriptor of this process. A
client by itself has half as many under way."""

MAX_UNREAD = 1024
"""Messages that wait for a client to read them; then nothing more is read from it."""


class ClientStream:
    """One stream of a client, with its permissions, its uploads and its fetches."""

    def __init__(self, link: links.AsyncLink, grant: Grant, quota: UploadQuota) -> None:
        self.grant = grant
        self.session = grant.session
        self.quota = quota
        self.gone: Gone | None = None if grant.allowance is None else quota.gone
        """Where it is said that one of its arrays has left the store; None where these count only on their way."""
        self.outbox = outboxes.AsyncOutbox()
        self.uploads: dict[int, Upload] = {}
        self.fetches: dict[int, FetchRequest] = {}
        self.workers = ThreadPoolExecutor(MAX_WORKERS, "fetch")
        self.storing = ThreadPoolExecutor(MAX_STORING, "put")
        self.handed: set[Upload] = set()
        self.waiting = 0
        """Uploads with a pipe or a file that wait for frees."""
        self.waited_in_vain = False
        """Whether the last one that waited for frees was refused; further ones do not wait as long, one by one."""
        self.turns = asyncio.Semaphore(MAX_WORKERS)
        self._slices: set[tuple[PlacedSlice, str]] = set()
        self._awaited = self._looked_at = 0
        self.link = link
        self._resuming: asyncio.Task[None] | None = None

    def wait_for_reader(self, local: LocalServer[ClientStream], connection: socket.socket) -> None:
        """Has nothing more read from the local socket until the client has read some of what waits for it."""

        async def resume() -> None:
            await self.outbox.room(MAX_UNREAD)
            local.resume(connection)

        if self._resuming is not None and not self._resuming.done():
            return
        local.pause(connection)
        self._resuming = asyncio.ensure_future(resume())

    def end(self) -> None:
        """Ends what its client has waited for, and its threads."""
        self.workers.shutdown(wait=False, cancel_futures=True)
        for upload in self.handed:
            if isinstance(upload, PipedUpload):
                upload.pipe.end()
        self.storing.shutdown(wait=False)  # what waits there fails, and says so
        if self._resuming is not None:
            self._resuming.cancel()

    @property
    def files(self) -> int:
        """Files in memory and pipes that fetches hold open."""
        fetches = list(self.fetches.values())  # in one step: the threads that answer take fetches out meanwhile
        return sum(fetching.file is not None or fetching.pipe is not None for fetching in fetches)

    def check(self, put: wire.PutOpen, secret: str) -> None:
        """Looks whether an upload may come to this session, and by this stream.

        Raises:
            AuthenticationError: the controller did not give its slice to the session.
            QuotaExceeded: too many are under way.
            WireError: its number is that of one that is.
        """
        if (put.placed, put.slice_tag) not in self._slices:
            self._check_slice(put.placed, put.slice_tag, secret)
        if put.request in self.uploads:
            raise WireError(f"request {put.request} is under way already")
        if len(self.uploads) >= limits.MAX_REQUESTS:
            raise QuotaExceeded(f"{limits.MAX_REQUESTS} puts of a stream may be under way; one more was asked for")

    def _check_slice(self, placed: PlacedSlice, tag: str, secret: str) -> None:
        """Looks once at the tag of a slice, which says that the controller gave it to the session."""
        if not is_slice_tag(secret, self.session, placed, tag):
            raise AuthenticationError(
                f"session {self.session} has no slice {placed.mesh.id} on these devices: the tag is wrong"
            )
        if len(self._slices) >= MAX_SLICES:
            self._slices.clear()
        self._slices.add((placed, tag))

    def upload(
        self,
        message: wire.PutOpen,
        plan: UploadPlan,
        local: socket.socket | None = None,
        came: SharedFile | None = None,
    ) -> Upload:
        """An upload whose bytes came with it, by the `local` socket or not, come in parts, are in the file that came
        with it, or come by a pipe. The last two are in `handed` until somebody takes them out of it.

        Raises:
            QuotaExceeded: too many that came with a file or a pipe are not stored yet.
            WireError: the file, or what came with the message, does not fit.
        """
        if came is None:
            return WholeUpload(message, plan, local) if message.whole else Upload(message, plan)
        if len(self.handed) >= MAX_PIPES:
            raise QuotaExceeded(
                f"{MAX_PIPES} arrays of a stream may come by pipes and in files at a time; one more came"
            )
        made: Upload
        assert local is not None, "descriptors come by no other way"
        if is_pipe(came):
            made = PipedUpload(message, plan, HostPipe(came), local, self.quota.reading)
        else:
            made = SharedUpload(message, plan, came, self.quota.mapped)
        made.came_by = local
        self.handed.add(made)
        return made

    async def computed(self, value: Any) -> None:
        """Waits until a big value is computed, or has failed, which reading it says. Of many it is looked at now and
        then: one that is there would wait behind all of them."""
        while not is_computed(value):
            if self._awaited < MAX_AWAITED:
                self._awaited += 1
                try:
                    with contextlib.suppress(RuntimeError, ValueError):
                        await asyncio.get_running_loop().run_in_executor(self.workers, value.block_until_ready)
                finally:
                    self._awaited -= 1
                return
            self._looked_at += 1
            try:
                await asyncio.sleep(LOOK_S * self._looked_at)
            finally:
                self._looked_at -= 1

    def name_of(self, put: wire.PutOpen) -> Name:
        """The name of what is put, in the tenant's quota."""
        return self.session, put.buffer


def arriving(streams: Iterable[ClientStream]) -> tuple[Arriving, ...]:
    """Some of the uploads that come in; from any thread. Empty where they change at this moment."""
    try:
        found = [(stream.session, upload) for stream in streams for upload in stream.uploads.values()]
    except RuntimeError:
        return ()
    return tuple(
        Arriving(session, upload.message.buffer, upload.size - max(upload.missing, 0), upload.size)
        for session, upload in found[:MAX_STOPPED]
    )


class FetchRequest:
    """A fetch: `come` is called when its buffer is there, and then, one of more than one part has a task. It waits for
    `buffer`, and behind that for `others`.

    Where it came by a local socket: `local` is that connection, and `file` takes a big array, or is the end of a pipe
    for one, which is `pipe` once it is written to.
    """

    __slots__ = ("buffer", "come", "file", "local", "message", "others", "pipe", "task")

    come: Waiter

    def __init__(self, message: wire.Fetch, local: socket.socket | None, file: SharedFile | None) -> None:
        self.message = message
        self.buffer = message.buffer
        self.others = [buffer for _, buffer in message.also] if message.also and not message.devices else []
        self.local = local
        self.file = file
        self.pipe: HostPipe | None = None
        self.task: asyncio.Task[None] | None = None
