"""Arguments that come with their launch: a host makes its part of each from the bytes. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from pathways_ray.errors import Failure
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.executor.run.parts import Parts
from pathways_ray.executor.run.steps import failed_in
from pathways_ray.limits import MAX_INLINE_BYTES
from pathways_ray.transport.messages import IslandLaunch, LaunchEarly, ServeCall


class Carried:
    """The arguments of a program's launches on one host that are not in its store."""

    def __init__(self, plan: HostPlan, parts: Parts) -> None:
        self.plan = plan
        self.parts = parts
        self._sizes = {place: kind.nbytes for place, (kind, _) in plan.types.items()}
        self._makers: dict[int, Callable[[bytes], Any]] = {}

    def take(self, launch: IslandLaunch, place: int) -> Any:
        """The argument at a place, or the failure in place of one that is nowhere."""
        k = bisect_left(launch.inline, (place,))
        if k == len(launch.inline) or launch.inline[k][0] != place:
            return _lost(launch.arguments[place], self.plan.host)
        try:
            if place not in self._makers:
                self._makers[place] = self.parts.argument(*self.plan.types[place])
            return self._makers[place](launch.inline[k][1])
        except Exception as error:
            return failed_in("an argument", error, self.plan.host)

    def fits(self, message: LaunchEarly | ServeCall) -> bool:
        """Whether a call that a client hands over carries what is missing among its arguments, and no more."""
        inline = message.inline
        if not inline:
            return 0 not in message.arguments
        found = size = 0
        for place, buffer in enumerate(message.arguments):
            if not buffer:
                if found == len(inline) or inline[found][0] != place or len(inline[found][1]) != self._sizes.get(place):
                    return False
                size += self._sizes[place]
                found += 1
        return found == len(inline) and size <= MAX_INLINE_BYTES


def _lost(buffer: int, host: int) -> Failure:
    """The failure in place of an argument that is nowhere; with number 0, of one that came with the call."""
    if buffer:
        return Failure("BufferLost", f"buffer {buffer} is not on this host (host restarted?)")
    text = (
        "the host restarted after it had said the value of the call, and what the call carried went with it; call again"
    )
    return Failure("HostLost", text, host=host)
