"""Transfers between hosts of one machine: the bytes go from one memory to the other by a local connection.

As with the transfer library, a receiver asks by the secret name of a transfer, perhaps before the sender has it, and a
sender that has it waits until it is computed and asked for. What is small comes with the answer. Of what is big the
answer says where it is, and the sender keeps it until the receiver has read it there; one that may not read another
process's memory asks for a pipe, which all later transfers to it then use.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import threading
import time
from collections.abc import Callable, Iterable

from pathways_ray.executor.data.near_messages import PeerKey
from pathways_ray.executor.data.near_offers import NearOffers
from pathways_ray.executor.data.near_pulls import NearPulls
from pathways_ray.executor.threads import ending_with_process
from pathways_ray.transport import neighbours
from pathways_ray.transport.neighbours import MAX_PACKET_BYTES

ACCEPT_PAUSE_S = 0.05
"""A host that cannot take a connection, since it has no descriptor or thread left, waits this long for one."""

_HAND = b"o"
_SEAL_BYTES = 16


class NearTransfer:
    """This host's transfers to (`offers`) and from (`pulls`) others of its machine.

    Args:
        address: the one by which others know this host.
        arrived: is called by another thread whenever something has come.
    """

    def __init__(self, host: int, address: str, secret: str, arrived: Callable[[], None]) -> None:
        self.on_handed: Callable[[bytes], None] = lambda data: None
        self._key = hashlib.sha256(f"hand over {secret}".encode()).digest()
        self.offers, self.pulls = NearOffers(host, self._hears), NearPulls(host, secret, arrived)
        self._listener = neighbours.listener(neighbours.name_of(address, secret))
        threading.Thread(target=ending_with_process(self._accept), name="near transfers", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
                with connected:  # what the connection takes over is not closed
                    self.offers.accept(connected)
            except Exception:  # others may end, and then there is room for who waits
                time.sleep(ACCEPT_PAUSE_S)

    def lose(self, gone: Iterable[PeerKey]) -> None:
        """Ends what goes to and comes from hosts that are not up any more, and lets go of what was for them."""
        lost = set(gone)
        for connection in (*self.pulls.lose(lost), *self.offers.lose(lost)):
            connection.end()

    # --- launches -----------------------------------------------------------------------------------------------------

    def hand_over(self, peer: PeerKey, address: str, data: bytes) -> None:
        """Tells a host of a launch that it may begin. One that cannot be told, or not in one packet, hears of it
        otherwise. For any thread."""
        if len(_HAND) + _SEAL_BYTES + len(data) > MAX_PACKET_BYTES:  # who gets a longer one hangs up
            return
        with contextlib.suppress(OSError, RuntimeError):
            self.pulls.connected(peer, address).send(_HAND + self._sealed(data) + data)

    def _sealed(self, data: bytes) -> bytes:
        """The keyed hash of data, which only hosts of this runtime can make. Others of this user can connect here."""
        return hashlib.blake2b(data, key=self._key, digest_size=_SEAL_BYTES).digest()

    def _hears(self, message: bytes) -> bool:
        """Whether a message is a launch that another host of this runtime hands over."""
        seal, data = message[len(_HAND) : len(_HAND) + _SEAL_BYTES], message[len(_HAND) + _SEAL_BYTES :]
        if message[: len(_HAND)] != _HAND or not hmac.compare_digest(seal, self._sealed(data)):
            return False
        self.on_handed(data)
        return True
