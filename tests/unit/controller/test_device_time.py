"""The part of its time for which each device computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pathways_ray.controller.device_time import DeviceTime
from pathways_ray.ir.plan import Device


def test_the_time_of_launches_is_that_of_their_devices_and_fades() -> None:
    """1. Two launches take half of ten seconds on two devices. 2. Nothing runs for ten more. 3. Nor for a minute."""
    taken = DeviceTime()
    devices = (Device(0, 0), Device(0, 1))
    programs: Any = {7: SimpleNamespace(messages={0: SimpleNamespace(devices=devices)})}
    assert taken.report(programs, 0.0) == ()
    for _ in range(2):
        taken.taken_us[7, 0] += 2_500_000
    taken.taken_us[8, 0] += 1_000_000  # its program is gone
    busy = dict(taken.report(programs, 10.0))
    assert busy == {device: pytest.approx(0.5 * (1 - 0.368), abs=1e-2) for device in devices}
    assert dict(taken.report(programs, 10.0)).keys() == busy.keys(), "asked twice at once"
    later = dict(taken.report(programs, 20.0))
    assert later[devices[0]] == pytest.approx(busy[devices[0]] * 0.368, abs=1e-2)
    assert taken.report(programs, 80.0) == ()
