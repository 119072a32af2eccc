"""Cancellation, as a client decides it: what has not left ends here, and of the rest the controller is asked."""

from __future__ import annotations

from collections.abc import Sequence

from pathways_ray.client import events
from pathways_ray.client.buffer import READY, BufferRecord
from pathways_ray.client.ending import WAKE_ALL, Ending
from pathways_ray.errors import Failure
from pathways_ray.transport import messages as wire


class Cancelling(Ending):
    """The part of `ClientCore` that takes launches back."""

    def _results_of(self, launch: int) -> Sequence[BufferRecord]:
        raise NotImplementedError

    def maker_of(self, buffer: BufferRecord) -> int:
        """The launch without an outcome that makes a buffer; 0 when nothing makes it any more."""
        made = list(self.pending.items())
        return next((launch for launch, results in made if any(result is buffer for result in results)), 0)

    def _cancelling(self, event: events.Cancelling, now: float) -> Sequence[events.Command]:
        launch = self.maker_of(event.buffer)
        if not launch or any(result.shown is READY for result in self.pending.get(launch, ())):
            return ()  # the user may have a value of the launch, which ends as a whole
        if any(isinstance(m := queued.message, wire.Launch) and m.launch == launch for queued in list(self.queue)):
            return self._fail(launch, Failure("Cancelled", "the launch was cancelled before it was sent"), now)
        if launch not in self.unanswered and self.coalescer.cancel(launch):
            return (wire.Cancel(launch),)
        for buffer in self.pending.get(launch, ()):
            buffer.cancel_late(Failure("Cancelled", "the launch was cancelled when it could not be taken back"))
        return WAKE_ALL

    def _cancel_refused(self, message: wire.CancelRefused, now: float) -> Sequence[events.Command]:
        """The results count as failed from now on; of donated arguments the end of the launch decides."""
        for buffer in self._results_of(message.launch):
            buffer.cancel_late(message.failure)
        return WAKE_ALL
