"""Messages between the hosts of one machine that send each other arrays (`near_offers`, `near_pulls`)."""

from __future__ import annotations

import struct

NAMED = struct.Struct("<cQ")
"""The head of each: its kind, and the name of the transfer."""

ASK, TAKEN, UNREAD = b"a", b"t", b"u"
"""From the receiver: it wants what has this name; has read it in the sender's memory; may not, and wants a pipe."""

HERE, KEPT, PIPED, FAILED = b"h", b"k", b"p", b"f"
"""From the sender: the bytes follow; the `PLACE` of each array follows; the bytes come by the pipe that is with this
message, and their `SIZE` follows; the text of a failure follows."""

UNASKED = {b"H": HERE, b"K": KEPT}
"""The first two of what nobody has asked for yet. The receiver says of both that it has `TAKEN` them."""

FORGET = b"g"
"""From the sender: what came unasked is not needed any more. Who has not taken it yet says that it is `TAKEN`."""

PLACE = struct.Struct("<QQ")
"""The address and the bytes of an array in the sender's memory."""

SIZE = struct.Struct("<Q")

PeerKey = tuple[int, int]
"""The number and the epoch of a host."""
