"""Has hosts of one machine count as on different ones: for the benchmark `network`, which puts it on the path."""

from pathways_ray.transport import neighbours


def _none() -> str:
    """The mark of a machine on which nobody else is, in place of `neighbours.machine`."""
    return ""


neighbours.machine = _none
