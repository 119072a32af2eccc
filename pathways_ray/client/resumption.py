"""The search of a session for a lost controller's successor: in a thread of its own, while the user's threads go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pathways_ray import limits
from pathways_ray.client.connection import Connection
from pathways_ray.client.core import ClientCore
from pathways_ray.client.driver import Driver
from pathways_ray.client.ending import ANSWER_LIMIT_S
from pathways_ray.client.events import Resumed, ResumeFailed
from pathways_ray.errors import ControllerLost, PathwaysError
from pathways_ray.transport import messages as wire

START_LIMIT_S = 30.0
"""A controller that Ray starts again answers within this time, on a busy machine too."""

LOOK_PAUSE_S = 0.2
"""Between two attempts to reach the successor."""


class Resumption:
    """Opens the session again.

    Args:
        name: of the session.
        slices: those that there is a handle to; where the session is suspended, those that it had.
        place: gives handles of slices the devices that they have now.
        connect: begins to send and to receive.
    """

    def __init__(
        self,
        core: ClientCore,
        connection: Connection,
        driver: Driver,
        name: str,
        slices: Callable[[bool], Sequence[wire.KnownSlice]],
        place: Callable[[Sequence[wire.SliceCreated]], None],
        connect: Callable[[], None],
    ) -> None:
        self.core, self.connection, self.driver = core, connection, driver
        self.name, self.slices, self.place, self.connect = name, slices, place, connect

    def begin(self) -> None:
        """Looks for the successor from now on. Waits for nothing."""
        try:
            threading.Thread(target=self._run, name="pathways-resume", daemon=True).start()
        except RuntimeError as error:  # the process can have no further thread: what waits would wait without end
            self._give_up(f"no thread can look for the next one: {error}")

    def _run(self) -> None:
        deadline = time.monotonic() + limits.RESUME_LIMIT_S + START_LIMIT_S
        reason = ""
        while not self.core.closing and time.monotonic() < deadline:
            try:
                self._resume()
            except ControllerLost as error:
                reason = str(error)
                time.sleep(LOOK_PAUSE_S)
            except PathwaysError as error:
                reason = str(error)
                break
            except BaseException as error:  # nobody else looks for the successor: what waits would wait without end
                reason = f"{type(error).__name__}: {error}"
                break
            else:
                return self._look_again()
        with self.driver.sending:
            self._give_up(reason)
        if self.core.closing:
            self.connection.close()

    def _give_up(self, reason: str) -> None:
        self.driver.handle(ResumeFailed(f"{self.core.away}; {reason}"))
        self.connection.give_up()

    def _resume(self) -> None:
        with self.driver.sending:
            suspension = self.driver.suspension
            slices = self.slices(suspension is not None)
            request = self.core.resume_request(self.name, slices, time.monotonic(), suspension)
        reply = self.connection.resume_session(request, ANSWER_LIMIT_S)
        with self.driver.sending:
            if self.core.closing:  # the controller closes it, since its stream does not come
                raise PathwaysError("the session was shut down")
            self.connect()
            self.place(reply.slices)
            self.driver.handle(Resumed(reply))

    def _look_again(self) -> None:
        self.connection.settle()
        self.driver.sweep()
        if self.connection.is_over:  # it broke before the core knew of it
            self.driver.disconnected("the controller is gone again")
