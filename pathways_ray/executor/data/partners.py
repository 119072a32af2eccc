"""Partners of this host in computations whose sums go from one process of a machine to the other (`agreement`).

Each computation has a connection of its own between its first host and each of the others, which is made while they
compile it: all have compiled a program before one of them is to launch it. The other host dials, at a name that only
hosts of the runtime know, and shows that it has their secret; the first answers once it has compiled the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import select
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from pathways_ray.executor.compile.agreement import Agreement, Partner, PartnerLost, Place
from pathways_ray.executor.compile.sections import MAX_EXCHANGED_BYTES
from pathways_ray.executor.threads import ending_with_process
from pathways_ray.transport import neighbours
from pathways_ray.transport.busy_poll import BusyPoll
from pathways_ray.transport.messages import Peer
from pathways_ray.transport.neighbours import HeldSocket

MAX_PARTNERS = 256
"""Computations and hosts for which this host is the first; further ones are run by XLA."""

MAX_STRANGERS = 64
"""Connections that have not shown yet whose they are."""

COMPILE_LIMIT_S = 30.0
"""Time for which a host waits for the first one to compile the same. Then XLA runs the computation."""

SAY_LIMIT_S = 5.0
"""Time for which a host waits that cannot say anything more, since its partner hears nothing."""

MAX_COMPILED = 4096
"""Computations that are known here, the last ones; a compiler keeps fewer."""

ACCEPT_PAUSE_S = 0.05
"""A host that cannot take a connection waits this long for a descriptor."""

_HEAD = struct.Struct("<QqII")
_SAID = _HEAD.size + 1
_HELLO = struct.Struct("<16sQ16s")
_MOST_AHEAD = 1024


class Transfer(Protocol):
    """This host's connections to its peers."""

    address: str

    def near(self, host: int) -> Peer | None:
        """Another host, if it is of this machine."""


