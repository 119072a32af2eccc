"""The layout of a training run: stages of the model, and a slice for each pipeline device of each replica."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias

import pathways_ray as pw
from megatron_ptdp.errors import BadSizes
from megatron_ptdp.models.interface import DATA, TENSOR, Model, Stage
from megatron_ptdp.parallel.layer_split import cut
from megatron_ptdp.parallel.sizes import Sizes
from pathways_ray.errors import PathwaysError

Placement: TypeAlias = Literal["together", "apart"]
"""All pipeline devices of a replica on one island; or spread over its islands, neighbours side by side."""


def islands_of(sizes: Sizes, islands: Sequence[int], placement: Placement) -> list[list[int]]:
    """The island of each pipeline device, for each of the r groups of replicas.

    Args:
        sizes: p and r
        islands: the islands there are to use
        placement: where each group's devices lie; a group has len(islands) // r of them.

    Raises:
        BadSizes: there are fewer islands than r.
    """
    if len(islands) < sizes.islands:
        raise BadSizes(
            f"replicas are to lie on {sizes.islands} islands, but there are {len(islands)}; start more, or choose "
            f"islands={len(islands)}; the sizes are {sizes}"
        )
    each = len(islands) // sizes.islands
    found = []
    for group in range(sizes.islands):
        mine = islands[group * each : (group + 1) * each]
        if placement == "together":
            mine = mine[:1]
        found.append([mine[device * len(mine) // sizes.pipeline] for device in range(sizes.pipeline)])
    return found


def of_one_tenant(islands: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The islands, as `pw.islands()` gives them, where a session gets slices: the operator's sees those that tenants
    have for themselves as well."""
    mine = min((one.get("tenant", "") for one in islands), default="")
    return [one for one in islands if one.get("tenant", "") == mine]


def devices_there(islands: Sequence[Mapping[str, Any]], asked: Sequence[int] | None = None) -> dict[int, int]:
    """The number of devices of each island that takes slices of this session, where it is known.

    Args:
        islands: as `pw.islands()` gives them
        asked: islands that are to be used in any case, by number
    """
    found = {}
    for one in of_one_tenant(islands):
        devices = sum(len(host["devices"]) for host in one["hosts"])
        if devices and (one.get("state") not in ("draining", "lost") or one["island"] in (asked or ())):
            found[one["island"]] = devices
    return found


def places_on(
    there: Mapping[int, int], sizes: Sizes, placement: Placement, islands: Sequence[int] | None = None
) -> list[list[int]]:
    """`islands_of`, where the islands have the devices for it.

    Args:
        there: how many devices each island has
        sizes, placement: as there
        islands: to be used, by number; left out, all

    Raises:
        BadSizes: there are fewer devices or islands, or an island is to hold more than it has.
    """
    sizes.require_devices(sum(there.values()))
    if sizes.expert_slices:
        return [_beside_experts(there, sizes, placement, islands)]
    places = islands_of(sizes, sorted(there) if islands is None else islands, placement)
    each = sizes.members * sizes.tensor
    for island, count in Counter(chain.from_iterable(places)).items():
        if there.get(island, 0) < count * each:
            raise BadSizes(
                f"island {island} is to hold {count} pipeline devices of {sizes.members} × {sizes.tensor} (data × "
                f"tensor), which are {count * each} devices, but has {there.get(island, 0)}; choose smaller sizes or "
                f"another placement; the sizes are {sizes}"
            )
    return places


def _beside_experts(
    there: Mapping[int, int], sizes: Sizes, placement: Placement, islands: Sequence[int] | None
) -> list[int]:
    """The island of the slice that has all but the experts, and of each of their slices: the one with most devices
    left, and of equal ones the first; "together" all on one.

    Raises:
        BadSizes: an island has too few devices for a slice.
    """
    left = {island: there.get(island, 0) for island in (sorted(there) if islands is None else islands)}
    wanted = [sizes.tensor, *[sizes.expert_members] * sizes.expert_slices]
    if placement == "together":
        left = dict([max(left.items(), key=lambda one: (one[1], -one[0]))])
    found = []
    for number, each in enumerate(wanted):
        island = max(left, key=lambda one: (left[one], -one))
        if left[island] < each:
            what = "all but the experts" if not number else f"slice {number} of {sizes.expert_slices} of the experts"
            raise BadSizes(
                f"{what} needs {each} devices of an island, but no island has more than {left[island]} left of "
                f"{dict(there)}; choose smaller sizes or another placement; the sizes are {sizes}"
            )
        left[island] -= each
        found.append(island)
    return found


def given_back(slices: Iterable[pw.VirtualSlice]) -> None:
    """Gives slices back once something else has failed: what becomes of each is of no matter."""
    for one in slices:
        with contextlib.suppress(PathwaysError):
            one.release()


@dataclass(frozen=True)
class Layout:
    """The stages and slices of a training run.

    Attributes:
        sizes: of the run
        stages: of the model, in order
        slices: for each group of replicas (one group for each of the r islands), one slice of shape (d/r, t) with axes
            DATA and TENSOR for each pipeline device, and behind it those of the experts, of shape (1, members)
    """

    sizes: Sizes
    stages: tuple[Stage, ...]
    slices: tuple[tuple[pw.VirtualSlice, ...], ...]

    @classmethod
    def of(
        cls,
        model: Model,
        sizes: Sizes,
        *,
        lighter: int = 0,
        counts: Sequence[int] | None = None,
        placement: Placement = "together",
        islands: Sequence[int] | None = None,
    ) -> Layout:
        """Cuts the model and takes the slices.

        Args:
            model: to be cut
            sizes: of the run
            lighter: how many layers fewer the first and the last stage have
            counts: the layers of each stage, instead
            placement: of the pipeline devices of a replica
            islands: to be used, by number; left out, all that take slices of this session

        Raises:
            BadSizes: the model, or the devices, do not fit the sizes.
            PathwaysError: a slice cannot be had; those before it are given back.
        """
        stages = cut(model.layers, sizes.stages, lighter, counts)
        there = devices_there(pw.islands(), islands)
        places = places_on(there, sizes, placement, islands)
        own = [(sizes.members, sizes.tensor)] * sizes.pipeline
        shapes = [*own, *[(1, sizes.expert_members)] * sizes.expert_slices]
        rows: list[list[pw.VirtualSlice]] = []
        try:
            for group, row in enumerate(places):
                rows.append([])
                for device, (shape, island) in enumerate(zip(shapes, row, strict=True)):
                    name = f"stage{device}.{group}"
                    rows[-1].append(pw.virtual_slice(shape, (DATA, TENSOR), island=island, name=name))
        except BaseException:
            given_back(chain.from_iterable(rows))
            raise
        return cls(sizes, stages, tuple(map(tuple, rows)))

    @property
    def direct(self) -> bool:
        """Whether members may use reduce-scatters: not between CPU hosts, whose gloo gets the sums wrong."""
        spans = (slice.devices for row in self.slices for slice in row)  # named host.index
        return all(len({device.partition(".")[0] for device in devices}) == 1 for devices in spans)

    def release(self) -> None:
        """Gives the slices back."""
        for row in self.slices:
            for slice in row:
                slice.release()
