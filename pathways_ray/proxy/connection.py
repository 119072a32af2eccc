"""A client of the proxy: its core, the carrier to the runtime, and the answers on their way."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pathways_ray.client.session import Session
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.proxy import events as do
from pathways_ray.proxy.arrays import Code, Status
from pathways_ray.proxy.carrier import MEMORY_KINDS, Carrier
from pathways_ray.proxy.codec import Reader
from pathways_ray.proxy.core import ProxyCore
from pathways_ray.proxy.descriptors import messages
from pathways_ray.proxy.folders import REMOVE_WITHIN_S, remove_left
from pathways_ray.proxy.handover import Handover
from pathways_ray.proxy.host_buffers import HostBuffers
from pathways_ray.proxy.readers import Readers
from pathways_ray.proxy.reading import INVITATION, written

_log = logging.getLogger(__name__)

Opened = tuple[Session, list[VirtualSlice]]
Write = Callable[[bytes], None]

BYTES_LIMIT_S = 60.0
"""A request whose bytes do not come fails when none have come for so long, and those behind it go on."""

SESSION_OVER = Status(Code.UNAVAILABLE, "the session of the client is over")

UNCOUNTED = 1 << 60
"""The number of answers that the client does not count: it never comes, so that it is not waited for."""


class Connection:
    """One client. `folder` is where it leaves big arrays.

    Args:
        readers: read its programs.
        handover: takes files for it.
        write, write_later: send it an answer that it waits for, or does not; called by any thread.
        leave: has what was written leave at once.
        end: tells it that the session is over.
    """

    def __init__(
        self,
        number: int,
        opened: Opened,
        readers: Readers,
        handover: Handover,
        write: Write,
        write_later: Write,
        leave: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self.number = number
        session, wholes = opened
        self.messages = messages()
        self.host_buffers = HostBuffers()
        self.handover = handover
        self.folder: Path | None = None
        told = self.handle, self._changed, self._resume
        self.carrier = Carrier(session, wholes, self.messages, readers, self.host_buffers, handover, *told)
        islands = {number: wholes.index(whole) for number, (whole, _) in enumerate(self.carrier.origins)}
        self.core = ProxyCore(Reader(self.messages), islands)
        self._write, self._write_later, self._leave, self._end = write, write_later, leave, end
        self.bytes_came = 0.0
        """When the last bytes of host buffers have come, by `time.monotonic`."""
        self._awaited: tuple[int, ...] = ()
        self._awaited_since = 0.0
        self._ended = False
        self._lock = threading.Lock()
        self._look = False
        self._numbers = itertools.count()
        self._read = self.messages.IfrtRequest.FromString
        session.watch(self._changed)

    def handle(self, event: do.Event) -> None:
        """Takes an event to the core, and carries out what it decides."""
        with self._lock:
            self._carry_out(event)
        self._sweep()

    def requests(self, found: Sequence[bytes]) -> None:
        """Takes requests in their order. One that trips over a mistake of ours gets that for an answer, and others go
        on. All that can be answered at once is answered before anything is carried out: the client goes on meanwhile.

        Raises:
            DecodeError: one of them is no request; those before it were taken.
        """
        with self._lock:
            commands: list[do.Command] = []
            try:
                for data in found:
                    request = self._read(data)
                    kind = request.WhichOneof("request") or ""
                    about = request.request_metadata
                    body = getattr(request, kind) if kind else None
                    self._request(do.Requested(about.op_id, about.user_context_id, kind, body), commands)
            finally:
                self._leave()
                for command in commands:
                    self._carry(command)
                if self._look:
                    self._settle()
        self._sweep()

    def give_up_late(self, now: float) -> None:
        """Has a request fail whose bytes do not come. To be called every few seconds; it does not wait: what stands
        behind that request may, for other things, and is carried out by another thread."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            awaited = self.core.parked.awaited
            if awaited != self._awaited:
                self._awaited, self._awaited_since = awaited, now
            elif awaited and now - max(self.bytes_came, self._awaited_since) > BYTES_LIMIT_S:
                self._awaited_since = now
                threading.Thread(target=self._give_up, args=(awaited,), name="pathways-proxy-late", daemon=True).start()
        finally:
            self._lock.release()
        self._sweep()

    def _give_up(self, awaited: tuple[int, ...]) -> None:
        with self._lock:
            if self.core.parked.awaited != awaited:  # they have come meanwhile
                return
            text = f"the bytes of host buffer {awaited[0]} did not come; none came for {BYTES_LIMIT_S:.0f} s"
            for handle in awaited:
                self._carry_out(do.Stored(handle, Status(Code.DEADLINE_EXCEEDED, text)))
        self._sweep()

    def _request(self, request: do.Requested, commands: list[do.Command]) -> None:
        """Answers a request where that is possible; adds what is to be carried out."""
        try:
            commands.extend(self._answered(self.core.handle(request)))
        except Exception as error:
            _log.exception("request %s failed", request.kind)
            text = f"{request.kind} failed in the proxy: {type(error).__name__}: {error}"
            self._answer(do.Reply(request.op, request.context, status=Status(Code.INTERNAL, text)))

    def _carry(self, command: do.Command) -> None:
        for event in self.carrier.carry_out(command):
            self._carry_out(event)

    def _carry_out(self, event: do.Event) -> None:
        for command in self._answered(self.core.handle(event)):
            self._carry(command)

    def _answered(self, commands: list[do.Command]) -> Iterator[do.Command]:
        """The commands that are to be carried out; the others are replies, which are sent as it comes to them."""
        for command in commands:
            if type(command) is do.Reply:
                self._answer(command)
                continue
            if type(command) is do.Fetch:  # the client asks for it, on another connection, once it has its answer
                self.host_buffers.expect(command.handle)
            yield command

    def _answer(self, reply: do.Reply) -> None:
        if reply.kind == "init_response":
            reply = reply._replace(body=self._introduction())
        number = next(self._numbers) if reply.counted else UNCOUNTED
        write = self._write if reply.awaited else self._write_later
        write(self.carrier.writer.response(reply, number))

    def _changed(self) -> None:
        """Notes that arrays may have got their outcomes. Called by threads of the session, so it does not wait: the
        holder of the lock looks when done."""
        self._look = True
        self._sweep()

    def _sweep(self) -> None:
        while self._look and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _resume(self) -> None:
        """Carries out what stood behind an array that the proxy has read. It may wait, in a thread of its own."""
        with self._lock:
            for event in self.carrier.resumed():
                self._carry_out(event)
        self._sweep()

    def _settle(self) -> None:
        self._look = False
        for event in self.carrier.settled():
            self._carry_out(event)
        if self.carrier.session.closed_because:
            self._end()  # the client sees it, and may attach again

    def close(self, remove_within_s: float = REMOVE_WITHIN_S) -> None:
        """Ends the session, and the answers; removes the folder of a client that has ended, or does so in time."""
        if not self._ended:
            self._ended = True
            self._end()
            self.carrier.close()
            self.host_buffers.close(SESSION_OVER)
            if self.folder is not None:
                remove_left(self.folder, remove_within_s)

    def _introduction(self) -> Any:
        """The devices and memories of the client."""
        made = self.messages.InitResponse(
            session_id=self.number,
            platform_name=self.carrier.session.platforms[0],
            platform_version="pathways-ray",
            platform_id=1,
            process_index=0,
            runtime_type="pathways-ray",
        )
        islands: list[VirtualSlice] = []
        for number, (whole, place) in enumerate(self.carrier.origins):
            if whole not in islands:
                islands.append(whole)
            text = f"PathwaysDevice(id={number}, at={whole.devices[place]})"
            device = made.all_devices.add(
                id=number,
                local_device_id=number,
                local_hardware_id=number,
                platform_name=made.platform_name,
                device_kind=made.platform_name,
                default_memory_id=number * len(MEMORY_KINDS),
                debug_string=text,
                to_string=text,
            )
            if self.carrier.origins[-1][0] is not self.carrier.origins[0][0]:
                device.attributes.attributes["slice_index"].int64_value = len(islands) - 1
            made.primary_device_ids.append(number)
            made.addressable_device_ids.append(number)
            for k, kind in enumerate(MEMORY_KINDS):
                memory = number * len(MEMORY_KINDS) + k
                device.memory_ids.append(memory)
                text = f"{kind} of device {number}"
                made.memories.add(
                    id=memory,
                    memory_space_kind=kind,
                    kind_id=k,
                    device_ids=[number],
                    debug_string=text,
                    to_string=text,
                )
        for key, said in (("supports_executable_serialization", False), ("serialize_with_sdy", True)):
            made.client_attributes.attributes[key].bool_value = said
        if self.handover.invitation.name:
            made.client_attributes.attributes[INVITATION].string_value = written(self.handover.invitation).encode()
        return made
