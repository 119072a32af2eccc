"""Usage: device time of tenants over a span, out of the controller's log.

The controller notes the account of each tenant that has used devices once in `PERIOD_S` (the event `usage`: the tenant,
and its device seconds since the controller began). Those of another life of the controller, which is another process,
begin at zero.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

PERIOD_S = 600.0
PERIOD = datetime.timedelta(seconds=PERIOD_S)

EVENT = "usage"

_TOGETHER = datetime.timedelta(seconds=1)
"""Notes of all tenants at one time are no further apart."""


def used(lines: Iterable[Mapping[str, Any]], since: datetime.datetime) -> dict[str, float]:
    """Device seconds by tenant.

    What an account has grown by counts as spread evenly over the time since it was looked at before: that is
    `PERIOD_S`, or less where the controller is younger, and in the accounts of now. One that had not grown has no note,
    so the last note of any tenant tells when all were looked at.

    Args:
        lines: of the controller's log, in their order, and perhaps the accounts of now behind them.
        since: where the span begins.
    """
    before: dict[str, float] = {}
    found: dict[str, float] = {}
    life: Any = None
    began: datetime.datetime | None = None
    looked = last_look = datetime.datetime.min.replace(tzinfo=datetime.UTC)
    for line in lines:
        try:
            at = datetime.datetime.fromisoformat(line["time"])
            if line.get("pid", life) != life or began is None:
                life, began, before = line.get("pid", life), at, {}
                looked = last_look = at
            if line["event"] != EVENT:
                continue
            tenant, seconds = str(line["detail"]), float(line["cause"])
            if at - last_look > _TOGETHER:
                looked, last_look = last_look, at
            noted = max(at - PERIOD, looked)
            part = 0.0 if at <= since else 1.0 if at == noted else min(1.0, (at - since) / (at - noted))
        except (KeyError, TypeError, ValueError):  # what a process that was killed left of a line
            continue
        # One that is smaller is of another life too, whose process got the same number.
        last = before.get(tenant, 0.0) if seconds >= before.get(tenant, 0.0) else 0.0
        before[tenant] = seconds
        if part > 0:
            found[tenant] = found.get(tenant, 0.0) + part * (seconds - last)
    return found
