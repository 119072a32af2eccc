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

EVENT = "usage"


def used(lines: Iterable[Mapping[str, Any]], since: datetime.datetime) -> dict[str, float]:
    """Device seconds by tenant.

    Args:
        lines: of the controller's log, in their order.
        since: what was noted earlier is where a span begins.
    """
    before: dict[str, float] = {}
    found: dict[str, float] = {}
    life: Any = None
    for line in lines:
        if line.get("pid", life) != life:
            life, before = line["pid"], {}
        if line.get("event") != EVENT:
            continue
        try:
            tenant, seconds = str(line["detail"]), float(line["cause"])
            counts = datetime.datetime.fromisoformat(line["time"]) >= since
        except (KeyError, TypeError, ValueError):  # what a process that was killed left of a line
            continue
        # One that is smaller is of another life too, whose process got the same number.
        last = before.get(tenant, 0.0) if seconds >= before.get(tenant, 0.0) else 0.0
        before[tenant] = seconds
        if counts:
            found[tenant] = found.get(tenant, 0.0) + seconds - last
    return found
