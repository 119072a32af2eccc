"""Usage: device time of tenants over a span, out of the controller's log.

The controller notes the account of each tenant that has used devices once in `PERIOD_S` (the event `usage`: the tenant,
and its device seconds since the controller began). An account that is smaller than the one before is that of another
life of the controller.
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
    for line in lines:
        if line.get("event") != EVENT:
            continue
        tenant, seconds = line["detail"], float(line["cause"])
        last = before.get(tenant, 0.0)
        before[tenant] = seconds
        if datetime.datetime.fromisoformat(line["time"]) >= since:
            found[tenant] = found.get(tenant, 0.0) + (seconds - last if seconds >= last else seconds)
    return found
