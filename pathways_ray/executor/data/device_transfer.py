"""Device-to-device transfers between hosts, over `jax.experimental.transfer`; on one machine, over local connections.

By which of the two is decided by `is_near`, which both ends know alike. Both work on futures: a pull returns what fills
later, and a producer may serve an array that is still being computed. When the producer's process dies, the consumer's
arrays turn into errors at once. Two limits of the transfer library shape this file: an array without elements never
arrives (so none is sent), and of two offers under one name the later one replaces the other (so names come from the
launch sequence, which only counts up). A third one: the library asks nobody who pulls for a token. So the names that it
hears are a keyed hash of ours, which only the hosts of this runtime can make.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import msgspec
import numpy as np
from jax.experimental import transfer

from pathways_ray.errors import Failure
from pathways_ray.executor.data.arriving import Landing
from pathways_ray.executor.data.failure_texts import error_text
from pathways_ray.executor.data.near_messages import PeerKey
from pathways_ray.executor.data.near_transfer import NearTransfer
from pathways_ray.executor.data.shared_shards import is_shared
from pathways_ray.ir.plan import launch_of, receiver_of
from pathways_ray.transport.messages import Following, Peer

CHUNK_BYTES = 1 << 20
PARALLEL_COPIES = 256
"""Chunks under way at once. A peer that dies in the middle of a transfer leaves its chunks occupied for good, so there
are many; their memory is only taken once used."""
_FOLLOWING = msgspec.msgpack.Decoder(Following)

TRIM_AFTER_S = 5.0
"""After this time launches with a lost host have ended, and what they held is free."""


MAX_OFFERED = 4096
"""Offers to a host that are remembered: all that may be under way, and more. Nobody says when one has been pulled."""


class _Offered(NamedTuple):
    """An offer by its name, and where its arrays lie."""

    name: int
    shardings: Sequence[jax.sharding.Sharding]


class DeviceTransfer:
    """This host's transfer server and its connections to peers. Used by the dispatcher thread only.

    Args:
        secret: the link secret, which all hosts of the runtime have.
        machine: what hosts have in common that reach each other by local connections; "" where none do.
    """

    def __init__(self, host: int, client: Any, address: str, secret: str, machine: str = "") -> None:
        self.host = host
        self.machine = machine
        self.on_arrival: Callable[[], None] = lambda: None
        self.on_handed: Callable[[Following], None] = lambda following: None
        self.take_out: Callable[[Any], bool] = lambda array: False
        """Has an array be given to no further session, and returns whether another one than its own may have it."""
        self._names = hashlib.blake2b(key=hashlib.sha256(f"transfers {secret}".encode()).digest(), digest_size=8)
        self._server = transfer.start_transfer_server(
            client,
            f"{address}:0",
            [f"{address}:0"] * 2,
            # The defaults reserve some 6 GiB.
            transfer_size=CHUNK_BYTES,
            max_num_parallel_copies=PARALLEL_COPIES,
        )
        self.address = self._server.address()
        self._peers: dict[int, Peer] = {}
        self._connections: dict[tuple[int, int], Any] = {}
        self._offered: dict[PeerKey, deque[_Offered]] = {}
        """The last offers to each host of another machine."""
        self._near = NearTransfer(host, self.address, secret, lambda: self.on_arrival()) if machine else None
        if self._near is not None:
            self._near.on_handed = lambda data: self.on_handed(_FOLLOWING.decode(data))

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Learns who is up, under which epoch, at which address. Connections to those that are gone are reset, and soon
        the memory of what was on its way to or from them goes back to the system."""
        current = {(peer.host, peer.epoch) for peer in peers}
        left, self._peers = self._peers.values(), {peer.host: peer for peer in peers}
        gone = {(one.host, one.epoch): one.transfer_address for one in left if (one.host, one.epoch) not in current}
        if not gone:
            return
        if self._near is not None:
            self._near.lose(gone)
        for key in gone.keys() & self._connections.keys():
            del self._connections[key]
            hang_up(gone[key])
        for key in gone:
            self._let_go(key)
        trim = threading.Timer(TRIM_AFTER_S, return_free_memory)
        trim.daemon = True
        trim.start()

    def near(self, host: int) -> Peer | None:
        """Another host, if what goes there goes by local connections. For any thread."""
        peer = self._peers.get(host)
        return peer if is_near(peer, self.machine) else None

    def reaches(self, receiver: int, launch: int) -> bool:
        """Whether a host is up that may pull what a launch offers: the process that the launch was sent to."""
        peer = self._peers.get(receiver)
        return peer is not None and peer.since < launch

    def serve(self, name: int, arrays: list[jax.Array]) -> None:
        """Offers arrays, which may still be computed, to the host that a name is for."""
        peer = self._peers.get(receiver_of(name))
        if self._near is not None and is_near(peer, self.machine):
            self._near.offers.serve(self._secret_name(name), (peer.host, peer.epoch), arrays)
            return
        if peer is not None:
            last = self._offered.setdefault((peer.host, peer.epoch), deque(maxlen=MAX_OFFERED))
            last.append(_Offered(name, [array.sharding for array in arrays]))
        self._server.await_pull(self._secret_name(name), arrays)

    def _let_go(self, gone: PeerKey) -> None:
        """Lets go of what was for a host that is gone, and that the library would keep for ever."""
        for name, shardings in self._offered.pop(gone, ()):
            tiny = [jax.ShapeDtypeStruct((1,), np.uint8, sharding=sharding) for sharding in shardings]
            self._fail(name, tiny, Failure("HostLost", f"host {gone[0]} was lost", host=gone[0]))

    def hand_over(self, host: int, following: Following) -> None:
        """Tells a host of this machine what follows a value; others hear of it by the controller. For any thread."""
        peer = self._peers.get(host)
        if self._near is not None and is_near(peer, self.machine):
            data = msgspec.msgpack.encode(following)
            self._near.hand_over((peer.host, peer.epoch), peer.transfer_address, data)

    def _secret_name(self, name: int) -> int:
        """The name of a transfer on the network, of 63 bits: nobody without the secret can guess it."""
        made = self._names.copy()
        made.update(name.to_bytes(8))
        return int.from_bytes(made.digest()) >> 1

    def own(self, array: Any) -> Any:
        """The array, or a copy of it when overwriting its memory could take it from under a peer, another array or
        another session."""
        return self.copy(array) if is_shared(array) or self.take_out(array) else array

    def copy(self, array: Any) -> Any:
        return jax.numpy.copy(array)

    def is_consumed(self, array: Any) -> bool:
        return isinstance(array, jax.Array) and array.is_deleted()

    def serve_failure(self, name: int, types: list[jax.ShapeDtypeStruct], failure: Failure) -> None:
        """Lets the consumer's arrays fail with `failure` as the root cause."""
        peer = self._peers.get(receiver_of(name))
        if self._near is not None and is_near(peer, self.machine):
            self._near.offers.serve_failure(self._secret_name(name), (peer.host, peer.epoch), failure)
            return
        self._fail(name, types, failure)

    def _fail(self, name: int, types: list[jax.ShapeDtypeStruct], failure: Failure) -> None:
        text = error_text(failure)
        self._server.await_pull(self._secret_name(name), [transfer.make_error_array(t, text) for t in types])

    def take_back(self, name: int, types: list[jax.ShapeDtypeStruct], failure: Failure) -> None:
        """Offers `failure` in place of the arrays that were or may be offered. The transfer library then lets go of
        those: of two offers under one name it keeps the later one."""
        peer = self._peers.get(receiver_of(name))
        if self._near is not None:
            if is_near(peer, self.machine):
                self._near.offers.take_back(self._secret_name(name), (peer.host, peer.epoch), failure)
                return
            if peer is None and self._near.offers.refuse(self._secret_name(name), failure):
                return
        self.serve_failure(name, types, failure)

    def pull(
        self, sender: int, name: int, types: list[jax.ShapeDtypeStruct], landing: Landing | None = None
    ) -> list[Any] | Failure:
        """Arrays that fill when the sender has served them; from this machine those of `landing`, if any."""
        peer = self._peers.get(sender)
        if peer is None:
            return Failure("HostLost", f"host {sender}, which holds the data, is down", host=sender)
        if launch_of(name) <= peer.since:
            return Failure("HostLost", f"host {sender}, which held the data, was lost", host=sender)
        key = (peer.host, peer.epoch)
        if self._near is not None and is_near(peer, self.machine):
            return self._near.pulls.pull(key, peer.transfer_address, self._secret_name(name), types, landing)
        try:
            if key not in self._connections:
                self._connections[key] = self._server.connect(peer.transfer_address)
            pulled: list[Any] = self._connections[key].pull(self._secret_name(name), types)
            return pulled
        except jax.errors.JaxRuntimeError as error:
            self._connections.pop(key, None)
            return Failure("HostLost", f"host {sender} could not be reached: {error}", host=sender)


def is_near(peer: Peer | None, machine: str) -> TypeGuard[Peer]:
    """Whether what goes between a host on a machine and a peer goes by local connections."""
    return peer is not None and bool(machine) and peer.machine == machine


def return_free_memory() -> None:
    """Has the C library return what is free to the system. glibc keeps blocks below 32 MiB for later ones: what was on
    its way to a lost host, hundreds of megabytes, would stay with this process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other libraries have none
        trim(0)


def hang_up(address: str) -> None:
    """Resets the connections of this process to an address: what is pulled over them fails, and its memory is free.

    A machine that has vanished resets nothing, and the transfer library would wait for it for ever.
    """
    host, _, port = address.rpartition(":")
    wanted = (host.strip("[]"), int(port))
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            try:
                found = socket.socket(fileno=copy)
            except OSError:  # no socket: the copy would stay open, and be copied with all others the next time
                os.close(copy)
                continue
            with found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername()[:2] == wanted:
                    found.shutdown(socket.SHUT_RDWR)
