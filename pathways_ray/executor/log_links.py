"""The links by which the host that leads an island writes its log to the others (`leading`).

The leader dials each of them at its data server, once all are up, and shows the link secret; they show that they have
it as well. What went by a link that has ended may be lost, so both of its ends end.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence

from pathways_ray.executor.run.inbox import FromLog, Source
from pathways_ray.executor.run.instructions import Event
from pathways_ray.executor.run.leading import FAREWELL_S
from pathways_ray.transport import links, streams, thread_links
from pathways_ray.transport.capabilities import authorised
from pathways_ray.transport.frames import LinkLost
from pathways_ray.transport.messages import FROM_LEADER, FromLeader, Peer
from pathways_ray.transport.tls import Trust

REDIAL_PAUSE_S = 5.0
"""Time between two attempts to reach a follower. Nobody waits for them: there is no term before all are linked."""


def _end_process(host: int, reason: str) -> None:
    print(f"host {host} ends: the log of its island ended: {reason}", flush=True)
    threading.Timer(FAREWELL_S, os._exit, (1,)).start()


def _answer(secret: str, epoch: int, follower: int) -> bytes:
    """The bytes that a follower shows to the leader of an epoch: it has the link secret, and is the host that was
    meant."""
    key = hashlib.sha256(f"log {secret}".encode()).digest()
    return hashlib.blake2b(f"{epoch} {follower}".encode(), key=key, digest_size=32).digest()


class LogWriter:
    """The leader's ends: any thread writes, and waits for nobody.

    Args:
        members: the hosts of the island.
        linked: called once all of them hear it.
    """

    def __init__(
        self,
        host: int,
        members: Sequence[int],
        epoch: int,
        secret: str,
        trust: Trust | None,
        silence: float,
        linked: Callable[[], None],
    ) -> None:
        self._host, self._epoch, self._secret = host, epoch, secret
        self._trust, self._silence, self._linked = trust, silence, linked
        self._outboxes = {member: thread_links.Outbox() for member in members if member != host}
        self._missing = set(self._outboxes)
        self._dialling = False

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Dials the followers, once all of them are up."""
        found = {peer.host: peer for peer in peers if peer.epoch == self._epoch and peer.host in self._outboxes}
        if self._dialling or found.keys() != self._outboxes.keys():
            return
        self._dialling = True
        for peer in found.values():
            threading.Thread(target=self._carry, args=(peer,), name="log", daemon=True).start()

    def tell(self, entry: FromLeader) -> None:
        """Writes an entry."""
        for outbox in self._outboxes.values():
            outbox.send(entry)

    def _carry(self, peer: Peer) -> None:
        link = self._dialled(peer)
        self._missing.discard(peer.host)
        if not self._missing:
            self._linked()
        try:
            for _ in link:  # followers say nothing
                pass
            reason = "it was closed"
        except LinkLost as error:
            reason = str(error)
        _end_process(self._host, f"host {peer.host}: {reason}")

    def _dialled(self, peer: Peer) -> thread_links.ThreadLink:
        shown, said = {"authorization": self._secret, "epoch": str(self._epoch)}, False
        while True:
            link = thread_links.ThreadLink(
                peer.data_address, streams.LOG_STREAM, shown, self._outboxes[peer.host], self._trust, self._silence
            )
            try:
                link.dial(answer=_answer(self._secret, self._epoch, peer.host))
                return link
            except LinkLost as error:
                if not said:
                    print(f"host {self._host} leads its island once it reaches host {peer.host}: {error}", flush=True)
                said = True
                time.sleep(REDIAL_PAUSE_S)


class LogReader:
    """A follower's end, on the loop of its data server.

    Args:
        take: takes the entries of the leader, in their order.
    """

    def __init__(self, host: int, epoch: int, secret: str, take: Callable[[Sequence[Event], Source], None]) -> None:
        self._host, self._epoch, self._secret, self._take = host, epoch, secret, take
        self._open = False

    async def serve(self, link: links.AsyncLink) -> None:
        """Reads the log of the island's leader until that ends, and this process with it."""
        if not authorised(link.metadata, self._secret) or link.metadata.get("epoch") != str(self._epoch) or self._open:
            link.refuse("no log of this leader is read here")
        self._open, begun = True, False
        try:
            await link.write(_answer(self._secret, self._epoch, self._host))
            if (first := await link.read()) is not None:
                begun = True
                self._read(first)
                await link.each(self._read)
        finally:
            self._open = False
            if begun:  # else the leader has given up dialling, and dials again
                _end_process(self._host, link.reason or "an entry was refused")

    def _read(self, data: bytes) -> None:
        self._take(FROM_LEADER.decode_batch(data), FromLog)
