"""Numbers that users give as options, from Python or from NumPy."""

from __future__ import annotations

import math
import numbers
from typing import Any

from pathways_ray.errors import UsageError


def whole(value: Any, least: int, most: float = math.inf) -> int | None:
    """The number, if it is a whole one from `least` to `most`; else None, as for `True`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    number = int(value)
    return number if least <= number <= most else None


def seconds(timeout: Any) -> float | None:
    """The limit of a wait; None for no limit. Raises `UsageError` for what is no number."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or math.isnan(timeout):
        raise UsageError(f"timeout= is seconds, or None for no limit; not {timeout!r}")
    return float(timeout)
