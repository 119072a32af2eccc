"""Donated arguments in their client: what launches without an outcome may take the memory of.

They count as deleted from the call on. They are gone when the launch succeeds, and live again when it fails before it
has taken them; where that is not known yet they are *undecided*.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pathways_ray.client.buffer import BufferRecord
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import DonationsDecided


def with_donations_untaken(failure: Failure) -> Failure:
    """The failure of a launch that left alone what was donated to it."""
    text = f"{failure.message}; it had not taken the memory of what was donated to it, which lives on"
    return msgspec.structs.replace(failure, message=text)


class Donations:
    """The donated buffers, by launch.

    Args:
        buffers: all of the session, by number; those that are gone leave it.
    """

    def __init__(self, buffers: dict[int, BufferRecord]) -> None:
        self.buffers = buffers
        self.by_launch: dict[int, Sequence[BufferRecord]] = {}

    def give(self, launch: int, donated: Sequence[BufferRecord], why: str) -> None:
        """A launch may take the memory of buffers; `why` completes the message of later errors."""
        self.by_launch[launch] = donated
        for buffer in donated:
            buffer.donate(why)

    def join(self, other: int, launch: int) -> None:
        """A launch left with another one, and has its outcome too."""
        self.by_launch[launch] = [*self.by_launch.pop(other), *self.by_launch.get(launch, ())]

    def taken(self, launch: int) -> None:
        """A launch has succeeded."""
        self._consume(self.by_launch.pop(launch, ()))

    def failed(
        self,
        donated: Sequence[BufferRecord],
        failure: Failure,
        consumed: Sequence[int],
        undecided: Sequence[int],
    ) -> Sequence[BufferRecord]:
        """The launch has failed that some buffers were donated to; returns those of them that live again."""
        gone = [buffer for buffer in donated if buffer.id in consumed]
        for buffer in gone:
            buffer.why_deleted += f", which failed after it had taken the memory: {failure.message}"
        for buffer in donated:
            buffer.undecided = buffer.id in undecided
        self._consume(gone)
        given = [buffer for buffer in donated if buffer.donated is not None]  # Ctrl-C may end a call amid its donations
        return self._take_back([buffer for buffer in given if not buffer.undecided])

    def decided(self, message: DonationsDecided) -> Sequence[BufferRecord]:
        """It is known which undecided buffers are gone; returns those that live again."""
        known = [self.buffers[number] for number in message.buffers if number in self.buffers]
        waiting = [buffer for buffer in known if buffer.undecided]
        self._consume([buffer for buffer in waiting if buffer.id in message.consumed])
        return self._take_back([buffer for buffer in waiting if buffer.id not in message.consumed])

    def _consume(self, donated: Sequence[BufferRecord]) -> None:
        for buffer in donated:
            buffer.donated, buffer.undecided = None, False
            self.buffers.pop(buffer.id, None)

    def _take_back(self, donated: Sequence[BufferRecord]) -> Sequence[BufferRecord]:
        for buffer in donated:
            buffer.take_back()
        return donated
