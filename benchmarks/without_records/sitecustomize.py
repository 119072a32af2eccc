"""Has processes of a runtime keep no records of launches: for the benchmark `observing`, which puts it on the path."""

from typing import Any

from pathways_ray.observe.ring import Ring


def _nothing(self: Ring, *numbers: Any) -> None:
    """In place of `Ring.add`."""


Ring.add = _nothing  # type: ignore[method-assign]
