"""The part of its time for which each device computed lately: where the resource manager puts no slice if it can."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.ir.plan import Device

SPAN_S = 10.0
"""What was so long ago counts for a third."""

LEAST = 0.01
"""A part of a device's time that is as good as none."""

Shares = tuple[tuple[Device, float], ...]


class DeviceTime:
    """Sums up the time of launches on devices: one sum for each program and island, since launches are many."""

    def __init__(self) -> None:
        self.taken_us = Counter[tuple[int, int]]()
        """Microseconds that launches took on each of their devices, by program and island."""
        self.shares: dict[Device, float] = {}
        self.at = -math.inf

    def report(self, programs: Mapping[int, PlannedProgram], now: float) -> Shares:
        """The devices that computed lately, and for what part of the time, 0 to 1."""
        since, self.at = now - self.at, now
        if since <= 0.0:
            return tuple(self.shares.items())
        seconds: dict[Device, float] = {}
        for (key, island), device_us in self.taken_us.items():
            program = programs.get(key)
            message = program.messages.get(island) if program is not None else None
            for device in message.devices if message is not None else ():
                seconds[device] = seconds.get(device, 0.0) + device_us * 1e-6
        self.taken_us.clear()
        kept = math.exp(-since / SPAN_S)
        new = {d: min(1.0, taken / since) for d, taken in seconds.items()}
        mixed = {d: kept * self.shares.get(d, 0.0) + (1 - kept) * new.get(d, 0.0) for d in self.shares | new}
        self.shares = {d: share for d, share in mixed.items() if share >= LEAST}
        return tuple((d, round(share, 3)) for d, share in self.shares.items())
