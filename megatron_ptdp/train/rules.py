"""Ranges of the numbers in a configuration, which msgspec does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ptdp.errors import ConfigError

_POSITIVE = (
    "pipeline", "tensor", "data", "microbatch", "data_islands", "pieces", "token_slices", "expert_members", "steps",
    "keep", "log_every", "in_flight", "eval_batches", "hosts_per_island", "lost_after",
)  # fmt: skip

_MOST = {
    **dict.fromkeys(("steps", "warmup_steps", "decay_steps"), 2**31 - 1),  # the optimizer counts them in int32
    **dict.fromkeys(("microbatch", "microbatches", "batch"), 10**8),  # as the planner
    **dict.fromkeys(("pipeline", "tensor", "data", "data_islands"), 10**7),
    **dict.fromkeys(("islands", "hosts_per_island", "devices_per_host", "expert_slices", "expert_members"), 10**4),
    "pieces": 10**4,
}
"""Larger ones are typing errors."""

MIN_EPSILON = 1.2e-38
"""What float32 does not take for 0."""


def check_numbers(table: str, values: Mapping[str, Any]) -> None:
    """Makes sure that the numbers among the settings of a table are in range.

    Raises:
        ConfigError.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not value >= (1 if name in _POSITIVE else 0) or value == float("inf"):
            least = "at least 1" if name in _POSITIVE else "0 or more, and finite"
            raise ConfigError(f"table {table}: {name} is {value}, must be {least}")
        if value > _MOST.get(name, value):
            raise ConfigError(f"table {table}: {name} is {value}, must be at most {_MOST[name]:,}")
