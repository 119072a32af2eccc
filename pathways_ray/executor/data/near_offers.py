"""Offers of this host to others of its machine, which ask for them by name."""

from __future__ import annotations

import functools
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pathways_ray.errors import Failure
from pathways_ray.executor.data.failure_texts import OF_A_PEER, error_text, failure_in
from pathways_ray.executor.data.near_messages import (
    ASK,
    FAILED,
    FORGET,
    HERE,
    KEPT,
    NAMED,
    PIPED,
    PLACE,
    SIZE,
    TAKEN,
    UNASKED,
    UNREAD,
    PeerKey,
)
from pathways_ray.executor.run.arrivals import Arrivals, is_there
from pathways_ray.executor.threads import ending_with_process
from pathways_ray.transport.neighbours import MAX_PACKET_BYTES, Connection
from pathways_ray.transport.peer_memory import places_of

MAX_FAILURES = 1 << 12
"""Failures in place of what was taken back, which nobody has asked for. Hosts of such a launch that ask later hear
of it otherwise, too."""


MAX_UNASKED = 32
"""Offers that one receiver is sent unasked and has not taken yet; further ones wait until they are asked for."""

_AS_UNASKED = {kind: unasked for unasked, kind in UNASKED.items()}


class _Offer(NamedTuple):
    """An offer of a host to another one: arrays, or the failure in their place. `ready`: all are computed."""

    receiver: PeerKey
    arrays: Sequence[jax.Array]
    failure: Failure | None = None
    ready: bool = False


class _Kept(NamedTuple):
    """An offer that its receiver reads out of this process's memory, or does not: then it has a pipe; or that it was
    sent unasked."""

    offer: _Offer
    parts: Sequence[np.ndarray[Any, Any]]
    unasked: bool = False