class SocketPartner:
    """A partner by a connection of packets. For one thread.

    Both ends count their calls, and say with each word which call it belongs to: so what one of them says of a call
    that the other has left is let go of. Where their orders differ, the connection ends.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = HeldSocket(fileno=connected.detach())
        self._socket.setblocking(False)
        self._busy = BusyPoll()
        self._count, self._place = 0, Place(0, 0)
        self._head = b""
        """That of the words of this call, in its first part."""
        self._heard: dict[tuple[int, int], tuple[Place, bytes, bytes]] = {}
        self._poll, self._room = select.poll(), select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._room.register(self._socket, select.POLLOUT)
        self.is_open = True
        self.deciding = threading.Lock()

    def begin(self, place: Place) -> None:
        self._count += 1
        self._place = place
        self._head = _HEAD.pack(self._count, *place, 0)
        if self._heard:
            self._heard = {when: said for when, said in self._heard.items() if when[0] >= self._count}

    def say(self, kind: bytes, part: int, values: bytes = b"") -> None:
        data = (_HEAD.pack(self._count, *self._place, part) if part else self._head) + kind + values
        deadline = 0.0
        while True:
            try:
                self._socket.send(data)
                return
            except BlockingIOError:
                now = time.monotonic()
                deadline = deadline or now + SAY_LIMIT_S
                if now > deadline:
                    raise PartnerLost(f"a partner has heard nothing for {SAY_LIMIT_S:.0f} s") from None
                self.drain()
                self._room.poll(10)
            except OSError as error:
                raise PartnerLost(f"a partner has ended: {error}") from None

    def hear(self, part: int, limit_s: float | None = None) -> tuple[bytes, bytes] | None:
        when = self._count, part
        while when not in self._heard:
            if (data := self._received(limit_s)) is None:
                return None
            if not part and data.startswith(self._head) and len(data) >= _SAID:  # most often
                return data[_HEAD.size : _SAID], data[_SAID:]
            self._take(data)
        place, kind, values = self._heard.pop(when)
        if place != self._place:
            raise PartnerLost(f"a partner is at launch {place.launch}, and not at {self._place.launch}")
        return kind, values

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._take(self._read())

    def greet(self, seal: bytes) -> None:
        """Says, before any call, that this end is there."""
        with contextlib.suppress(OSError):  # it is found as soon as a call needs it
            self._socket.send(seal)

    def end(self) -> None:
        self.is_open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def has_ended(self) -> bool:
        """Whether one of the ends has. For any thread."""
        return not self.is_open or _has_ended(self._socket)

    def _received(self, limit_s: float | None) -> bytes | None:
        """The next word; None where none comes in time. Looks again and again before it sleeps, where that pays."""
        try:  # a context would take longer
            return self._read()
        except BlockingIOError:
            pass
        busy = self._busy
        looks = busy.begins(time.perf_counter())
        while looks:
            os.sched_yield()
            try:
                data = self._read()
            except BlockingIOError:
                looks = busy.goes_on(time.perf_counter())
            else:
                busy.came(time.perf_counter())
                return data
        came = self._poll.poll(None if limit_s is None else 1000 * limit_s)
        busy.came(time.perf_counter())
        return self._read() if came else None

    def _read(self) -> bytes:
        try:
            return self._socket.recv(_SAID + MAX_EXCHANGED_BYTES)
        except BlockingIOError:
            raise
        except OSError as error:
            raise PartnerLost(f"a partner has ended: {error}") from None

    def _take(self, data: bytes) -> None:
        if len(data) < _SAID or len(self._heard) > _MOST_AHEAD:
            self.end()
            raise PartnerLost("a partner has ended")
        count, launch, gang, part = _HEAD.unpack_from(data)
        if count >= self._count:
            self._heard[count, part] = Place(launch, gang), data[_HEAD.size : _SAID], data[_SAID:]
        elif (launch, gang) == self._place:  # it has made fewer calls, and would wait for this one
            self.end()
            raise PartnerLost("a partner has counted other calls")


class Partners:
    """The partners of this host, by the computation.

    Args:
        transfer: this host's connections to its peers, and its own address.
        secret: the link secret, which all hosts of the runtime have.
    """

    def __init__(self, host: int, transfer: Transfer, secret: str) -> None:
        self.host, self._near = host, transfer.near
        self._sides: weakref.WeakSet[Agreement] = weakref.WeakSet()
        self._secret = f"sums {secret}"
        self._key = hashlib.sha256(self._secret.encode()).digest()
        self._changing = threading.Lock()
        self._known: dict[bytes, bool] = {}
        """Computations that this host has compiled as the first one, and whether values are exchanged."""
        self._early: dict[tuple[bytes, int], socket.socket] = {}
        """Those that have compiled a computation before this host has."""
        self._found: dict[tuple[bytes, int], SocketPartner] = {}
        self._dialling: dict[bytes, threading.Lock] = {}
        self._dialled: weakref.WeakValueDictionary[bytes, SocketPartner] = weakref.WeakValueDictionary()
        self._strangers: dict[socket.socket, None] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = neighbours.listener(neighbours.name_of(transfer.address, self._secret))
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=ending_with_process(self._serve), name="partners", daemon=True).start()

    def meet(self, computation: bytes, hosts: Sequence[int], may: bool) -> Agreement | None:
        """This host's side of a computation that it has compiled; None where values are not exchanged. Waits for the
        first host of it, for others not.

        Args:
            computation: 16 bytes that all its hosts have for it.
            hosts: those of it, the first one first.
            may: whether it is one whose values may be exchanged, between hosts of one machine.
        """
        peers = [self._near(host) for host in hosts if host != self.host]
        may &= None not in peers
        if hosts[0] == self.host:
            self._decide(computation, may)
            keys = [(computation, host) for host in hosts[1:]]
            return self._noted(Agreement(lambda: self._at(keys), len(keys), is_first=True)) if may else None
        with self._changing:
            dialling = self._dialling.setdefault(computation, threading.Lock())
            _bound(self._dialling)
        with dialling:
            partner = self._dialled.get(computation)
            if not may or peers[0] is None:
                if partner is not None:
                    _end(partner)
                return None
            if partner is None or not partner.is_open:
                partner = self._dial(computation, self._near(hosts[0]))
                if partner is not None:
                    self._dialled[computation] = partner
        known = [partner] if partner is not None else []
        side = Agreement(lambda: [one for one in known if one.is_open], len(hosts) - 1, is_first=False)
        return self._noted(side)

    @property
    def agreed(self) -> int:
        """Calls of the computations that are here in which hosts have exchanged values."""
        with self._changing:
            sides = list(self._sides)
        return sum(side.agreed for side in sides)

    def _noted(self, side: Agreement) -> Agreement:
        with self._changing:
            self._sides.add(side)
        return side

    # --- the other host -----------------------------------------------------------------------------------------------

    def _dial(self, computation: bytes, first: Peer | None) -> SocketPartner | None:
        """A partner at the first host; None where that cannot be reached, or does not compile the same in time."""
        if first is None:
            return None
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connected.setblocking(False)  # who takes no connection must not hold up this thread
            connected.connect(neighbours.name_of(first.transfer_address, self._secret))
            neighbours.check_user(connected)
            connected.send(_HELLO.pack(computation, self.host, self._sealed(b"hello", computation, self.host)))
            connected.settimeout(COMPILE_LIMIT_S)
            answer = connected.recv(64)
        except OSError:
            connected.close()
            return None
        if not hmac.compare_digest(answer, self._sealed(b"welcome", computation, self.host)):
            connected.close()
            return None
        return SocketPartner(connected)

    def _sealed(self, what: bytes, computation: bytes, host: int) -> bytes:
        """The keyed hash of a greeting, which only hosts of this runtime can make. Others of this user can connect."""
        return hashlib.blake2b(what + computation + host.to_bytes(8), key=self._key, digest_size=16).digest()

    # --- the first host -----------------------------------------------------------------------------------------------

    def _at(self, keys: Sequence[tuple[bytes, int]]) -> list[Partner]:
        found = [self._found.get(key) for key in keys]
        return [one for one in found if one is not None and one.is_open]

    def _decide(self, computation: bytes, may: bool) -> None:
        """Notes whether values of a computation are exchanged, and tells those that have dialled for it, or did before
        it was compiled again."""
        with self._changing:
            self._known.pop(computation, None)
            self._known[computation] = may
            _bound(self._known)
            for key in [key for key in self._early if key[0] == computation]:
                self._welcome(key, self._early.pop(key))
            keys = [key for key in self._found if key[0] == computation] if not may else []
            ended = [self._found.pop(key) for key in keys]
        for partner in ended:  # which may take as long as a call
            _end(partner)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._strangers:  # else it had to go
                    self._greet(key.fileobj)

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:  # there is no descriptor left
            time.sleep(ACCEPT_PAUSE_S)
            return
        try:
            neighbours.check_user(connected)
            connected.setblocking(False)
            self._selector.register(connected, selectors.EVENT_READ)
        except OSError:
            connected.close()
            return
        self._strangers[connected] = None
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            self._take(oldest)
            oldest.close()

    def _take(self, connected: socket.socket) -> None:
        del self._strangers[connected]
        self._selector.unregister(connected)

    def _greet(self, connected: socket.socket) -> None:
        """Hears who has dialled, and for which computation."""
        self._take(connected)
        try:
            computation, host, seal = _HELLO.unpack(connected.recv(_HELLO.size + 1))
        except (OSError, struct.error):
            connected.close()
            return
        if not hmac.compare_digest(seal, self._sealed(b"hello", computation, host)):
            connected.close()
            return
        with self._changing:
            if computation in self._known:
                self._welcome((computation, host), connected)
                return
            if (before := self._early.pop((computation, host), None)) is not None:
                before.close()
            if len(self._early) >= MAX_PARTNERS:
                self._early = {known: one for known, one in self._early.items() if not _has_ended(one)}
            if len(self._early) < MAX_PARTNERS:
                self._early[computation, host] = connected
            else:
                connected.close()

    def _welcome(self, key: tuple[bytes, int], connected: socket.socket) -> None:
        """Takes a partner, or hangs up: it is there before it hears so."""
        if len(self._found) >= MAX_PARTNERS:
            self._found = {known: one for known, one in self._found.items() if not one.has_ended()}
        if not self._known[key[0]] or (len(self._found) >= MAX_PARTNERS and key not in self._found):
            connected.close()
            return
        self._found[key] = partner = SocketPartner(connected)
        partner.greet(self._sealed(b"welcome", *key))


def _end(partner: SocketPartner) -> None:
    """Ends a partner, but not while hosts decide on a call: some might have heard a word of it, and others not."""
    with partner.deciding:
        partner.end()


def _bound(noted: dict[bytes, Any]) -> None:
    """Lets go of what was noted first, where that is too much."""
    if len(noted) > MAX_COMPILED:
        del noted[next(iter(noted))]


def _has_ended(connected: socket.socket) -> bool:
    """Whether the other end of a connection has hung up."""
    ends = select.poll()
    ends.register(connected, select.POLLRDHUP)
    return bool(ends.poll(0))
