"""The sizes that a training takes on the islands that there are. Pure.

Where islands are lost for good, it goes on with fewer replicas, and the batch keeps its size: those that are left take
more microbatches each. Where islands come, it takes as many replicas as are configured again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_ptdp.errors import BadSizes
from megatron_ptdp.parallel import Sizes
from megatron_ptdp.parallel.layout import of_one_tenant, places_on
from megatron_ptdp.schedules import Schedule, ScheduleError
from megatron_ptdp.train.config import Config
from megatron_ptdp.train.setup import schedule_of, sizes_of


@dataclass(frozen=True)
class There:
    """An island of the cluster.

    Attributes:
        state: "up"; "away": expected back; "draining"; "lost"
        devices: all of its hosts'
    """

    island: int
    state: str
    devices: int


def islands_there(status: Mapping[str, Any]) -> list[There]:
    """The islands of a session's status where it gets slices.

    One of whose hosts is down is away, whatever its state says.
    """
    found = []
    for island in of_one_tenant(status["islands"]):
        up = all(host["up"] for host in island["hosts"])
        state = "away" if island["state"] == "up" and not up else island["state"]
        found.append(There(island["island"], state, sum(len(host["devices"]) for host in island["hosts"])))
    return found


@dataclass(frozen=True)
class Fit:
    """The sizes of a training on some islands.

    Attributes:
        config: with these sizes
        islands: to be used, by number; None: all that there are
    """

    config: Config
    schedule: Schedule
    sizes: Sizes
    islands: tuple[int, ...] | None = None

    @classmethod
    def of(cls, config: Config, islands: tuple[int, ...] | None = None) -> Fit:
        """The fit of a configuration as it stands.

        Raises:
            BadSizes, ScheduleError: the sizes do not fit each other.
        """
        schedule = schedule_of(config)
        return cls(config, schedule, sizes_of(config, schedule), islands)


def fitting(config: Config, devices: Mapping[int, int]) -> Fit | None:
    """The configured sizes, or else those with the most replicas, from `min_data` up; None where none fit.

    Args:
        devices: of each island that is up
    """
    parallel = config.parallel
    batch = Fit.of(config).sizes.batch
    for data in range(parallel.data, (parallel.min_data or parallel.data) - 1, -1):
        microbatches, rest = divmod(batch, parallel.microbatch * data)
        for groups in range(min(parallel.data_islands, data, len(devices)), 0, -1) if not rest else ():
            sizes = {"data": data, "data_islands": groups, "microbatches": microbatches, "batch": 0}
            changed = msgspec.structs.replace(config, parallel=msgspec.structs.replace(parallel, **sizes))
            try:
                found = Fit.of(changed, tuple(sorted(devices)))
                places_on(devices, found.sizes, parallel.placement, found.islands)
            except (BadSizes, ScheduleError):
                continue
            return found
    return None


def after_loss(config: Config, current: Fit, used: Mapping[int, int], there: Sequence[There]) -> Fit | None:
    """The sizes with which training goes on after a loss; None: wait for an island that is expected back.

    Args:
        config: the configured sizes
        current, used: those of before, and the devices that they take of each island. Slices that have moved to an
            island that is too small share its devices: these sizes do not fit any more.
    """
    up = {one.island: one.devices for one in there if one.state == "up"}
    if all(up.get(island, 0) >= devices for island, devices in used.items()):
        return larger(config, current, there) or current
    if any(one.state == "away" for one in there if one.island in used):
        return None
    return fitting(config, up)


def larger(config: Config, current: Fit, there: Sequence[There]) -> Fit | None:
    """Sizes with more replicas than now, where islands have come; None where nothing larger fits."""
    if current.sizes.data >= config.parallel.data:
        return None
    found = fitting(config, {one.island: one.devices for one in there if one.state == "up"})
    return found if found is not None and found.sizes.data > current.sizes.data else None