class NearOffers:
    """This host's offers, and what it sends of them.

    Args:
        heard: is given each message first; true if that was another one than those of transfers.
    """

    def __init__(self, host: int, heard: Callable[[bytes], bool]) -> None:
        self.host, self._heard = host, heard
        self._changing = threading.Lock()
        self._offers: dict[int, _Offer] = {}
        self._failed: OrderedDict[int, _Offer] = OrderedDict()
        self._asked: dict[int, Connection] = {}
        self._receivers: dict[Connection, PeerKey | None] = {}
        self._kept: dict[Connection, dict[int, _Kept]] = {}
        self._by_pipe: set[Connection] = set()
        self._computed = Arrivals(lambda name, _, values: self._is_computed(name))
        threading.Thread(target=ending_with_process(self._computed.run), name="near transfers", daemon=True).start()

    def accept(self, connected: socket.socket) -> None:
        """Serves who has connected. Raises `OSError` for another user, and `RuntimeError` where no thread is left."""
        with self._changing:
            made = Connection(connected, self._take_request, self._receiver_ended)
            self._receivers[made], self._kept[made] = None, {}

    def serve(self, name: int, receiver: PeerKey, arrays: Sequence[jax.Array]) -> None:
        """Offers arrays, which may still be computed, to a host that asks for the name."""
        ready = all(map(is_there, arrays))
        with self._changing:
            self._offers[name] = _Offer(receiver, arrays, None, ready)
        if ready:
            self._give(name)
        else:
            self._computed.add(name, 0, list(arrays))

    def serve_failure(self, name: int, receiver: PeerKey, failure: Failure) -> None:
        """Offers a failure, which may be all that the receiver ever hears of it."""
        with self._changing:
            self._offers[name] = _Offer(receiver, (), failure, True)
        self._answer(name)

    def take_back(self, name: int, receiver: PeerKey, failure: Failure) -> None:
        """Offers a failure in place of what was or may be offered under the name. The receiver hears of it otherwise,
        too."""
        with self._changing:
            self._offers.pop(name, None)
            self._failed[name] = _Offer(receiver, (), failure, True)
            if len(self._failed) > MAX_FAILURES:
                self._failed.popitem(last=False)
            told = [one for one, kept in self._kept.items() if name in kept and kept[name].unasked]
        for connection in told:
            connection.send(NAMED.pack(FORGET, name))
        self._computed.drop(name)
        self._answer(name)

    def refuse(self, name: int, failure: Failure) -> bool:
        """Answers a host that has asked for a name, and is not known any more; false where none has."""
        with self._changing:
            connection = self._asked.pop(name, None)
        if connection is not None:
            connection.send(NAMED.pack(FAILED, name) + error_text(failure).encode())
        return connection is not None

    def _is_computed(self, name: int) -> None:
        with self._changing:
            offer = self._offers.get(name)
            if offer is None:
                return
            self._offers[name] = offer._replace(ready=True)
        self._give(name)

    def _give(self, name: int) -> None:
        """Sends what is there to a receiver that has asked for something before, and answers others once they ask."""
        with self._changing:
            offer = self._offers.get(name)
            connection = self._free_for(name, offer) if offer is not None else None
        if offer is None or connection is None or not self._sent_unasked(connection, name, offer):
            self._answer(name)

    def _free_for(self, name: int, offer: _Offer) -> Connection | None:
        """The connection by which an offer may go now that nobody has asked for. The caller has the lock."""
        if name in self._asked or name in self._failed:
            return None
        known = (one for one, key in self._receivers.items() if key == offer.receiver)
        return next((one for one in known if len(self._kept[one]) < MAX_UNASKED), None)

    def _sent_unasked(self, connection: Connection, name: int, offer: _Offer) -> bool:
        """Sends an offer that nobody has asked for; false where that cannot be, or not now."""
        try:
            parts = _parts(offer.arrays)
        except Exception:  # `_send` says so
            return False
        if NAMED.size + sum(part.nbytes for part in parts) <= MAX_PACKET_BYTES:
            kind, said = HERE, b"".join(part.tobytes() for part in parts)
        elif said := _places_said(parts):
            kind = KEPT
        else:
            return False
        with self._changing:  # in one step: it may be taken back or asked for, and its receiver may be lost
            is_wanted = self._offers.get(name) is offer and self._free_for(name, offer) is connection
            if not is_wanted or (kind == KEPT and connection in self._by_pipe):
                return False
            if not connection.send_at_once(NAMED.pack(_AS_UNASKED[kind], name) + said):
                return False
            self._kept[connection][name] = _Kept(self._offers.pop(name), parts, unasked=True)
        return True

    def _answer(self, name: int) -> None:
        """Answers who has asked for a name, if it is there."""
        with self._changing:
            offer = self._failed.get(name) or self._offers.get(name)
            if offer is None or not offer.ready or name not in self._asked:
                return
            self._failed.pop(name, None)
            self._offers.pop(name, None)
            connection = self._asked.pop(name)
            if connection in self._receivers:
                self._receivers[connection] = offer.receiver
        if offer.failure is not None or sum(one.nbytes for one in offer.arrays) + NAMED.size <= MAX_PACKET_BYTES:
            self._send(connection, name, offer)
        elif not self._keep(connection, name, offer):
            self._pipe(connection, name, offer)

    def _keep(self, connection: Connection, name: int, offer: _Offer) -> bool:
        """Says where the arrays are, and keeps them until the receiver has read them; false where a pipe is the way."""
        try:
            parts = _parts(offer.arrays)
        except Exception:  # `_send` says so
            return False
        if not (said := _places_said(parts)):
            return False
        with self._changing:
            kept = self._kept.get(connection)
            if kept is None:  # it has ended, and nobody waits
                return True
            if connection in self._by_pipe:
                return False
            kept[name] = _Kept(offer, parts)
        connection.send(NAMED.pack(KEPT, name) + said)
        return True

    def _pipe(self, connection: Connection, name: int, offer: _Offer) -> None:
        try:
            connection.work(functools.partial(self._send, connection, name, offer))
        except RuntimeError as error:
            text = f"an array could not be sent: {error}"
            failure = Failure("ExecutionError", text, "transfer", "", self.host)
            self._send(connection, name, _Offer(offer.receiver, (), failure))

    def _send(self, connection: Connection, name: int, offer: _Offer) -> None:
        failure, parts = offer.failure, list[np.ndarray[Any, Any]]()
        try:
            parts = _parts(offer.arrays)
        except Exception as error:
            text = str(error) or type(error).__name__
            failure = failure_in(text) or Failure("ExecutionError", f"{OF_A_PEER}: {text}", host=self.host)
        try:
            if failure is not None:
                connection.send(NAMED.pack(FAILED, name) + error_text(failure).encode())
            elif (size := sum(part.nbytes for part in parts)) + NAMED.size > MAX_PACKET_BYTES:
                connection.write(NAMED.pack(PIPED, name) + SIZE.pack(size), parts)
            else:
                connection.send(NAMED.pack(HERE, name) + b"".join(part.tobytes() for part in parts))
        except (OSError, EOFError) as error:
            # Unless its peer is gone, it would wait for ever.
            text = f"{size} bytes could not be sent: {error}"
            lost = Failure("ExecutionError", text, "transfer", "", self.host)
            connection.send(NAMED.pack(FAILED, name) + error_text(lost).encode())

    def _take_request(self, connection: Connection, message: bytes, pipe: socket.socket | None) -> None:
        if pipe is None and self._heard(message):
            return
        kind, name = NAMED.unpack(message) if len(message) == NAMED.size else (b"", 0)
        if kind == ASK and pipe is None:
            with self._changing:
                self._asked[name] = connection
            self._answer(name)  # unless it is sent unasked just now
            return
        with self._changing:
            kept = self._kept.get(connection, {}).pop(name, None)
            if kept is not None:
                self._asked.pop(name, None)  # it has asked while that was sent unasked
            if kind == UNREAD:
                self._by_pipe.add(connection)
        if kept is None or kind not in (TAKEN, UNREAD) or pipe is not None:
            connection.end()  # it is no host of this runtime
        elif kind == UNREAD:
            self._pipe(connection, name, kept.offer)

    def _receiver_ended(self, connection: Connection) -> None:
        with self._changing:
            is_up = self._receivers.pop(connection, None) is not None
            kept = self._kept.pop(connection, {})
            # A receiver that is not lost asks again, by another connection, for what it did not take.
            again = {
                name: one.offer for name, one in kept.items() if is_up and one.unasked and name not in self._failed
            }
            self._offers.update(again)
            self._by_pipe.discard(connection)
            self._asked = {name: other for name, other in self._asked.items() if other is not connection}
        for name in again:
            self._answer(name)

    def lose(self, gone: Collection[PeerKey]) -> list[Connection]:
        """Lets go of what is for hosts that are gone; returns the connections of these."""
        with self._changing:
            for offers in (self._offers, self._failed):
                for name in [name for name, offer in offers.items() if offer.receiver in gone]:
                    del offers[name]
                    self._computed.drop(name)
            ended = [one for one, key in self._receivers.items() if key in gone]
            self._receivers.update(dict.fromkeys(ended))  # or their ends would bring back what was for them
            return ended


def _parts(arrays: Sequence[jax.Array]) -> list[np.ndarray[Any, Any]]:
    """The bytes of arrays, where they are. Raises the error of one that failed: NumPy would end the process over it."""
    return [np.asarray(one.block_until_ready()) for one in arrays]


def _places_said(parts: Sequence[np.ndarray[Any, Any]]) -> bytes:
    """The places of arrays, as a message says them; nothing where a pipe is the way."""
    places = places_of(parts)
    if places is None or NAMED.size + PLACE.size * len(places) > MAX_PACKET_BYTES:
        return b""
    return b"".join(PLACE.pack(*place) for place in places)
